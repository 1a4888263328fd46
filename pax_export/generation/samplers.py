"""Samplers: rules that choose the next token, combined by ``|``.

Each rule is a frozen dataclass of numbers, so equal samplers are equal static data. `generate`
passes the numbers of these rules to its programs as arrays, so other numbers do not recompile.

Example:
    >>> from pax_export.generation import samplers
    >>> samplers.temperature(0.8) | samplers.top_p(0.9)
    temperature(0.8) | top_p(0.9)
"""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import PRNGKey

__all__ = [
    "Sampler",
    "greedy",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
]


#: Logits times or divided by numbers in this range are finite in float32.
_LEAST, _MOST = 1e-20, 1e20
#: The least probability above 0.
_TINY = 5e-324
#: So many tokens are looked for as fast as fewer.
_FEW = 64


@dataclass(frozen=True)
class Sampler:
    """One rule, or several in order. Derive your own rules from this class.

    It is a frozen dataclass of numbers, and `adjust` maps logits to logits.

    Attributes:
        draws: whether tokens are drawn at random; otherwise the most likely one is chosen.
        looks_back: whether `adjust` gets the tokens that have occurred.
        traced: the names of fields that compiled programs take as arrays, so other values do not
            recompile; in `adjust` they are traced scalars.  All other fields are static.

    Example:
        >>> import dataclasses, jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> @dataclasses.dataclass(frozen=True)
        ... class without(samplers.Sampler):
        ...     token: int
        ...
        ...     def adjust(self, logits, seen):
        ...         return logits.at[:, self.token].set(-jnp.inf)
        >>> chosen = without(2) | samplers.greedy()
        >>> chosen.choose(jnp.array([[0.0, 1.0, 2.0]])).tolist()
        [1]
    """

    draws: ClassVar[bool] = True
    looks_back: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ()

    def _split(self) -> tuple[Sampler, Any]:
        """Splits the rule into its static part and the values that `_joined` puts back."""
        values = {name: getattr(self, name) for name in self.traced}
        return self._joined(dict.fromkeys(values)), values

    def _joined(self, values: Any) -> Sampler:
        if not values:
            return self
        joined = copy.copy(self)  # its own checks expect numbers
        for name, value in values.items():
            object.__setattr__(joined, name, value)
        return joined

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Returns the logits after this rule; minus infinity excludes a token.

        Args:
            logits: ``[batch, vocabulary]``, in float32.
            seen: ``[batch, vocabulary]``, whether a token is in the row's prompt or has been
                generated; None if no rule needs it.
        """
        return logits

    def choose(
        self, logits: jax.Array, keys: PRNGKey | None = None, seen: jax.Array | None = None
    ) -> jax.Array:
        """Chooses a token for each row.

        Args:
            logits: ``[batch, vocabulary]``.
            keys: a random key per row, if tokens are drawn.
            seen: as for `adjust`.

        Returns:
            ``[batch]``, int32.
        """
        adjusted = self.adjust(logits.astype(jnp.float32), seen)
        if not self.draws:
            return jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
        if keys is None:
            raise InvalidArgumentError(
                "The sampler draws tokens at random and needs keys.",
                where="Sampler.choose: keys",
                got=repr(self),
                write=f"keys=jax.random.split(key, {logits.shape[0]})",
            )
        return jax.vmap(jax.random.categorical)(keys, adjusted).astype(jnp.int32)

    def __or__(self, other: object) -> Sampler:
        if not isinstance(other, Sampler):
            return NotImplemented
        return _Chain((*_parts(self), *_parts(other)))

    def __repr__(self) -> str:
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


@dataclass(frozen=True, repr=False)
class _Chain(Sampler):
    parts: tuple[Sampler, ...]

    def __post_init__(self) -> None:
        early = [part for part in self.parts[:-1] if not part.draws]
        if early:
            raise InvalidArgumentError(
                "greedy() must be the last rule of a sampler.",
                got=repr(self),
                write=" | ".join(map(repr, [p for p in self.parts if p.draws] + early[:1])),
            )

    @property
    def draws(self) -> bool:  # type: ignore[override]  # of the last part
        return self.parts[-1].draws

    @property
    def looks_back(self) -> bool:  # type: ignore[override]
        return any(part.looks_back for part in self.parts)

    def _split(self) -> tuple[Sampler, Any]:
        parts, values = zip(*[part._split() for part in self.parts])
        return _Chain(parts), values

    def _joined(self, values: Any) -> Sampler:
        return _Chain(tuple([part._joined(each) for part, each in zip(self.parts, values)]))

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        for part in self.parts:
            logits = part.adjust(logits, seen)
        return logits

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def _parts(sampler: Sampler) -> tuple[Sampler, ...]:
    return sampler.parts if isinstance(sampler, _Chain) else (sampler,)


@dataclass(frozen=True, repr=False)
class greedy(Sampler):
    """The likeliest token; of several with equal logits, the first.

    Example:
        >>> import jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> samplers.greedy().choose(jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])).tolist()
        [1, 0]
    """

    draws: ClassVar[bool] = False


@dataclass(frozen=True, repr=False)
class temperature(Sampler):
    """Divides logits: values below 1 favor likely tokens, values above 1 unlikely ones.

    ``temperature(1.0)`` draws tokens with the net's own probabilities.

    Args:
        value: above 0; from 1e-20 to 1e20.

    Raises:
        InvalidArgumentError: out of range.
        InvalidArgumentTypeError: not a number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> logits = jnp.array([[0.0, 1.0]])
        >>> samplers.temperature(0.5).adjust(logits, None).tolist()
        [[0.0, 2.0]]
    """

    traced: ClassVar[tuple[str, ...]] = ("value",)
    value: float

    def __post_init__(self) -> None:
        write = "temperature(1.0), or greedy() for the likeliest token"
        value = _checked_number("temperature", self.value, _LEAST, _MOST, write)
        object.__setattr__(self, "value", value)

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """The logits over the temperature."""
        return logits / self.value


@dataclass(frozen=True, repr=False)
class top_k(Sampler):
    """Keeps the most likely tokens, and ties with the last of them.

    Args:
        count: the number of tokens, at least 1.

    Raises:
        InvalidArgumentError: less than 1.
        InvalidArgumentTypeError: not an integer.

    Example:
        >>> import jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> samplers.top_k(2).adjust(jnp.array([[0.0, 2.0, 1.0]]), None).tolist()
        [[-inf, 2.0, 1.0]]
    """

    _traced_count: ClassVar[Any] = None  # of a sampler that a program puts together
    count: int

    def __post_init__(self) -> None:
        count = checked_integer(
            self.count, "top_k", 1, what="A number of tokens", write="top_k(40)"
        )
        object.__setattr__(self, "count", count)

    def _split(self) -> tuple[Sampler, Any]:
        if type(self) is not top_k:  # its own `adjust` reads the count
            return super()._split()
        # How many are looked for is static, a power of two; the last that is kept is not.
        most = max(_FEW, 1 << (self.count - 1).bit_length())
        return top_k(most), {"_traced_count": min(self.count, 2**31 - 1)}

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Minus infinity for the others."""
        largest = jax.lax.top_k(logits, min(self.count, logits.shape[-1]))[0]
        if self._traced_count is None:
            return _at_least(logits, largest[:, -1:])
        last = jnp.minimum(self._traced_count, largest.shape[-1]) - 1
        return _at_least(logits, jax.lax.dynamic_slice_in_dim(largest, last, 1, axis=-1))


@dataclass(frozen=True, repr=False)
class top_p(Sampler):
    """Keeps the most likely tokens whose probabilities add up to `part` (nucleus sampling).

    The token at which the sum reaches `part` is kept, so at least one is.

    Args:
        part: above 0, and 1 at most.

    Raises:
        InvalidArgumentError: out of range.
        InvalidArgumentTypeError: not a number.

    Example:
        >>> import jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> logits = jnp.log(jnp.array([[0.5, 0.125, 0.375]]))
        >>> jnp.isfinite(samplers.top_p(0.8).adjust(logits, None)).tolist()
        [[True, False, True]]
    """

    traced: ClassVar[tuple[str, ...]] = ("part",)
    part: float

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "part", _checked_number("top_p", self.part, _TINY, 1.0, "top_p(0.9)")
        )

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Minus infinity for the others."""
        ordered = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first token is kept regardless of rounding.
        mask = (before < self.part).at[:, 0].set(True)
        return _at_least(logits, jnp.min(jnp.where(mask, ordered, jnp.inf), -1, keepdims=True))


@dataclass(frozen=True, repr=False)
class min_p(Sampler):
    """Keeps the tokens that have at least a part of the probability of the likeliest.

    Args:
        part: above 0, and 1 at most.

    Raises:
        InvalidArgumentError: it is not.
        InvalidArgumentTypeError: it is not a number.

    Example:
        >>> import jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> logits = jnp.log(jnp.array([[0.5, 0.0625, 0.4375]]))
        >>> jnp.isfinite(samplers.min_p(0.25).adjust(logits, None)).tolist()
        [[True, False, True]]
    """

    traced: ClassVar[tuple[str, ...]] = ("part",)
    part: float

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "part", _checked_number("min_p", self.part, _TINY, 1.0, "min_p(0.05)")
        )

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Minus infinity for the others."""
        part = self.part
        log = math.log(part) if isinstance(part, float) else jnp.log(part)
        return _at_least(logits, jnp.max(logits, -1, keepdims=True) + log)


@dataclass(frozen=True, repr=False)
class repetition_penalty(Sampler):
    """Makes tokens of the prompt and generated tokens less likely.

    Positive logits are divided by the penalty, negative ones multiplied by it (Keskar et al.,
    2019). The tokens in a given cache are unknown: only this call's prompt counts.

    Args:
        penalty: above 0, from 1e-20 to 1e20; more than 1 makes repetitions less likely.

    Raises:
        InvalidArgumentError: out of range.
        InvalidArgumentTypeError: not a number.

    Example:
        >>> import jax.numpy as jnp
        >>> from pax_export.generation import samplers
        >>> seen = jnp.array([[True, True, False]])
        >>> samplers.repetition_penalty(2.0).adjust(jnp.array([[4.0, -1.0, 3.0]]), seen).tolist()
        [[2.0, -2.0, 3.0]]
    """

    looks_back: ClassVar[bool] = True
    traced: ClassVar[tuple[str, ...]] = ("penalty",)
    penalty: float

    def __post_init__(self) -> None:
        write = "repetition_penalty(1.1); 1 changes nothing"
        value = _checked_number("repetition_penalty", self.penalty, _LEAST, _MOST, write)
        object.__setattr__(self, "penalty", value)

    def adjust(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """The logits, smaller where a token has been seen."""
        less = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return logits if seen is None else jnp.where(seen, less, logits)


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(logits < least, -jnp.inf, logits)


def _checked_number(name: str, value: object, least: float, most: float, write: str) -> float:
    """A number as a float, so that ``1`` and ``1.0`` are one sampler."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgumentTypeError(
            "The numbers of a sampler must be Python numbers, not arrays.",
            got=f"{name}({type(value).__name__})",
            write=write,
        )
    number = float(value)
    if not least <= number <= most:
        raise InvalidArgumentError(
            f"{name} must be from {least} to {most}.", got=f"{name}({number})", write=write
        )
    return number
