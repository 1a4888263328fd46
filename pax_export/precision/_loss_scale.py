"""Loss scales: prevent underflow of gradients in half precision.

They are jmp's loss scales as pytrees; jmp's own classes also work. (In jmp 0.0.4, a static scale
cannot be an argument of jitted functions, and a dynamic one loses its lower bound there and rejects
float16.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys, tree_map

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, ArrayLike, PyTree
from pax_export.core import is_floating

T = TypeVar("T")


class NoOpLossScale(jmp.NoOpLossScale):
    """Does not scale; for a training step that takes any loss scale.

    Example:
        >>> import pax_export as pax
        >>> pax.precision.NoOpLossScale().scale(3.0)
        3.0
    """


class StaticLossScale(jmp.StaticLossScale):
    """Scales by a constant.

    Args:
        loss_scale: the factor: a number, or a floating-point scalar array.

    Raises:
        InvalidArgumentTypeError: the factor is none of these.

    Example:
        >>> import pax_export as pax
        >>> float(pax.precision.StaticLossScale(1024.0).scale(0.5))
        512.0
    """

    def __init__(self, loss_scale: ArrayLike):
        _set_fields(self, loss_scale=_as_scalar(loss_scale, "loss_scale"))

    def unscale(self, tree: T) -> T:
        """Divides the arrays of a tree by the scale; each keeps its dtype."""
        return unscale_tree(tree, self.loss_scale)


class DynamicLossScale(jmp.DynamicLossScale):
    """A loss scale that grows until gradients overflow, and then shrinks; at most 2**126.

    Args:
        loss_scale: the initial scale: a number, or a floating-point scalar array, whose dtype is
            kept.
        counter: int32 scalar: the number of steps with finite gradients since the last change.
        period: the number of finite steps after which the scale grows.
        factor: the factor by which it grows, or shrinks after an overflow.
        min_loss_scale: the smallest scale.

    Raises:
        InvalidArgumentTypeError: a scale is neither a number nor a floating-point scalar.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> scale = pax.precision.DynamicLossScale(jnp.float16(2.0**15), period=2)
        >>> float(scale.adjust(jnp.array(False)).loss_scale)
        16384.0
    """

    def __post_init__(self) -> None:
        _set_fields(
            self,
            loss_scale=_as_scalar(self.loss_scale, "loss_scale"),
            min_loss_scale=_as_scalar(self.min_loss_scale, "min_loss_scale"),
            counter=jnp.asarray(self.counter, jnp.int32),
        )

    def unscale(self, tree: T) -> T:
        """Divides the arrays of a tree by the scale; each keeps its dtype."""
        return unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: Array) -> Self:
        """Returns the scale for the next step.

        Args:
            grads_finite: boolean scalar: whether this step's gradients are finite.

        Raises:
            InvalidArgumentError: (an AssertionError too) it is not a scalar.
        """
        return adjust_dynamic(self, grads_finite)


def _as_scalar(value: ArrayLike, name: str) -> jax.Array:
    """A floating-point scalar of a fixed dtype, so that a step is traced once."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return jnp.array(value, jnp.float32)
    value = np.asarray(value) if isinstance(value, np.generic) else value
    if not is_floating(value) or value.ndim:
        raise InvalidArgumentTypeError(
            f"{name} of a loss scale must be a floating-point scalar.",
            got=f"{type(value).__name__}: {value!r}"[:120],
            write="2.0**15, or jnp.float16(2.0**15) to keep it in half precision",
        )
    array = jnp.asarray(value)
    return array.astype(array.dtype)  # not weakly typed any more


def _set_fields(scale: jmp.LossScale, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(scale, name, value)


# --- the arithmetic, for jmp's loss scales as well ---------------------------------


class LossScale(Protocol):
    """A loss scale: ours, jmp's, or another class."""

    def scale(self, tree: T, /) -> T: ...
    def unscale(self, tree: T, /) -> T: ...
    def adjust(self, grads_finite: Array, /) -> Self: ...


L = TypeVar("L", bound=LossScale)


def unscale(scale: LossScale, tree: T) -> T:
    """Unscales gradients by our loss scales, jmp's, or another class with ``unscale``."""
    method = getattr(type(scale), "unscale", None)
    if method is None:
        raise InvalidArgumentTypeError(
            "Expected a loss scale.",
            got=f"{type(scale).__name__}: {scale!r}"[:120],
            write="pax.precision.DynamicLossScale(2.0**15), or one of jmp's",
        )
    own = (jmp.StaticLossScale.unscale, jmp.DynamicLossScale.unscale)
    if isinstance(scale, (jmp.StaticLossScale, jmp.DynamicLossScale)) and method in own:
        return unscale_tree(tree, scale.loss_scale)
    return scale.unscale(tree)


def adjust(scale: L, grads_finite: Array) -> L:
    """Returns the next state of a dynamic loss scale, ours, jmp's, or one with ``adjust``."""
    own = jmp.DynamicLossScale.adjust
    if isinstance(scale, jmp.DynamicLossScale) and type(scale).adjust is own:
        return adjust_dynamic(scale, grads_finite)
    return scale.adjust(grads_finite)


#: Above it, 1 / scale is subnormal, and hardware that multiplies by it gets 0.
_LARGEST = 2.0**126


def unscale_tree(tree: T, loss_scale: ArrayLike) -> T:
    """Divides the arrays of a tree by a scale, in float32; each keeps its dtype."""
    # XLA multiplies by 1 / constant, which is 0 for 2**127.
    scale = jax.lax.optimization_barrier(jnp.asarray(loss_scale).astype(jnp.float32))
    return tree_map(lambda x: (x / scale).astype(jnp.result_type(x)), tree)


def adjust_dynamic(scale: jmp.DynamicLossScale, grads_finite: ArrayLike) -> Any:
    """The next state of a `jmp.DynamicLossScale`; every field keeps its dtype."""
    if jnp.ndim(grads_finite) != 0:
        raise InvalidArgumentError(
            "grads_finite must be a single boolean.",
            got=f"an array of shape {jnp.shape(grads_finite)}",
            write="loss_scale.adjust(jmp.all_finite(grads))",
        )
    now = scale.loss_scale
    grown = now * scale.factor
    largest = min(float(jnp.finfo(jnp.result_type(now)).max), _LARGEST)
    grown = jnp.where(grown <= largest, grown, now)
    grown = jnp.where(scale.counter == scale.period - 1, grown, now)
    shrunk = jnp.maximum(_lowest_scale(scale), now / scale.factor)
    chosen = jnp.where(grads_finite, grown, shrunk)
    counter = (scale.counter + 1) % scale.period * jnp.asarray(grads_finite, jnp.int32)
    return dataclasses.replace(scale, loss_scale=chosen, counter=counter)


def _lowest_scale(scale: jmp.DynamicLossScale) -> Any:
    lowest = scale.min_loss_scale
    if isinstance(lowest, (int, float, np.ndarray, np.generic)):
        # A plain number leaves a weakly typed scale, jnp.asarray(2.0**15), as it
        # is; this also happens with jmp's own, and must not change its type after one step.
        return float(lowest)
    return lowest.astype(jnp.result_type(scale.loss_scale))


# --- as pytrees ------------------------------------------------------------------------


def _register_scale(cls: type, children: tuple[str, ...], static: tuple[str, ...]) -> None:
    """Registers a loss scale; rebuilding one runs no constructor."""
    keys = tuple([GetAttrKey(name) for name in children])

    def flatten(scale: jmp.LossScale) -> tuple[tuple, tuple]:
        values = [getattr(scale, name) for name in children]
        return tuple(values), tuple([getattr(scale, name) for name in static])

    def flatten_with_keys(scale: jmp.LossScale) -> tuple[tuple, tuple]:
        values, aux = flatten(scale)
        return tuple(zip(keys, values)), aux

    def unflatten(aux: tuple, values: PyTree) -> Any:
        scale = object.__new__(cls)
        _set_fields(scale, **dict(zip(children, values)), **dict(zip(static, aux)))
        return scale

    register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


_register_scale(NoOpLossScale, (), ())
_register_scale(StaticLossScale, ("loss_scale",), ())
_register_scale(DynamicLossScale, ("loss_scale", "counter", "min_loss_scale"), ("period", "factor"))
