"""When two pieces of static data are the same to jax."""

import pickle
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.core import static_key
from pax_export.core._containers import copy_containers

Point = namedtuple("Point", "x y")


def test_objects_with_a_failing_eq_differ():
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            raise RuntimeError("no")

    assert static_key(Odd()) != static_key(Odd())
    odd = Odd()
    assert static_key(odd) == static_key(odd)


def test_containers_are_copied_and_objects_shared():
    thing = object()
    value = [1, {"a": (thing, [2])}, {3}]
    copy = copy_containers(value)
    assert copy == value
    assert copy[1]["a"][0] is thing
    assert copy[1]["a"][1] is not value[1]["a"][1]


class Config(dict):
    """A user's own kind of dict."""


class Uncopied(list):
    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be copied")


@pytest.mark.parametrize(
    "value",
    [OrderedDict(a=[1]), defaultdict(list, a=[1]), deque([[1]], 3), Point([1], 2), Counter("ab")],
    ids=lambda value: type(value).__name__,
)
def test_containers_of_the_standard_library_are_copied(value):
    copy = copy_containers(value)
    assert type(copy) is type(value) and copy == value and copy is not value
    assert static_key(copy) == static_key(value)
    if not isinstance(value, Counter):
        inner = "a" if isinstance(value, dict) else 0
        assert copy[inner] == [1] and copy[inner] is not value[inner]
    assert getattr(copy, "maxlen", None) == getattr(value, "maxlen", None)


def test_containers_of_a_users_own_kind():
    value = Config(a=1)
    copy = copy_containers(value)
    assert type(copy) is Config and copy == value and copy is not value
    stubborn = Uncopied([1])
    assert copy_containers(stubborn) is stubborn


RECORDS = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])
NO_NUMBERS = {
    "strings": lambda: np.array(["a", "bc"]),
    "bytes": lambda: np.array([b"a", b"bc"]),
    "objects": lambda: np.array([1, "a", None], object),
    "records": RECORDS.copy,
    "dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "many strings": lambda: np.array(["word"] * 20_000),
}


class Words(pax.Module):
    def __init__(self, vocabulary, beside=False):
        super().__init__()
        self.vocabulary = [jnp.ones(1), vocabulary] if beside else vocabulary
        self.w = np.ones(2, np.float32)

    def __call__(self, x):
        return x * self.w


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_numpy_arrays_of_other_dtypes_are_static(kind, beside):
    traces = []

    @jax.jit
    def call(module, x):
        traces.append(1)
        return module(x)

    module = Words(NO_NUMBERS[kind](), beside)
    assert len(jax.tree_util.tree_leaves(module)) == 1 + beside
    for each in (module, module.eval().train(), module.copy(), pickle.loads(pickle.dumps(module))):
        assert call(each, 2.0).tolist() == [2, 2]
        found = each.vocabulary[1] if beside else each.vocabulary
        assert type(found) is np.ndarray and (found == NO_NUMBERS[kind]()).all()
    assert len(traces) == (2 if kind == "many strings" else 1)  # by identity: not after a pickle
    assert module.load_state_dict(module.state_dict()) == module
    updated, _ = module % 2.0
    assert updated == module


def test_a_vocabulary_cannot_be_changed_outside():
    words = NO_NUMBERS["strings"]()
    module = Words(words)
    with pytest.raises(ValueError, match="read-only"):
        module.vocabulary[0] = "z"
    words[0] = "y"
    assert module.vocabulary[0] == "a"


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "complex64", "float16", "bfloat16", "int4"]
)
def test_all_numbers_are_arrays(dtype):
    module = pax.Module().set_attribute("x", np.ones(2, jnp.dtype(dtype)))
    assert module.pytree_attributes == ("x",)
