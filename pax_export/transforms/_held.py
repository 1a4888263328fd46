"""Arguments that are no business of a transform: static ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Held:
    """A static argument: for jax a leaf, whatever it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def hold(args: Sequence[Any], places: Iterable[int]) -> list[Any]:
    """The arguments with the static ones held."""
    held = list(args)
    for place in places:
        if -len(held) <= place < len(held):
            held[place] = Held(held[place])
    return held


def releasing(function: Callable) -> Callable:
    """A function that takes held arguments as what they are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple([x.value if type(x) is Held else x for x in args])
        kwargs = {k: x.value if type(x) is Held else x for k, x in kwargs.items()}
        return function(*args, **kwargs)

    return call
