"""Layers under a transform: what ``T.remat(layer)`` and ``T.vmap(layer)`` return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pax_export._foundations.types import PyTree
from pax_export.core import Module
from pax_export.transforms._axes import StateAxes
from pax_export.transforms._lift import Strict

P = ParamSpec("P")
R = TypeVar("R")


class TransformedLayer(Module):
    """A layer that is called under a transform; as an attribute it is trained and saved.

    Args:
        layer: any module that can be called.
        transform: a transform of this package that takes the layer as the first argument of a
            function.
        options: those of the transform; ``in_axes`` and ``static_argnums`` count the arguments of
            the layer.

    Attributes:
        layer: the layer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> block = T.remat(pax.Linear(3, 4))
        >>> block.layer.weight.shape, block(jnp.ones((2, 3))).shape
        ((3, 4), (2, 4))
    """

    def __init__(
        self,
        layer: Module,
        transform: Callable[..., Callable[..., Any]],
        options: dict[str, Any],
    ):
        super().__init__()
        self.layer = layer
        self.transform = transform
        self.options = options

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Calls the layer under the transform; state that the call changes is written back."""
        options = dict(self.options)
        # The layer becomes argument 0.
        if "static_argnums" in options:
            numbers = options["static_argnums"]
            options["static_argnums"] = tuple([n + 1 if n >= 0 else n for n in numbers])
        if "in_axes" in options:
            axes = options["in_axes"]
            each = axes if isinstance(axes, (tuple, list)) else (axes,) * len(args)
            options["in_axes"] = (StateAxes({}), *each)
        call = self.transform(Strict(_call), **options)
        return call(self.layer, *args, **kwargs)


def _call(layer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return layer(*args, **kwargs)
