"""Functions that runtimes have an operator for, kept whole as calls with a name.

`jax.lax.composite` writes them: a program with such calls still runs in jax, and a format that
lacks the operator writes what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_PREFIX = "pax_export."


def clip(x: Any, *, low: float | None = None, high: float | None = None) -> Any:
    if low is not None:
        x = lax.max(x, jnp.asarray(low, x.dtype))
    if high is not None:
        x = lax.min(x, jnp.asarray(high, x.dtype))
    return x


def silu(x: Any) -> Any:
    return x * lax.logistic(x)


def hard_sigmoid(x: Any) -> Any:
    return jax.nn.relu6(x + 3.0) / 6.0


def hard_swish(x: Any) -> Any:
    return x * hard_sigmoid(x)


def gelu(x: Any, *, approximate: bool) -> Any:
    return jax.nn.gelu(x, approximate=approximate)


def softmax(x: Any, *, axis: int) -> Any:
    return jax.nn.softmax(x, axis)


def log_softmax(x: Any, *, axis: int) -> Any:
    return jax.nn.log_softmax(x, axis)


def mean(x: Any, *, axes: tuple[int, ...], keepdims: bool) -> Any:
    return x.mean(axes, keepdims=keepdims)


def layer_norm(x: Any, *vectors: Any, epsilon: float, scaled: bool, shifted: bool) -> Any:
    """Over the last axis; `vectors` are the scale and the shift, those that there are."""
    apart = x - x.mean(-1, keepdims=True)
    variance = (apart * apart).mean(-1, keepdims=True)
    made = apart * lax.rsqrt(variance + epsilon)
    if scaled:
        made = made * vectors[0]
    return made + vectors[-1] if shifted else made


#: By name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (clip, silu, hard_sigmoid, hard_swish, gelu, softmax, log_softmax, mean, layer_norm)
}
#: Those that treat each element alike, wherever it lies.
ELEMENTWISE = frozenset({"clip", "silu", "hard_sigmoid", "hard_swish", "gelu"})


def call(name: str, *operands: Any, **attributes: Any) -> Any:
    """Calls one of the functions, so that the program says its name."""
    return lax.composite(FUNCTIONS[name], _PREFIX + name)(*operands, **attributes)


def name_of(parameters: Mapping[str, Any]) -> str:
    """The name of the function that a composite with these parameters is; empty for another's."""
    name = parameters["name"]
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""


def attributes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the function of such a composite was told, by name."""
    held = parameters["attributes"]
    return {name: jax.tree.unflatten(tree, leaves) for name, leaves, tree in held}
