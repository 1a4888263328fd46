"""scan: nnx's API, and PAX's scan over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_map

from pax_export._check import checked_integer
from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree
from pax_export.core import is_node
from pax_export.transforms._axes import MapOptions, inputs_of, mapped_size
from pax_export.transforms._checks import check_function, checked_size
from pax_export.transforms._lift import wrap_like
from pax_export.transforms._scan_body import ScanBody


def scan(
    f: Callable[..., Any],
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: object = 0,
    in_axes_kwargs: object = 0,
    out_axes: object = 0,
    carry_argnum: int = 0,
    state_axes: Mapping[Any, int | None] | None = None,
    split_rngs: object = ...,
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
    check_function(f, "scan")
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
    options = MapOptions.of(
        "scan", f, in_axes=in_axes, in_axes_kwargs=in_axes_kwargs, out_axes=out_axes,
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
        place = carry_argnum % len(args)
        inputs = inputs_of(f, args, kwargs, options, carried=place)
        size = mapped_size(inputs, length, "length", options)
        body = ScanBody(inputs, options, place, scan_output)
        (carry, threaded), ys = jax.lax.scan(
            body.step, body.start(), (body.slices(), jnp.arange(size)),  # which may be symbolic
            reverse=reverse, unroll=unroll, _split_transpose=_split_transpose,
        )  # fmt: skip
        return body.collect_results(carry, threaded, ys, last=0 if reverse else -1)

    return scanned


def scan_over_time(
    func: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: object,
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

    def step(state: PyTree, x: object) -> tuple[Any, Any]:
        return func(state, x)

    # jax remembers programs by the function; a module is equal to another one
    # with the same arrays, so it is not passed itself.
    body = step if is_node(func) else func
    xs = xs if time_major else _swap_axes(xs)
    state, ys = jax.lax.scan(body, init, xs, length, reverse=reverse, unroll=unroll)
    return state, ys if time_major else _swap_axes(ys)


def _swap_axes(tree: PyTree) -> Any:
    """Exchanges batch and time where an array has both."""
    return tree_map(lambda x: jnp.swapaxes(x, 0, 1) if jnp.ndim(x) > 1 else x, tree)
