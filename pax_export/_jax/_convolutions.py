"""Convolutions whose strides, or kernels, meet symbolic sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

_NAME = "conv_general_dilated"
#: Where jax's rule for the gradient finds its convolution, wherever that is by now.
_home: dict[str, Any] = inspect.unwrap(jax.lax.conv_general_dilated).__globals__


def convolution_rules() -> Iterator[tuple[Any, Any, Any]]:
    """For gradients of convolutions whose strides meet symbolic sizes, and for their batches.

    How far such a gradient is padded depends on the remainder; jax computes
    that, and its own convolution takes no such padding.  `lax.pad` does.
    """
    from jax.interpreters import batching

    yield _home, _NAME, partial(_convolve, _home.get(_NAME, jax.lax.conv_general_dilated))
    convolution = jax.lax.conv_general_dilated_p
    batchers: Any = batching.fancy_primitive_batchers
    if convolution in batchers:
        yield batchers, convolution, _batched(batchers[convolution])


def _convolve(
    first: Callable,
    lhs: Any,
    rhs: Any,
    window_strides: Any,
    padding: Any,
    *dilations: Any,
    **options: Any,
) -> Any:
    from jax import export as jax_export  # which a program that exports nothing does without

    sizes = [] if isinstance(padding, str) else [size for pair in padding for size in pair]
    if any(map(jax_export.is_symbolic_dim, sizes)):
        spatial = options["dimension_numbers"].lhs_spec[2:]
        widths = [(0, 0, 0)] * lhs.ndim
        dilation = options.get("lhs_dilation") or (1,) * len(spatial)
        for axis, (low, high), step in zip(spatial, padding, dilation):
            widths[axis] = (low, high, step - 1)
        lhs = jax.lax.pad(lhs, jax.numpy.zeros((), lhs.dtype), widths)
        options["lhs_dilation"], padding = None, [(0, 0)] * len(spatial)
    return first(lhs, rhs, window_strides, padding, *dilations, **options)


def _batched(first: Callable) -> Callable:
    """A rule to batch convolutions: jax's `first`, or a loop where it cannot.

    With a kernel for each example, jax makes the examples groups of one convolution, and their
    number has to be known; so they are convolved one after the other here.
    """
    from jax import export as jax_export

    convolution = jax.lax.conv_general_dilated_p

    def rule(
        axis: Any, operands: Sequence[Any], places: Sequence[Any], **parameters: Any
    ) -> tuple[Any, int | None]:
        if None in places or not jax_export.is_symbolic_dim(operands[0].shape[places[0]]):
            return first(axis, operands, places, **parameters)
        pairs = tuple(jax.numpy.moveaxis(each, at, 0) for each, at in zip(operands, places))
        return jax.lax.map(lambda pair: convolution.bind(*pair, **parameters), pairs), 0

    return rule
