"""scan: nnx's API, PAX's scan over time, and the body that all loops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentError, StructureMismatchError
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import Selector, is_node, structure_differences
from pax_export.transforms._axes import (
    AxisPrefix,
    MapOptions,
    MappedArguments,
    Target,
    checked_size,
    finish_result,
    inputs_of,
    mapped_size,
    not_covered,
    targets_of,
)
from pax_export.transforms._lift import (
    Result,
    as_pair,
    check_arraylike,
    parts_of,
    tree_differences,
    wrap_like,
)

C = TypeVar("C")
T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")

Leaves = dict[int, Any]  # by their numbers

# The source of a leaf of the result: stacked by the loop, its last slice, the
# last carry, the state after the last step, or the caller's own leaf.
STACKED, LAST, CARRIED, THREADED, GIVEN = "stacked", "last", "carried", "threaded", "given"


class ScanBody:
    """One call of a looped function; leaves are sliced by axis, or threaded if a module's.

    `argnum` is the number of the positional argument that is the carry.
    """

    result: Result | None = None  # None if the loop, without jit, had no step
    targets: list[Target]
    origins: list[tuple[str, int]]
    handed_on: set[int]  # the modules of the carry that came back in their places

    def __init__(
        self, inputs: MappedArguments, options: MapOptions, argnum: int, scan_output: bool
    ):
        self.inputs, self.options, self.scan_output = inputs, options, scan_output
        self._name, call = options.transform, inputs.call
        self._carry = call.parts_at(argnum)
        self.carried = {n for part in self._carry for n in range(part.start, part.stop)}
        self._init = call.treedef.unflatten(call.leaves)[0][argnum]
        others = [slot for slot in inputs.slots if slot.number not in self.carried]
        self.sliced = [slot for slot in others if slot.axis is not None]
        self.threaded = [slot for slot in others if slot.root is not None and slot.axis is None]

    def slices(self) -> Leaves:
        """The sliced inputs, with the axis of steps first."""
        return {s.number: jnp.moveaxis(jnp.asarray(s.value), s.axis or 0, 0) for s in self.sliced}

    def start(self) -> tuple[Leaves, Leaves]:
        """The initial carry."""
        leaves = self.inputs.call.leaves
        for slot in self.inputs.slots:
            if slot.number in self.carried:
                what = f"{self._name}: the carry must consist of arrays, numbers or modules."
                check_arraylike(slot.value, what, slot.name, "the value in a closure of f")
        carry = {number: _as_array(leaves[number]) for number in self.carried}
        return carry, {slot.number: _as_array(slot.value) for slot in self.threaded}

    def step(self, state: tuple[Leaves, Leaves], x: tuple[Leaves, Any]) -> tuple[tuple, list]:
        """One step; jax traces this."""
        (carry, threaded), (sliced, index) = state, x
        for slot in self.threaded:
            if slot.is_key and not slot.split:  # it is the same in every step
                threaded[slot.number] = slot.value
        with self.options.split.folded(index):
            leaves = carry | threaded | sliced
            self.result = result = self.inputs.call.inside(leaves, self._take)
        after = tree_leaves(result.head)
        self._check_carry(result.head)
        self.handed_on = {
            part.root
            for part, returned in zip(self._carry, parts_of(result.head))
            if part.is_module and returned.value is result.copies[part.root]
        }
        self.targets = targets_of(result, self.inputs, self.options)
        self.origins = [
            self._origin(self.targets[i], result.untouched[i], part.path[0].idx == 1, root)
            for part, root in zip(result.parts, result.roots)
            for i in range(part.start, part.stop)
        ]
        ys = [x for x, (kind, _) in zip(result.leaves, self.origins) if kind in (STACKED, LAST)]
        return (dict(zip(carry, map(_as_array, after))), self._state_after(result)), ys

    def _take(self, value: object) -> tuple[Any, Any]:
        """The carry and the other results of the function."""
        if not self.scan_output:
            return value, None
        return as_pair(
            value,
            f"{self._name}: the function must return a pair: the carry, and what to stack.",
            write="return carry, y (or carry, None), or scan_output=False",
        )

    # --- from one step to the next --------------------------------------------------------

    def _state_after(self, result: Result) -> Leaves:
        """The state that is not sliced, for the next step."""
        after: Leaves = {}
        with_state = {slot.root for slot in self.threaded}
        for part in self.inputs.call.parts:
            if not part.is_module or part.root not in with_state:
                continue
            copy = result.copies[part.root]
            if tree_structure(part.value) != tree_structure(copy):
                raise StructureMismatchError(
                    f"{self._name}: a module changed its structure, so the next step could not "
                    "take it.",
                    got="; ".join(structure_differences(part.value, copy)[:3]),
                    write="a function that changes only arrays",
                )
            after |= dict(zip(range(part.start, part.stop), tree_leaves(copy)))
        return {slot.number: _as_array(after[slot.number]) for slot in self.threaded}

    def _check_carry(self, carry: PyTree) -> None:
        lines = tree_differences(self._init, carry, "the carry", _fits_carry)
        if lines:
            raise StructureMismatchError(
                f"{self._name}: the carry changed its structure, so the next step could not "
                "take it.",
                got="; ".join(lines[:3]),
                write="a carry of the classes, shapes and dtypes of the one given",
            )

    # --- the result -----------------------------------------------------------------------

    def _origin(
        self, target: Target, untouched: int | None, is_final: bool, root: int | None
    ) -> tuple[str, int]:
        """Returns the source of a leaf of the result, and its number or axis there."""
        source = target.source
        if source is not None and source.number not in self.carried:
            if source.axis is None:
                return THREADED, source.number
            leaves = untouched == source.number
            return (GIVEN, source.number) if leaves else (STACKED, source.axis)
        if source is not None and is_final:
            if root in self.handed_on:
                return CARRIED, source.number
            return GIVEN, source.number
        if target.axis is not None:
            return STACKED, target.axis
        if target.is_key or source is not None:
            return LAST, 0
        raise not_covered(target, self._name)

    def collect_results(
        self, carry: Leaves, threaded: Leaves, ys: list | None = None, last: int = -1
    ) -> Any:
        """The last carry, with the stacked outputs if there are any.

        `last` is the index of the last step.
        """
        if self.result is None:
            return self._init
        stacked = iter(ys or ())
        of_kind: Any = {CARRIED: carry, THREADED: threaded, GIVEN: self.inputs.call.leaves}
        leaves: list[Any] = []
        axes: list[int | None] = []
        for kind, number in self.origins:
            if kind in of_kind:
                leaves.append(of_kind[kind][number])
                axes.append(self.inputs.slots[number].axis if kind == GIVEN else None)
            else:
                y = next(stacked)
                leaves.append(jnp.moveaxis(y, 0, number) if kind == STACKED else y[last])
                axes.append(number if kind == STACKED else None)
        y = finish_result(self.inputs, self.result, leaves, axes, self.options.axis_label)
        tree = tree_structure(self.result.head).unflatten(list(carry.values()))
        last_carry = self._carry_for_caller(tree)
        return (last_carry, y) if self.scan_output else last_carry

    def _carry_for_caller(self, tree: T) -> T:
        """The last carry; a module that the caller has open is that object."""
        call = self.inputs.call
        items, treedef = tree_flatten(tree, is_leaf=is_node)
        for i, part in enumerate(self._carry):
            if part.is_module and part.root in self.handed_on and call.written[part.root]:
                items[i] = call.roots[part.root]
        return treedef.unflatten(items)


def _as_array(value: ArrayLike) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _fits_carry(old: ArrayLike, new: ArrayLike) -> bool:
    """Whether a leaf of the carry may follow another; jax adapts a Python number's dtype."""
    if jnp.shape(old) != jnp.shape(new):
        return False
    old, new = _as_array(old), _as_array(new)
    return old.dtype == new.dtype or old.weak_type or new.weak_type


# --- scan: nnx's API, and PAX's scan over time ----------------------------------------


def scan(
    f: Callable[..., Any],
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: AxisPrefix = 0,
    in_axes_kwargs: AxisPrefix = 0,
    out_axes: AxisPrefix = 0,
    carry_argnum: int = 0,
    state_axes: Mapping[Any, int | None] | None = None,
    split_rngs: Selector = ...,
    transform_metadata: Mapping[str, Any] = MappingProxyType({}),
    scan_output: bool = True,
) -> Callable[..., Any]:
    """Makes a function that calls another one in a compiled loop.

    This is a transform, as in flax nnx. ``pax.scan`` is PAX's function: it takes an initial state
    and a sequence, and runs the loop.

    Args:
        f: takes the carry among its arguments and returns ``(carry, y)``.
        length: the number of steps, if nothing is scanned.
        reverse: whether to go from the last step to the first.
        unroll: the number of loop iterations to unroll; True for all.
        _split_transpose: as in `jax.lax.scan`.
        in_axes: the axis along which each positional argument is sliced, None
            for one that is the same in all steps: a single entry for all, or a
            tuple with one for each, the carry included (whose entry does not
            count).  An entry may be `StateAxes`, for a module.
        in_axes_kwargs: the same for keyword arguments: one entry, or a dict.
        out_axes: the axis along which ``y`` is stacked.
        carry_argnum: which positional argument is the carry.  It is carried
            whole, modules included.
        state_axes: an ordered mapping from filters to axes.  If given, it alone
            says how leaves of modules are sliced.  What no filter selects goes
            from step to step.
        split_rngs: a filter that selects the random keys, of modules and not
            sliced, that go from step to step as in a loop; others are the same
            in every step.  The tag ``"params"`` is the ambient stream.
        transform_metadata: ``{PARTITION_NAME: name}`` names the stacked axis in
            partition specs.
        scan_output: whether there is a ``y``; if not, ``f`` returns the carry.

    Returns:
        A function of the same arguments that returns the last carry and the
        stacked ``y``, or the last carry.

    Raises:
        InvalidArgumentError: (a ValueError) None in ``out_axes``; (when called)
            too few arguments, axes that do not fit.
        InvalidArgumentTypeError: (a ValueError, when called) ``f`` does not return a pair.
        StructureMismatchError: (a ValueError, when called) the carry, or a
            module that goes from step to step, changed its structure.
        UncoveredStateError: (a ValueError, when called) a leaf of a new module
            in ``y`` has no axis.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> layers = T.vmap(lambda: pax.Linear(4, 4), axis_size=5)()
        >>> deep = T.scan(lambda layer, x: (layer(x), None), carry_argnum=1)
        >>> y, _ = deep(layers, jnp.ones((2, 4)))
        >>> y.shape
        (2, 4)
    """
    length = checked_size(length, "scan.length")
    carry_argnum = checked_integer(carry_argnum, "scan.carry_argnum", write="carry_argnum=0")
    if not isinstance(unroll, bool):
        unroll = checked_size(
            checked_integer(unroll, "scan.unroll", write="unroll=2"), "scan.unroll"
        )
    if None in tree_leaves(out_axes, is_leaf=lambda x: x is None):
        raise InvalidArgumentError(
            "scan: None in out_axes: the outputs of each step must be stacked.",
            got=f"out_axes={out_axes!r}",
            write="an axis, or return it as part of the carry",
        )
    options = MapOptions(
        "scan", in_axes=in_axes, in_axes_kwargs=in_axes_kwargs, out_axes=out_axes,
        state_axes=state_axes, split_rngs=split_rngs, transform_metadata=transform_metadata,
    )  # fmt: skip

    @wrap_like(f)
    def scanned(*args: object, **kwargs: object) -> Any:
        if not -len(args) <= carry_argnum < len(args):
            raise InvalidArgumentError(
                "scan: the function was called with fewer positional arguments than the carry "
                "needs.",
                got=f"carry_argnum={carry_argnum} and {len(args)} positional arguments",
                write="the carry by position, not by keyword",
            )
        argnum = carry_argnum % len(args)
        inputs = inputs_of(f, args, kwargs, options, carried=argnum)
        size = mapped_size(inputs, length, "length", options)
        body = ScanBody(inputs, options, argnum, scan_output)
        (carry, threaded), ys = jax.lax.scan(
            body.step, body.start(), (body.slices(), jnp.arange(size)),  # which may be symbolic
            reverse=reverse, unroll=unroll, _split_transpose=_split_transpose,
        )  # fmt: skip
        return body.collect_results(carry, threaded, ys, last=0 if reverse else -1)

    return scanned


def scan_over_time(
    func: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X,
    length: int | None = None,
    unroll: int | bool = 1,
    time_major: bool = True,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Calls a function for each time step with a carried state: PAX's ``pax.scan``.

    It runs the loop, as `jax.lax.scan` does. `transforms.scan` is a transform of functions of
    modules, with axes for arguments, states and random keys.

    Args:
        func: takes ``(state, x)`` and returns ``(state, y)``; a function, or a
            module such as a recurrent cell.
        init: the initial state, any pytree.
        xs: a pytree of arrays ``[time, ...]``, or None.
        length: the number of steps; needed if ``xs`` has no arrays.
        unroll: the number of loop iterations to unroll.
        time_major: if False, arrays of ``xs`` and of the result are
            ``[batch, time, ...]``.  Arrays with only a time axis are unchanged.
        reverse: whether to go from the last step to the first.

    Returns:
        The last state, and the stacked ``y`` of all steps.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> total, sums = pax.scan(lambda s, x: (s + x, s + x), 0, jnp.arange(5))
        >>> int(total), sums.tolist()
        (10, [0, 1, 3, 6, 10])
    """

    def step(state: C, x: X) -> tuple[C, Y]:
        return func(state, x)

    # jax remembers programs by the function; a module is equal to another one
    # with the same arrays, so it is not passed itself.
    body = step if is_node(func) else func
    xs = xs if time_major else _swap_axes(xs)
    state, ys = jax.lax.scan(body, init, xs, length, reverse=reverse, unroll=unroll)
    return state, ys if time_major else _swap_axes(ys)


def _swap_axes(tree: T) -> T:
    """Exchanges batch and time where an array has both."""
    return tree_map(lambda x: jnp.swapaxes(x, 0, 1) if jnp.ndim(x) > 1 else x, tree)
