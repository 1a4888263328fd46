"""Optimizers of optax as modules that hold their state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_map

from pax_export.core import Module, StateModule
from pax_export.core._tree import is_node
from pax_export.optim._recipe import OptaxRecipe


class OptaxOptimizer(StateModule):
    """An optimizer of optax with its state; made by `from_optax`.

    Attributes:
        recipe: the transformation, static data.
        state: the state of the transformation.  Moments are modules of the
            model's class that hold the parameters' shapes.

    Example:
        >>> import optax, pax_export as pax
        >>> params = pax.Linear(2, 3).parameters()
        >>> optimizer = pax.optim.from_optax(optax.sgd(1.0, momentum=0.9))(params)
        >>> isinstance(optimizer, pax.optim.OptaxOptimizer)
        True
        >>> optimizer, updates = optimizer % (params, params)
        >>> updates.weight.shape
        (2, 3)
    """

    def __init__(self, recipe: OptaxRecipe, params: Any):
        super().__init__()
        self.recipe = recipe
        self.state = _as_arrays(recipe.init(_parameters(params)))

    def __call__(self, grads: Any, params: Any = None, **extra: Any) -> Any:
        """Returns the updates to subtract; the state is changed, so call it with `%`.

        Args:
            grads: gradients.
            params: the parameters, for transformations that need them.
            **extra: what else the transformation takes, e.g. ``value=loss``.
        """
        updates, state = self.recipe.update(grads, self.state, params, **extra)
        self.state = _as_arrays(state)
        return tree_map(jnp.negative, updates)


def from_optax(transformation: Any) -> Callable[[Any], OptaxOptimizer]:
    """Makes modules of an optimizer of optax.

    Such a module holds optax's state.  Called with gradients and parameters, it
    returns optax's updates with their sign turned: they are *subtracted*, as
    opax's are.  `build_update_fn`, `apply_gradients` and `apply_scaled_gradients`
    do that.

    Args:
        transformation: what ``optax.adam(1e-3)`` or ``optax.chain(...)`` gives;
            or a function without arguments that makes it, such as
            ``functools.partial(optax.adam, 1e-3)``, which can be pickled.

    Returns:
        A function from the parameters of a model to a module.  Modules of equal
        transformations have equal treedefs, so a jitted step is traced once.

    Raises:
        InvalidArgumentTypeError: ``transformation`` is neither.

    Example:
        >>> import optax, pax_export as pax
        >>> layer = pax.Linear(2, 3)
        >>> optimizer = pax.optim.from_optax(optax.sgd(1.0))(layer.parameters())
        >>> grads = layer.parameters()
        >>> optimizer, updates = optimizer % (grads, layer.parameters())
        >>> bool((updates.weight == grads.weight).all())
        True
    """
    return functools.partial(OptaxOptimizer, OptaxRecipe(transformation))


def _parameters(params: Any) -> Any:
    """Only the trainable part, if a whole model was given."""
    return params.parameters() if isinstance(params, Module) else params


def _as_arrays(state: Any) -> Any:
    """Numbers among the state become arrays: as static data they would be fixed."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf

    return tree_map(as_array, state, is_leaf=is_node)
