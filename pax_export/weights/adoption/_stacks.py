"""Stacked layers: the modules whose leaves have an axis of layers.

`Scan` and `Vmap` are known by class. Others (`stack_layers`, `jax.vmap` of a constructor) are
recognized by shapes, and several positions in the path may have the layer's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pax_export.core import is_at
from pax_export.transforms import Scan, Vmap
from pax_export.weights.adoption._array_transforms import Shape
from pax_export.weights.adoption._name_parsing import Name, name_of


@dataclass(eq=False)
class Stack:
    """The leading axes of leaves that stack several layers."""

    sizes: Shape  # the number of layers along each axis
    path: str  # of the layer
    around: Sequence[str]  # the paths of the modules around it, the outermost first
    leaves: Mapping[str, Any]  # all leaves of the net by path
    known: Sequence[str] = ()  # the paths of stacking modules, if known by class

    @cached_property
    def roots(self) -> tuple[tuple[str, ...], ...]:
        """Every choice of paths that the layers' numbers may follow, one path for each axis.

        Without `known`, it is the outermost module whose leaves are all stacked, and ones below.
        """
        if self.known:
            return (tuple(self.known),)
        found: dict[int, str] = {}
        for at in [*self.around, self.path]:
            count = len(name_of(at).numbers)
            if count not in found and self._holds(at):
                found[count] = at
        return tuple([(root,) * len(self.sizes) for root in (found.values() or (self.path,))])

    def _holds(self, at: str) -> bool:
        """Whether everything below a path is stacked."""
        return all(
            tuple(leaf.shape[: len(self.sizes)]) == self.sizes
            for path, leaf in self.leaves.items()
            if is_at(path, at)
        )


def stack_at(
    path: str,
    around: Sequence[tuple[str, Any]],
    shapes: Sequence[Shape],
    count: int | None,
    leaves: Mapping[str, Any],
) -> Stack | None:
    """The stack of a layer, or None; `count` is its number of axes, or None if unknown."""
    lifted = [(at, module) for at, module in around if isinstance(module, (Scan, Vmap))]
    axes = [axis for _, m in lifted for axis in dict(m.options)["state_axes"].values()]
    if any(axis not in (0, None) for axis in axes):
        return None
    wanted = count if count is not None else len(lifted) or 1
    sizes = {shape[:wanted] for shape in shapes}
    if len(sizes) != 1 or len(size := next(iter(sizes))) != wanted:
        return None
    known = [f"{at}.{module._attribute}".lstrip(".") for at, module in lifted]
    known = known if len(lifted) == wanted else []
    return Stack(size, path, [at for at, _ in around], leaves, known)


def _deepest_first(places: Sequence[int]) -> list[int]:
    return sorted(range(len(places)), key=lambda axis: (places[axis], axis), reverse=True)


def insert_numbers(path: str, roots: Sequence[str], numbers: Sequence[int]) -> str:
    """A path with the numbers of layers behind their roots.

    Example:
        >>> insert_numbers("layers.scan_module.fc", ["layers.scan_module"], [3])
        'layers.scan_module.3.fc'
        >>> insert_numbers("fc", ["", "fc"], [1, 2])
        '1.fc.2'
    """
    steps = path.split(".") if path else []
    places = [len(root.split(".")) if root else 0 for root in roots]
    for axis in _deepest_first(places):
        steps.insert(places[axis], str(numbers[axis]))
    return ".".join(steps)


def insert_numbers_in_name(name: Name, roots: Sequence[str], numbers: Sequence[int]) -> Name:
    """The name of a path with these numbers in it."""
    words, found = list(name.words), list(name.numbers)
    before = [name_of(root) for root in roots]
    for axis in _deepest_first([len(each.words) for each in before]):
        words.insert(len(before[axis].words), "#")
        found.insert(len(before[axis].numbers), numbers[axis])
    return Name(tuple(words), tuple(found))
