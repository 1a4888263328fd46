"""One step of an optimizer: updates a model and its optimizer by gradients.

An optimizer is a module. Called with gradients and parameters, it returns updates, which are
*subtracted* from the parameters. This is opax's convention; optax's updates are added, so
`from_optax` negates them, and the rest of this package treats both alike.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
from jax.tree_util import tree_map, tree_map_with_path

from pax_export._foundations.errors import InvalidArgumentTypeError, StructureMismatchError
from pax_export._foundations.types import Array
from pax_export.core import (
    Module,
    assert_structure_equal,
    describe_array,
    module_and_value,
    named_modules,
    path_name,
    structure_differences,
    warn_of_untrained,
)
from pax_export.precision import adjust, unscale

M = TypeVar("M", bound=Module)
O = TypeVar("O", bound=Module)  # noqa: E741
L = TypeVar("L")
T = TypeVar("T")

_MOST = 10  # differences that a message lists


def apply_gradients(
    model: M, optimizer: O, grads: M, all_finite: jax.Array | None = None, **extra: Any
) -> tuple[M, O]:
    """Updates a model and its optimizer by gradients.

    Args:
        model: the model.
        optimizer: a module of opax or of `from_optax`, created for ``model.parameters()``.  (Its
            updates are subtracted.)
        grads: gradients with the structure of ``model.parameters()``, as `pax.grad` returns them;
            the loss descends along the conjugates of complex ones, which the optimizer gets.
        all_finite: a boolean scalar; if it is False, model and optimizer do not change.
        **extra: other arguments of the optimizer, e.g. ``value=loss``.

    Returns:
        ``(model, optimizer)``; every array keeps its dtype.

    Raises:
        InvalidArgumentTypeError: (an AssertionError too) not a module.
        StructureMismatchError: the structures of gradients, updates or optimizer state do not
            match, or the optimizer was created for another model.

    Example:
        >>> import optax, pax_export as pax
        >>> layer = pax.Linear(2, 3)
        >>> sgd = pax.optim.from_optax(optax.sgd(1.0))(layer.parameters())
        >>> layer, sgd = pax.optim.apply_gradients(layer, sgd, layer.parameters())
        >>> float(abs(layer.weight).max())
        0.0
    """
    require_model_and_optimizer(model, optimizer)
    params = parameters_of(model)
    grads = parameters_of(grads)
    assert_structure_equal(params, grads)
    directions = conjugates(grads)
    try:
        new_optimizer, updates = module_and_value(optimizer)(directions, params, **extra)
    except (TypeError, ValueError) as error:
        refuse_another_model(optimizer, params, error)
        _refuse_other_module(optimizer, (directions, params), extra, error)
        raise
    new_params = _subtract_updates(params, updates)
    if all_finite is not None:
        new_params = _choose_tree(all_finite, new_params, params)
        new_optimizer = _choose_tree(all_finite, new_optimizer, optimizer)
    return model | new_params, new_optimizer


def apply_scaled_gradients(
    model: M, optimizer: O, loss_scale: L, grads: M, **extra: Any
) -> tuple[M, O, L]:
    """Updates a model, its optimizer and its loss scale by gradients of a scaled loss.

    With a dynamic loss scale, a step with non-finite gradients changes neither the model nor the
    optimizer, and lowers the scale. State that changed in that step, such as BatchNorm statistics,
    is kept, because it is part of the ``model`` argument.

    Args:
        model: the model.
        optimizer: a module of opax or of `from_optax`.
        loss_scale: a loss scale of `pax_export.precision` or of jmp.
        grads: gradients of ``loss_scale.scale(loss)``.
        **extra: other arguments of the optimizer, e.g. ``value=loss``, unscaled.

    Returns:
        ``(model, optimizer, loss_scale)``; every array keeps its dtype, so a
        jitted step is traced once.

    Raises:
        InvalidArgumentTypeError: (an AssertionError too) an argument is not a module, or not a loss
            scale.
        StructureMismatchError: the structure of the gradients differs.

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


def require_model_and_optimizer(model: Module, optimizer: Module) -> None:
    """Raises unless both are modules, in this order."""
    if hasattr(type(model), "remade") and not hasattr(type(optimizer), "remade"):
        raise InvalidArgumentTypeError(
            "The optimizer of a training step comes after the model.",
            got=f"{type(model).__name__} as the model",
            write="step(model, optimizer, ...)",
        )
    for role, value in (("model", model), ("optimizer", optimizer)):
        if not isinstance(value, Module):
            raise InvalidArgumentTypeError(
                f"The {role} of a training step must be a module.",
                got=f"{type(value).__name__}: {value!r}"[:200],
                write="pax.optim.from_optax(optax.adam(1e-3))(model.parameters()), or "
                "opax.adam(1e-3)(model.parameters())"
                if role == "optimizer"
                else "an instance of a pax_export.Module subclass",
            )


def refuse_another_model(optimizer: Module, params: Module, error: Exception) -> None:
    """Raises if moments of an optimizer have another structure than the parameters."""
    for path, moments in named_modules(optimizer):
        if not (path and type(moments).__name__ == type(params).__name__):
            continue
        differences = structure_differences(moments, params)
        if differences:
            raise StructureMismatchError(
                "The optimizer was created for another model; its moments (first) and the "
                "parameters (second) differ:\n"
                + "\n".join(f"  - {each}" for each in differences[:_MOST]),
                where=f"optimizer.{path}",
                got=f"{len(differences)} places",
                write="the mode (train or eval) in which the optimizer was created, or "
                "optimizer.remade(model.parameters()), which keeps leaves with the same path and "
                "shape; create an opax optimizer again",
            ) from error


def _refuse_other_module(
    optimizer: Module, arguments: tuple, extra: dict[str, Any], error: Exception
) -> None:
    """Raises if the module cannot be called as an optimizer is."""
    try:
        inspect.signature(optimizer.__call__).bind(*arguments, **extra)
    except TypeError:
        raise InvalidArgumentTypeError(
            "The optimizer of a training step is called with gradients and parameters.",
            got=f"{type(optimizer).__name__}: {error}"[:200],
            write="pax.optim.from_optax(optax.adam(1e-3))(model.parameters())",
        ) from error


def parameters_of(tree: T) -> T:
    """Returns the trainable part of a model."""
    if not isinstance(tree, Module):
        return tree
    warn_of_untrained(tree)
    return tree.parameters()


def conjugates(grads: T) -> T:
    """The directions in which a loss grows: gradients by jax's convention are their conjugates."""
    return tree_map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, grads)


def _subtract_updates(params: T, updates: T) -> T:
    assert_structure_equal(params, updates)
    return tree_map_with_path(
        lambda path, p, u: _check_replacement(path, p, (p - u).astype(jnp.result_type(p))),
        params,
        updates,
    )


def _choose_tree(condition: Array, new: T, old: T) -> T:
    """Selects the new tree if the condition holds, else the old one."""
    assert_structure_equal(new, old)

    def choose(path: tuple, a: Array, b: Array) -> Any:
        a = _check_replacement(path, b, a)
        return jax.lax.select(jnp.asarray(condition), jnp.asarray(a), jnp.asarray(b))

    return tree_map_with_path(choose, new, old)


def _check_replacement(path: tuple, before: Array, after: Array) -> Any:
    """Checks the replacement of an array."""
    same_shape = jnp.shape(before) == jnp.shape(after)
    if not same_shape or jnp.result_type(before) != jnp.result_type(after):
        raise StructureMismatchError(
            "A training step must not change the shape or dtype of an array.",
            where=path_name(path),
            got=f"{describe_array(before)} before, {describe_array(after)} after",
            write="an optimizer made for these parameters, and gradients of one loss",
        )
    return after
