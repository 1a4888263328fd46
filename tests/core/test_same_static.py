"""A module keeps its own static data, whatever Python calls equal to it."""

import collections
import dataclasses
import decimal
import functools
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_structure

import pax_export as pax
from pax_export.core import static_key


@dataclasses.dataclass(frozen=True)
class Config:
    value: Any
    note: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(eq=False)
class Plain:
    value: Any


class Loose:
    """Calls everything of its kind equal."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Loose)

    def __hash__(self):
        return 0


class Slotted(Loose):
    __slots__ = ("more",)

    def __init__(self, value, more):
        super().__init__(value)
        self.more = more


class Pair(tuple):
    pass


class Text(str):
    pass


class Stubborn(Loose):
    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be taken apart")


class Numbers(set):
    pass


class Options(dict):
    """A user's own kind of dict."""


class Steps(list):
    """A user's own kind of list."""


class Holder(pax.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value
        self.x = jnp.ones(1)


def with_note(text, note):
    text = Text(text)
    text.note = note
    return text


Point = collections.namedtuple("Point", "x y")


def adder(n):
    return lambda x: x + n


def switch():
    state = 0

    def get(x):
        return x + state

    def put(value):
        nonlocal state
        state = value

    return get, put


def rebuilt_by_jit(module):
    return jax.jit(lambda m: m)(module)


PAIRS = [
    (Config(1), Config(1.0)),
    (Config(1, note="a"), Config(1, note="b")),
    (Config(0.0), Config(-0.0)),
    (Config(True), Config(1)),
    (Config((Config(1),)), Config((Config(1.0),))),
    (Pair((1,)), Pair((1.0,))),
    (0j, complex(-0.0, 0.0)),
    (np.float32(0.0), np.float32(-0.0)),
    (functools.partial(max, 1), functools.partial(max, 1.0)),
    (frozenset([1]), frozenset([1.0])),
    (Numbers([1]), Numbers([True])),
    ({1: "a"}, {True: "a"}),
    (switch()[0], switch()[0]),
    (Plain(1), Plain(1)),
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ((1,), [1]),
    ((1,), (1.0,)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (adder(1), adder(2)),
    (adder([]), adder([])),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (Point(1, 2), (1, 2)),
    (object(), object()),
    (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
    (collections.OrderedDict(a=1), {"a": 1}),
    (collections.defaultdict(list), collections.defaultdict(set)),
    (collections.deque([1], 3), collections.deque([1], 4)),
    (collections.deque([1]), collections.deque([True])),
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda value: type(value).__name__)
def test_different_statics_stay_different(a, b):
    first, second = Holder(a), Holder(b)
    assert static_key(a) != static_key(b)
    for module, value in ((first, a), (second, b)):
        for again in (module, module.copy(), module.eval(), rebuilt_by_jit(module)):
            assert isinstance(again.value, type(value))
            assert repr(again.value) == repr(value)
            if not isinstance(value, (Numbers, dict)):
                assert again.value is value or static_key(again.value) == static_key(value)
    assert tree_structure(first) != tree_structure(second)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Config(1, note="a"),
        lambda: Config(Config((1, "b", 2.0))),
        lambda: Loose(3),
        lambda: Slotted(1, (2,)),
        lambda: Pair((1, 2)),
        lambda: with_note("a", 1),
        lambda: np.float32(1.5),
        lambda: np.dtype("int8"),
        lambda: decimal.Decimal("1.50"),
        lambda: functools.partial(max, 1),
        lambda: jax.ShapeDtypeStruct((1,), "float32"),
        lambda: jax.sharding.PartitionSpec("data", None),
        lambda: Numbers([3, 1, 2]),
        lambda: slice(1, 2),
        lambda: jnp.float32,
        lambda: Options(f=functools.partial(max, [1])),
        lambda: Steps([functools.partial(max, {"a": 1})]),
        lambda: 1,
        lambda: float("nan"),
        lambda: [1, (2, {"a": 3})],
        lambda: Point(1, 2),
        lambda: jax.nn.relu,
        lambda: collections.OrderedDict(a=[1]),
        lambda: collections.defaultdict(list, a=[1]),
        lambda: collections.Counter("ab"),
        lambda: collections.deque([1], 3),
        lambda: bytearray(b"a"),
    ],
)
def test_one_recipe_has_one_treedef(make):
    assert static_key(make()) == static_key(make())
    assert hash(static_key(make())) == hash(static_key(make()))
    assert tree_structure(Holder(make())) == tree_structure(Holder(make()))


def test_sets_have_no_order():
    assert static_key({1, 2}) == static_key({2, 1})


def test_functions_that_read_only_their_arguments_are_one():
    def make():
        return lambda v, n=2: jnp.tanh(v) * len(v.shape) + sum(x for x in range(n))

    traces = []

    @jax.jit
    def call(net, x):
        traces.append(1)
        return net(x)

    for _ in range(3):
        call(pax.Sequential(make()), 1.0)
    assert len(traces) == 1
    assert static_key(make()) == static_key(make())


rate = 0.0


def now():
    return rate


class Rate:
    value = 0.0


def by_global():
    return lambda v: v * rate


def by_function():
    return lambda v: v * now()


def by_attribute():
    return lambda v: v * Rate.value


def by_builtin():
    return lambda v: v * globals()["rate"]


def by_import():
    def f(v):
        from tests.core.test_same_static import Rate

        return v * Rate.value

    return f


def by_inner_function():
    return lambda v: (lambda: v * rate)()


def by_class_in_it():
    def f(v):
        class Inner:
            value = rate

        return v * Inner.value

    return f


def by_closure():
    value = rate
    return lambda v: v * value


def by_closure_set_later():
    value = -1.0
    f = lambda v: v * value  # noqa: E731
    holder = Holder(f)
    value = rate
    return holder.value


def by_default():
    return lambda v, value=Rate: v * value.value


def by_keyword_default():
    return lambda v, *, value=rate: v * value


def by_partial():
    return functools.partial(lambda value, v: v * value, rate)


def by_wrapping():
    return functools.wraps(now)(lambda v: v * rate)


def by_own_attribute():
    def f(v):
        return v * f.value

    f.value = rate
    return f


def by_method():
    return types.SimpleNamespace(value=rate, f=lambda v: v * rate).f


READERS = [value for name, value in list(globals().items()) if name.startswith("by_")]


@pytest.mark.parametrize("make", READERS)
@pytest.mark.parametrize("build", [pax.Sequential, lambda f: Holder(f).replace(x=f), Holder])
def test_a_changed_value_is_never_that_of_another_trace(make, build, monkeypatch):
    """A jitted call equals the call, whatever the function reads."""
    call, got = jax.jit(lambda net, v: getattr(net, "value", net)(v)), []
    for value in (1.0, 2.0, 3.0):
        for module in (__name__, "tests.core.test_same_static"):
            monkeypatch.setattr(sys.modules[module], "rate", value)
            monkeypatch.setattr(sys.modules[module].Rate, "value", value)
        got.append(float(call(build(make()), 1.0)))
    assert got == [1.0, 2.0, 3.0]


def test_a_default_that_can_change_belongs_to_one_function():
    def make():
        def count(x, seen=[]):  # noqa: B006
            seen.append(x)
            return len(seen)

        return count

    first, second = Holder(make()), Holder(make())
    first.value(1)
    assert second.value(1) == 1 and first.value is not second.value


def test_jit_traces_again_where_static_data_differs_and_only_there():
    traces = []

    @jax.jit
    def call(module):
        traces.append(module.value.value)
        return module.x * module.value.value

    for value in (1, 1, 1.5, 1.5, True):
        call(Holder(Config(value)))
    assert traces == [1, 1.5, True]


def test_a_cached_property_does_not_tell_two_objects_apart():
    @dataclasses.dataclass(frozen=True)
    class Sizes:
        n: int

        @functools.cached_property
        def twice(self):
            return 2 * self.n

    first, second = Sizes(1), Sizes(1)
    assert first.twice == 2
    assert static_key(first) == static_key(second)


def test_threads_find_one_moduledef():
    found = []
    barrier = threading.Barrier(4)

    def make():
        barrier.wait()
        found.append(tree_structure(Holder(Config((1, 2.0)))))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
