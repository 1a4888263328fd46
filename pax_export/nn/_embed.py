"""Embed: a table of vectors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentTypeError
from pax_export.core import ParameterModule
from pax_export.nn._arguments import Initializer, integer, key_or_next, normal


class Embed(ParameterModule):
    """Looks up a trainable vector for each integer.

    Args:
        vocab_size: the number of vectors.
        embed_dim: the size of each.
        w_init: ``w_init(key, shape)`` makes the table; normal with a standard
            deviation of 0.01 by default.
        rng_key: the key of the initial values; the next of the ambient stream
            by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        weight: ``[vocab_size, embed_dim]``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is no integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.Embed(100, 8)(jnp.array([[3, 1, 4]])).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        w_init: Initializer | None = None,
        *,
        rng_key: Any = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.vocab_size = integer(vocab_size, "Embed.vocab_size", least=1)
        self.embed_dim = integer(embed_dim, "Embed.embed_dim", least=1)
        shape = (self.vocab_size, self.embed_dim)
        self.weight = (w_init or normal(0.01))(key_or_next(rng_key), shape)

    def __call__(self, x: Any) -> jax.Array:
        """Looks up vectors.

        Args:
            x: integers of any shape ``[...]``.  Negative ones count from the
                end of the table; those outside of it give its nearest row.

        Returns:
            ``[..., embed_dim]``.

        Raises:
            InvalidArgumentTypeError: (a TypeError) not integers.
        """
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise InvalidArgumentTypeError(
                "Embed needs integers.",
                where=repr(self),
                got=f"{x.dtype}{list(x.shape)}",
                write="x.astype(jnp.int32)",
            )
        return jnp.asarray(self.weight)[x]

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        own = {"vocab_size": self.vocab_size, "embed_dim": self.embed_dim}
        return super()._repr({**own, **(info or {})})
