"""When two pieces of static data are the same to jax."""

import functools
from collections import namedtuple

import jax
import numpy as np
import pytest

from pax_export.core._static import copy_containers, static_key


def make_adder(n):
    return lambda x: x + n


def make_counter():
    n = 0

    def count(x):
        nonlocal n
        n += 1
        return x + n

    return count


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1),
        (float("nan"), float("nan")),
        ([1, (2, {"a": 3})], [1, (2, {"a": 3})]),
        ({1, 2}, {2, 1}),
        (make_adder(1), make_adder(1)),
        (functools.partial(max, 1), functools.partial(max, 1)),
        (np.dtype("float32"), np.dtype("float32")),
        (Point(1, 2), Point(1, 2)),
        (jax.nn.relu, jax.nn.relu),
    ],
)
def test_same(a, b):
    assert static_key(a) == static_key(b)
    assert hash(static_key(a)) == hash(static_key(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1,), [1]),
        ((1,), (1.0,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (make_adder(1), make_adder(2)),
        (make_adder([]), make_adder([])),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (Point(1, 2), (1, 2)),
        (object(), object()),
    ],
)
def test_different(a, b):
    assert static_key(a) != static_key(b)


def test_functions_that_keep_state_are_told_apart():
    assert static_key(make_counter()) != static_key(make_counter())


def test_objects_that_cannot_say_whether_they_are_equal_differ():
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
