"""Functions that compute in bfloat16 between inputs and outputs of float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pax_export.export.orbax._tensorflow import tf


def with_bfloat16(
    function: Callable[..., Any], *, inputs: bool = True, outputs: bool = True
) -> Callable[..., Any]:
    """A function whose arguments of float32 are bfloat16 inside.

    Args:
        function: of jax or of TensorFlow, of any nested arguments: an
            `apply_fn`, whose params then take part in bfloat16, or a processor.
        inputs: turn float32 arguments into bfloat16.
        outputs: turn bfloat16 outputs into float32, so that a signature keeps
            its dtypes.

    Returns:
        A function with the same arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> def add(params, x):
        ...     return {"y": params["w"] + x, "inside": x.dtype == jnp.bfloat16}
        >>> result = with_bfloat16(add)({"w": jnp.ones(2)}, jnp.ones(2))
        >>> result["y"].dtype, result["inside"]
        (dtype('float32'), True)
    """

    @functools.wraps(function)
    def converted(*args: Any, **kwargs: Any) -> Any:
        if inputs:
            args, kwargs = _cast((args, kwargs), "float32", "bfloat16")
        output = function(*args, **kwargs)
        return _cast(output, "bfloat16", "float32") if outputs else output

    return converted


def _cast(tree: Any, old: str, new: str) -> Any:
    def cast(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or getattr(dtype, "name", None) != old:
            return leaf
        return tf.cast(leaf, new) if tf.is_tensor(leaf) else jax.numpy.asarray(leaf, new)

    return jax.tree_util.tree_map(cast, tree)
