"""A whole net under one policy, with exemptions: classes, paths, functions of a module."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.core import named_modules
from pax_export.export import load, spec, to_onnx, to_saved_model, to_tflite
from pax_export.precision import mixed_precision, policy_of, remove_policies
from tests.closeness import assert_close
from tests.precision.models import FHF, HHH, F, H, Layer
from tests.refusals import refused

FFF, FFH, FHH = jmp.Policy(F, F, F), jmp.Policy(F, F, H), jmp.Policy(F, H, H)


@functools.cache
def transformer():
    pax.seed_rng_key(0)
    return pax.nets.Transformer(8, num_heads=2, num_layers=1, dropout_rate=0.0)


def policies(net):
    return {path: policy_of(module) for path, module in named_modules(net)}


def structure(tree):
    return jax.tree_util.tree_structure(tree)


def test_every_module_has_the_policy():
    layer = Layer()
    half = mixed_precision(layer, HHH)
    assert set(policies(half).values()) == {HHH}
    assert {x.dtype for x in jax.tree_util.tree_leaves(half)} == {jnp.dtype(H), jnp.dtype("int32")}
    assert policies(layer).keys() == policies(half).keys()
    assert set(policies(layer).values()) == {None}


@pytest.mark.parametrize(
    "exempt, matched",
    [
        (
            pax.LayerNorm,
            {"layers.0.attn_layer_norm", "layers.0.dense_layer_norm", "layer_norm_output"},
        ),
        ("layer_norm_output", {"layer_norm_output"}),
        ("layers.*.*_norm", {"layers.0.attn_layer_norm", "layers.0.dense_layer_norm"}),
        ("dense_block.fc1", {"layers.0.dense_block.fc1"}),
        ("fc?", {"layers.0.dense_block.fc1", "layers.0.dense_block.fc2"}),
        (lambda module: module.name == "key_proj", {"layers.0.attention.key_projection"}),
        (
            ("rng_seq", "attention"),
            {"rng_seq", "layers.0.attention"}
            | {f"layers.0.attention.{n}_projection" for n in ("query", "key", "value", "output")},
        ),
    ],
)  # fmt: skip
def test_what_an_exemption_matches_is_in_float32_with_all_inside(exempt, matched):
    for policy, full in ((FHF, FFF), (FHH, FFH), (HHH, FFH)):
        found = policies(mixed_precision(transformer(), policy, exempt=exempt))
        assert {path for path, each in found.items() if each == full} == matched
        assert {each for path, each in found.items() if path not in matched} == {policy}


def test_float64_is_not_made_narrower():
    wide = jmp.Policy(jnp.float64, H, F)
    net = pax.Sequential(pax.Linear(1, 1), pax.Linear(1, 1))
    with jax.enable_x64(True):
        net = mixed_precision(net, wide, exempt="modules.1")
    assert policy_of(net[1]) == jmp.Policy(jnp.float64, F, F)


def test_a_module_with_a_policy_keeps_it():
    net = transformer()
    norm = pax.apply_mp_policy(net.layer_norm_output, FHH)
    net = mixed_precision(net.replace(layer_norm_output=norm), FHF, exempt=pax.LayerNorm)
    assert policy_of(net.layer_norm_output) == FHH
    assert policy_of(net.layers[0]["attn_layer_norm"]) == FFF


def test_equal_calls_give_equal_treedefs_and_are_traced_once():
    traces = []

    @jax.jit
    def call(net, x):
        traces.append(x)
        return net(x)

    for exempt in ((pax.LayerNorm,), [pax.LayerNorm], "*norm*", lambda m: "Norm" in repr(m)[:9]):
        call(mixed_precision(transformer(), FHF, exempt=exempt), jnp.ones((1, 2, 8)))
    assert len(traces) == 1


def test_policies_come_off_again():
    net = transformer()
    half = mixed_precision(net, FHF, exempt=pax.LayerNorm)
    assert remove_policies(half) == net
    assert structure(remove_policies(half.eval())) == structure(net.eval())
    assert remove_policies(net) == net
    frozen = pax.freeze_parameters(half)
    assert remove_policies(frozen) == pax.freeze_parameters(net)
    assert pax.unwrap_mp_policy(half.layer_norm_output) == net.layer_norm_output


def test_modes_copies_pickles_and_jit_keep_it():
    net = mixed_precision(transformer(), FHF, exempt=pax.LayerNorm)
    for again in (
        net.eval().train(),
        pickle.loads(pickle.dumps(net)),
        copy.deepcopy(net),
        copy.copy(net),
        jax.jit(lambda m: m)(net),
        pax.pure(lambda m: m)(net),
        net.update_parameters(net.parameters()),
    ):
        assert structure(again) == structure(net)
        assert policies(again) == policies(net)


# --- what it is for ---------------------------------------------------------------


def large(*shape):
    """Numbers whose squares overflow in float16."""
    return jnp.asarray(400 * np.random.RandomState(0).standard_normal(shape), F)


def weights_of(net, steps, scale):
    """The parameters after a few steps, with a loss scale."""

    def loss_fn(net, x, y):
        loss = jnp.mean((net(x).astype(F) - y) ** 2)
        return scale.scale(loss), loss

    @jax.jit
    def step(net, optimizer, x, y):
        grads, loss = pax.grad(loss_fn, has_aux=True)(net, x, y)
        net, optimizer, _ = pax.optim.apply_scaled_gradients(net, optimizer, scale, grads)
        return net, optimizer, loss

    x, y = large(2, 4, 8), large(2, 4, 8) / 400
    optimizer = pax.optim.from_optax(optax.sgd(0.05))(net.parameters())
    losses = []
    for _ in range(steps):
        net, optimizer, loss = step(net, optimizer, x, y)
        losses.append(float(loss))
    return jax.tree_util.tree_leaves(net.parameters()), losses


def distance(a, b):
    return max(float(jnp.max(abs(x.astype(F) - y))) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("exempt", [(), pax.LayerNorm])
def test_training_in_float16_follows_float32(exempt):
    """The sums of squares of norms would overflow, but norms compute them in float32."""
    scale = pax.precision.StaticLossScale(128.0)
    weights, losses = weights_of(transformer(), 3, scale)
    half_net = mixed_precision(transformer(), FHH, exempt=exempt)
    half_weights, half_losses = weights_of(half_net, 3, scale)
    assert_close(half_losses, losses, rtol=0.01)
    assert losses[-1] < losses[0]
    assert distance(half_weights, weights) < 2e-3


@pytest.mark.parametrize("policy", [FHF, HHH])
def test_averages_under_a_half_policy_keep_their_small_steps(policy):
    norm, x = pax.BatchNorm1D(1, decay_rate=0.999), jnp.array([[1.0], [2001.0]])
    of_each = norm.apply(lambda m: pax.apply_mp_policy(m, policy))
    for net in (mixed_precision(norm, policy), of_each):
        net, _ = net % jnp.zeros((2, 1))
        net, _ = jax.lax.scan(lambda net, _: ((net % x)[0], None), net, None, 1000)
        assert_close(net.ema_mean.averages.ravel(), [1001 * (1 - 0.999**1000)], rtol=1e-3)
        assert jnp.isfinite(net.ema_var.averages).all()


@pytest.mark.parametrize("policy", [FHF, FHH, HHH])
def test_the_softmax_of_attention_is_in_float32_under_every_policy(policy):
    attention = pax.MultiHeadAttention(2, 4, w_init_scale=1.0)
    x = large(1, 3, 8)
    half = mixed_precision(attention, policy)
    text = str(jax.make_jaxpr(lambda m, x: m(x, x, x))(half, x))
    exponentials = [line for line in text.splitlines() if " exp " in line]
    assert exponentials and all(":f32[" in line for line in exponentials)
    assert_close(
        half(x, x, x) / 400, attention(x, x, x) / 400, atol=0.05, where="logits overflowed"
    )
    hidden = half(x, x, x, mask=jnp.zeros((1, 1, 3, 3), bool))
    assert bool(jnp.isfinite(hidden).all())


def test_a_loaded_net_is_exported(tmp_path):
    net = mixed_precision(transformer(), FHF, exempt=pax.LayerNorm).eval()
    net = pickle.loads(pickle.dumps(net))
    to_saved_model(net, tmp_path / "net", spec("batch, 4, 8"), validate=False)
    x = large(3, 4, 8)
    assert_close(load(tmp_path / "net")(x), net(x), atol=2e-2)


@pytest.mark.parametrize(
    ("make", "policy", "exempt", "names"),
    [
        (transformer, FHF, ("rng_seq", "attention.softmax"),
         ["got: 'attention.softmax'", "such as"]),
        (transformer, FHF, pax.GroupNorm,
         ["got: GroupNorm", "layers.0.attention"]),
        (transformer, FHF, pax.Module, ["got: Module"]),
        *[(transformer, FHF, wrong, ["exempt="]) for wrong in (3, [pax.LayerNorm, None])],
        (lambda: mixed_precision(pax.Sequential(pax.Linear(1, 1)), FHF), HHH, (),
         ["got: Sequential(parameters=2, mode=train, mp_policy=FHF)", "remove_policies(net)"]),
        (transformer, "half", (), ["half"]),
        (lambda: jnp.ones(3), FHF, (), ["got: ArrayImpl"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(make, policy, exempt, names):
    net = make()
    with refused((ValueError, TypeError), *names):
        mixed_precision(net, policy, exempt=exempt)
    with refused(TypeError, "remove_policies"):
        remove_policies(jnp.ones(3))


# --- errors -------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "ending"), [(to_onnx, "onnx"), (to_tflite, "tflite")])
@pytest.mark.parametrize("dtype", [H, jnp.bfloat16])
def test_what_xla_does_not_round_other_runtimes_may(tmp_path, write, ending, dtype):
    """Where it optimises, XLA leaves out a rounding between two conversions."""
    path = tmp_path / f"model.{ending}"

    def model(params, x):
        return ((x.astype(dtype) * 3 + 1) @ params["w"].astype(dtype)).astype(F)

    w = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    assert write(({"w": w}, model), path, spec("batch, 4")).validated
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    assert_close(load(path)(x), (x * 3 + 1) @ w, rtol=0.02)


def test_quantized_weights_are_no_modules_under_a_policy():
    """Their scales would be rounded to half precision."""
    small, _ = pax.quantize(pax.Sequential(pax.Linear(8, 4)))
    half = mixed_precision(small, HHH)
    assert half.modules[0].weight == small.modules[0].weight
    assert half.modules[0].weight.scales.dtype == F and policy_of(half.modules[0]) == HHH
    x = jnp.linspace(-1, 1, 8, dtype=H)[None]
    assert half(x).dtype == H
    with refused(pax.errors.PolicyError):
        mixed_precision(half, HHH)
