"""When a module may be changed, and when not."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.core import mutable
from pax_export.errors import ImmutableModuleError
from tests.core.models import Counter, Dense, Net
from tests.refusals import refused


def test_outside_nothing_changes():
    module = Dense()
    with refused(ValueError, where="Dense.weight"):
        module.weight = jnp.ones(1)
    with refused(ImmutableModuleError, where="Dense.din"):
        del module.din
    assert module == module.copy()


def test_a_constructor_changes_only_its_own_object():
    class Parent(pax.Module):
        def __init__(self):
            self.child = Dense()
            self.child.bias = jnp.ones(3)

    class Caller(pax.Module):
        def __init__(self):
            self.child = Counter()
            self.child(1)

    for cls in (Parent, Caller):
        with pytest.raises(ImmutableModuleError):
            cls()


def test_a_constructor_suspends_that_of_its_parent():
    class Child(pax.Module):
        def __init__(self, parent):
            parent.x = 1

    class Parent(pax.Module):
        def __init__(self):
            self.child = Child(self)

    with refused(ImmutableModuleError, "Parent.x"):
        Parent()

    class Patient(pax.Module):
        def __init__(self):
            try:
                Child(self)
            except ValueError:
                self.x = 2  # open again, after the exception too

    assert Patient().x == 2


def test_pure_opens_copies_with_all_their_submodules():
    module = Net()

    @pax.pure
    def change(net):
        net.layers[1].bias = jnp.ones(2)
        net.parts["a"].din = 9
        return net

    changed = change(module)
    assert changed.layers[1].bias.sum() == 2 and module.layers[1].bias.sum() == 0
    assert (changed.parts["a"].din, module.parts["a"].din) == (9, 3)
    with pytest.raises(ImmutableModuleError):
        changed.kind = "other"


def test_pure_opens_nothing_else():
    captured = Dense()

    @pax.pure
    def closure(module):
        captured.din = 1

    @pax.pure
    def created(module):
        Dense().din = 1

    for function in (closure, created):
        with pytest.raises(ImmutableModuleError):
            function(Dense())


def test_an_inner_pure_suspends_the_outer_one():
    @pax.pure
    def outer(module, fail):
        @pax.pure
        def inner(other):
            module.din = 5

        with pytest.raises(ImmutableModuleError):
            inner(Dense())
        module.din = 6
        return module

    assert outer(Dense(), True).din == 6


def test_mutable_block():
    module = Dense()
    with mutable(module) as copy:
        copy.bias = jnp.ones(3)
        assert module.bias.sum() == 0
    assert copy.bias.sum() == 3
    with pytest.raises(ImmutableModuleError):
        copy.bias = jnp.zeros(3)


def test_mutable_closes_after_an_exception_and_checks_sharing():
    with pytest.raises(KeyError):
        with mutable(Dense()) as copy:
            raise KeyError
    with pytest.raises(ImmutableModuleError):
        copy.din = 1
    with refused(ValueError, where="weight and other"):
        with mutable(Dense(2, 2)) as copy:
            copy.other = copy.weight
    with refused(TypeError, got="int: 3"):
        with mutable(3):
            pass


TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(2)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_open_module_is_closed_under_a_later_trace(transform):
    @pax.pure
    def run(module):
        def body(x):
            module.bias = x
            return x

        transform(body)

    with refused(ImmutableModuleError, where="Dense.bias"):
        run(Dense())


def test_pure_inside_a_trace_and_not_around_it():
    @pax.pure
    def step(counter, x):
        counter(x)
        return counter

    assert jax.jit(step)(Counter(), 1.0).count == 1
    with pytest.raises(ImmutableModuleError):
        pax.pure(jax.jit(lambda counter: counter(1.0)))(Counter())


def test_another_thread_cannot_change_an_open_module():
    errors = []

    def change(module):
        try:
            module.din = 1
        except ValueError as error:
            errors.append(error)

    with mutable(Dense()) as module:
        thread = threading.Thread(target=change, args=(module,))
        thread.start()
        thread.join()
        module.din = 4
    assert len(errors) == 1 and module.din == 4


def test_a_task_that_outlives_the_block_cannot_change_the_module():
    async def main():
        async def later(module, gate):
            await gate.wait()
            module.din = 1

        gate = asyncio.Event()
        with mutable(Dense()) as module:
            task = asyncio.create_task(later(module, gate))
            await asyncio.sleep(0)
        gate.set()
        with pytest.raises(ImmutableModuleError):
            await task

    asyncio.run(main())


def test_deleting():
    @pax.pure
    def delete(module, name):
        delattr(module, name)
        return module

    assert "din" not in vars(delete(Dense(), "din"))
    with refused(ValueError, where="Dense.weight"):
        delete(Dense(), "weight")
    with pytest.raises(AttributeError):
        delete(Dense(), "nothing")


def test_name_and_training_are_read_only():
    @pax.pure
    def rename(module, name):
        setattr(module, name, "x")

    for name in ("name", "training"):
        with refused(AttributeError, name):
            rename(Dense(), name)


def test_what_changes_kind_moves_in_and_out_of_the_tree():
    @pax.pure
    def change(module):
        module.bias = None
        module.din = jnp.ones(2)
        module.new = Dense(1, 1)
        return module

    assert change(Dense()).pytree_attributes == ("din", "weight", "new")


def test_a_container_that_became_mixed_inside_pure_is_seen():
    @pax.pure
    def add(net):
        net.layers.append(jnp.tanh)
        return net

    net = add(Net())
    assert net.pytree_attributes == ("parts", "scale", "mixed", "layers")
    assert jax.jit(lambda m: m)(net).layers[2] is jnp.tanh


@pytest.mark.parametrize(
    ("name", "write"), [("bias", "replace(bias=...)"), ("rate", "set_attribute('rate', ...)")]
)
def test_an_error_says_how_to_add_an_attribute(name, write):
    with refused(ImmutableModuleError, f"module = module.{write}"):
        setattr(pax.Linear(2, 3), name, 1)
