"""scan: a Python loop over layers or over time, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from pax_export._errors import InvalidArgumentError
from pax_export.transforms._lift import wraps
from pax_export.transforms._mapping import MapOptions, inputs_of, mapped_size, options_of
from pax_export.transforms._state_axes import as_state_axes
from pax_export.transforms._steps import Steps


def scan(
    f: Callable[..., Any],
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Any = 0,
    in_axes_kwargs: Any = 0,
    out_axes: Any = 0,
    carry_argnum: int = 0,
    state_axes: Mapping[Any, int | None] | None = None,
    split_rngs: Any = ...,
    transform_metadata: Mapping[str, Any] = MappingProxyType({}),
    scan_output: bool = True,
) -> Callable[..., Any]:
    """Makes a function that calls another one step by step, as a Python loop does.

    Args:
        f: takes the carry among its arguments and returns ``(carry, y)``.
        length: how many steps, where nothing is scanned.
        reverse: whether to go from the last step to the first.
        unroll: how many steps the compiled loop makes at a time; True for all.
        _split_transpose: as in `jax.lax.scan`.
        in_axes: the axis along which each positional argument is sliced, None
            for one that is the same in all steps: a single entry for all, or a
            tuple with one for each, the carry included (whose entry does not
            count).  An entry may be `StateAxes`, for a module.
        in_axes_kwargs: the same for keyword arguments: one entry, or a dict.
        out_axes: along which axis ``y`` is stacked.
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
            too few arguments, axes that do not fit, no pair returned.
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
    check_out_axes(out_axes)
    options = options_of(
        "scan", in_axes, in_axes_kwargs, out_axes, as_state_axes(state_axes), split_rngs,
        transform_metadata,
    )  # fmt: skip
    loop = {"reverse": reverse, "unroll": unroll, "_split_transpose": _split_transpose}

    @wraps(f)
    def scanned(*args: Any, **kwargs: Any) -> Any:
        return call_scanned(f, args, kwargs, options, length, carry_argnum, scan_output, loop)

    return scanned


def check_out_axes(out_axes: Any) -> None:
    """Raises where a result of each step would not be stacked."""
    if None in tree_leaves(out_axes, is_leaf=lambda x: x is None):
        raise InvalidArgumentError(
            "scan: None in out_axes: what a loop gives at each step must be stacked.",
            got=f"out_axes={out_axes!r}",
            write="an axis, or return it as part of the carry",
        )


def call_scanned(
    f: Callable,
    args: tuple,
    kwargs: dict,
    options: MapOptions,
    length: int | None,
    carry_argnum: int,
    scan_output: bool,
    loop: dict[str, Any],
    strict: bool = False,
) -> Any:
    """One call of a scanned function; ``strict`` as for `Call`."""
    place = _place(carry_argnum, args)
    inputs = inputs_of(f, args, kwargs, options, strict, carried=place)
    size = mapped_size(inputs.slots, length, "length", "scan")
    steps = Steps(inputs, options, place, scan_output)
    xs = (steps.slices(), jnp.arange(size))
    (carry, threaded), ys = jax.lax.scan(steps.step, steps.start(), xs, length=size, **loop)
    carry, y = steps.finished(carry, threaded, ys, last=0 if loop["reverse"] else -1)
    return (carry, y) if scan_output else carry


def _place(carry_argnum: int, args: Sequence[Any]) -> int:
    if not -len(args) <= carry_argnum < len(args):
        raise InvalidArgumentError(
            "scan: the function was called with fewer positional arguments than the carry needs.",
            got=f"carry_argnum={carry_argnum} and {len(args)} positional arguments",
            write="the carry by position, not by keyword",
        )
    return carry_argnum % len(args)
