"""Stacked layers: the modules whose leaves have an axis of layers.

Of ``Scan`` and ``Vmap`` it is known which module it is.  Of a module that was stacked otherwise
(`stack_layers`, `jax.vmap` of a constructor) only the shapes tell; and if numbers stand in the
path, there are several places at which the number of a layer may count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pax_export._types import PyTree
from pax_export.transforms import Scan, Vmap
from pax_export.weights.adoption._array_transforms import Shape
from pax_export.weights.adoption._name_parsing import Name, name_of


class Stack:
    """The axes of layers in front of the axes that a leaf has in one layer.

    Args:
        sizes: how many layers, of each axis.
        path: of what is stacked.
        around: the paths of the modules around it, the outermost first.
        leaves: those of the whole net, by path.
        known: the paths of the modules that are stacked, if the modules themselves say so.

    Attributes:
        sizes: how many layers, of each axis.
    """

    def __init__(
        self, sizes: Shape, path: str, around: Sequence[str], leaves: Mapping[str, Any],
        known: Sequence[str] = (),
    ):  # fmt: skip
        self.sizes = sizes
        self._path, self._around, self._leaves, self._known = path, around, leaves, known

    @cached_property
    def roots(self) -> tuple[tuple[str, ...], ...]:
        """Behind which paths the numbers of a layer may stand, one for each axis: every way.

        Without modules that say so it is the outermost one all of whose leaves are stacked, and
        below it those that come after one more number.
        """
        if self._known:
            return (tuple(self._known),)
        found: dict[int, str] = {}
        for at in [*self._around, self._path]:
            count = len(name_of(at).numbers)
            if count not in found and self._holds(at):
                found[count] = at
        return tuple([(root,) * len(self.sizes) for root in (found.values() or (self._path,))])

    def _holds(self, at: str) -> bool:
        """Whether everything below a path is stacked."""
        return all(
            tuple(leaf.shape[: len(self.sizes)]) == self.sizes
            for path, leaf in self._leaves.items()
            if not at or path == at or path.startswith(f"{at}.")
        )


def stack_at(
    path: str,
    around: Sequence[tuple[str, Any]],
    shapes: Sequence[Shape],
    count: int | None,
    leaves: Mapping[str, Any],
) -> Stack | None:
    """The stack that a layer is part of, or None.

    Args:
        path: of the layer.
        around: the modules around it and itself with their paths, the outermost first.
        shapes: of its leaves.
        count: how many axes of layers there are; None if the class does not say it: then there
            may be as many as modules around tell of, or one.
        leaves: those of the whole net, by path.
    """
    lifted = [(at, module) for at, module in around if isinstance(module, (Scan, Vmap))]
    if any(not _at_first_axis(module) for _, module in lifted):
        return None
    wanted = count if count is not None else len(lifted) or 1
    sizes = {shape[:wanted] for shape in shapes}
    if len(sizes) != 1 or len(size := next(iter(sizes))) != wanted:
        return None
    known = [_inside(at, module) for at, module in lifted] if len(lifted) == wanted else []
    return Stack(size, path, [at for at, _ in around], leaves, known)


def _at_first_axis(module: PyTree) -> bool:
    return all(axis in (0, None) for axis in dict(module.options)["state_axes"].values())


def _inside(path: str, module: PyTree) -> str:
    return f"{path}.{module._attribute}" if path else module._attribute


def _deepest_first(places: Sequence[int]) -> list[int]:
    return sorted(range(len(places)), key=lambda axis: (places[axis], axis), reverse=True)


def numbered(path: str, roots: Sequence[str], numbers: Sequence[int]) -> str:
    """A path with the numbers of layers behind those of their roots.

    Example:
        >>> numbered("layers.scan_module.fc", ["layers.scan_module"], [3])
        'layers.scan_module.3.fc'
        >>> numbered("fc", ["", "fc"], [1, 2])
        '1.fc.2'
    """
    steps = path.split(".") if path else []
    places = [len(root.split(".")) if root else 0 for root in roots]
    for axis in _deepest_first(places):
        steps.insert(places[axis], str(numbers[axis]))
    return ".".join(steps)


def numbered_name(name: Name, roots: Sequence[str], numbers: Sequence[int]) -> Name:
    """The name of a path with these numbers in it."""
    words, found = list(name.words), list(name.numbers)
    before = [name_of(root) for root in roots]
    for axis in _deepest_first([len(each.words) for each in before]):
        words.insert(len(before[axis].words), "#")
        found.insert(len(before[axis].numbers), numbers[axis])
    return Name(tuple(words), tuple(found))
