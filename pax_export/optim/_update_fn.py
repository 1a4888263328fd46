"""Update functions: training steps from loss functions."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pax_export._foundations.errors import (
    InvalidArgumentTypeError,
    UnchangedStateWarning,
    hide_frames,
)
from pax_export._foundations.types import PyTree
from pax_export.core import (
    Module,
    Node,
    StateModule,
    assert_structure_equal,
    changed_modules,
    declared_in,
    named_modules,
    rebuild_tree,
)
from pax_export.optim._apply import apply_gradients, conjugates, require_model_and_optimizer
from pax_export.optim._optax import OptaxOptimizer
from pax_export.transforms import describe_result, value_and_grad


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
        require_model_and_optimizer(model, optimizer)
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
            extra = {"value": loss, "grad": conjugates(grads), "value_fn": value_fn}
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
