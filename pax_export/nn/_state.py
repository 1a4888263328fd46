"""EMA and RngSeq: modules with state."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_fraction, checked_integer
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.jax import is_computing
from pax_export._foundations.types import PRNGKey, PyTree
from pax_export.core import (
    Declared,
    StateModule,
    assert_structure_equal,
    is_array,
    parameters_method,
)
from pax_export.nn._arguments import at_least_float32, key_or_next
from pax_export.nn._explicit import laid_like, on_explicit_mesh


class EMA(StateModule):
    """Keeps the exponential moving average of a pytree.

    Each call in train mode updates it to ``decay * average + (1 - decay) * new``. Averages have the
    dtypes of the initial value, in float32 at least, whatever the dtype of new values: in half
    precision they would stop where a step is smaller than the last bit. They are never trainable,
    even if they form a module.

    Args:
        initial_value: a pytree of arrays or numbers; it is copied.
        decay_rate: from 0 to 1; the weight of the old average.
        debias: whether the first call replaces the initial value, so that
            averages are not biased towards it.
        allow_int: whether integer leaves are allowed; they are not averaged
            but replaced by the newest value.

    Attributes:
        averages: a pytree like ``initial_value``.
        debias: float32 ``[]``: 0 before the first call, then 1; None without debias.

    Raises:
        InvalidArgumentError: ``decay_rate`` is out of its range.
        InvalidArgumentTypeError: (a ValueError) an integer leaf without ``allow_int``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> average = pax.EMA(jnp.zeros(()), 0.9)
        >>> average, _ = average % 10.0
        >>> round(float(average.averages), 3)
        1.0
    """

    arrays: ClassVar = {"averages": Declared("average", ()), "debias": Declared("counter", ())}
    # Not even those of a module: StateModule alone would let them through.
    parameters = parameters_method(submodules=False)
    _pax_changes = "in train mode"

    def __init__(
        self,
        initial_value: object,
        decay_rate: float,
        debias: bool = False,
        allow_int: bool = False,
    ):
        super().__init__()
        self.decay_rate = checked_fraction(decay_rate, "EMA.decay_rate", one_allowed=True)
        self.allow_int = bool(allow_int)
        self._require_inexact(initial_value)
        self.averages = jax.tree_util.tree_map(_initial_average, initial_value)
        self.debias = jnp.zeros(()) if debias else None

    def __call__(self, value: PyTree) -> Any:
        """Adds a value to the average, in train mode.

        Args:
            value: a pytree of the structure of the averages; ignored in eval mode.

        Returns:
            The averages.

        Raises:
            ImmutableModuleError: in train mode, outside of `pure` and `purecall`.
            InvalidArgumentTypeError: (a ValueError) an integer leaf without ``allow_int``.
            StructureMismatchError: (a ValueError) the structure differs.
        """
        if not self.training:
            return self.averages
        assert_structure_equal(self.averages, value)
        self._require_inexact(value)
        if on_explicit_mesh(self.averages):
            value = jax.tree_util.tree_map(laid_like, value, self.averages)
        old = self.averages
        if self.debias is not None:
            first = self.debias == 0
            old = jax.tree_util.tree_map(
                lambda a, b: jnp.where(first, jnp.asarray(b, a.dtype), a), old, value
            )
            self.debias = jnp.ones_like(self.debias)
        self.averages = jax.tree_util.tree_map(self._update_average, old, value)
        return self.averages

    def _update_average(self, old: jax.Array, new: object) -> jax.Array:
        if not _is_inexact(old):
            return jnp.asarray(new, old.dtype)
        average = self.decay_rate * old + (1 - self.decay_rate) * jnp.asarray(new)
        # The state must not change its type: it is carried through scans.
        return jnp.asarray(average, old.dtype)

    def _require_inexact(self, tree: PyTree) -> None:
        if self.allow_int:
            return
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if not _is_inexact(leaf):
                raise InvalidArgumentTypeError(
                    "An integer has no moving average.",
                    where="EMA" + jax.tree_util.keystr(path),
                    got=str(jnp.result_type(leaf)),
                    write="a float array, or allow_int=True to keep the newest integer",
                )


def _initial_average(leaf: object) -> jax.Array:
    dtype = jnp.result_type(leaf)
    wide = at_least_float32(dtype) if _is_inexact(leaf) else dtype
    return _own_copy(leaf) if wide == dtype else jnp.asarray(leaf, wide)


def _own_copy(leaf: object) -> jax.Array:
    """A strongly typed copy, so that a model and its averages share no array."""
    if is_computing() and isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", True):
        return jax.device_put(leaf, may_alias=False)  # where jnp compiles a program for each shape
    return jnp.array(leaf, dtype=jnp.result_type(leaf), copy=True)


def _is_inexact(leaf: object) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


class RngSeq(StateModule):
    """A stream of random keys whose state is part of the module.

    Args:
        seed: the number to start from.
        rng_key: the key to start from; it takes precedence over ``seed``.  Without either, the next
            key of the ambient stream.

    Attributes:
        _rng_key: the state.  (The name is that of PAX's checkpoints.)

    Raises:
        InvalidArgumentTypeError: (a ValueError) ``rng_key`` is not an array, or ``seed`` not an
            integer.

    Example:
        >>> import pax_export as pax
        >>> stream = pax.RngSeq(seed=42)
        >>> stream, keys = pax.module_and_value(stream.next_rng_key)(2)
        >>> len(keys)
        2
    """

    arrays: ClassVar = {"_rng_key": Declared("key", ())}
    rng_attributes = ("_rng_key",)
    _pax_changes = "always"

    def __init__(self, seed: int | None = None, rng_key: PRNGKey | None = None):
        super().__init__()
        if rng_key is None and seed is not None:
            rng_key = _key_of_seed(seed)
        self._rng_key = jnp.asarray(key_or_next(rng_key, "RngSeq.rng_key"))

    def next_rng_key(self, num_keys: int = 1) -> Any:
        """Draws keys and advances the state, in train and in eval mode.

        Args:
            num_keys: how many.

        Returns:
            The key itself for 1, else a list of keys.

        Raises:
            ImmutableModuleError: outside of `pure` and `module_and_value`.
            InvalidArgumentError: ``num_keys`` is negative.
        """
        count = checked_integer(num_keys, "RngSeq.next_rng_key.num_keys", least=0)
        state, *keys = jax.random.split(self._rng_key, count + 1)
        self._rng_key = state
        return keys[0] if count == 1 else keys


def _key_of_seed(seed: int) -> jax.Array:
    # An array is allowed, so that a seed may be an argument of a jitted function.
    if not is_array(seed):
        seed = checked_integer(seed, "RngSeq.seed", what="A seed", write="RngSeq(seed=42)")
    return jax.random.PRNGKey(seed)
