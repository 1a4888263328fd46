"""Random keys under transforms: the global stream, and keys in modules."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export.core import (
    FilteredLeaf,
    Selector,
    as_rule,
    has_names,
    is_random_key,
    keys_changed_by,
    leaves_of,
    require_names_among,
)

AMBIENT = "params"
"""The tag by which ``split_rngs`` knows the ambient stream."""


def rng_fold(index: int | jax.Array) -> AbstractContextManager[None]:
    """Context manager that folds every ambient key with an index.

    `next_rng_key` returns ``fold_in(key, index)``, where ``key`` is its result outside. Layer ``i``
    that `Vmap` or `Scan` builds equals the module built under ``rng_fold(i)`` from the same seed.

    Args:
        index: an integer that fits into uint32, or an integer array without axes.

    Raises:
        InvalidArgumentTypeError: (a TypeError and ValueError) the index is another value.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> pax.seed_rng_key(1)
        >>> layers = T.Vmap(pax.Linear, axis_size=5)(3, 4)
        >>> pax.seed_rng_key(1)
        >>> with T.rng_fold(2):
        ...     layer = pax.Linear(3, 4)
        >>> bool(abs(layers.vmap_module.weight[2] - layer.weight).max() < 1e-6)
        True
    """
    is_array = isinstance(index, (jax.Array, np.ndarray, np.generic))
    if is_array and jnp.issubdtype(index.dtype, jnp.integer):
        fits = jnp.ndim(index) == 0
    else:
        fits = type(index) is int and 0 <= index < 2**32
    if not fits:
        raise InvalidArgumentTypeError(
            "The index of rng_fold must be an integer from 0 to 2**32 - 1.",
            where="rng_fold.index",
            got=f"{type(index).__name__}: {index!r}"[:120],
            write="with rng_fold(0): ...",
        )
    return keys_changed_by(lambda key: jax.random.fold_in(key, index))


class SplitRngs:
    """The selection of ``split_rngs``: keys of modules, and whether to split the ambient stream."""

    def __init__(self, filters: Selector):
        self.rule = as_rule(filters)  # which leaves of a module are split, if they are keys
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        self._stream = FilteredLeaf((AMBIENT,), key, (_StreamModule(),), AMBIENT)
        self.ambient = self.rule(None, [self._stream])[0]
        self._filters = filters

    def folded(self, index: int | jax.Array) -> Any:
        """The context in which a function runs at an index."""
        return rng_fold(index) if self.ambient else nullcontext()

    def require_names(self, modules: Iterable[Any], where: str) -> None:
        """Raises if filters by name select no key of these modules, nor the ambient stream.

        Some may select none: ``["params", "dropout"]`` is for nets without dropout, too.
        """
        if has_names(self._filters):
            leaves = [leaf for module in modules for leaf in leaves_of(module)]
            keys = [self._stream, *[leaf for leaf in leaves if is_random_key(leaf)]]
            if not any(self.rule(None, keys)):
                require_names_among(self._filters, keys, where)


class _StreamModule:
    """Owns the ambient keys, as a module owns its keys."""

    name = None
    rng_attributes = (AMBIENT,)


def is_stacked(key: jax.Array) -> bool:
    """Returns whether a key leaf contains several keys."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key.ndim > (0 if is_typed else 1)


def split_for(key: jax.Array, count: int) -> tuple[Any, Any]:
    """The key after a split, and one for each of ``count`` calls, on a new first axis."""
    if is_stacked(key):
        return jax.vmap(lambda k: split_for(k, count), out_axes=(0, 1))(key)
    advanced, used = jax.random.split(key)
    return advanced, jax.random.split(used, count)
