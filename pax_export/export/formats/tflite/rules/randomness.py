"""Random bits, as jax's own generator (Threefry) makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule
from pax_export.export.formats.tflite.rules.arithmetic import logical_shift
from pax_export.export.formats.tflite.tensors import broadcast

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@rule("threefry2x32", thin=True)
def threefry(op: Operation, key_1: Any, key_2: Any, x: Any, y: Any) -> list[Any]:
    third = lite.bitwise_xor(lite.bitwise_xor(key_1, key_2), lite.constant(0x1BD11BDA))
    keys = [key_1, key_2, third]
    x, y = broadcast(lite.add, x, key_1), broadcast(lite.add, y, key_2)
    for block in range(5):
        for bits in _ROTATIONS[block % 2]:
            x = broadcast(lite.add, x, y)
            y = lite.bitwise_xor(x, _rotated(y, bits))
        x = broadcast(lite.add, x, keys[(block + 1) % 3])
        y = broadcast(lite.add, y, keys[(block + 2) % 3]) + (block + 1)
    return [x, y]


def _rotated(x: Any, bits: int) -> Any:
    return x * (1 << bits) + logical_shift(x, 32 - bits)


def _implementation(key: Any) -> Any:
    """How the keys of this kind make bits: functions of jax over their two words."""
    from jax.extend.random import threefry_prng_impl

    if "fry" not in str(key.dtype):
        raise NotInTfliteError(f"it draws with jax's Threefry only, and not with {key.dtype}.")
    return threefry_prng_impl


def _words(struct: Any) -> Any:
    return jax.ShapeDtypeStruct((*struct.shape, 2), "uint32")


@rule("random_wrap", "random_unwrap", thin=True)
def wrap(op: Operation, x: Any) -> Any:
    _implementation(op.results[0] if op.name == "random_wrap" else op.operands[0])
    return x


@rule("random_seed", thin=True)
def seed(op: Operation, x: Any) -> Any:
    implementation = _implementation(op.results[0])
    return _mapped(op, implementation.seed, [op.operands[0]], 0, [x])


@rule("random_bits", thin=True)
def bits(op: Operation, key: Any) -> Any:
    implementation = _implementation(op.operands[0])
    width, shape = op.params["bit_width"], op.params["shape"]
    return _mapped(
        op,
        lambda k: implementation.random_bits(k, width, shape),
        [_words(op.operands[0])],
        1,
        [key],
    )


@rule("random_split", thin=True)
def split(op: Operation, key: Any) -> Any:
    implementation, shape = _implementation(op.operands[0]), op.params["shape"]
    return _mapped(op, lambda k: implementation.split(k, shape), [_words(op.operands[0])], 1, [key])


@rule("random_fold_in", thin=True)
def fold_in(op: Operation, key: Any, data: Any) -> Any:
    implementation = _implementation(op.operands[0])
    structs = [_words(op.operands[0]), op.operands[1]]
    function = implementation.fold_in
    for _ in op.operands[0].shape:
        function = jax.vmap(function)
    return op.call(function, structs, [key, data])


def _mapped(
    op: Operation, function: Any, structs: Sequence[Any], inner: int, operands: Sequence[Any]
) -> Any:
    """A function of one key, or of a seed, over all of them."""
    for _ in range(len(structs[0].shape) - inner):
        function = jax.vmap(function)
    return op.call(function, structs, operands)


@rule("iota_2x32_shape")
def counters(op: Operation) -> list[Any]:
    """The number of each element, in two words; the upper one is 0 in arrays that fit a phone."""
    count: Any = 1
    for size in op.shape:
        count = count * op.sizes.of(size)
    low = op.reshape(lite.range(count), op.shape)
    return [lite.zeros_like(low), low]
