"""Sequential: layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pax_export.core import Module
from pax_export.nn._lambda import Lambda


class Sequential(Module):
    """Layers one after the other; each gets what the one before it returned.

    Args:
        *layers: modules or functions; a function becomes a `Lambda`.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        modules: the layers, a tuple.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Linear(3, 4), jax.nn.relu) >> pax.Linear(4, 2)
        >>> net(jnp.ones((8, 3))).shape
        (8, 2)
        >>> net[-1]
        Linear(in_dim=4, out_dim=2, with_bias=True)
    """

    def __init__(self, *layers: Callable, name: str | None = None):
        super().__init__(name=name)
        self.modules = tuple([_as_module(layer) for layer in layers])

    def __call__(self, x: Any) -> Any:
        """Applies all layers in their order.

        Args:
            x: what the first layer takes.

        Returns:
            What the last layer returns; ``x`` itself if there is none.
        """
        for layer in self.modules:
            x = layer(x)
        return x

    def __getitem__(self, index: int | slice) -> Any:
        """Returns a layer, or a tuple of layers for a slice."""
        return self.modules[index]

    def set(self, index: int, value: Callable) -> Self:
        """Returns a new Sequential in which one layer is another.

        Args:
            index: which one; negative numbers count from the end.
            value: a module or a function.

        Raises:
            IndexError: there is no such layer.
            SharedNodeError: the new layer stands at another place already.
        """
        modules = list(self.modules)
        modules[index] = self._in_own_mode(value)
        return self.replace(modules=tuple(modules))

    def __rshift__(self, layer: Callable) -> Self:
        """``net >> layer``: a new Sequential with one more layer at the end.

        Name and mode of the Sequential stay, and so does the mode of the layer.
        """
        return self.replace(modules=(*self.modules, self._in_own_mode(layer)))

    def _in_own_mode(self, layer: Callable) -> Module:
        if isinstance(layer, Module):
            return layer
        return _as_module(layer) if self.training else _as_module(layer).eval()


def _as_module(layer: Callable) -> Module:
    return layer if isinstance(layer, Module) else Lambda(layer)
