"""LazyModule and materialize."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.errors import ImmutableModuleError, NotMaterializedError
from pax_export.experimental import LazyModule, materialize
from pax_export.experimental.graph import build_graph_module
from tests.core.models import Counter
from tests.refusals import refused


@dataclass
class MLP(LazyModule):
    features: list

    def __call__(self, x):
        sizes = zip(self.features[:-1], self.features[1:])
        for i, size in enumerate(sizes):
            x = jax.nn.relu(self.get_or_create(f"fc_{i}", partial(pax.Linear, *size))(x))
        return x


class Block(LazyModule):
    """Creates layers that change in the very call that creates them."""

    def __call__(self, x):
        x = self.get_or_create("norm", lambda: pax.BatchNorm1D(x.shape[-1]))(x)
        x = self.get_or_create("dropout", lambda: pax.Dropout(0.5))(x)
        return self.get_or_create("mlp", lambda: MLP([x.shape[-1], 4]))(x)


class Outer(pax.Module):
    """Contains lazy modules, and a state of its own."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()
        self.blocks = [Block(), pax.Linear(4, 3), Block()]

    def __call__(self, x):
        x = self.counter(x)
        for block in self.blocks:
            x = block(x)
        return x


X = jnp.linspace(-1.0, 1.0, 30).reshape(2, 5, 3)


def test_submodules_are_created_when_needed():
    mlp, _ = MLP([1, 2, 3]) % jnp.ones((1, 1))
    assert mlp.summary().splitlines() == [
        "MLP(features=[1, 2, 3])",
        "├── fc_0: Linear(in_dim=1, out_dim=2, with_bias=True)",
        "└── fc_1: Linear(in_dim=2, out_dim=3, with_bias=True)",
    ]
    assert mlp.pytree_attributes == ("fc_0", "fc_1")
    assert mlp(jnp.ones((7, 1))).shape == (7, 3)
    again, _ = mlp % jnp.ones((1, 1))
    assert again == mlp


def test_keys_are_drawn_as_if_written_out():
    pax.seed_rng_key(7)
    mlp, _ = MLP([1, 2, 3]) % jnp.ones((1, 1))
    pax.seed_rng_key(7)
    np.testing.assert_array_equal(mlp.fc_0.weight, pax.Linear(1, 2).weight)
    np.testing.assert_array_equal(mlp.fc_1.weight, pax.Linear(2, 3).weight)


def test_any_attribute_counts():
    class Named(LazyModule):
        limit = 3

        def __call__(self):
            made = [self.get_or_create(n, lambda: 1 / 0) for n in ("name", "limit")]
            return made, self.get_or_create("table", lambda: jnp.ones(2)), self.table

    named, (made, first, second) = Named() % ()
    assert made == [None, 3]
    assert first is second is named.table


def test_static_values_and_containers_are_created_too():
    class Several(LazyModule):
        def __call__(self, x):
            self.get_or_create("size", lambda: x.shape[-1])
            odd = self.get_or_create("odd", lambda: {1: "a", "b": 2})
            layers = self.get_or_create("layers", lambda: [Counter(), jnp.tanh])
            assert odd == {1: "a", "b": 2}
            return layers[1](layers[0](x))

    several, _ = Several() % X
    assert several.size == 3
    assert int(several.layers[0].count) == 1
    again, _ = several % X
    assert int(again.layers[0].count) == 2


def test_created_modules_can_change_in_the_same_call():
    block, _ = Block() % X
    assert float(block.norm.ema_mean.debias) == 1.0
    assert block.mlp.fc_0.weight.shape == (3, 4)
    with pytest.raises(ImmutableModuleError):
        block.norm.scale = None
    with pytest.raises(ImmutableModuleError):
        block.norm(X)


def test_a_container_of_a_created_module_may_become_mixed():
    class Growing(pax.Module):
        def __init__(self):
            super().__init__()
            self.parts = [jnp.ones(1)]

    class Grower(LazyModule):
        def __call__(self):
            self.get_or_create("growing", Growing).parts.append("text")

    grower, _ = Grower() % ()
    assert jax.tree.map(lambda x: x, grower).growing.parts[1] == "text"
    assert len(jax.tree.leaves(grower)) == 1


def test_shared_modules_stay_immutable():
    shared = Counter()

    class Keeper(LazyModule):
        def __call__(self, x):
            return self.get_or_create("counter", lambda: shared)(x)

    keeper, _ = Keeper() % 1
    assert int(shared.count) == 0
    assert int(keeper.counter.count) == 1


def test_a_constructor_may_create_but_not_call():
    class Early(LazyModule):
        def __init__(self, call):
            super().__init__()
            counter = self.get_or_create("counter", Counter)
            if call:
                counter(1)

    assert int(Early(call=False).counter.count) == 0
    with pytest.raises(ImmutableModuleError):
        Early(call=True)


def test_an_inner_pure_suspends_created_modules():
    class Inner(LazyModule):
        def __call__(self, x):
            counter = self.get_or_create("counter", Counter)
            pax.pure(lambda: counter(x))()

    with pytest.raises(ImmutableModuleError):
        Inner() % 1


def test_created_modules_follow_eval_mode():
    block, _ = Block().eval() % X
    assert [module.training for module in block.submodules()] == [False] * 3
    assert float(block.norm.ema_mean.debias) == 0.0
    block, _ = Block() % X
    assert [module.training for module in block.submodules()] == [True] * 3


def test_under_a_mixed_precision_policy():
    policy = jmp.get_policy("p=f32,c=f16,o=f32")
    block, y = pax.apply_mp_policy(Block(), policy) % X
    assert y.dtype == jnp.float32
    assert block.norm.scale.dtype == jnp.float32
    assert float(block.norm.ema_mean.debias) == 1.0
    first = materialize(pax.apply_mp_policy(Block(), policy), X)
    assert float(first.norm.ema_mean.debias) == 0.0


# --- materialize ---------------------------------------------------------------


def initial(module):
    """All leaves that a call would change, as they are before any call."""
    return [
        *(float(block.norm.ema_mean.debias) for block in (module.blocks[0], module.blocks[2])),
        int(module.counter.count),
    ]


def test_exports_without_submodules_are_refused(tmp_path):
    from pax_export.export import to_saved_model

    inputs = jax.ShapeDtypeStruct((2, 1), jnp.float32)
    lazy = MLP([1, 2])
    with refused(ValueError, "pax.experimental.materialize(module"):
        to_saved_model(lazy, tmp_path / "lazy", inputs)
    assert list(tmp_path.iterdir()) == []
    report = to_saved_model(materialize(lazy, jnp.ones((2, 1))), tmp_path / "net", inputs)
    assert len(report.signatures) == 1


def test_materialize_creates_everything_and_keeps_first_states():
    outer = Outer()
    module = materialize(outer, X)
    assert initial(module) == [0.0, 0.0, 0]
    assert module.blocks[1].weight is outer.blocks[1].weight
    assert outer.blocks[0].pytree_attributes == ()
    after, y = module % X
    assert y.shape == (2, 5, 4)
    assert jax.tree.structure(after) == jax.tree.structure(module)
    assert initial(after) == [1.0, 1.0, 1]
    assert materialize(module, X) == module


def test_a_dropout_has_not_used_its_key():
    pax.seed_rng_key(3)
    block = materialize(Block(), X)
    pax.seed_rng_key(3)
    np.testing.assert_array_equal(block.dropout.rng_key, pax.Dropout(0.5).rng_key)


def test_one_trace_after_materialize():
    traced = []

    @jax.jit
    def step(module, x):
        traced.append(1)
        return module % x

    module = materialize(Outer(), X)
    for _ in range(3):
        module, _ = step(module, X)
    assert len(traced) == 1
    grads = pax.grad(lambda module: jnp.sum((module % X)[1]))(module)
    assert jax.tree.structure(grads) == jax.tree.structure(module.parameters())


def test_modules_that_were_exchanged_for_updated_ones():
    class Exchanging(LazyModule):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def __call__(self, x):
            self.block, x = self.block % x
            self.get_or_create("norm", lambda: pax.BatchNorm1D(4))
            self.norm, x = self.norm % x
            return x

    module = materialize(Exchanging(), X)
    assert float(module.norm.ema_mean.debias) == 0.0
    assert float(module.block.norm.ema_mean.debias) == 0.0


def test_the_structure_is_that_after_the_call():
    class ByHand(pax.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.width, self.seen = None, None, jnp.zeros(())

        def __call__(self, x):
            if self.fc is None:
                self.fc, self.width = pax.Linear(x.shape[-1], 1), x.shape[-1]
            self.seen = self.seen + 1
            return self.fc(x)

    module = materialize(ByHand(), X)
    assert module.width == 3 and module.fc.weight.shape == (3, 1)
    assert int(module.seen) == 0


def test_arrays_that_are_created_and_changed():
    class Averaging(LazyModule):
        def __call__(self, x):
            mean = self.get_or_create("mean", lambda: jnp.zeros(x.shape[-1]))
            self.mean = 0.5 * (mean + x.mean((0, 1)))
            return x - self.mean

    np.testing.assert_array_equal(materialize(Averaging(), X).mean, jnp.zeros(3))
    after, _ = Averaging() % X
    assert float(jnp.abs(after.mean).max()) > 0


def test_keyword_arguments_and_methods():
    class Coder(LazyModule):
        def encode(self, x, *, scale):
            return self.get_or_create("fc", lambda: pax.Linear(3, 2))(x) * scale

    module = materialize(Coder().encode, X, scale=2.0)
    assert type(module) is Coder and module.fc.weight.shape == (3, 2)
    assert module.encode(X, scale=1.0).shape == (2, 5, 2)


def test_an_exception_leaves_no_submodule():
    class Failing(LazyModule):
        def __call__(self, x):
            self.get_or_create("fc", lambda: pax.Linear(3, 3))
            raise RuntimeError("no")

    module = Failing()
    with refused(RuntimeError, "no"):
        materialize(module, X)
    assert module.pytree_attributes == ()
    with pytest.raises(NotMaterializedError):  # nothing records any more
        module(X)


# --- what is refused -----------------------------------------------------------

LACKING = [
    "A lazy module lacks a submodule, and cannot create it where it is not open for change.",
    "  where: MLP.fc_0",
    "  fix: module = pax.experimental.materialize(module, x) with an example input x, "
    "before jit, grad or export; or module, y = module % x",
]


@pytest.mark.parametrize(
    "call",
    [
        lambda mlp, x: mlp(x),
        jax.jit(lambda mlp, x: mlp(x)),
        lambda mlp, x: jax.grad(lambda x: jnp.sum(mlp(x)))(x),
        lambda mlp, x: jax.vmap(mlp)(x),
        pax.pure(jax.jit(lambda mlp, x: mlp(x))),
    ],
)
def test_calls_without_submodules_are_refused(call):
    with pytest.raises(NotMaterializedError) as caught:
        call(MLP([1, 2, 3]), jnp.ones((1, 1)))
    assert str(caught.value).splitlines() == LACKING
    assert isinstance(caught.value, ValueError)
    module = materialize(MLP([1, 2, 3]), jnp.ones((1, 1)))
    call(module, jnp.ones((1, 1, 1)))


@pytest.mark.parametrize(
    ("given", "got"), [(3, "int: 3"), (Counter(), "Counter: Counter(state=1, mode=train)")]
)
def test_create_fn_must_be_a_function(given, got):
    class Wrong(LazyModule):
        def __call__(self):
            return self.get_or_create("fc", given)

    with refused(AssertionError, where=f"{Wrong.__qualname__}.fc", got=str(got)):
        Wrong() % ()


@pytest.mark.parametrize("value", [3, jnp.tanh, X])
def test_materialize_needs_a_module(value):
    with refused(ValueError, "materialize"):
        materialize(value, X)


def test_a_gradient_of_a_module_without_its_submodules_is_refused():
    def loss(mlp, x):
        mlp, y = mlp % x
        return jnp.sum(y), (None, mlp)

    sgd = pax.optim.from_optax(optax.sgd(0.1))
    for mlp in (
        MLP([1, 2, 3]),
        build_graph_module(lambda x: x >> MLP([1, 2, 3]))(jnp.ones((1, 1))),
    ):
        with refused(NotMaterializedError, "no gradients", where="MLP.fc_0"):
            pax.grad(loss, has_aux=True)(mlp, jnp.ones((1, 1)))
        with refused(NotMaterializedError, "no gradients", where="MLP.fc_0"):
            pax.build_update_fn(loss)(mlp, sgd(mlp.parameters()), jnp.ones((1, 1)))
        mlp = materialize(mlp, jnp.ones((1, 1)))
        pax.build_update_fn(loss)(mlp, sgd(mlp.parameters()), jnp.ones((1, 1)))
