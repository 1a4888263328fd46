"""The functions that orbax's programs find under `orbax.export.utils`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export.export.orbax import constants
from pax_export.export.orbax._bfloat16 import with_bfloat16
from pax_export.export.orbax._exported_maps import load_jax_exported_map, save_jax_exported_map
from pax_export.export.orbax._names import get_key_name, get_param_names
from pax_export.export.orbax._session import CallableSignatures
from pax_export.export.orbax._tensor_specs import (
    TensorSpecWithDefault,
    make_auto_batching_function,
    remove_signature_defaults,
    with_default_args,
)
from pax_export.export.orbax.serving_config import ServingConfig
from pax_export.export.orbax.typing import PyTree

__all__ = [
    "CallableSignatures",
    "TensorSpecWithDefault",
    "get_key_name",
    "get_lowering_platforms",
    "get_param_names",
    "get_variable_tree",
    "load_jax_exported_map",
    "make_auto_batching_function",
    "make_e2e_inference_fn",
    "remove_signature_defaults",
    "save_jax_exported_map",
    "with_bfloat16",
    "with_default_args",
]

ConfigProto = Any
SignatureDef = Any
NestedTfTensorSpec = Any

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def get_variable_tree(var_treedef: Any, var_leaves: Sequence[Any]) -> PyTree:
    """The pytree of these leaves.

    Example:
        >>> get_variable_tree(jax.tree_util.tree_structure({"w": 0}), ["variable"])
        {'w': 'variable'}
    """
    return jax.tree_util.tree_unflatten(var_treedef, var_leaves)


def make_e2e_inference_fn(model_fn: Callable[..., Any], serving_config: ServingConfig) -> Any:
    """A `tf.function` of a whole signature: preprocessor, method and postprocessor.

    Args:
        model_fn: the method, a function of TensorFlow.
        serving_config: the signature.

    Raises:
        InvalidArgumentError: the signature does not say what it takes.

    Example:
        >>> import tensorflow as tf
        >>> config = ServingConfig(
        ...     "serving_default", [tf.TensorSpec([], name="x")], tf_preprocessor=lambda x: x + 1
        ... )
        >>> float(make_e2e_inference_fn(lambda x: 2 * x, config)(3.0))
        8.0
    """
    functions = serving_config.bind(model_fn, require_numpy=False)
    key = serving_config.get_signature_keys()[0]
    return with_default_args(functions[key], serving_config.get_input_signature())


def get_lowering_platforms(kwargs: Mapping[str, Any]) -> Sequence[str] | None:
    """The platforms under ``native_serialization_platforms``, None if there are none.

    Raises:
        InvalidArgumentError: they are none that jax lowers for.

    Example:
        >>> get_lowering_platforms({"native_serialization_platforms": "cpu"})
        ['cpu']
    """
    platforms = kwargs.get(constants.NATIVE_SERIALIZATION_PLATFORMS)
    if platforms is None:
        return None
    if isinstance(platforms, str):
        platforms = [platforms]
    if not all(isinstance(name, str) and name in _PLATFORMS for name in platforms):
        raise InvalidArgumentError(
            "native_serialization_platforms must be a sequence and should be a Platform enum type.",
            got=repr(platforms),
            write=f"some of {', '.join(_PLATFORMS)}",
        )
    return platforms
