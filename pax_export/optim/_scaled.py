"""A training step with a loss scale."""

from __future__ import annotations

from typing import Any, TypeVar

import jmp

from pax_export.core import Module
from pax_export.optim._apply import apply_gradients
from pax_export.precision import adjust, unscale

M = TypeVar("M", bound=Module)
O = TypeVar("O", bound=Module)  # noqa: E741
L = TypeVar("L")


def apply_scaled_gradients(
    model: M, optimizer: O, loss_scale: L, grads: Any, **extra: Any
) -> tuple[M, O, L]:
    """Updates a model, its optimizer and its loss scale by gradients of a scaled loss.

    With a dynamic loss scale, a step whose gradients are not finite leaves the
    model and the optimizer as they were and lowers the scale.  What the model
    itself changed in that step, the statistics of a BatchNorm for example, is
    kept: it came with the ``model`` that was passed.

    Args:
        model: the model.
        optimizer: a module of opax or of `from_optax`.
        loss_scale: a loss scale of `pax_export.precision` or of jmp.
        grads: gradients of ``loss_scale.scale(loss)``.
        **extra: what else the optimizer takes, e.g. ``value=loss``, not scaled.

    Returns:
        ``(model, optimizer, loss_scale)``; every array keeps its dtype, so a
        jitted step is traced once.

    Raises:
        InvalidArgumentTypeError: (an AssertionError too) something is no module,
            or no loss scale.
        StructureMismatchError: gradients of another structure.

    Example:
        >>> import optax, pax_export as pax
        >>> layer, scale = pax.Linear(2, 3), pax.precision.DynamicLossScale(2.0**15)
        >>> adam = pax.optim.from_optax(optax.adam(1e-3))(layer.parameters())
        >>> grads = layer.parameters()
        >>> layer, adam, scale = pax.experimental.apply_scaled_gradients(
        ...     layer, adam, scale, grads
        ... )
        >>> float(scale.loss_scale), int(scale.counter)
        (32768.0, 1)
    """
    grads = unscale(loss_scale, grads)
    if not isinstance(loss_scale, jmp.DynamicLossScale):
        return (*apply_gradients(model, optimizer, grads, **extra), loss_scale)
    finite = jmp.all_finite(grads)
    model, optimizer = apply_gradients(model, optimizer, grads, all_finite=finite, **extra)
    return model, optimizer, adjust(loss_scale, finite)
