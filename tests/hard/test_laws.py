"""Laws of modules, on random trees: round trips, no original changed, equal recipes.

A tree is built from a recipe, plain data of tuples, so that it can be built twice.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
import warnings
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

import pax_export as pax
from pax_export.core import named_leaves, named_modules, static_key
from tests.hard.size import runs

each_tree = settings(
    max_examples=runs(short=60, long=1000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    note: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass
class Open:
    value: Any


class Pair(tuple):
    """Static: jax does not know this kind of tuple."""


class Config(dict):
    """A user's own kind of dict."""


class Holder(pax.Module):
    parameters = pax.parameters_method("a")

    def __init__(self, a: Any = None, b: Any = None):
        super().__init__()
        self.a, self.b, self.step = a, b, jnp.zeros(())

    def __call__(self, x):
        self.step = self.step + 1
        return x * self.step


class Weights(pax.ParameterModule):
    def __init__(self, held: Any):
        super().__init__()
        self.held = held


class States(pax.StateModule):
    def __init__(self, held: Any):
        super().__init__()
        self.held = held


def scaled(x, by=1):
    return x * by


# --- recipes ---------------------------------------------------------------------------

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(allow_nan=True, width=16),
    st.complex_numbers(max_magnitude=2),
    st.text(max_size=2),
    st.sampled_from([0.0, -0.0, 1, 1.0, True, b"a", jax.nn.relu, np.float32, slice]),
).map(lambda value: ("plain", value))
ARRAYS = st.sampled_from([("jax", 2), ("jax", 3), ("numpy", 2), ("key", 0), ("empty", 0)])
LAYERS = st.sampled_from(
    [("linear", 2), ("norm", 2), ("dropout", 0), ("ema", 2), ("sequential", 2)]
)


def _within(children: st.SearchStrategy) -> st.SearchStrategy:
    one = {
        kind: children.map(lambda part, kind=kind: (kind, part))
        for kind in ("frozen", "open", "partial", "weights", "states", "default")
    }
    many = {
        kind: st.lists(children, max_size=3).map(lambda parts, kind=kind: (kind, *parts))
        for kind in ("list", "tuple", "dict", "ordered", "deque", "pair", "config", "holder")
    }
    return st.one_of(*one.values(), *many.values())


RECIPES = st.recursive(st.one_of(PLAIN, ARRAYS, LAYERS), _within, max_leaves=8)
TREES = st.tuples(RECIPES, RECIPES)

BUILD = {
    "plain": lambda value: value,
    "jax": lambda n: jnp.zeros(n),
    "numpy": lambda n: np.zeros(n, np.float32),
    "key": lambda n: jax.random.key(n),
    "empty": lambda n: pax.EmptyNode(),
    "linear": lambda n: pax.Linear(n, n),
    "norm": pax.BatchNorm1D,
    "dropout": lambda n: pax.Dropout(0.5),
    "ema": lambda n: pax.EMA(np.zeros(n, np.float32), 0.9, debias=True),
    "sequential": lambda n: pax.Sequential(pax.Linear(n, n), jax.nn.relu),
}
HOLD = {
    "frozen": lambda part: Frozen(part, note=1),
    "open": Open,
    "partial": lambda part: functools.partial(scaled, by=part),
    "weights": Weights,
    "states": States,
    "default": lambda part: collections.defaultdict(list, k=part),
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: parts,
    "dict": lambda *parts: dict(zip("xyz", parts)),
    "ordered": lambda *parts: collections.OrderedDict(zip("zyx", parts)),
    "deque": lambda *parts: collections.deque(parts),
    "pair": lambda *parts: Pair(parts),
    "config": lambda *parts: Config(zip("xyz", parts)),
    "holder": lambda *parts: Holder(*parts[:2]),
}
# In these jax sees no arrays: what lies there must be static all through.
OPAQUE = ("frozen", "open", "partial", "deque", "pair", "config")


def build(recipe: tuple, within_static: bool = False) -> Any:
    kind, *parts = recipe
    if kind in BUILD:
        if within_static and (kind != "plain" or parts[0] is jax.nn.relu):
            return kind  # pickle finds what jax wraps in containers only
        return BUILD[kind](*parts)
    within_static = within_static or kind in OPAQUE
    if within_static and kind in ("weights", "states", "holder"):
        kind = "tuple"
    return HOLD[kind](*[build(part, within_static) for part in parts])


def tree_of(recipe: tuple) -> Holder:
    pax.seed_rng_key(0)
    return Holder(build(recipe[0]), build(recipe[1]))


# --- what a tree is, to the last bit ------------------------------------------------


def picture(module: Any) -> tuple:
    """All that a tree holds: the arrays by identity and content, static data by key."""
    leaves, treedef = tree_flatten(module)
    # The treedef is of copies: what is changed in place later does not change the picture.
    frozen = tree_structure(copy.copy(module))
    content = [id(x) if not isinstance(x, np.ndarray) else (id(x), x.tobytes()) for x in leaves]
    static = [
        (path, type(each), [(n, _key(v)) for n, v in vars(each).items()])
        for path, each in named_modules(module)
    ]
    assert frozen == treedef
    return frozen, content, static


def _key(value: Any) -> Any:
    """A key of static data; of what holds arrays or modules only where they stand."""
    leaves, treedef = tree_flatten_or_none(value)
    if any(isinstance(x, (jax.Array, np.ndarray)) for x in leaves):
        return treedef
    if any(isinstance(x, pax.EmptyNode) for x in leaves):
        return type(value)  # static leaves may stay wrapped where nothing else is left
    return static_key(value) if not isinstance(value, pax.Module) else None


def tree_flatten_or_none(value: Any) -> tuple:
    try:
        return tree_flatten(value, is_leaf=lambda x: isinstance(x, pax.EmptyNode))
    except (TypeError, ValueError):
        return [], None


def disturb(module: Any) -> None:
    """Changes in place whatever can be changed in a tree."""
    for _, each in named_modules(module):
        for value in list(vars(each).values()):
            _disturb(value)


def _disturb(value: Any) -> None:
    if isinstance(value, dict):
        for part in list(value.values()):
            _disturb(part)
        with suppress(pax.errors.ImmutableModuleError):  # those of closed modules
            value["new"] = 9
    elif isinstance(value, (list, collections.deque)):
        for part in list(value):
            _disturb(part)
        with suppress(pax.errors.ImmutableModuleError):
            value.append(9)
    elif isinstance(value, (tuple, frozenset)):
        for part in value:
            _disturb(part)
    elif isinstance(value, (Open, Frozen)):
        _disturb(value.value)
        if isinstance(value, Open):
            value.value = 9
    elif isinstance(value, functools.partial):
        _disturb(value.keywords["by"])
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value += 1


def disturbed(module: Any) -> Any:
    disturb(module)
    return 0


# --- the laws -----------------------------------------------------------------------------


@each_tree
@given(TREES)
def test_round_trip(recipe):
    tree = tree_of(recipe)
    before = picture(tree)
    leaves, treedef = tree_flatten(tree)
    again = tree_unflatten(treedef, leaves)
    assert again == tree and tree_structure(again) == treedef and hash(again) == hash(tree)
    assert picture(again) == before == picture(tree)
    assert picture(tree_unflatten(treedef, tree_leaves(again))) == before
    assert again.pytree_attributes == tree.pytree_attributes and again.summary() == tree.summary()
    named = named_leaves(tree)
    assert [id(leaf) for _, leaf in named] == [id(leaf) for leaf in leaves]
    assert len({name for name, _ in named}) == len(leaves)


@each_tree
@given(TREES)
def test_equal_recipes(recipe):
    first, second = tree_of(recipe), tree_of(recipe)
    assert tree_structure(first) == tree_structure(second)
    traces = []
    count = jax.jit(lambda tree: traces.append(1) or len(tree_leaves(tree)))
    again = pickle.loads(pickle.dumps(first))
    assert count(first) == count(second) == count(first.copy()) == count(again)
    assert len(traces) == 1


@each_tree
@given(TREES, TREES)
def test_other_recipes(recipe, other):
    first, second = tree_of(recipe), tree_of(other)
    keys = [[(n, _key(v)) for n, v in vars(tree).items()] for tree in (first, second)]
    if tree_structure(first) == tree_structure(second):
        assert keys[0] == keys[1]
        assert repr(vars(tree_map(str, first))) == repr(vars(tree_map(str, second)))


@each_tree
@given(TREES)
def test_no_original_is_changed(recipe):
    tree = tree_of(recipe)
    before = picture(tree)
    changing = pax.pure(disturbed)
    changing(tree)
    assert picture(tree) == before
    with pax.experimental.mutable(tree) as opened:
        disturb(opened)
    assert picture(tree) == before
    jax.eval_shape(lambda m: pax.pure(lambda m: disturbed(m) or m.step)(m), tree)
    assert picture(tree) == before
    jax.grad(lambda step: pax.pure(lambda m: disturbed(m) or m.step)(tree.replace(step=step)))(0.0)
    assert picture(tree) == before
    after, _ = tree % jnp.ones(2)
    assert picture(tree) == before and float(after.step) == 1.0


@each_tree
@given(TREES)
def test_copies_share_no_mutable_values(recipe):
    tree = tree_of(recipe)
    before = picture(tree)
    for make in (
        lambda: tree.copy(),
        lambda: copy.copy(tree),
        lambda: tree.replace(step=jnp.ones(())),
        lambda: tree.set_attribute("other", 1),
        lambda: tree.replace_node(tree.step, jnp.ones(())),
        lambda: tree.replace_method(twice=lambda self: 2),
        lambda: tree.eval(),
        lambda: pax.freeze_parameters(tree),
        lambda: tree.parameters(),
        lambda: copy.deepcopy(tree),
        lambda: pickle.loads(pickle.dumps(tree)),
        lambda: tree_map(lambda x: x, tree),
    ):
        # numpy arrays are leaves, and leaves are shared.
        new = tree_map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, make())
        disturb(new)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree_structure(new)
        assert picture(tree) == before


@each_tree
@given(TREES)
def test_pickle_and_deepcopy(recipe):
    tree = tree_of(recipe)
    assert tree.load_state_dict(tree.state_dict()) == copy.copy(tree) == tree
    for again in (pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree)):
        assert tree_structure(again) == tree_structure(tree)
        pairs = zip(tree_leaves(again), tree_leaves(tree))
        assert all(type(a) is type(b) and (a == b).all() for a, b in pairs)


@each_tree
@given(TREES)
def test_modes_and_parameters(recipe):
    tree = tree_of(recipe)
    off = tree.eval()
    assert not any(each.training for _, each in named_modules(off))
    assert off.train() == tree and off != tree
    assert tree_structure(off) == tree_structure(tree_of(recipe).eval())
    frozen = pax.freeze_parameters(tree)
    assert tree_leaves(frozen.parameters()) == []
    assert pax.unfreeze_parameters(frozen, origin=tree) == tree
    kept = pax.freeze_parameters(tree, states=True).train()
    assert not any(each.training for _, each in named_modules(kept))
    parameters = tree.parameters()
    assert tree.update_parameters(parameters) == tree and parameters.parameters() == parameters
    assert parameters | tree == tree == tree | parameters


@each_tree
@given(TREES)
def test_mutable(recipe):
    tree = tree_of(recipe)
    with pax.experimental.mutable(tree) as opened:
        opened.step = jnp.ones(())
        opened.b = None
        disturb(opened)
    assert tree_structure(opened) == tree_structure(opened.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree_leaves(opened)
