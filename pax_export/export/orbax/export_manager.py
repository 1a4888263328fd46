"""Writes a `JaxModule` with its processors as a SavedModel."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.files.atomic import check_directory, check_plain, replace_directory
from pax_export._foundations.types import PyTree
from pax_export.export.artifact.own_exports import saved_model_files
from pax_export.export.artifact.report import DEFAULT
from pax_export.export.formats.saved_model.processing import (
    generated_files_removed,
    rename_tables,
    trackables,
)
from pax_export.export.orbax import dtensor_utils
from pax_export.export.orbax.dtensor_utils import tf
from pax_export.export.orbax.jax_module import JaxModule
from pax_export.export.orbax.serving_config import (
    ServingConfig,
    graph_function,
    make_e2e_inference_fn,
)
from pax_export.export.tracing.names import dotted_name, signature_names

__all__ = ["ExportManager"]


class ExportManager:
    """Exports a `JaxModule` with a signature for each serving config.

    Args:
        module: the module.
        serving_configs: the signatures.

    Raises:
        InvalidArgumentError: a config does not fit the module, or two have one key.

    Example:
        >>> import tempfile, jax.numpy as jnp, tensorflow as tf
        >>> module = JaxModule(
        ...     {"w": jnp.ones((3, 2))}, lambda params, x: {"y": x @ params["w"]},
        ...     input_polymorphic_shape="b, ...",
        ... )
        >>> spec = tf.TensorSpec([None, 3], tf.float32, name="x")
        >>> manager = ExportManager(module, [ServingConfig("serving_default", [spec])])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager.save(folder + "/1")
        ...     loaded = manager.load(folder + "/1")
        >>> loaded.signatures["serving_default"](x=tf.ones((4, 3)))["y"].shape
        TensorShape([4, 2])
    """

    def __init__(self, module: JaxModule, serving_configs: Sequence[ServingConfig]):
        self._computation, self._serving_configs = module, list(serving_configs)
        self._module: Any = tf.Module()
        self._module.computation_module = module
        self._build_signatures()

    def _build_signatures(self) -> None:
        """Makes the functions of all signatures over the methods of the module."""
        functions: dict[str, Any] = {}
        configs: dict[str, ServingConfig] = {}
        for config in self._serving_configs:
            try:
                step = config.get_infer_step(self._computation.methods)
                function = make_e2e_inference_fn(step, config)
            except Exception as error:  # of a processor, or one of ours; raised again
                error.add_note(f"Failed exporting signature_key={config.signature_key}")
                raise
            for key in config.get_signature_keys():
                if key in functions:
                    raise InvalidArgumentError(
                        f'Duplicated key "{config.signature_key}" in `serving_configs`.',
                        write="a key of its own for each signature",
                    )
                functions[key], configs[key] = function, config
        resources = [each.extra_trackable_resources for each in self._serving_configs]
        # As many as were given, for who counts them.
        self._module.tf_trackable_resources = [each for each in resources if each is not None]
        self._module.processor_resources = [
            found
            for each in self._serving_configs
            for found in trackables(each.tf_preprocessor, each.tf_postprocessor)
        ]
        if functions:
            # Loaded again, the model is called with nested inputs; a signature
            # takes flat ones by name.
            first = next(iter(functions))
            self._module.__call__ = functions[DEFAULT if DEFAULT in functions else first]
        self._serving_signatures, self._config_of = functions, configs
        self._generation = self._computation._generation

    @property
    def tf_module(self) -> Any:
        """The `tf.Module` that is saved."""
        self._renew_signatures()
        return self._module

    @property
    def serving_signatures(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of the signatures, by their keys."""
        self._renew_signatures()
        return self._serving_signatures

    def _renew_signatures(self) -> None:
        if self._generation != self._computation._generation:
            self._build_signatures()

    def save(
        self,
        model_path: str | os.PathLike[str],
        save_options: Any = None,
        signature_overrides: Mapping[str, Callable[..., Any]] | None = None,
        *,
        serving_signatures: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Writes the SavedModel, atomically.

        Args:
            model_path: the directory.  An existing one is replaced if it contains only a SavedModel
                or is empty.
            save_options: a `tf.saved_model.SaveOptions`; it is not modified.
            signature_overrides: signatures that replace or add to those of the configs.
            serving_signatures: signatures that replace all those of the configs.

        Raises:
            ExportPathError: the directory contains other files.
        """
        options = copy.copy(save_options) or tf.saved_model.SaveOptions()
        options.experimental_custom_gradients = self._computation.with_gradient
        if "://" in str(model_path):  # a file system of TensorFlow's own
            functions = self._flat_signatures(signature_overrides, serving_signatures)
            tf.saved_model.save(self._module, str(model_path), functions, options)
            return
        path = Path(model_path)
        check_plain(path)
        check_directory(path, saved_model_files)
        functions = self._flat_signatures(signature_overrides, serving_signatures)
        mesh = dtensor_utils.get_current_dtensor_mesh()
        if mesh is not None and jax.process_count() > 1:
            # Every process writes its shards to one place.
            tf.saved_model.save(self._module, str(path), functions, options)
        else:
            with replace_directory(path, saved_model_files) as directory, generated_files_removed():
                tf.saved_model.save(self._module, str(directory), functions, options)
                rename_tables(directory)
        if mesh is not None:
            tf.experimental.dtensor.barrier(mesh, "export done")

    def _flat_signatures(
        self,
        overrides: Mapping[str, Callable[..., Any]] | None,
        instead: Mapping[str, Callable[..., Any]] | None,
    ) -> dict[str, Any]:
        """The functions of all signatures; one under several keys is one."""
        own = self.serving_signatures
        configs = {id(function): self._config_of[key] for key, function in own.items()}
        flat: dict[int, Any] = {}
        chosen = dict(overrides or {})
        for key, function in (own if instead is None else instead).items():
            if id(function) not in flat:
                config = configs.get(id(function))
                flat[id(function)] = _with_flat_outputs(function, config) if config else function
            chosen.setdefault(key, flat[id(function)])
        return chosen

    def load(self, model_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a SavedModel, by `tf.saved_model.load` with these arguments."""
        return tf.saved_model.load(str(model_path), **kwargs)


def _with_flat_outputs(function: Any, config: ServingConfig) -> Any:
    """The function of a config with flat outputs by name: ``a.0``, or ``output_0.a`` of a tuple."""
    if _is_flat(function.get_concrete_function().structured_outputs):
        return function

    def flat(*inputs: PyTree) -> dict[str, Any]:
        paths, _ = jax.tree_util.tree_flatten_with_path(function(*inputs))
        names = signature_names(
            f"output_{dotted_name('', path)}" if hasattr(path[0], "idx") else dotted_name("", path)
            for path, _ in paths
        )
        return dict(zip(names, (value for _, value in paths)))

    return graph_function(flat, config.get_input_signature())


def _is_flat(output: PyTree) -> bool:
    parts = output.values() if isinstance(output, Mapping) else output
    return not isinstance(output, (Mapping, list, tuple)) or jax.tree_util.all_leaves(parts)
