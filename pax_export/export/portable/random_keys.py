"""Operations on random keys, as functions of their uint32 words.

The keys are those of jax's own generator, Threefry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.random import threefry_prng_impl

from pax_export.export.portable.decompositions.registry import NotDecomposedError
from pax_export.export.portable.program import is_key
from pax_export.export.portable.sizes import trace


def on_words(equation: Any) -> Any:
    """Traces an operation on random keys as a function of their words.

    Each operand and result that is a key has a last axis of 2 in the traced program.

    Raises:
        NotDecomposedError: the keys belong to another generator.
    """
    atoms = (*equation.invars, *equation.outvars)
    for dtype in [atom.aval.dtype for atom in atoms if is_key(atom.aval.dtype)]:
        if "fry" not in str(dtype):
            raise NotDecomposedError("of another kind than threefry2x32")
    structs = [_words(atom.aval) for atom in equation.invars]
    return trace(_FUNCTIONS[equation.primitive.name], structs, equation.params)


def _words(aval: Any) -> jax.ShapeDtypeStruct:
    if is_key(aval.dtype):
        return jax.ShapeDtypeStruct((*aval.shape, 2), "uint32")
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _each(function: Callable, axes: int) -> Callable:
    """Maps a function of one key over the axes of an array of keys."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def _bits(words: Any, *, bit_width: int, shape: Any, **_: object) -> Any:
    def draw(key: Any) -> Any:
        return threefry_prng_impl.random_bits(key, bit_width, shape)

    return _each(draw, words.ndim - 1)(words)


def _fold_in(words: Any, numbers: Any, **_: object) -> Any:
    if words.ndim - 1 != numbers.ndim:
        raise NotDecomposedError("of keys and numbers of different shapes")
    return _each(threefry_prng_impl.fold_in, numbers.ndim)(words, numbers)


_FUNCTIONS: dict[str, Callable] = {
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_clone"), lambda words, **_: words),
    "random_seed": lambda seeds, **_: _each(threefry_prng_impl.seed, seeds.ndim)(seeds),
    "random_bits": _bits,
    "random_split": lambda words, *, shape, **_: _each(
        lambda key: threefry_prng_impl.split(key, shape), words.ndim - 1
    )(words),
    "random_fold_in": _fold_in,
}
KEYS = frozenset(_FUNCTIONS)
