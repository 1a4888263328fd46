"""Random keys and numbers, by threefry, whose rounds jax says as plain operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import random as threefry

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, complex_rule, has, rule
from pax_export.export.formats.onnx.rules.bits import shifted
from pax_export.export.formats.onnx.values import AnyValue, Parts, Value
from pax_export.export.portable import decompose

Results = Sequence[Any]

_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = np.array(0xFFFFFFFF, np.int64)


@rule("threefry2x32")
def threefry2x32(
    writer: Writer, results: Results, k1: Value, k2: Value, x1: Value, x2: Value
) -> list[str]:
    """Twenty rounds of sums and rotations of 32 bits, in numbers of 64."""
    first, second, one, two = writer.spread(results[0].shape, k1, k2, x1, x2)
    mixed = writer("BitwiseXor", writer("BitwiseXor", first, second), np.array(_PARITY, np.int64))
    keys = [first, second, mixed]
    one, two = _sum(writer, one, keys[0]), _sum(writer, two, keys[1])
    for turn in range(5):
        for places in _TURNS[turn % 2]:
            one = _sum(writer, one, two)
            left = writer("Mul", two, np.array(1 << places, np.int64))
            right = shifted(writer, two, np.array(32 - places, np.int64), "RIGHT")
            turned = writer("BitwiseOr", writer("BitwiseAnd", left, _MASK), right)
            two = writer("BitwiseXor", one, turned)
        one = _sum(writer, one, keys[(turn + 1) % 3])
        two = _sum(writer, two, keys[(turn + 2) % 3])
        two = _sum(writer, two, np.array(turn + 1, np.int64))
    shape = results[0].shape
    return [writer.expand(each, shape) for each in (one, two)]


@rule("iota_2x32_shape")
def iota_2x32_shape(writer: Writer, results: Results, *, shape: Sequence[Any]) -> list[str]:
    """The numbers of all elements, as their upper and their lower 32 bits."""
    count: Any = 1
    for size in shape:
        count = count * size
    numbers = writer.reshape(writer.arange(count), shape)
    return [
        shifted(writer, numbers, np.array(32, np.int64), "RIGHT"),
        writer("BitwiseAnd", numbers, _MASK),
    ]


def _sum(writer: Writer, x: Any, y: Any) -> str:
    return writer("BitwiseAnd", writer("Add", x, y), _MASK)


@complex_rule("random_wrap")
def random_wrap(writer: Writer, results: Results, x: Value, *, impl: Any) -> Parts:
    _check(impl)
    return _halves(writer, x, results[0])


def _halves(writer: Writer, x: Value, result: Any) -> Parts:
    """Key data, which has an axis of two, as keys."""
    axis = x.rank - 1
    one, two = (
        Value(
            writer("Gather", x, np.array(index, np.int64), axis=axis),
            np.dtype(np.uint32),
            tuple(result.shape),
        )
        for index in range(2)
    )
    return Parts((one, two), result.dtype)


@complex_rule("random_unwrap")
def random_unwrap(writer: Writer, results: Results, keys: Parts) -> str:
    _check_keys(keys)
    return _data(writer, keys)


def _data(writer: Writer, keys: Parts) -> str:
    axis = keys.rank
    return writer("Concat", *(writer.unsqueeze(each, [axis]) for each in keys.parts), axis=axis)


@complex_rule("random_clone")
def random_clone(writer: Writer, results: Results, keys: Parts) -> Parts:
    return keys


def _by_jax(function: Callable, batched: int) -> Callable:
    """What threefry of jax does with one key, for keys with so many axes."""
    for _ in range(batched):
        function = jax.vmap(function)
    return function


def _written(
    writer: Writer, function: Callable, given: Sequence[tuple[str, tuple, Any]]
) -> AnyValue:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in given]
    program = decompose(jax.make_jaxpr(function)(*structs), has)
    values = [Value(name, np.dtype(dtype), tuple(shape)) for name, shape, dtype in given]
    (made,) = writer.inline(program, values)
    return made


@complex_rule("random_split")
def random_split(writer: Writer, results: Results, keys: Parts, *, shape: Any) -> Parts:
    _check_keys(keys)
    split = _by_jax(lambda key: _threefry().split(key, shape), keys.rank)
    made = _written(writer, split, [(_data(writer, keys), (*keys.shape, 2), np.uint32)])
    assert isinstance(made, Value)
    return _halves(writer, made, results[0])


@complex_rule("random_bits")
def random_bits(
    writer: Writer, results: Results, keys: Parts, *, bit_width: int, shape: Any
) -> AnyValue:
    _check_keys(keys)
    draw = _by_jax(lambda key: _threefry().random_bits(key, bit_width, shape), keys.rank)
    return _written(writer, draw, [(_data(writer, keys), (*keys.shape, 2), np.uint32)])


@complex_rule("random_fold_in")
def random_fold_in(writer: Writer, results: Results, keys: Parts, number: Value) -> Parts:
    _check_keys(keys)
    if keys.rank != number.rank:
        raise Refused("of keys and numbers of different shapes")
    fold = _by_jax(_threefry().fold_in, keys.rank)
    given = [
        (_data(writer, keys), (*keys.shape, 2), np.uint32),
        (number.name, number.shape, number.dtype),
    ]
    made = _written(writer, fold, given)
    assert isinstance(made, Value)
    return _halves(writer, made, results[0])


@complex_rule("random_seed")
def random_seed(writer: Writer, results: Results, seeds: Value, *, impl: Any) -> Parts:
    _check(impl)
    seed = _by_jax(_threefry().seed, seeds.rank)
    made = _written(writer, seed, [(seeds.name, seeds.shape, seeds.dtype)])
    assert isinstance(made, Value)
    return _halves(writer, made, results[0])


def _threefry() -> Any:
    return threefry.threefry_prng_impl


def _check(impl: Any) -> None:
    if "fry" not in str(getattr(impl, "tag", impl)):
        raise Refused("of another kind than threefry2x32")


def _check_keys(keys: Parts) -> None:
    _check(keys.dtype)
