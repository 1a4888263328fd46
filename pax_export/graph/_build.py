"""build_graph_module: a graph module from a function of nodes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pax_export._errors import InvalidArgumentTypeError
from pax_export.graph._graph_module import GraphModule
from pax_export.graph._node import InputNode, Node


def build_graph_module(func: Callable[..., Node]) -> Callable[..., GraphModule]:
    """Makes a builder of graph modules from a function that computes with nodes.

    Args:
        func: takes an `InputNode` for each example input and returns a node.

    Returns:
        A function of example inputs that returns a `GraphModule`; it calls
        ``func``, so it makes new modules at each call.

    Raises:
        InvalidArgumentTypeError: (an AssertionError too) ``func`` cannot be
            called, or (when the builder is called) does not return a node.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> from pax_export.experimental.graph import build_graph_module
        >>> def residual(x):
        ...     y = x >> pax.Linear(x.shape[-1], x.shape[-1])
        ...     y >>= jax.nn.relu
        ...     return (x | y) >> jax.lax.add
        >>> net = build_graph_module(residual)(jnp.zeros((3, 8)))
        >>> net(jnp.ones((5, 8))).shape
        (5, 8)
    """
    if not callable(func):
        raise InvalidArgumentTypeError(
            "build_graph_module needs a function of nodes.",
            got=repr(func)[:120],
            write="def forward(x): return x >> pax.Linear(8, 8)",
        )

    @functools.wraps(func)
    def build(*example_inputs: Any) -> GraphModule:
        names = _names(func, example_inputs)
        inputs = [InputNode(x, name=n) for x, n in zip(example_inputs, names)]
        output = func(*inputs)
        if not isinstance(output, Node):
            raise InvalidArgumentTypeError(
                "The function given to build_graph_module must return a node.",
                where=getattr(func, "__qualname__", repr(func)),
                got=f"{type(output).__name__}: {output!r}"[:120],
                write="return x >> pax.Linear(8, 8); for several outputs, return y & z",
            )
        return GraphModule(inputs, output)

    return build


def _names(func: Callable, example_inputs: tuple) -> list[str | None]:
    """The function's names for its arguments, where it has names for them."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names: list[str | None] = [p.name for p in parameters if p.kind in kinds]
    missing = len(example_inputs) - len(names)
    return names + [None] * missing
