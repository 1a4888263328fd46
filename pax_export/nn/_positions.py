"""Positions: rotary and sinusoidal embeddings, ALiBi slopes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_choice, checked_integer, checked_positive
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array
from pax_export.core import Module
from pax_export.nn import _arguments as arg

_PAIRINGS = ("halves", "neighbors")
_KINDS = ("linear", "llama3", "yarn", "longrope", "table")


@dataclass(frozen=True)
class RotaryScaling:
    """Changes the angles of a rotary embedding for sequences longer than in training.

    Attributes:
        kind: ``"linear"`` divides all angles (Chen et al., 2023); ``"llama3"`` only those of slow
            pairs; ``"yarn"`` too, with a ramp between slow and fast ones, and scales the result
            (Peng et al., 2023); ``"table"`` divides each by its own number; ``"longrope"`` too,
            by other numbers in contexts longer than ``original_length``, and scales the result
            (Ding et al., 2024), see `for_length`.
        factor: the divisor; for ``"longrope"`` by how much contexts are longer than in training.
        original_length: the sequence length of the original training; not for ``"linear"``.
        low: for ``"llama3"`` pairs with fewer rotations in ``original_length`` than this are slow;
            for ``"yarn"`` the same (``beta_slow``).
        high: pairs with more rotations than this are fast; for ``"yarn"`` (``beta_fast``) 32 in
            most models.
        attention_factor: the factor of the result; default ``0.1 * log(factor) + 1`` for
            ``"yarn"``, ``sqrt(1 + log(factor) / log(original_length))`` for ``"longrope"``, 1 for
            ``"table"``.
        table: for ``"table"`` the divisor of each pair's frequency, as in GGUF files of Llama 3;
            for ``"longrope"`` those of contexts up to ``original_length``.
        long_table: for ``"longrope"`` those of longer contexts.
        truncated: for ``"yarn"`` whether the ends of the ramp are rounded to whole pairs.

    Raises:
        InvalidArgumentError: an unknown kind, or a number that is not positive and finite.

    Example:
        >>> import pax_export as pax
        >>> pax.RotaryScaling("linear", 8.0).factor
        8.0
    """

    kind: str
    factor: float = 1.0
    original_length: int | None = None
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    table: tuple[float, ...] = ()
    long_table: tuple[float, ...] = ()
    truncated: bool = True

    def __post_init__(self) -> None:
        if self.kind == "dynamic":
            raise InvalidArgumentError(
                "Dynamic scaling rotates cached keys by other angles with each longer sequence, "
                "so a cache cannot hold them.",
                where="RotaryScaling.kind",
                got="'dynamic'",
                write="'yarn' or 'linear' with this factor for long sequences, or no scaling "
                "for those of the length in training",
            )
        checked_choice(self.kind, _KINDS, "RotaryScaling.kind")
        for name in _NUMBERS.get(self.kind, ("factor",)):
            if not _is_positive(getattr(self, name)):
                raise _not_positive(f"RotaryScaling.{name}", getattr(self, name))
        factor = self.attention_factor
        if factor is not None and not _is_positive(factor):
            raise _not_positive("RotaryScaling.attention_factor", factor)
        for each in self.table + self.long_table:
            if not _is_positive(each):
                raise _not_positive("RotaryScaling.table", each)
        if self.kind == "llama3" and not self.low < self.high:
            raise InvalidArgumentError(
                "The number of rotations of fast pairs must be larger than that of slow ones.",
                where="RotaryScaling.high",
                got=f"low={self.low!r}, high={self.high!r}",
                write="a larger number than low",
            )

    @property
    def result_factor(self) -> float:
        """The factor of cosines and sines."""
        if self.kind in ("linear", "llama3"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "table" or self.factor <= 1:
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(max(self.original_length or 2, 2)))

    def for_length(self, length: int) -> RotaryScaling:
        """Returns the scaling in a context of a length: a table for ``"longrope"``, else itself.

        Args:
            length: the number of positions, or the capacity of a cache.
        """
        if self.kind != "longrope" or self.original_length is None:
            return self
        table = self.long_table if length > self.original_length else self.table
        return RotaryScaling("table", attention_factor=self.result_factor, table=table)


_FULL = ("factor", "original_length", "low", "high")
#: The numbers that a kind needs; others only a factor.
_NUMBERS = {"llama3": _FULL, "yarn": _FULL, "longrope": _FULL[:2]}


def _is_positive(value: float) -> bool:
    """Returns whether a number is positive and its products stay finite and normal."""
    is_real = isinstance(value, (int, float, np.integer, np.floating))
    return is_real and bool(1e-30 <= value <= 1e30)


def _not_positive(where: str, value: float) -> InvalidArgumentError:
    return InvalidArgumentError(
        "This number must be positive and finite.",
        where=where,
        got=f"{value!r:.80}",
        write=f"{where.rpartition('.')[2]}= of the configuration of the model (rope_scaling)",
    )


def check_frequencies(size: int, base: float, scaling: RotaryScaling | None, where: str) -> None:
    """Checks the base, and the size of the table."""
    if not _is_positive(base):
        raise _not_positive(where, base)
    if scaling is None:
        return
    if scaling.kind == "yarn" and base <= 1:
        raise InvalidArgumentError(
            "YaRN requires a base above 1.",
            where=where,
            got=f"{base!r:.80}",
            write="a base above 1, 10000.0 in most models",
        )
    for name in {"table": ("table",), "longrope": ("table", "long_table")}.get(scaling.kind, ()):
        if 2 * len(getattr(scaling, name)) != size:
            raise InvalidArgumentError(
                "The table must have a number for each pair of rotated channels.",
                where=f"RotaryScaling.{name}",
                got=f"{len(getattr(scaling, name))} numbers for {size} rotated channels",
                write=f"{size // 2} numbers",
            )


def rotary_frequencies(
    size: int, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> np.ndarray:
    """Returns the angle by which each pair of channels rotates per position.

    Args:
        size: the number of rotated channels; even.
        base: the base of the geometric series of frequencies (theta).
        scaling: for sequences longer than in training; ``"longrope"`` has the frequencies of short
            ones, see `RotaryScaling.for_length`.

    Returns:
        ``[size / 2]`` of float64, in numpy: they are constants of a program.

    Raises:
        InvalidArgumentError: an odd size, a base that is not positive, or a scaling that does
            not fit.
        InvalidArgumentTypeError: the size is not an integer.

    Example:
        >>> import pax_export as pax
        >>> pax.rotary_frequencies(4, 100.0).tolist()
        [1.0, 0.1]
    """
    size = arg.checked_even(size, "rotary_frequencies: size")
    check_frequencies(size, base, scaling, "rotary_frequencies: base")
    plain = 1.0 / float(base) ** (np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind in ("table", "longrope"):
        return plain / np.asarray(scaling.table, np.float64)
    assert scaling.original_length is not None  # checked at construction
    turns = scaling.original_length * plain / (2 * math.pi)  # in a sequence of the training
    if scaling.kind == "llama3":
        share = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    else:
        share = 1.0 - _yarn_ramp(size, base, scaling)
    return plain * share + plain / scaling.factor * (1.0 - share)


def _yarn_ramp(size: int, base: float, scaling: RotaryScaling) -> np.ndarray:
    """Returns the position of each pair between fast (0) and slow (1)."""

    def pair(turns: float) -> float:
        length = scaling.original_length or 1
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.high), pair(scaling.low)
    if scaling.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 1e-3  # below zero for bases at which all pairs are fast
    return np.clip((np.arange(size // 2) - first) / width, 0.0, 1.0)


def rotary_angles(
    positions: Array | None, frequencies: Array, factor: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for `rotate`, float32 ``[..., size / 2]``, times ``factor``."""
    # In float32 the angle itself rounds at long distances, as in the training of the models.
    angles = jnp.asarray(positions, jnp.float32)[..., None] * frequencies.astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def checked_pairing(pairing: str, where: str) -> str:
    """Returns which channels are rotated together; ``"neighbours"`` is the older spelling."""
    if pairing == "neighbours":
        warnings.warn('write pairing "neighbors"', DeprecationWarning, stacklevel=3)
        return "neighbors"
    return checked_choice(pairing, _PAIRINGS, where)


def rotate(x: Array, cos: Array, sin: Array, pairing: str = "halves") -> jax.Array:
    """Rotates the first ``2 * pairs`` channels of ``x`` ``[..., heads, size]``.

    ``cos`` and ``sin`` are ``[..., pairs]``. `pairing` is ``"halves"``: channel ``i`` with ``i +
    pairs``, or ``"neighbors"``: ``2i`` with ``2i + 1``.
    """
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if pairing == "halves":
        # Two products with all channels: exports have half as many operators as with four.
        swapped = jnp.concatenate((turned[..., pairs:], turned[..., :pairs]), -1)
        cos, sin = jnp.concatenate((cos, cos), -1), jnp.concatenate((-sin, sin), -1)
        turned = jnp.add(turned * cos, swapped * sin)
    else:
        split = turned.reshape((*turned.shape[:-1], pairs, 2))
        first, second = split[..., 0], split[..., 1]
        ends = first * cos - second * sin, second * cos + first * sin
        turned = jnp.stack(ends, -1).reshape(turned.shape)
    turned = arg.cast(turned, x.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate((turned, rest), -1)


class Rotary(Module):
    """A rotary embedding (Su et al., 2021): rotates queries and keys by their positions.

    It has no parameters.

    Args:
        size: the number of rotated channels per head; even.
        base: the base of the geometric series of frequencies (theta).
        pairing: ``"halves"`` (channel ``i`` pairs with ``i + size / 2``: Llama in the layout of
            transformers, Qwen, Gemma, NeoX) or ``"neighbors"`` (``2i`` with ``2i + 1``: the
            paper, GPT-J, Llama in llama.cpp).
        scaling: for sequences longer than in training.

    Attributes:
        size: as passed.
        base: as passed.
        pairing: as passed.
        scaling: as passed.

    Raises:
        InvalidArgumentError: an odd size, a base that is not positive, or another pairing.
        InvalidArgumentTypeError: the size is not an integer, or the base not a number.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> x = jnp.ones((2, 5, 3, 8))
        >>> pax.Rotary(8)(x, jnp.arange(5)).shape
        (2, 5, 3, 8)
    """

    def __init__(
        self,
        size: int,
        base: float = 10000.0,
        pairing: str = "halves",
        scaling: RotaryScaling | None = None,
    ):
        super().__init__()
        self.size = arg.checked_even(size, "Rotary.size")
        self.base = checked_positive(base, "Rotary.base")
        self.pairing = checked_pairing(pairing, "Rotary.pairing")
        self.scaling = scaling

    def angles(self, positions: Array | None) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines for positions ``[...]``, two arrays ``[..., size / 2]``."""
        frequencies = rotary_frequencies(self.size, self.base, self.scaling)
        factor = 1.0 if self.scaling is None else self.scaling.result_factor
        return rotary_angles(positions, frequencies, factor)

    def __call__(self, x: Array, positions: Array) -> jax.Array:
        """Rotates the heads of queries or keys.

        Args:
            x: ``[..., length, heads, head_size]``, with at least `size` channels; more stay.
            positions: integers that broadcast to ``[..., length]``.

        Returns:
            The shape and dtype of ``x``.

        Raises:
            InvalidArgumentError: ``x`` has less than three axes, or less than `size` channels.
        """
        x = arg.as_array(x)
        if x.ndim < 3 or x.shape[-1] < self.size:
            raise InvalidArgumentError(
                f"The input must have {self.size} channels per head or more.",
                where=repr(self),
                got=f"shape {x.shape}",
                write="an input [..., length, heads, head_size], or a Rotary of a smaller size",
            )
        return rotate(x, *self.angles(positions), self.pairing)

    _repr = arg.repr_method("size", "base", "pairing")


# --- sinusoidal positions and ALiBi slopes --------------------------------------------


def sinusoidal_positions(positions: Array, dim: int, base: float = 10000.0) -> jax.Array:
    """The vectors that Vaswani et al. (2017) add for positions: sines, then cosines.

    Args:
        positions: integers ``[...]``.
        dim: the size of a vector; an even number.
        base: the ratio of the longest wave to the shortest.

    Returns:
        ``[..., dim]`` of float32: the sines of all frequencies, then the cosines.

    Raises:
        InvalidArgumentError: ``dim`` is odd or less than two, or ``base`` not positive.
        InvalidArgumentTypeError: an argument is not a number.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.sinusoidal_positions(jnp.arange(3), 4).shape
        (3, 4)
    """
    dim = arg.checked_even(dim, "sinusoidal_positions.dim")
    waves = checked_positive(base, "sinusoidal_positions.base") ** (
        -np.arange(0, dim, 2, dtype=np.float64) / dim
    )
    angles = jnp.asarray(positions, jnp.float32)[..., None] * np.float32(waves)
    return jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the slope by distance of each head's logits (Press et al., 2021).

    Args:
        num_heads: how many heads.  For a number that is not a power of two, those of the power
            below, then every other one of the power above.

    Returns:
        ``[num_heads]`` of float64, in numpy: they are constants of a program.

    Raises:
        InvalidArgumentError: ``num_heads`` is less than one.
        InvalidArgumentTypeError: ``num_heads`` is not an integer.

    Example:
        >>> import pax_export as pax
        >>> pax.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = checked_integer(num_heads, "alibi_slopes.num_heads", least=1)
    power = 2 ** math.floor(math.log2(num_heads))

    def of(power: int) -> np.ndarray:
        return 2.0 ** (-8.0 / power * np.arange(1, power + 1))

    return np.concatenate([of(power), of(2 * power)[::2][: num_heads - power]])
