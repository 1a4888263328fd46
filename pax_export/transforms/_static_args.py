"""Static arguments of transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pax_export._types import PyTree


class Held:
    """A static argument, wrapped as a leaf."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value


def wrap_static(args: Sequence[Any], places: Iterable[int]) -> list[Any]:
    """Wraps the static arguments."""
    held = list(args)
    for place in places:
        if -len(held) <= place < len(held):
            held[place] = Held(held[place])
    return held


def unwrap_static(args: Sequence[Any], kwargs: dict) -> tuple[list[Any], dict[str, Any]]:
    """Unwraps the static arguments."""
    released = {k: x.value if type(x) is Held else x for k, x in kwargs.items()}
    return [x.value if type(x) is Held else x for x in args], released


class StaticArgs:
    """Which arguments of a function are static, by number and by name."""

    def __init__(self, fun: Callable, numbers: PyTree, names: PyTree):
        numbers = [numbers] if isinstance(numbers, int) else list(numbers or ())
        names = [names] if isinstance(names, str) else list(names or ())
        signature = signature_of(fun)
        positional = [
            p.name
            for p in (signature.parameters.values() if signature is not None else ())
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if not numbers:
            numbers = [positional.index(name) for name in names if name in positional]
        if not names:
            places = range(-len(positional), len(positional))
            names = [positional[number] for number in numbers if number in places]
        self.numbers, self.names = numbers, frozenset(names)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def wrap_static(self, args: Sequence[Any], kwargs: dict) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with those that are static hidden from jax's trees."""
        held = {k: Held(x) if k in self.names else x for k, x in kwargs.items()}
        return wrap_static(args, self.numbers), held


def signature_of(fun: Callable) -> inspect.Signature | None:
    """The signature of a function, or None."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None
