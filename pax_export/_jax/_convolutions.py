"""Convolutions whose strides, or kernels, meet symbolic sizes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

_lock = threading.Lock()
_inside = 0  # how many threads and blocks are in `symbolic_convolutions` now
_NAME = "conv_general_dilated"
#: Where jax's rule for the gradient finds its convolution, wherever that is by now.
_home: dict[str, Any] = inspect.unwrap(jax.lax.conv_general_dilated).__globals__
_first: Any = jax.lax.conv_general_dilated


@contextmanager
def symbolic_convolutions() -> Iterator[None]:
    """Lets convolutions be differentiated in its block where their strides meet symbolic sizes.

    How far the gradient is padded depends on the remainder then; jax computes
    that, and its own convolution takes no such padding.  `lax.pad` does.
    """
    global _inside, _first
    with _lock:
        if not _inside:
            _first, _home[_NAME] = _home.get(_NAME, _first), _convolve
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _home[_NAME] = _first


def _convolve(
    lhs: Any, rhs: Any, window_strides: Any, padding: Any, *dilations: Any, **options: Any
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
    return _first(lhs, rhs, window_strides, padding, *dilations, **options)


def batched_convolution(first: Callable) -> Callable:
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
