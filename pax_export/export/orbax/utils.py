"""Functions of `orbax.export.utils`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export

from pax_export._errors import ExportPathError, InvalidArgumentError
from pax_export._files.directory import replace_path
from pax_export.export.orbax._params import get_key_name, get_param_names
from pax_export.export.orbax._signatures import (
    CallableSignatures,
    TensorSpecWithDefault,
    make_auto_batching_function,
    remove_signature_defaults,
    with_default_args,
)
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.serving_config import ServingConfig
from pax_export.export.orbax.typing import PyTree
from pax_export.export.pipeline.arguments import PLATFORMS

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
    "to_bfloat16",
    "with_bfloat16",
    "with_default_args",
]

_SUFFIX = ".jax_exported"


def get_variable_tree(var_treedef: object, var_leaves: Sequence[Any]) -> PyTree:
    """The pytree of these leaves.

    Example:
        >>> get_variable_tree(jax.tree_util.tree_structure({"w": 0}), ["variable"])
        {'w': 'variable'}
    """
    return jax.tree_util.tree_unflatten(var_treedef, var_leaves)


def make_e2e_inference_fn(model_fn: Callable[..., Any], serving_config: ServingConfig) -> Any:
    """A `tf.function` of a whole signature: preprocessor, method and postprocessor.

    Args:
        model_fn: the method, a TensorFlow function.
        serving_config: the signature.

    Raises:
        InvalidArgumentError: the input signature is missing.

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
    """The platforms under ``native_serialization_platforms``, or None.

    Raises:
        InvalidArgumentError: a platform is unknown.

    Example:
        >>> get_lowering_platforms({"native_serialization_platforms": "cpu"})
        ['cpu']
    """
    platforms = kwargs.get("native_serialization_platforms")
    if platforms is None:
        return None
    platforms = [platforms] if isinstance(platforms, str) else platforms
    if not all(isinstance(name, str) and name in PLATFORMS for name in platforms):
        raise InvalidArgumentError(
            "native_serialization_platforms must be a sequence and should be a Platform enum type.",
            got=repr(platforms),
            write=f"some of {', '.join(PLATFORMS)}",
        )
    return platforms


def with_bfloat16(
    function: Callable[..., Any], *, inputs: bool = True, outputs: bool = True
) -> Callable[..., Any]:
    """Wraps a function so that it computes in bfloat16 for float32 arguments.

    Args:
        function: a jax or TensorFlow function of nested arguments: an `apply_fn`, whose params are
            converted, too, or a processor.
        inputs: convert float32 arguments to bfloat16.
        outputs: convert bfloat16 outputs to float32, so that a signature keeps its dtypes.

    Example:
        >>> import jax.numpy as jnp
        >>> def add(params, x):
        ...     return {"y": params["w"] + x, "inside": x.dtype == jnp.bfloat16}
        >>> result = with_bfloat16(add)({"w": jnp.ones(2)}, jnp.ones(2))
        >>> result["y"].dtype, result["inside"]
        (dtype('float32'), True)
    """

    @functools.wraps(function)
    def converted(*args: object, **kwargs: object) -> Any:
        if inputs:
            args, kwargs = _cast_leaves((args, kwargs), "float32", "bfloat16")
        output = function(*args, **kwargs)
        return _cast_leaves(output, "bfloat16", "float32") if outputs else output

    return converted


def to_bfloat16(x: PyTree) -> PyTree:
    """Converts the floating-point numbers of a pytree to bfloat16.

    Args:
        x: arrays, `jax.ShapeDtypeStruct` and Python floats, which become jax arrays; other
            leaves stay.

    Example:
        >>> tree = to_bfloat16({"w": jax.numpy.ones(2), "scale": 0.5, "steps": 3})
        >>> tree["w"].dtype, tree["scale"], tree["steps"]
        (dtype(bfloat16), Array(0.5, dtype=bfloat16), 3)
    """
    bfloat16 = jax.numpy.bfloat16

    def convert(leaf: Any) -> Any:
        dtype: Any = getattr(leaf, "dtype", None)
        if dtype is None:
            return bfloat16(leaf) if isinstance(leaf, float) else leaf
        if tf.is_tensor(leaf):
            return tf.cast(leaf, "bfloat16") if dtype.is_floating else leaf
        if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=bfloat16)
        return leaf.astype(bfloat16)

    return jax.tree_util.tree_map(convert, x)


def _cast_leaves(tree: Any, old: str, new: str) -> Any:
    def cast(leaf: object) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or getattr(dtype, "name", None) != old:
            return leaf
        return tf.cast(leaf, new) if tf.is_tensor(leaf) else jax.numpy.asarray(leaf, new)

    return jax.tree_util.tree_map(cast, tree)


def save_jax_exported_map(
    dir_path: str | os.PathLike[str],
    jax_exported_map: Mapping[str, jax_export.Exported],
    *,
    vjp_order: int = 0,
) -> None:
    """Writes exported functions into a new directory, atomically.

    Args:
        dir_path: the directory; it must not exist.
        jax_exported_map: the functions by key.
        vjp_order: how often they can be differentiated after loading.

    Raises:
        ExportPathError: the directory exists already.

    Example:
        >>> save_jax_exported_map(folder, module.obm_module_to_jax_exported_map(x))
        ... # doctest: +SKIP
    """
    path = Path(dir_path)
    if path.exists():
        raise ExportPathError(f"Directory {dir_path} already exists.", write="another path")
    with replace_path(path, None) as directory:
        for key, exported in jax_exported_map.items():
            (directory / f"{key}{_SUFFIX}").write_bytes(exported.serialize(vjp_order=vjp_order))


def load_jax_exported_map(dir_path: str | os.PathLike[str]) -> dict[str, jax_export.Exported]:
    """Reads the files of `save_jax_exported_map`.

    Raises:
        ExportPathError: the directory is missing, or a file in it is damaged.

    Example:
        >>> load_jax_exported_map(folder)  # doctest: +SKIP
    """
    path = Path(dir_path)
    if not path.is_dir():
        raise ExportPathError(f"Directory {dir_path} does not exist.")
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if not files:
        raise ExportPathError(f"No {_SUFFIX} files found in {dir_path}.")
    found = {}
    for file in files:
        try:
            exported = jax_export.deserialize(bytearray(file.read_bytes()))
        except Exception as error:  # jax raises a bare StopIteration for damaged bytes
            raise ExportPathError(
                "This file cannot be read as an exported function.",
                where=file.name,
                got=f"{type(error).__name__}: {error}",
            ) from error
        found[file.name.removesuffix(_SUFFIX)] = exported
    return found
