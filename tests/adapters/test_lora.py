"""One layer with adapters: what it gives, what of it trains, what merging leaves."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export import adapters
from pax_export import transforms as T
from tests.adapters.layers import LAYERS, built, disturbed, names_of, same
from tests.closeness import assert_close
from tests.refusals import refused

each_layer = pytest.mark.parametrize("name", LAYERS)
both_kinds = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])


@each_layer
@both_kinds
def test_merged_it_gives_the_same(name, dora):
    layer, x = built(name)
    adapted = disturbed(adapters.lora(layer, 2, alpha=3, dora=dora))
    adapted = adapters.activate(adapted, {"default": 0.7})
    merged = adapters.merge(adapted)
    y = jax.jit(lambda layer, x: layer(x))(adapted, x)
    assert_close(y, merged(x), 2e-5)
    assert np.abs(y - layer(x)).max() > 1e-3
    assert jax.tree_util.tree_structure(merged) == jax.tree_util.tree_structure(layer)
    assert same(adapters.unmerge(merged, adapted), adapted)


@each_layer
def test_at_first_nothing_changes_bit_for_bit(name):
    layer, x = built(name)
    assert (adapters.lora(layer, 2, alpha=5)(x) == layer(x)).all()
    assert_close(adapters.lora(layer, 2, dora=True)(x), layer(x))


@pytest.mark.parametrize("name", ["linear", "groups", "embed"])
def test_only_the_adapter_trains(name):
    layer, x = built(name)
    adapted = disturbed(adapters.lora(layer, 2, dora=True))
    assert type(adapted).__name__ == type(layer).__name__ and isinstance(adapted, type(layer))
    wanted = [f"adapters.default.{each}" for each in ("lora_a", "lora_b", "magnitude")]
    assert names_of(adapted.parameters()) == wanted
    grads = jax.grad(lambda p: (adapted.update_parameters(p)(x) ** 2).sum())(adapted.parameters())
    assert names_of(grads) == wanted
    assert all((leaf != 0).any() for leaf in jax.tree_util.tree_leaves(grads))


def test_the_merged_weight_is_what_the_formula_gives_bit_for_bit():
    adapted = disturbed(adapters.lora(pax.Linear(8, 6), 2, alpha=3))
    adapted = disturbed(adapters.lora(adapted, 3, name="more"))
    first, second = adapted.adapters.values()
    changes = [jnp.matmul(a.lora_a, a.lora_b, precision="highest") for a in (first, second)]
    weight = adapted.weight + changes[0] * 1.5 + changes[1]
    assert (adapters.merge(adapted).weight == weight).all()


def test_merged_bfloat16_is_rounded_once():
    layer = pax.Linear(8, 6).map(lambda x: x.astype(jnp.bfloat16))
    adapted = disturbed(adapters.lora(layer, 2))
    adapter = adapted.adapters["default"]
    assert adapter.lora_a.dtype == jnp.float32
    exact = layer.weight.astype(jnp.float32) + adapter.lora_a @ adapter.lora_b
    assert (adapters.merge(adapted).weight == exact.astype(jnp.bfloat16)).all()
    assert adapted(jnp.ones((1, 8), jnp.bfloat16)).dtype == jnp.bfloat16


def test_initial_values_are_those_of_peft():
    conv = adapters.lora(pax.Conv2D(4, 16, 3), 8, key=jax.random.key(0)).adapters["default"]
    assert conv.lora_a.shape == (3, 3, 4, 8) and conv.lora_b.shape == (8, 16)
    bound = 1 / np.sqrt(36)
    assert bound * 0.9 < abs(conv.lora_a).max() <= bound and not conv.lora_b.any()
    embed = adapters.lora(pax.Embed(50, 8), 4, key=jax.random.key(0)).adapters["default"]
    assert not embed.lora_a.any() and abs(float(embed.lora_b.std()) - 1) < 0.4
    assert same(adapters.lora(pax.Embed(9, 8), 4, key=jax.random.key(0)).adapters["default"].lora_b,
                embed.lora_b)  # fmt: skip


def test_rslora_divides_by_the_root():
    layer = adapters.lora(pax.Linear(8, 6), 4, alpha=6, rslora=True)
    assert layer.adapters["default"].scale == 3


def test_removed_it_is_the_layer_it_was():
    layer = pax.Linear(8, 6)
    twice = adapters.lora(adapters.lora(layer, 2), 3, name="more")
    assert adapters.names(adapters.remove(twice, "default")) == ["more"]
    assert adapters.remove(adapters.remove(twice, "default"), "more") == layer


def test_what_its_user_froze_stays_frozen():
    frozen = pax.freeze_parameters(pax.Linear(8, 6))
    merged = adapters.merge(adapters.lora(frozen, 2))
    assert same(merged, frozen) and names_of(merged.parameters()) == []


def test_equal_layers_have_equal_treedefs_and_pickle():
    make = lambda: adapters.lora(pax.Linear(8, 6), 2, dropout=0.1)  # noqa: E731
    assert jax.tree_util.tree_structure(make()) == jax.tree_util.tree_structure(make())
    assert same(pickle.loads(pickle.dumps(layer := make())), layer)


def test_dropout_drops_in_train_mode_only():
    layer = disturbed(adapters.lora(pax.Linear(8, 6), 2, dropout=0.5, key=jax.random.key(3)))
    x = jnp.ones((4, 8))
    after, y = layer % x
    _, z = after % x
    assert (y != z).any() and (layer.eval()(x) == adapters.merge(layer)(x)).any()
    assert_close(layer.eval()(x), adapters.merge(layer)(x))
    assert names_of(after.parameters()) == names_of(layer.parameters())
    assert adapters.lora(pax.Linear(8, 6).eval(), 2, dropout=0.5)(x).shape == (4, 6)


def test_a_subclass_with_a_call_of_its_own():
    class Doubled(pax.Linear):
        def __call__(self, x, twice=False):
            y = super().__call__(x)
            return y + y if twice else y

    layer = adapters.lora(Doubled(8, 6), 2)
    x = jnp.ones((1, 8))
    assert_close(layer(x, twice=True), 2 * layer(x))


def test_stacked_layers_have_an_adapter_each():
    scanned = T.Scan(pax.Linear, length=3, scan_output=False)(4, 4)
    adapted = disturbed(adapters.add(scanned, pax.Linear, 2, dropout=0.1)).eval()
    adapter = adapted.scan_module.adapters["default"]
    assert adapter.lora_a.shape == (3, 4, 2) and adapter.dropout.rng_key.shape == (3, 2)
    x = jnp.ones((2, 4))
    assert_close(adapted(x), adapters.merge(adapted)(x))
    one_by_one = T.unstack_layers(adapted.scan_module)
    assert_close(adapted(x), one_by_one[2](one_by_one[1](one_by_one[0](x))))
    mapped = disturbed(adapters.add(T.Vmap(pax.Linear, axis_size=3)(4, 2), pax.Linear, 1))
    xs = jax.random.normal(jax.random.key(2), (3, 5, 4))
    assert_close(mapped(xs), adapters.merge(mapped)(xs))


def test_a_policy_holds_for_its_adapters():
    half = jmp.get_policy("p=f32,c=f16,o=f32")
    before = adapters.lora(pax.apply_mp_policy(pax.Linear(8, 6), half), 2, key=jax.random.key(0))
    after = adapters.lora(pax.Linear(8, 6), 2, key=jax.random.key(0))
    after = pax.precision.mixed_precision(after, half)
    assert jax.tree_util.tree_structure(before) == jax.tree_util.tree_structure(after)
    x = jnp.ones((2, 8))
    jaxpr = str(jax.make_jaxpr(lambda layer: layer(x))(disturbed(before)))
    assert jaxpr.count("dot_general") == jaxpr.count("preferred_element_type=float16") == 3
    assert before.adapters["default"].lora_a.dtype == before(x).dtype == jnp.float32
    assert pax.precision.policy_of(adapters.merge(before)) is not None


def test_a_module_of_shapes_can_be_adapted():
    shapes = jax.eval_shape(lambda: adapters.lora(pax.Linear(8, 6), 2))
    assert shapes.adapters["default"].lora_b.shape == (2, 6)


# --- mistakes -----------------------------------------------------------------------


class Own(pax.Linear):
    """A layer with an attribute of its own that adapters would have."""

    def __init__(self):
        super().__init__(2, 2)
        self.adapters = 3


LINEAR = "Linear(in_dim=2, out_dim=3, with_bias=True)"


def linear():
    return pax.Linear(2, 3)


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (lambda: pax.LayerNorm(3, -1), {}, ["class LayerNorm", "pax.Declared"]),
        (linear, {"key": 3}, ["where: lora: key", "got: int: 3", "key=jax.random.key(0)"]),
        (lambda: pax.freeze_parameters(linear()).parameters(), {}, ["got: EmptyNode"]),
        (
            lambda: linear().map(lambda x: x.astype(jnp.int8)),
            {},
            [f"where: {LINEAR}", "got: int8[2,3]"],
        ),
        (linear, {"rank": 3}, [f"where: {LINEAR}", "got: rank 3 for 2"]),
        (linear, {"rank": 0}, ["rank", "0"]),
        (
            lambda: adapters.lora(linear(), 1),
            {},
            [f"where: {LINEAR}", "got: 'default'", "adapters.remove"],
        ),
        (lambda: adapters.lora(linear(), 1), {"name": "a.b"}, ["'a.b'"]),
        (linear, {"alpha": 0}, ["alpha", "0"]),
        (linear, {"alpha": "much"}, ["alpha", "'much'"]),
        (lambda: adapters.weight_of(3), {}, ["adapters.weight_of", "int: 3"]),
        (lambda: adapters.names("net"), {}, ["adapters.names", "str: 'net'"]),
        (linear, {"dropout": 1.0}, ["lora.dropout"]),
        (Own, {}, ["adapters"]),
    ],
)
def test_invalid_arguments_are_refused(make, options, names):
    kinds = (pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError)
    with refused(kinds, *names):
        adapters.lora(make(), **{"rank": 1, **options})
