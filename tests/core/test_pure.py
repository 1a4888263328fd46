"""pure, purecall, module_and_value and ``%``."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export.core import _pure, _tree
from pax_export.core._check import check_sharing
from tests.core.models import Counter, Dense, Net
from tests.refusals import refused


def test_four_ways_to_call_are_one():
    x = jnp.ones((1, 2))
    results = [
        Net() % x,
        pax.purecall(Net(), x),
        pax.module_and_value(Net())(x),
        pax.module_and_value(Net.__call__)(Net(), x),
        pax.module_and_value(Net().__call__)(x),
    ]
    for net, y in results:
        assert net.parts["b"].count == 1 and y.shape == (1, 2)
    y = pax.pure(Net())(x)
    assert y.shape == (1, 2)


def test_a_tuple_on_the_right_is_unpacked():
    class Pair(pax.Module):
        def __call__(self, *args):
            return args

    assert (Pair() % (1, 2))[1] == (1, 2)
    assert (Pair() % ())[1] == ()
    assert (Pair() % [1, 2])[1] == ([1, 2],)


def test_a_memory_map_is_not_written_through(tmp_path):
    """An array of a subclass is the caller's, too."""
    np.save(tmp_path / "w.npy", np.zeros(3, np.float32))
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r+")

    class Scaled(pax.Module):
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, x):
            self.weight += 1
            return x

    new, _ = Scaled(mapped) % 1.0
    assert new.weight.tolist() == [1, 1, 1] and mapped.tolist() == [0, 0, 0]


def test_methods_decorated_with_pure_and_module_and_value():
    class Stack(pax.Module):
        def __init__(self):
            self.items = [Dense(1, 1)]

        @pax.pure
        def add(self):
            """Adds one."""
            self.items.append(Dense(1, 1))
            return self

        @pax.module_and_value
        def drop(self, count=1):
            del self.items[-count:]
            return len(self.items)

    stack = Stack()
    assert len(stack.add().items) == 2 and len(stack.items) == 1
    assert Stack.add.__doc__ == "Adds one."
    smaller, count = stack.add().drop()
    assert (len(smaller.items), count) == (1, 1)
    assert stack.add().add().drop(count=2)[1] == 1


def test_one_module_passed_twice_is_two_copies():
    @pax.pure
    def pair(a, b):
        a.din = 7
        return a, b

    module = Dense()
    a, b = pair(module, module)
    assert (a.din, b.din) == (7, 2) and a.weight is b.weight is module.weight


def test_keyword_arguments_and_containers_are_copied_too():
    @pax.pure
    def change(*, parts):
        parts["m"].din = 7
        return parts

    parts = {"m": Dense()}
    assert change(parts=parts)["m"].din == 7 and parts["m"].din == 2


def test_sharing_is_found_before_and_after():
    @pax.pure
    def share(net):
        net.extra = net.layers[0]

    with refused(ValueError, where="layers.0 and extra", got="Dense(din=2, dout=2)"):
        share(Net())


def test_partial_does_not_open_its_arguments():
    call = functools.partial(Counter.__call__, Counter())
    with refused(ValueError, where="Counter.count"):
        pax.pure(call)(1.0)


def test_wrong_arguments():
    for kind, got, call in (
        (ValueError, "3", lambda: pax.pure(3)()),
        (ValueError, "3", lambda: pax.module_and_value(3)),
        (AssertionError, "int: 3", lambda: pax.purecall(3)),
        (AssertionError, "int: 3", lambda: pax.module_and_value(lambda m: m)(3)),
        (AssertionError, repr(pax.Module()), lambda: pax.purecall(pax.Module())),
        (AssertionError, repr(pax.Module()), lambda: pax.Module() % 1),
        (AssertionError, repr(pax.Module()), lambda: pax.module_and_value(pax.Module())),
        (ValueError, repr(pax.Module()), lambda: pax.pure(pax.Module())()),
    ):
        with refused(kind, got=got):
            call()


def test_any_name_may_be_a_keyword_of_the_call():
    class Odd(pax.Module):
        def __call__(self, module, function, args):
            return module + function + args

    assert pax.purecall(Odd(), module=1, function=2, args=3)[1] == 6
    assert pax.module_and_value(Odd())(module=1, function=2, args=3)[1] == 6
    call = pax.module_and_value(Odd.__call__)
    assert call(Odd(), module=1, function=2, args=3)[1] == 6


def test_attributes_set_one_after_the_other_make_one_moduledef(monkeypatch):
    """Counts moduledefs, not seconds: one for each assignment was quadratic."""
    made = []
    intern = _tree.intern_moduledef
    monkeypatch.setattr(_tree, "intern_moduledef", lambda *args: made.append(1) or intern(*args))

    @pax.pure
    def fill(module, count):
        for number in range(count):
            setattr(module, f"text{number}", str(number))
            setattr(module, f"array{number}", jnp.ones(()))
        return module

    counts = []
    for count in (5, 50):
        made.clear()
        module = fill(pax.Module(), count)
        counts.append(len(made))
        assert len(jax.tree_util.tree_leaves(module)) == count
        assert getattr(module, f"text{count - 1}") == str(count - 1)
    assert counts[0] == counts[1]


def test_an_open_module_is_flattened_as_it_is_now():
    @pax.pure
    def change(module):
        seen = []
        for value in (1, jnp.ones(()), [1, jnp.ones(())], None):
            module.value = value
            seen.append(len(jax.tree_util.tree_leaves(module)))
            seen.append("value" in module.pytree_attributes)
        module.value = jnp.zeros(())
        del module.text
        module.again = copy.deepcopy(module)
        return module, seen

    first = pax.Module().set_attribute("text", "a").set_attribute("value", jnp.ones(()))
    module, seen = change(first)
    assert seen == [0, False, 1, True, 1, True, 0, False]
    assert len(jax.tree_util.tree_leaves(module)) == 2
    assert not hasattr(module, "text") and not hasattr(module.again, "text")
    assert first.text == "a" and float(first.value) == 1.0


def test_unread_modules_are_not_rebuilt(monkeypatch):
    """A `pure` that does nothing fills in no attributes and checks once."""
    checks = []
    monkeypatch.setattr(_pure, "check_sharing", lambda x: checks.append(1) or check_sharing(x))
    net = pax.Sequential(pax.Linear(2, 3), pax.Linear(3, 4))
    same = pax.pure(lambda module: module)(net)
    assert same == net and len(checks) == 1
    assert pax.pure(lambda module: module[0].in_dim)(net) == 2 and len(checks) == 3
