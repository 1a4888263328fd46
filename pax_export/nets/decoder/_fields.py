"""Values of an untrusted configuration, checked, and LayerKind, which some make."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError, a_few

_MOST_LAYERS = 10_000
_BY_HAND = "Decoder.from_pretrained(folder, config=...) with a DecoderConfig that computes the same"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


Found = dict[str, Any]  # fields of a DecoderConfig
BIASES = ("projection_bias", "output_bias", "dense_bias")
#: Keys that may be null or missing; the sizes of the others determine them.
OPTIONAL = frozenset(
    "num_key_value_heads head_dim n_inner attention.head_count_kv attention.key_length".split()
)


@dataclass(frozen=True)
class Keys:
    """The supported keys of a configuration; others raise errors."""

    defaults: Mapping[str, Any]  # key -> default; None: required
    fixed: Mapping[str, tuple] = field(default_factory=dict)  # key -> allowed values
    ignored: Set[str] = frozenset()  # keys without effect on the function

    def __contains__(self, name: object) -> bool:
        return name in self.defaults or name in self.fixed or name in self.ignored


class Fields:
    """Keys and values of a configuration file, checked against `keys`.

    Raises:
        InvalidArgumentError: an unknown key or unsupported value.
    """

    def __init__(self, values: Mapping[str, Any], where: str, keys: Keys):
        self.values, self.where, self.keys = values, where, keys
        strange = [key for key in values if key not in keys and values[key] is not None]
        if strange:
            raise self._unknown(strange)
        for name, allowed in keys.fixed.items():
            value = self._value(name)
            if value is not None and not any(value == each for each in allowed):
                raise unsupported_error(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or the default if it is missing or null."""
        value = self._value(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """A value that must be there."""
        value = self.get(name)
        if value is None:
            keys = sorted(str(key)[:80] for key in self.values)
            null = f"null for {name!r}" if name in self.values else ""
            raise InvalidArgumentError(
                "The configuration lacks a required value.",
                where=self.where,
                got=null or f"no {name!r} among {a_few(keys, 8)}",
                write=f"the whole configuration, with {name!r}",
            )
        return value

    def layers(self, name: str) -> int:
        """Returns the number of layers, of each of which there is a description."""
        count = self.size(name)
        if count > _MOST_LAYERS:
            raise self.wrong(name, f"at most {_MOST_LAYERS} layers")
        return count

    def size(self, name: str) -> int:
        """Returns a required integer of one or more."""
        value = self.need(name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise self.wrong(name, "an integer of 1 or more")
        return int(value)

    def optional_size(self, name: str) -> int | None:
        """Like `size`, or None if it is missing."""
        return None if self.get(name) is None else self.size(name)

    def number(self, name: str, zero: bool = False) -> float:
        """A finite number above zero, or zero where that means something; it must be there."""
        value = self.need(name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        number = float(value) if is_number else math.nan
        if not 0 <= number < math.inf or (number == 0 and not zero):
            raise self.wrong(name, f"a number {'of 0 or more' if zero else 'above 0'}")
        return number

    def optional(self, name: str, zero: bool = False) -> float | None:
        """Like `number`, or None if it is missing."""
        return None if self.get(name) is None else self.number(name, zero)

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.need(name)
        if value not in (True, False):  # a word is neither
            raise self.wrong(name, "true or false")
        return bool(value)

    def sizes(self, names: Mapping[str, str], optional: Set[str]) -> dict[str, Any]:
        """Reads fields of a DecoderConfig from the given keys; optional ones have defaults."""
        readers = {"num_layers": self.layers, "tied": self.flag,
                   "norm_eps": lambda key: self.number(key, zero=True)}  # fmt: skip
        found: dict[str, Any] = {}
        for name, key in names.items():
            read = self.optional_size if key in optional else readers.get(name, self.size)
            found[name] = read(key)
        dim, heads = found["dim"], found["num_heads"]
        defaults = {"num_kv_heads": heads, "head_size": dim // heads, "hidden_dim": 4 * dim}
        return found | {n: default for n, default in defaults.items() if found.get(n) is None}

    def part(self, name: str) -> Mapping[str, Any]:
        """Returns a value that is itself a mapping; an empty one if it is missing."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "keys and values")
        return value

    def words(self, name: str, default: list[str]) -> list[str]:
        """A list of words, one at least."""
        value = self.get(name, default)
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or not all(isinstance(each, str) for each in value):
            raise self.wrong(name, "a list of words")
        return list(value)

    def wrong(self, name: str, needed: str) -> InvalidArgumentError:
        """The error about a value of another kind."""
        return InvalidArgumentError(
            "A value of the configuration has the wrong type.",
            where=f"{self.where}: {name}",
            got=short_repr(self._value(name)),
            write=needed,
        )

    def _value(self, name: str) -> Any:
        value = self.values[name] if name in self.values else self.keys.defaults.get(name)
        # Lists of numbers are arrays in GGUF files, which are neither equal nor unequal to a word.
        return value.tolist() if isinstance(value, np.ndarray) else value

    def _unknown(self, strange: list[str]) -> InvalidArgumentError:
        return InvalidArgumentError(
            "The configuration has unknown keys, which may change the model.",
            where=self.where,
            got=a_few([f"{str(key)[:80]}: {short_repr(self._value(key))}" for key in strange], 6),
            write=_BY_HAND + ": DecoderConfig.from_hf of the other keys, if these say nothing",
        )


def short_repr(value: object) -> str:
    """A value in a few words, however long and deep it is."""
    return _SHORT.repr(value)


def require_mapping(values: object, where: str) -> Mapping[str, Any]:
    """Requires a mapping."""
    if isinstance(values, Mapping):
        return values
    raise InvalidArgumentTypeError(
        "A configuration must be a mapping.",
        where=where,
        got=f"{type(values).__name__}: {short_repr(values)}",
        write='json.load(file), or for a whole folder Decoder.from_pretrained("folder")',
    )


def unknown_family_error(
    family: object, where: str, known: Iterable[str], strange: Iterable[str] = ()
) -> InvalidArgumentError:
    """The error about a model of another architecture, with its keys that no family has."""
    strange = [str(key)[:80] for key in strange]
    return InvalidArgumentError(
        "The architecture is unsupported by Decoder.",
        where=where,
        got=short_repr(family) + (f", with unknown keys {a_few(strange, 8)}" if strange else ""),
        write=f"a model of {', '.join(sorted(known))}; or {_BY_HAND}",
    )


def unsupported_error(fields: Fields, name: str, value: object = None) -> InvalidArgumentError:
    """The error about a choice that a Decoder does not have."""
    is_quantized = name in ("quantization_config", "quantization")
    return InvalidArgumentError(
        "The configuration has a value that Decoder does not support.",
        where=f"{fields.where}: {name}",
        got=short_repr(fields.get(name) if value is None else value),
        write="a folder with the weights as floating-point numbers, or a GGUF file"
        if is_quantized
        else "a model without it",
    )


@dataclass(frozen=True)
class LayerKind:
    """Settings that may differ between the layers of a `Decoder`.

    Attributes:
        window: the number of positions that a query attends to, including its own; None for all
            earlier ones.
        rotary_base: the base of the rotary embedding; None for that of the configuration, 0 for
            no rotation.
        scaled: whether the rotary scaling of the configuration applies.

    Raises:
        InvalidArgumentError: a window of less than one position.
        InvalidArgumentTypeError: the window is not an integer.

    Example:
        >>> import pax_export as pax
        >>> pattern = (pax.nets.LayerKind(window=512), pax.nets.LayerKind())  # in turns
        >>> pattern[0].window, pattern[1].window
        (512, None)
    """

    window: int | None = None
    rotary_base: float | None = None
    scaled: bool = True

    def __post_init__(self) -> None:
        if self.window is not None:
            checked_integer(self.window, "LayerKind.window", least=1)


def shortest_pattern(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """Returns the shortest pattern that repeats to these kinds, in linear time."""
    # For each prefix, the length of its longest border (Morris and Pratt).
    ends = [0] * len(kinds)
    for i in range(1, len(kinds)):
        length = ends[i - 1]
        while length and kinds[i] != kinds[length]:
            length = ends[length - 1]
        ends[i] = length + (kinds[i] == kinds[length])
    return tuple(kinds[: len(kinds) - ends[-1]] if kinds else ())
