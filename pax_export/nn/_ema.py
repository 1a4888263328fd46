"""EMA: an exponential moving average as a module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentTypeError
from pax_export.core import StateModule, assert_structure_equal, parameters_method
from pax_export.nn._arguments import fraction


class EMA(StateModule):
    """Keeps the exponential moving average of a pytree.

    Each call in train mode makes it ``decay * average + (1 - decay) * new``.
    Averages keep the dtypes of the initial value, whatever is averaged in; they
    are never trainable, not even if they form a module.

    Args:
        initial_value: a pytree of arrays or numbers; it is copied.
        decay_rate: from 0 to 1; how much of the old average stays.
        debias: whether the first call replaces the initial value, so that
            averages are not drawn towards it.
        allow_int: whether integer leaves are allowed; they are not averaged
            but replaced by the newest value.

    Attributes:
        averages: a pytree like ``initial_value``.
        debias: float32 ``[]``: 0 before the first call, then 1; None without
            debias.

    Raises:
        InvalidArgumentError: ``decay_rate`` is out of its range.
        InvalidArgumentTypeError: (a ValueError) an integer leaf without
            ``allow_int``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> average = pax.EMA(jnp.zeros(()), 0.9)
        >>> average, _ = average % 10.0
        >>> round(float(average.averages), 3)
        1.0
    """

    # Not even those of a module: StateModule alone would let them through.
    parameters = parameters_method(submodules=False)

    def __init__(
        self,
        initial_value: Any,
        decay_rate: float,
        debias: bool = False,
        allow_int: bool = False,
    ):
        super().__init__()
        self.decay_rate = fraction(decay_rate, "EMA.decay_rate", one_allowed=True)
        self.allow_int = bool(allow_int)
        self._require_inexact(initial_value)
        self.averages = jax.tree_util.tree_map(_own_copy, initial_value)
        self.debias = jnp.zeros(()) if debias else None

    def __call__(self, value: Any) -> Any:
        """Averages a value in, in train mode.

        Args:
            value: a pytree of the structure of the averages; ignored in eval
                mode.

        Returns:
            The averages.

        Raises:
            ImmutableModuleError: in train mode, outside of `pure` and `purecall`.
            InvalidArgumentTypeError: (a ValueError) an integer leaf without
                ``allow_int``.
            StructureMismatchError: (a ValueError) another structure.
        """
        if not self.training:
            return self.averages
        assert_structure_equal(self.averages, value)
        self._require_inexact(value)
        old = self.averages
        if self.debias is not None:
            first = self.debias == 0
            old = jax.tree_util.tree_map(
                lambda a, b: jnp.where(first, jnp.asarray(b, a.dtype), a), old, value
            )
            self.debias = jnp.ones_like(self.debias)
        self.averages = jax.tree_util.tree_map(self._average, old, value)
        return self.averages

    def _average(self, old: jax.Array, new: Any) -> jax.Array:
        if not _is_inexact(old):
            return jnp.asarray(new, old.dtype)
        average = self.decay_rate * old + (1 - self.decay_rate) * jnp.asarray(new)
        # The state must not change its type: it is carried through scans.
        return jnp.asarray(average, old.dtype)

    def _require_inexact(self, tree: Any) -> None:
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


def _own_copy(leaf: Any) -> jax.Array:
    """A copy that nothing else holds, with a dtype that stays.

    A model and its averages are often kept in one module, where an array may
    stand at one place only.
    """
    return jnp.array(leaf, dtype=jnp.result_type(leaf), copy=True)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
