"""LayerKind: settings that differ between the layers of a Decoder."""

from __future__ import annotations

from dataclasses import dataclass

from pax_export._foundations.check import checked_integer


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
