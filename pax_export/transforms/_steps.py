"""The steps of a scan: what goes from one to the next, and what is stacked.

The Python loop is what a scan must equal.  Of the leaves of the arguments some
are sliced, one slice for each step, and stacked again.  The carry goes from step
to step, and so does the state of modules that is not sliced, as if one object
were called again and again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from pax_export._errors import InvalidArgumentTypeError, StructureMismatchError
from pax_export.core import describe_array, is_node, named_leaves, structure_differences
from pax_export.transforms._lift import Part, Result, parts_of
from pax_export.transforms._mapping import (
    Inputs,
    MapOptions,
    Target,
    finished,
    not_covered,
    targets_of,
)

# Where a leaf of the result comes from: stacked by the loop, its last slice, the
# last carry, the state after the last step, or the caller's own leaf.
STACKED, LAST, CARRIED, THREADED, GIVEN = "stacked", "last", "carried", "threaded", "given"


class Steps:
    """One call of a scanned function, from its leaves to its result.

    Args:
        inputs: the arguments.
        options: the options.
        place: which positional argument is the carry.
        scan_output: whether the function returns a pair.

    Attributes:
        carried: the numbers of the leaves of the carry.
        sliced: the slots of leaves that have an axis.
        threaded: those of modules that have none.
    """

    result: Result
    targets: list[Target]
    origins: list[tuple[str, int]]
    handed_on: set[int]

    def __init__(self, inputs: Inputs, options: MapOptions, place: int, scan_output: bool):
        self.inputs, self.options, self.scan_output = inputs, options, scan_output
        call = inputs.call
        numbers = iter(range(len(call.roots)))
        roots = [next(numbers) if part.is_module else None for part in call.parts]
        self._carry = [
            (part, root) for part, root in zip(call.parts, roots) if _is_argument(part, place)
        ]
        self.carried = [n for part, _ in self._carry for n in range(part.start, part.stop)]
        self._init = call.treedef.unflatten(call.leaves)[0][place]
        own = set(self.carried)
        others = [slot for slot in inputs.slots if slot.number not in own]
        self.sliced = [slot for slot in others if slot.axis is not None]
        self.threaded = [slot for slot in others if slot.in_module and slot.axis is None]

    def slices(self) -> list[Any]:
        """What the loop slices, steps first."""
        return [jnp.moveaxis(jnp.asarray(s.value), s.axis or 0, 0) for s in self.sliced]

    def start(self) -> tuple[list[Any], list[Any]]:
        """What the first step gets from none before."""
        leaves = self.inputs.call.leaves
        carry = [_as_array(leaves[number]) for number in self.carried]
        return carry, [_as_array(slot.value) for slot in self.threaded]

    def step(self, state: tuple[list, list], x: tuple[list, Any]) -> tuple[tuple, list[Any]]:
        """One step; jax traces this."""
        (carry, threaded), (sliced, index) = state, x
        leaves = list(self.inputs.call.leaves)
        for number, leaf in zip(self.carried, carry):
            leaves[number] = leaf
        for slot, leaf in zip(self.threaded, threaded):
            # A key that is not split is the same in every step.
            leaves[slot.number] = slot.value if slot.is_key and not slot.split else leaf
        for slot, leaf in zip(self.sliced, sliced):
            leaves[slot.number] = leaf
        with self.options.split.folded(index):
            self.result = result = self.inputs.call.inside(leaves, self._take)
        after = tree_leaves(result.head)
        self._check_carry(result.head, after)
        self.handed_on = self._modules_handed_on(result)
        self.targets = targets_of(result, self.inputs, self.options)
        self.origins = self._origins_of(result, leaves)
        ys = [x for x, (kind, _) in zip(result.leaves, self.origins) if kind in (STACKED, LAST)]
        return ([_as_array(x) for x in after], self._state_after(result)), ys

    def _take(self, value: Any) -> tuple[Any, Any]:
        """The carry, and the rest of what the function returned."""
        if not self.scan_output:
            return value, None
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise InvalidArgumentTypeError(
                "scan: the function must return a pair: the carry, and what to stack.",
                got=type(value).__name__,
                write="return carry, y (or carry, None), or scan_output=False",
            )
        return value[0], value[1]

    # --- from one step to the next --------------------------------------------------------

    def _state_after(self, result: Result) -> list[Any]:
        """The state that is not sliced, for the next step."""
        after: dict[int, Any] = {}
        copies = iter(result.copies)
        for part in self.inputs.call.parts:
            if part.is_module:
                self._require_same(part, copy := next(copies))
                after |= dict(zip(range(part.start, part.stop), tree_leaves(copy)))
        return [_as_array(after[slot.number]) for slot in self.threaded]

    def _require_same(self, part: Part, after: Any) -> None:
        threads = any(part.start <= slot.number < part.stop for slot in self.threaded)
        if threads and tree_structure(part.value) != tree_structure(after):
            raise StructureMismatchError(
                "scan: a module changed its structure, so the next step could not take it.",
                got="; ".join(structure_differences(part.value, after)[:3]),
                write="a function that changes arrays and nothing else",
            )

    def _check_carry(self, carry: Any, leaves: list[Any]) -> None:
        if tree_structure(carry) != tree_structure(self._init):
            lines = structure_differences(self._init, carry) or ["the treedefs differ"]
        else:
            before = [self.inputs.call.leaves[number] for number in self.carried]
            names = [name or "the carry" for name, _ in named_leaves(carry)]
            lines = [
                f"{name}: {_describe(old)} against {_describe(new)}"
                for name, old, new in zip(names, before, leaves)
                if not _fits(old, new)
            ]
        if lines:
            raise StructureMismatchError(
                "scan: the carry changed its structure, so the next step could not take it.",
                got="; ".join(lines[:3]),
                write="a carry of the classes, shapes and dtypes of the one given",
            )

    def _modules_handed_on(self, result: Result) -> set[int]:
        """The modules of the carry that the function returned in their places."""
        pairs = zip(self._carry, parts_of(result.head))
        return {
            root
            for (_, root), part in pairs
            if root is not None and part.value is result.copies[root]
        }

    # --- the result -----------------------------------------------------------------------

    def _origins_of(self, result: Result, given: list[Any]) -> list[tuple[str, int]]:
        """Where each leaf of the result comes from, and its number or axis there."""
        origins: list[tuple[str, int]] = []
        untouched = result.untouched(given)
        for part, root in zip(result.parts, result.roots):
            is_final = part.path[0].idx == 1
            for i in range(part.start, part.stop):
                origins.append(self._origin(self.targets[i], untouched[i], is_final, root))
        return origins

    def _origin(
        self, target: Target, untouched: int | None, is_final: bool, root: int | None
    ) -> tuple[str, int]:
        source = target.source
        if source is not None and source.number not in self.carried:
            if source.axis is None:
                return THREADED, self.threaded.index(source)
            given = untouched == source.number
            return (GIVEN, source.number) if given else (STACKED, source.axis)
        if source is not None and is_final:
            if root in self.handed_on:
                return CARRIED, self.carried.index(source.number)
            return GIVEN, source.number
        if target.axis is not None:
            return STACKED, target.axis
        if target.is_key or source is not None:
            return LAST, 0
        raise not_covered(target, "scan")

    def finished(self, carry: list, threaded: list, ys: list, last: int) -> tuple[Any, Any]:
        """The last carry and the stacked output, for the caller.

        Args:
            carry: its leaves.
            threaded: the state after the last step.
            ys: what the loop stacked.
            last: the index of the last step in it.
        """
        stacked = iter(ys)
        given = self.inputs.call.leaves
        leaves: list[Any] = []
        for kind, number in self.origins:
            if kind in (STACKED, LAST):
                y = next(stacked)
                leaves.append(jnp.moveaxis(y, 0, number) if kind == STACKED else y[last])
            else:
                of_kind: Any = {CARRIED: carry, THREADED: threaded, GIVEN: given}
                leaves.append(of_kind[kind][number])
        axes = [self._axis(kind, number) for kind, number in self.origins]
        y = finished(self.inputs, self.result, leaves, axes, self.options.axis_label)
        return self._carry_for_caller(carry), y

    def _axis(self, kind: str, number: int) -> int | None:
        if kind == STACKED:
            return number
        return self.inputs.slots[number].axis if kind == GIVEN else None

    def _carry_for_caller(self, leaves: list[Any]) -> Any:
        """The last carry; a module that the caller has open is that object."""
        call = self.inputs.call
        tree = tree_structure(self.result.head).unflatten(leaves)
        items, treedef = tree_flatten(tree, is_leaf=is_node)
        for i, (_, root) in enumerate(self._carry):
            if root in self.handed_on and call.written[root]:
                items[i] = call.roots[root]
        return treedef.unflatten(items)


def _is_argument(part: Part, place: int) -> bool:
    return part.path[0].idx == 0 and part.path[1].idx == place


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _describe(leaf: Any) -> str:
    return describe_array(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))


def _fits(old: Any, new: Any) -> bool:
    """Whether a leaf of the carry may follow another; jax adapts a Python number's dtype."""
    if jnp.shape(old) != jnp.shape(new):
        return False
    old, new = _as_array(old), _as_array(new)
    return old.dtype == new.dtype or old.weak_type or new.weak_type
