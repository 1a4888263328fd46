"""Sequential, Lambda and Identity."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array, PyTree
from pax_export.core import Module, kernel_of, pax_line
from pax_export.nn._explicit import of_a_function


class Sequential(Module):
    """Applies layers in sequence: each gets the output of the previous one.

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

    def __call__(self, x: Array) -> Any:
        """Applies all layers in their order.

        Args:
            x: the input of the first layer.

        Returns:
            The output of the last layer; ``x`` itself if there are no layers.
        """
        for layer in self.modules:
            x = layer(x)
        return x

    def __getitem__(self, index: int | slice) -> Any:
        """Returns a layer, or a tuple of layers for a slice."""
        return self.modules[index]

    def set(self, index: int, value: Callable) -> Self:
        """Returns a new Sequential with one layer replaced.

        Args:
            index: the index of the layer; negative numbers count from the end.
            value: a module or a function.

        Raises:
            IndexError: there is no such layer.
            SharedNodeError: the new layer already occurs elsewhere.
        """
        modules = list(self.modules)
        modules[index] = self._in_own_mode(value)
        return self.replace(modules=tuple(modules))

    def __rshift__(self, layer: Callable) -> Self:
        """``net >> layer``: a new Sequential with one more layer at the end.

        Name and mode of the Sequential stay, and so does the mode of the layer.
        """
        return self.replace(modules=(*self.modules, self._in_own_mode(layer)))

    @property
    def axes_of_layers(self) -> dict[str, dict[str, str]]:
        """The names of the axes of dense layers: two neighbors share the hidden one."""
        names = [f"modules.{n}" for n, layer in enumerate(self.modules) if _is_dense(layer)]
        pairs = ({"in": "embed", "out": "hidden"}, {"in": "hidden", "out": "embed"})
        return {name: pairs[n % 2] for n, name in enumerate(names)}

    def _in_own_mode(self, layer: Callable) -> Module:
        if isinstance(layer, Module):
            return layer
        return _as_module(layer) if self.training else _as_module(layer).eval()


def _is_dense(layer: Module) -> bool:
    kernel = kernel_of(layer)
    return kernel is not None and kernel.axes == ("in", "out")


def _as_module(layer: Callable) -> Module:
    return layer if isinstance(layer, Module) else Lambda(layer)


class Lambda(Module):
    """A function as a layer; it has no arrays.

    Args:
        func: the function.  Functions written by the same line of code are
            equal, so that jax need not trace again for each of them.
        name: shown by ``repr`` and ``summary`` instead of the function's.

    Attributes:
        func: the function.

    Raises:
        InvalidArgumentTypeError: (a TypeError) it is not a function.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> pax.Lambda(jax.nn.relu)
        Lambda(relu)
        >>> print(pax.Lambda(jnp.tanh).summary())
        x => tanh(x)
    """

    def __init__(self, func: Callable, name: str | None = None):
        super().__init__(name=name)
        if not callable(func) or (isinstance(func, type) and issubclass(func, Module)):
            raise InvalidArgumentTypeError(
                "A layer must be a module or a function.",
                where=type(self).__name__,
                got=f"{type(func).__name__}: {func!r}"[:200],
                write="Sequential(pax.Linear(2, 3), jax.nn.relu, pax.Dropout(0.1))",
            )
        self.func = func

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Calls the function with all arguments."""
        try:
            return self.func(*args, **kwargs)
        except Exception as error:  # of the function; raised again if shardings are not the cause
            return of_a_function(self.func, args, kwargs, error)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        text = pax_line(self, info)
        if self.name is not None:
            return text
        title, bracket, rest = text.partition("(")
        return f"{title}({function_name(self.func)}" + (f", {rest}" if bracket else ")")

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns the line ``x => f(x)``.

        Args:
            return_list: whether to return a list of that line.
        """
        _, bracket, rest = pax_line(self).removeprefix(f"({self.name}) ").partition("(")
        line = f"x => {self.name or function_name(self.func)}(x)"
        line += f"  ({rest}" if bracket else ""  # a precision policy
        return [line] if return_list else line


def function_name(func: Callable[..., Any]) -> str:
    """The name of a function for people; never an address in memory."""
    if isinstance(func, functools.partial):
        values = [_argument_text(x) for x in func.args]
        values += [f"{key}={_argument_text(x)}" for key, x in func.keywords.items()]
        return f"functools.partial({', '.join([function_name(func.func), *values])})"
    # custom_jvp and jit return wrappers of the function that has the name.
    name = getattr(inspect.unwrap(func) if callable(func) else func, "__name__", None)
    if isinstance(name, str):
        return name
    return _argument_text(func)


def _argument_text(value: object) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    has_own_text = type(value).__repr__ is not object.__repr__
    return repr(value) if has_own_text else type(value).__qualname__


class Identity(Module):
    """A layer that returns its input.

    Args:
        training: whether it starts in train mode.
        name: shown by ``repr`` and ``summary``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> x = jnp.ones(3)
        >>> pax.Identity()(x) is x
        True
    """

    def __init__(self, *, training: bool = True, name: str | None = None):
        super().__init__(training=training, name=name)

    def __call__(self, x: Array) -> Any:
        """Returns ``x`` itself."""
        return x
