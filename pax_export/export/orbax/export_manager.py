"""Writes a `JaxModule` with its processors as a SavedModel."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pax_export._errors import ExportPathError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export._files.directory import check, check_plain, replace_path
from pax_export._files.overwrite_guard import some_names
from pax_export.export.artifact.ours import saved_model
from pax_export.export.artifact.report import DEFAULT
from pax_export.export.formats.generated_files import generated_files_removed
from pax_export.export.formats.saved_model.processing import trackables
from pax_export.export.formats.saved_model.writer import canonicalize
from pax_export.export.orbax import dtensor_utils
from pax_export.export.orbax._signatures import flatten_output, is_flat, with_default_args
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.export_manager_base import ExportManagerBase
from pax_export.export.orbax.jax_module import JaxModule, get_obx_export_tf_preprocess_only
from pax_export.export.orbax.serving_config import ServingConfig
from pax_export.export.orbax.utils import make_e2e_inference_fn

__all__ = ["ExportManager", "make_e2e_inference_fn"]


class ExportManager(ExportManagerBase):
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
        if not isinstance(module, JaxModule):
            raise InvalidArgumentTypeError(
                "An ExportManager takes a JaxModule.", got=type(module).__name__
            )
        several = isinstance(serving_configs, Iterable)
        configs = list(serving_configs) if several else [serving_configs]
        if not several or not all(hasattr(each, "get_signature_keys") for each in configs):
            raise InvalidArgumentTypeError(
                "`serving_configs` must be a sequence of ServingConfigs.",
                got=", ".join(type(each).__name__ for each in configs),
                write="ExportManager(module, [ServingConfig(...)])",
            )
        self._computation = module
        self._serving_configs = configs
        self._module: Any = tf.Module()
        self._module.computation_module = module
        self._build_signatures()

    def _build_signatures(self) -> None:
        """Makes the functions of all signatures over the methods of the module."""
        functions: dict[str, Any] = {}
        configs: dict[str, ServingConfig] = {}
        called, given, found = None, [], []
        for config in self._serving_configs:
            try:
                function = self._inference_fn(config)
            except Exception as error:
                error.add_note(f"Failed exporting signature_key={config.signature_key}")
                raise
            for key in config.get_signature_keys():
                if key in functions:
                    raise InvalidArgumentError(
                        f'Duplicated key "{config.signature_key}" in `serving_configs`.',
                        write="a key of its own for each signature",
                    )
                functions[key], configs[key] = function, config
            if called is None or DEFAULT in config.get_signature_keys():
                called = function
            if config.extra_trackable_resources is not None:
                given.append(config.extra_trackable_resources)
            found += trackables(config.tf_preprocessor, config.tf_postprocessor)
        self._module.tf_trackable_resources = given  # as many as were given, for who counts them
        self._module.processor_resources = found
        if called is not None:
            # Loaded again, the model is called with nested inputs; a signature
            # takes flat ones by name.
            self._module.__call__ = called
        self._serving_signatures, self._config_of = functions, configs
        self._generation = self._computation._generation

    def _inference_fn(self, config: ServingConfig) -> Any:
        if not get_obx_export_tf_preprocess_only():
            return make_e2e_inference_fn(config.get_infer_step(self._computation.methods), config)
        preprocessor = config.tf_preprocessor
        if preprocessor is None:
            raise InvalidArgumentError(
                "serving_config.tf_preprocessor must be provided when in "
                "`obx_export_tf_preprocess_only` mode.",
                where=f"ServingConfig {config.signature_key!r}",
            )

        def flat(*inputs: Any) -> list[Any]:
            return tf.nest.flatten(preprocessor(*inputs))

        return with_default_args(flat, config.get_input_signature())

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
        **kwargs: Any,
    ) -> None:
        """Writes the SavedModel, atomically.

        Args:
            model_path: the directory.  An existing one is replaced if it contains only a SavedModel
                or is empty.
            save_options: a `tf.saved_model.SaveOptions`; it is not modified.
            signature_overrides: signatures that replace or add to those of the configs.
            serving_signatures: signatures that replace all those of the configs.
            **kwargs: none; accepted to raise a clear error.

        Raises:
            ExportPathError: the directory contains other files.
            InvalidArgumentError: `save_options` has another type.
        """
        if kwargs:
            raise InvalidArgumentTypeError(
                f"save() has no argument {', '.join(sorted(kwargs))}.",
                write="save(model_path, save_options, signature_overrides, serving_signatures=...)",
            )
        options = self._save_options(save_options)
        if "://" in str(model_path):  # a file system of TensorFlow's own
            functions = self._flat_signatures(signature_overrides, serving_signatures)
            tf.saved_model.save(self._module, str(model_path), functions, options)
            return
        path = Path(model_path)
        check_plain(path)
        if path.is_dir() and any(path.iterdir()) and saved_model(path) is None:
            raise ExportPathError(
                "The path exists and is not a SavedModel, so it is not replaced.",
                where=str(path),
                got=f"a directory with {some_names(path)}",
                write="a new directory",
            )
        check(path, saved_model)
        functions = self._flat_signatures(signature_overrides, serving_signatures)
        mesh = dtensor_utils.get_current_dtensor_mesh()
        if mesh is not None and jax.process_count() > 1:
            # Every process writes its shards to one place.
            tf.saved_model.save(self._module, str(path), functions, options)
        else:
            with replace_path(path, saved_model) as directory, generated_files_removed():
                tf.saved_model.save(self._module, str(directory), functions, options)
                canonicalize(directory)
        if mesh is not None:
            tf.experimental.dtensor.barrier(mesh, "export done")

    def _flat_signatures(
        self,
        overrides: Mapping[str, Callable[..., Any]] | None,
        instead: Mapping[str, Callable[..., Any]] | None,
    ) -> dict[str, Any]:
        """The functions of all signatures; one under several keys is one."""
        flat: dict[int, Any] = {}
        own = self.serving_signatures
        configs = {id(function): self._config_of[key] for key, function in own.items()}
        chosen = dict(overrides or {})
        for key, function in (own if instead is None else instead).items():
            if key not in chosen:
                if id(function) not in flat:
                    config = configs.get(id(function))
                    flat[id(function)] = (
                        function if config is None else _with_flat_outputs(function, config)
                    )
                chosen[key] = flat[id(function)]
        return chosen

    def _save_options(self, given: Any) -> Any:
        options = tf.saved_model.SaveOptions() if given is None else copy.copy(given)
        if not isinstance(options, tf.saved_model.SaveOptions):
            raise InvalidArgumentError(
                f"save_options must be of type tf.saved_model.SaveOptions. Got type: {type(given)}"
            )
        options.experimental_custom_gradients = self._computation.with_gradient
        return options

    def load(self, model_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a SavedModel, by `tf.saved_model.load` with these arguments."""
        return tf.saved_model.load(str(model_path), **kwargs)


def _with_flat_outputs(function: Any, config: ServingConfig) -> Any:
    """Returns the function of a config with flat outputs, as signatures require."""
    if is_flat(function.get_concrete_function().structured_outputs):
        return function

    def flat(*inputs: Any) -> dict[str, Any]:
        return flatten_output(function(*inputs))

    return with_default_args(flat, config.get_input_signature())
