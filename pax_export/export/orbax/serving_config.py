"""ServingConfig: the configuration of one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export.formats.saved_model.processing import as_function, input_signature
from pax_export.export.orbax.typing import PyTree

__all__ = ["ServingConfig"]


@dataclass
class ServingConfig:
    """One signature: a method of a `JaxModule` between two TensorFlow functions.

    Args:
        signature_key: the key of the signature, or several.
        input_signature: the arguments of `tf_preprocessor`, or of the method
            without one: a sequence of `tf.TensorSpec`, `utils.TensorSpecWithDefault`
            or nests of them. By default that of `tf_preprocessor`.
        tf_preprocessor: a TensorFlow function; its output is the method's input.
        tf_postprocessor: a TensorFlow function of the method's output.
        extra_trackable_resources: resources of both that are not their attributes, e.g.
            vocabularies; they are saved.
        method_key: the method, if the module has several.
        preprocessors: only for ``ORBAX_MODEL``.
        postprocessors: only for ``ORBAX_MODEL``.
        data_processors: only for ``ORBAX_MODEL``.
        obm_kwargs: only for ``ORBAX_MODEL``.
        obm_export_options: only for ``ORBAX_MODEL``.
        preprocess_output_passthrough_enabled: `tf_preprocessor` returns a pair: the method's
            input, and a second argument for `tf_postprocessor`, such as strings.

    Raises:
        InvalidArgumentError: the key is missing, or processors are given that a
            SavedModel does not support.

    Example:
        >>> import tensorflow as tf
        >>> config = ServingConfig(
        ...     "serving_default", input_signature=[tf.TensorSpec([None, 3], name="x")]
        ... )
        >>> config.get_signature_keys()
        ['serving_default']
    """

    signature_key: str | Sequence[str]
    input_signature: Sequence[PyTree] | None = None
    tf_preprocessor: Callable[..., Any] | None = None
    tf_postprocessor: Callable[..., Any] | None = None
    extra_trackable_resources: Any = None
    method_key: str | None = None
    preprocessors: Sequence[Any] = ()
    postprocessors: Sequence[Any] = ()
    data_processors: Sequence[Any] = ()
    obm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    obm_export_options: Any = None
    preprocess_output_passthrough_enabled: bool = False

    def __post_init__(self):
        if not self.signature_key:
            raise InvalidArgumentError("`signature_key` must be set.")
        keys = self.get_signature_keys()
        if not (isinstance(keys, Sequence) and all(isinstance(key, str) for key in keys)):
            raise InvalidArgumentTypeError(
                "`signature_key` must be a string or a sequence of strings.",
                got=repr(self.signature_key)[:100],
                write='"serving_default"',
            )
        for name in ("preprocessors", "postprocessors", "data_processors"):
            if getattr(self, name):
                raise InvalidArgumentError(
                    f"`{name}` is only supported for ExportModelType.ORBAX_MODEL.",
                    where=f"ServingConfig {self.signature_key!r}",
                    write="`tf_preprocessor` and `tf_postprocessor`",
                )

    def get_signature_keys(self) -> Sequence[str]:
        """The keys of the signature, one or several."""
        if isinstance(self.signature_key, str):
            return [self.signature_key]
        return self.signature_key

    def get_input_signature(self, required: bool = True) -> Any:
        """Returns the input signature, from here or from `tf_preprocessor`.

        Raises:
            InvalidArgumentError: neither has one, and it is required.
            InvalidArgumentTypeError: (a TypeError) it is neither a tuple nor a list.
        """
        found = self.input_signature
        if found is None and self.tf_preprocessor is not None:
            found = input_signature(self.tf_preprocessor)
        if not (found is None or isinstance(found, (tuple, list))):
            raise InvalidArgumentTypeError(
                "`input_signature` must be either a tuple or a list.",
                where=f"ServingConfig {self.signature_key!r}",
                got=type(found).__name__,
                write="input_signature=[...], with the nested input as its only entry",
            )
        if required and found is None:
            raise InvalidArgumentError(
                f"Neither the ServingConfig (key={self.signature_key}) nor its `tf_preprocessor` "
                "sets an `input_signature`.",
                write="please set `input_signature` explicitly: "
                'input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")]',
            )
        return found

    def get_infer_step(
        self, infer_step_fns: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        """The method of this signature.

        Args:
            infer_step_fns: the methods by their keys, or the only one.

        Raises:
            InvalidArgumentError: none is chosen of several, or the chosen one is unknown.
            InvalidArgumentTypeError: (a TypeError) these are not methods.
        """
        if callable(infer_step_fns):
            return infer_step_fns
        if not isinstance(infer_step_fns, Mapping):
            raise InvalidArgumentTypeError(
                "A ServingConfig takes a function, or functions by their keys.",
                where=f"ServingConfig {self.signature_key!r}",
                got=type(infer_step_fns).__name__,
                write="config.bind(jax_module.methods)",
            )
        if self.method_key is None:
            if len(infer_step_fns) != 1:
                raise InvalidArgumentError(
                    f'`method_key` is not specified in ServingConfig "{self.signature_key}" and '
                    "the infer_step_fns has more than one methods: "
                    f"{list(infer_step_fns)}. Please specify `method_key` explicitly."
                )
            return next(iter(infer_step_fns.values()))
        if self.method_key not in infer_step_fns:
            raise InvalidArgumentError(
                f'Method key "{self.method_key}" is not found in the infer_step_fns. '
                f"Available method keys: {list(infer_step_fns)}."
            )
        return infer_step_fns[self.method_key]

    def bind(
        self,
        infer_step_fns: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        require_numpy: bool = True,
    ) -> Mapping[str, Callable[..., Any]]:
        """Returns the method between its processors, for each signature key.

        Args:
            infer_step_fns: the methods by key, or the only one.
            require_numpy: pass numpy arrays to the method, as jax functions need, and return numpy
                arrays; otherwise tensors.
        """
        step = self.get_infer_step(infer_step_fns)
        before = self.tf_preprocessor and as_function(self.tf_preprocessor)
        after = self.tf_postprocessor and as_function(self.tf_postprocessor)
        convert = _to_numpy if require_numpy else lambda output: output

        def inference_fn(*inputs: Any) -> Any:
            if before is None and len(inputs) != 1:
                raise InvalidArgumentError(
                    "JaxModule only takes single arg as the input, but got "
                    f"len(inputs)={len(inputs)} from the preprocessor or input signature.",
                    where=f"ServingConfig {self.signature_key!r}",
                    write="all inputs packed into one pytree, in `input_signature` (if there is "
                    "no `tf_preprocessor`) or by `tf_preprocessor`",
                )
            given, extra = convert(inputs[0] if before is None else before(*inputs)), ()
            if before is not None and self.preprocess_output_passthrough_enabled:
                given, *extra = self._check_pair(given)
            output = step(given)
            return output if after is None else convert(after(output, *extra))

        return dict.fromkeys(self.get_signature_keys(), inference_fn)

    def _check_pair(self, output: Any) -> tuple:
        if not isinstance(output, tuple) or len(output) != 2:
            raise InvalidArgumentError(
                "`preprocess_output_passthrough_enabled` is enabled, requiring the preprocessor "
                f"output to be a tuple of two elements, but got {output} with "
                f"type={type(output)}.",
                where=f"ServingConfig {self.signature_key!r}",
                write="return {...for the jax function...}, {...for tf_postprocessor...}",
            )
        return output


def _to_numpy(output: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: x.numpy() if hasattr(x, "numpy") else x, output)
