"""Norms of a block: words such as post and input say their order, not whose they are."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.refusals import refused
from tests.weights.adoption.foreign import Free

N = np.random.default_rng(0)
D = 4

IN_FILES = (
    "input_layernorm post_attention_layernorm", "self_attn_layer_norm final_layer_norm",
    "layernorm_before layernorm_after", "norm1 norm2", "ln_1 ln_2", "rms_1 rms_2",
    "attention.output.LayerNorm output.LayerNorm", "sa_layer_norm output_layer_norm",
    "attention_norm ffn_norm", "0.layer_norm 1.layer_norm",
)  # fmt: skip
IN_MODULES = (
    "attention_norm mlp_norm", "attn_norm dense_norm", "pre_attention_norm pre_mlp_norm",
    "norm1 norm2", "input_layernorm post_attention_layernorm", "input_norm post_norm",
)  # fmt: skip
FOUR = (
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
)
FOURS = (
    "attention_norm attention_post_norm dense_norm dense_post_norm", "norm1 norm2 norm3 norm4",
    "pre_attention_norm post_attention_norm pre_mlp_norm post_mlp_norm",
)  # fmt: skip
THREE = "self_attn_layer_norm encoder_attn_layer_norm final_layer_norm"
THREES = ("norm1 norm2 norm3", "self_norm cross_norm mlp_norm")


def _file(norms, layers):
    names = [f"model.layers.{i}.{n}" for i in range(layers) for n in norms.split()]
    return {f"{n}.weight": N.normal(size=D).astype(np.float32) for n in [*names, "model.norm"]}


def _block(norms, norm):
    block = {}
    for name in norms.split():
        *above, last = name.split(".")
        at = block
        for step in above:
            at = at.setdefault(step, {})
        at[last] = norm()
    return Free(**block)


def _net(norms, layers, norm):
    return Free(layers=[_block(norms, norm) for _ in range(layers)], norm=norm())


def _own_norm():
    """A norm of a class that is not the library's."""
    return Free(weight=jnp.ones(D))


@pytest.mark.parametrize(
    ("theirs", "ours", "layers"),
    [*itertools.product(IN_FILES, IN_MODULES, [2]), *itertools.product([FOUR], FOURS, [1]),
     *itertools.product(IN_FILES, IN_MODULES[:1], [1]), *itertools.product([THREE], THREES, [2])],
)  # fmt: skip
def test_norms_are_ordered_by_name(theirs, ours, layers):
    norm = _own_norm if layers == 1 else lambda: pax.RMSNorm(D)
    _, report = pax.weights.adopt(_net(ours, layers, norm), _file(theirs, layers))
    found = {row.leaf.rpartition(".")[0]: row.arrays for row in report.rows}
    for i in range(layers):
        for own, other in zip(ours.split(), theirs.split()):
            assert found[f"layers.{i}.{own}"] == (f"model.layers.{i}.{other}.weight",)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("input_layernorm post_attention_layernorm", "first_norm second_norm"),
        ("input_layernorm post_attention_layernorm", "post_attention_norm post_mlp_norm"),
        ("post_attention_layernorm post_feedforward_layernorm", "input_norm post_attention_norm"),
    ],
)
def test_contradictory_orders_are_refused(theirs, ours):
    with refused(pax.errors.AmbiguousWeightsError, "post_attention_layernorm.weight"):
        pax.weights.adopt(_net(ours, 2, lambda: pax.RMSNorm(D)), _file(theirs, 2))


@pytest.mark.parametrize("names", ["tensor_4 tensor_5", "yat376 yat646"])
def test_numbers_that_count_all_arrays_give_no_order(names):
    file = {f"{name}.weight": np.ones(D, np.float32) for name in names.split()}
    with refused(pax.errors.AmbiguousWeightsError, f"{names.split()[0]}.weight"):
        pax.weights.adopt(_block("attention_norm mlp_norm", _own_norm), file)


@pytest.mark.parametrize("names", ["first_norm second_norm", "mlp_norm attention_norm"])
def test_a_reference_overrides_the_order(names):
    first, second = names.split()
    net, file = _net(names, 2, lambda: pax.RMSNorm(D)), _file(IN_FILES[0], 2)

    def call(net, x):
        for block in net.layers:
            x = x + jnp.tanh(getattr(block, first)(x))
            x = x + jnp.tanh(2 * getattr(block, second)(x))
        return net.norm(x)

    def scaled(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * file[f"model.{name}.weight"]

    x = y = N.normal(size=(3, D)).astype(np.float32)
    for i in range(2):
        y = y + np.tanh(scaled(y, f"layers.{i}.input_layernorm"))
        y = y + np.tanh(2 * scaled(y, f"layers.{i}.post_attention_layernorm"))
    _, report = pax.weights.adopt(net, file, reference=(x, scaled(y, "norm"), call))
    found = {row.leaf: row.arrays for row in report.rows}
    assert found[f"layers.1.{second}.scale"] == ("model.layers.1.post_attention_layernorm.weight",)
    assert report.tried > 1
