"""No function changes the module that it is given, and none is changed in silence."""

import contextlib
import copy
import dataclasses
import functools
import pickle
from collections import OrderedDict, defaultdict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_leaves, tree_structure

import pax_export as pax
from pax_export.errors import ImmutableModuleError
from tests.core.models import Dense, Net


@dataclasses.dataclass
class Options:
    width: int = 1
    names: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Fixed:
    names: list


class Config(dict):
    """A user's own kind of dict."""


class Pair(tuple):
    pass


class Holder(pax.Module):
    def __init__(self, a=None, b=None):
        super().__init__()
        self.a, self.b, self.x = a, b, jnp.ones(1)

    def __call__(self, x):
        return x * self.x


def add_to(names):
    names.append(9)


CHANGES = {
    "list": (lambda: [1], lambda v: v.append(9)),
    "inner list": (lambda: {"k": [1]}, lambda v: v["k"].append(9)),
    "list in tuple": (lambda: ([1],), lambda v: v[0].append(9)),
    "list in own tuple": (lambda: Pair(([1],)), lambda v: v[0].append(9)),
    "set": (lambda: {1}, lambda v: v.add(9)),
    "deque": (lambda: deque([1]), lambda v: v.append(9)),
    "bytearray": (lambda: bytearray(b"a"), lambda v: v.append(9)),
    "OrderedDict": (lambda: OrderedDict(k=1), lambda v: v.update(k=9)),
    "defaultdict": (lambda: defaultdict(list, k=[1]), lambda v: v["k"].append(9)),
    "own dict": (lambda: Config(k=[1]), lambda v: v["k"].append(9)),
    "dataclass": (Options, lambda v: setattr(v, "width", 9)),
    "list in dataclass": (Options, lambda v: v.names.append(9)),
    "list in frozen dataclass": (lambda: Fixed([1]), lambda v: v.names.append(9)),
    "list in partial": (lambda: functools.partial(add_to, [1]), lambda v: v()),
}
PLACES = {
    "alone": (lambda v: v, lambda a: a),
    "beside an array": (lambda v: [jnp.ones(2), v], lambda a: a[1]),
    "in a dict beside an array": (lambda v: {"z": jnp.ones(2), "y": (v,)}, lambda a: a["y"][0]),
}


@pytest.fixture(params=CHANGES)
def kind(request):
    return CHANGES[request.param]


@pytest.fixture(params=PLACES)
def place(request):
    return PLACES[request.param]


def text(module):
    """All that a module holds, in words."""
    return repr(vars(module))  # a partial says its arguments


def ways(change):
    """What gives a new module, and changes that."""
    changing = pax.pure(lambda m: (change(m), m)[1])

    def then_change(make):
        def run(module):
            new = make(module)
            with contextlib.suppress(ImmutableModuleError):
                change(new)

        return run

    def in_block(module):
        with pax.experimental.mutable(module) as opened:
            change(opened)

    return {
        "pure": changing,
        "mutable": in_block,
        "jit": jax.jit(changing),
        "grad": lambda m: jax.grad(lambda x: changing(m.replace(x=x)).x.sum())(m.x),
        "replace": then_change(lambda m: m.replace(x=jnp.zeros(1))),
        "set_attribute": then_change(lambda m: m.set_attribute("more", 1)),
        "replace_method": then_change(lambda m: m.replace_method(twice=lambda self: 2)),
        "replace_node": then_change(lambda m: m.replace_node(m.x, jnp.zeros(1))),
        "copy": then_change(lambda m: m.copy()),
        "eval": then_change(lambda m: m.eval()),
        "freeze": then_change(pax.freeze_parameters),
        "deepcopy": then_change(copy.deepcopy),
        "pickle": then_change(lambda m: pickle.loads(pickle.dumps(m))),
        "tree_map": then_change(lambda m: jax.tree_util.tree_map(lambda x: x, m)),
    }


@pytest.mark.parametrize(
    ("way", "where"),
    [(way, "alone") for way in sorted(ways(None))]
    + [(way, where) for way in ("pure", "replace", "jit", "pickle") for where in list(PLACES)[1:]],
)
def test_the_original_stays_as_it_is(way, where, kind):
    (make, change), (put, get) = kind, PLACES[where]
    module = Holder(put(make()))
    before, structure = text(module), tree_structure(module)
    if way == "pickle" and isinstance(make(), functools.partial):
        pytest.skip("a partial's arguments are pickled as they are")
    ways(lambda m: change(get(m.a)))[way](module)
    assert text(module) == before
    assert tree_structure(module) == structure


@pytest.mark.parametrize("way", sorted(ways(None)))
def test_lists_of_modules_are_not_shared(way):
    module = Holder([Dense()], {"k": (Dense(), [Dense()])})
    leaves = tree_leaves(module)
    ways(lambda m: (m.a.clear(), m.b["k"][1].append(Dense())))[way](module)
    assert len(module.a) == 1 and len(module.b["k"][1]) == 1
    assert all(x is y for x, y in zip(leaves, tree_leaves(module)))


def test_arguments_of_the_caller_are_not_changed():
    layers, options = [Dense()], {"k": [1]}
    module = Holder().replace(a=layers, b=options)
    layers.append(Dense())
    options["k"].append(2)
    assert len(module.a) == 1 and module.b == {"k": [1]}
    assert module.a[0] is layers[0]
    table = np.zeros(2)
    assert module.replace(b=table).b is table and module.replace(b=[table, 1]).b[0] is table


def test_numpy_arrays_are_copied_when_opened_and_given_back_when_not_changed():
    class Count(pax.StateModule):
        def __init__(self):
            super().__init__()
            self.n, self.many, self.table = np.zeros(()), [np.zeros(2), 5], np.arange(3.0)

        def __call__(self, x):
            self.n += 1
            self.many[0][1] = 7
            return x + self.table.sum()

    module = Count()
    after, _ = module % 1.0
    assert float(module.n) == 0 and module.many[0].tolist() == [0, 0]
    assert float(after.n) == 1 and after.many[0].tolist() == [0, 7] and after.many[1] == 5
    assert after.table is module.table
    batch = np.ones(2)
    assert pax.pure(lambda m, x: x)(module, batch) is batch


def test_a_change_outside_is_refused_and_explained():
    module = Net()
    with pytest.raises(ImmutableModuleError) as caught:
        module.layers.append(Dense(2, 2))
    assert str(caught.value).splitlines() == [
        "A list of an immutable module cannot be changed in place.",
        "  got: [Dense(din=2, dout=2), Dense(din=2, dout=2)]",
        "  fix: module = module.replace(name=...), with a new list; or change it in a function "
        "decorated with pax.pure",
    ]


@pytest.mark.parametrize("first", ["new", "copied", "from jit", "from pure", "pickled", "edited"])
def test_every_module_refuses(first):
    module = Holder([Dense()], {"k": (Dense(), [Dense()])}).set_attribute("log", [])
    module = {
        "new": lambda m: m,
        "copied": lambda m: m.copy(),
        "from jit": jax.jit(lambda m: m),
        "from pure": pax.pure(lambda m: (m.a.append(Dense()), m)[1]),
        "pickled": lambda m: pickle.loads(pickle.dumps(m)),
        "edited": lambda m: m.replace(a=[Dense(), Dense()]),
    }[first](module)
    before = tree_structure(module)
    for change in (
        lambda: module.b["k"][1].append(Dense()),
        lambda: module.b.update(x=1),
        lambda: module.b.__setitem__("k", 1),
        module.a.pop,
        lambda: module.a.__setitem__(0, 1),
        lambda: module.a.__iadd__([1]),
        lambda: module.log.append(1),
    ):
        with pytest.raises(ImmutableModuleError):
            change()
    assert tree_structure(module) == before


def test_a_change_of_static_data_outside_is_refused_or_noticed(kind, place):
    (make, change), (put, get) = kind, place
    module = Holder(put(make()))
    before, words = tree_structure(module), text(module)
    try:
        change(get(module.a))
    except ImmutableModuleError:
        assert text(module) == words and tree_structure(module) == before
    else:
        assert tree_structure(module) != before
        assert repr(get(module.copy().a)) == repr(get(module.a)) and text(module) != words


def test_containers_of_a_closed_module_are_read_as_those_of_python():
    module = Holder([jnp.ones(2), jnp.zeros(2)], {"b": [1, 2], "a": {3}})
    assert module.b == {"b": [1, 2], "a": {3}} and list(module.b) == ["b", "a"]
    assert isinstance(module.a, list) and isinstance(module.b, dict)
    assert module.b["b"] + [3] == [1, 2, 3] and [*module.b["b"]] == [1, 2]
    assert repr(module.b) == repr({"b": [1, 2], "a": {3}})
    assert jnp.stack(module.a).shape == (2, 2) and jnp.zeros(module.b["b"]).shape == (1, 2)
    doubled = jax.tree_util.tree_map(lambda x: 2 * x, module.a)
    assert tree_structure(doubled) == tree_structure(module.a)
    assert tree_leaves(module.replace(a=doubled))[0].tolist() == [2, 2]
    for plain in (
        copy.copy(module.b),
        copy.deepcopy(module.b),
        pickle.loads(pickle.dumps(module.b)),
    ):
        assert type(plain) is dict and plain == module.b
    other = Holder()
    other = pax.pure(lambda m: (setattr(m, "a", module.b["b"]), m.a.append(3), m)[2])(other)
    assert other.a == [1, 2, 3] and module.b["b"] == [1, 2]


def test_changes_inside_a_mutable_block_are_allowed():
    @pax.pure
    def change(module):
        module.a.append(Dense())
        tree_leaves(module)
        module.b["k"].append(2)
        tree_leaves(module)
        module.a[0] = Dense()
        return module

    module = change(Holder([Dense()], {"k": [1]}))
    with pax.experimental.mutable(module) as module:
        module.a.pop()
        module.b["k"].clear()
    assert len(tree_leaves(module)) == 3
    with pytest.raises(KeyError), pax.experimental.mutable(module) as other:
        other.a.append(Dense())
        raise KeyError
    assert len(tree_leaves(other)) == 5
