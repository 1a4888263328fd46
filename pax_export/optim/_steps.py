"""Training steps: of a loss function, and of gradients.

An optimizer is a module. Called with gradients and parameters, it returns updates, which are
*subtracted* from the parameters. This is opax's convention; optax's updates are added, so
`from_optax` negates them, and the rest of this package treats both alike.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
from jax.tree_util import tree_map, tree_map_with_path

from pax_export._foundations.errors import (
    InvalidArgumentTypeError,
    StructureMismatchError,
    UnchangedStateWarning,
    hide_frames,
)
from pax_export._foundations.types import Array, PyTree
from pax_export.core import (
    Module,
    Node,
    StateModule,
    assert_structure_equal,
    changed_modules,
    declared_in,
    describe_array,
    module_and_value,
    named_modules,
    path_name,
    rebuild_tree,
    structure_differences,
)
from pax_export.optim._optax import OptaxOptimizer, parameters_of
from pax_export.precision import LossScale, adjust, unscale
from pax_export.transforms import describe_result, value_and_grad

M = TypeVar("M", bound=Module)
O = TypeVar("O", bound=Module)  # noqa: E741
L = TypeVar("L", bound=LossScale)
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
    _require_model_and_optimizer(model, optimizer)
    params = parameters_of(model)
    grads = parameters_of(grads)
    assert_structure_equal(params, grads)
    directions = _conjugates(grads)
    try:
        new_optimizer, updates = module_and_value(optimizer)(directions, params, **extra)
    except (TypeError, ValueError) as error:
        _refuse_another_model(optimizer, params, error)
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


def _require_model_and_optimizer(model: Module, optimizer: Module) -> None:
    """Raises unless both are modules, in this order."""
    swapped = isinstance(model, OptaxOptimizer) and not isinstance(optimizer, OptaxOptimizer)
    for role, value in (("model", model), ("optimizer", optimizer)):
        if swapped or not isinstance(value, Module):
            raise InvalidArgumentTypeError(
                "A training step takes a model and its optimizer, which are modules.",
                got=f"{type(value).__name__} as the {role}: {value!r}"[:200],
                write="step(model, optimizer, ...), where the optimizer is, for example, "
                "pax.optim.from_optax(optax.adam(1e-3))(model.parameters()), or "
                "opax.adam(1e-3)(model.parameters())",
            )


def _refuse_another_model(optimizer: Module, params: Module, error: Exception) -> None:
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


def _conjugates(grads: T) -> T:
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


# --- steps of a loss function -------------------------------------------------------------


def build_update_fn(loss_fn: Callable[..., Any], *, scan_mode: bool = False) -> Callable[..., Any]:
    """Makes a training step from a loss function.

    Args:
        loss_fn: called as ``loss_fn(model, *inputs)``, returns
            ``(loss, (aux, model))`` with the updated model.  It must not change
            the model itself: write ``model, y = model % x``.
        scan_mode: whether the step takes and returns a pair, for `jax.lax.scan`.

    Returns:
        ``update(model, optimizer, *inputs) -> (model, optimizer, aux)``; in scan
        mode ``update((model, optimizer), *inputs) -> ((model, optimizer), aux)``.
        The optimizer is a module of opax or of `pax_export.optim.from_optax`.
        An optax optimizer also gets the loss (``value``), the gradients (``grad``) and a function
        that computes the loss for other parameters (``value_fn``).

    Raises:
        InvalidArgumentTypeError: (an AssertionError too, when called) the model
            or the optimizer is not a module, or ``loss_fn`` returns no model.
        StructureMismatchError: (a ValueError, when called) the returned model
            has another structure than the argument.

    Example:
        >>> import jax, jax.numpy as jnp, optax, pax_export as pax
        >>> def loss_fn(model, x, y):
        ...     model, y_hat = model % x
        ...     loss = jnp.mean((y_hat - y) ** 2)
        ...     return loss, (loss, model)
        >>> update = jax.jit(pax.build_update_fn(loss_fn))
        >>> layer = pax.Linear(2, 3)
        >>> adam = pax.optim.from_optax(optax.adam(1e-3))(layer.parameters())
        >>> layer, adam, loss = update(layer, adam, jnp.ones((4, 2)), jnp.ones((4, 3)))
        >>> loss.shape
        ()
    """

    def of_immutable(model: Module, *inputs: PyTree) -> Any:
        # The gradient's copy of a model is mutable; but what is changed and
        # not returned would be lost, so here it is an error.
        copy = rebuild_tree(model)
        with changed_modules() as changed:
            returned = loss_fn(copy, *inputs)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise _no_model(describe_result(returned))
        _, updated = _aux_and_model(returned[1])
        unchanged.append(_loses_state(copy, updated, changed))
        return returned

    unchanged: list[bool] = []
    grad_fn = value_and_grad(of_immutable, has_aux=True)

    def update(model: Module, optimizer: Module, *inputs: PyTree) -> tuple[Any, Any, Any]:
        _require_model_and_optimizer(model, optimizer)
        try:
            (loss, (aux, updated)), grads = grad_fn(model, *inputs)
        except Exception as error:  # raised again with fewer frames
            hide_frames(error)
            raise
        assert_structure_equal(model, updated)

        def value_fn(params: Module) -> Any:
            return loss_fn(model.update_parameters(params), *inputs)[0]

        extra = {}
        if isinstance(optimizer, OptaxOptimizer):
            extra = {"value": loss, "grad": _conjugates(grads), "value_fn": value_fn}
        updated, optimizer = apply_gradients(updated, optimizer, grads, **extra)
        if unchanged.pop():
            warnings.warn(_unchanged_state(model), stacklevel=2)
        return updated, optimizer, aux

    def scan_update(model_and_optimizer: tuple[Module, Module], *inputs: PyTree) -> tuple[Any, Any]:
        model, optimizer, aux = update(*model_and_optimizer, *inputs)
        return (model, optimizer), aux

    return scan_update if scan_mode else update


def _loses_state(model: Module, returned: Module, changed: Sequence[Node]) -> bool:
    """Whether the returned net lacks what a call changed, or would change in train mode."""
    before, after = _changing_arrays(model), _changing_arrays(returned)
    if model.training and not any(map(_state_arrays, changed)):
        return False
    return bool(before) and len(before) == len(after) and all(map(operator.is_, before, after))


def _unchanged_state(model: Module) -> UnchangedStateWarning:
    if not model.training:
        return UnchangedStateWarning(
            "A net in eval mode is trained: it drops nothing, and its averages stay.",
            write="net.train(), or net.at(pax.BatchNorm2D).eval() for a part of it",
        )
    return UnchangedStateWarning(
        "The loss function returns the net from before the call, with its averages and keys.",
        write="net, y = net % x; ...; return loss, (aux, net)",
    )


def _changing_arrays(model: Module) -> list[jax.Array]:
    """The averages and keys that layers in the mode of the model replace, at least in train mode.

    In eval mode, those of averages that are part of no such layer are left out: they may be
    updated outside of the loss function.
    """
    layers: dict[str, Node] = dict(named_modules(model))
    found: list[jax.Array] = []
    for path, layer in layers.items():
        parent = layers.get(path.rpartition(".")[0], model)
        if not callable(layer) or getattr(layer, "training", None) != model.training:
            continue
        averages = isinstance(layer, StateModule) and layer._pax_changes == "in train mode"
        if model.training or not averages or parent._pax_changes:
            found.extend(_state_arrays(layers[path]))
    return jax.tree_util.tree_leaves(found)


def _state_arrays(layer: Node) -> list[jax.Array]:
    declared = declared_in(layer).values()
    return [each.array for each in declared if each.declared.role in ("average", "key")]


def _aux_and_model(returned: object) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Module):
        return returned
    raise _no_model(f"(loss, {type(returned).__name__})")


def _no_model(got: str) -> InvalidArgumentTypeError:
    return InvalidArgumentTypeError(
        "The loss function of build_update_fn must return its updated model.",
        got=got,
        write="return loss, (aux, model)",
    )
