"""ServingConfig: the configuration of one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import PyTree
from pax_export.export.formats.saved_model.processing import as_function, input_signature
from pax_export.export.orbax.dtensor_utils import tf

__all__ = ["ServingConfig"]

T = TypeVar("T")


@dataclass
class ServingConfig:
    """One signature: a method of a `JaxModule` between two TensorFlow functions.

    Args:
        signature_key: the key of the signature, or several.
        input_signature: the arguments of `tf_preprocessor`, or of the method
            without one: a sequence of `tf.TensorSpec` or nests of
            them. By default that of `tf_preprocessor`.
        tf_preprocessor: a TensorFlow function; its output is the method's input.
        tf_postprocessor: a TensorFlow function of the method's output.
        extra_trackable_resources: resources of both that are not their attributes, e.g.
            vocabularies; they are saved.
        method_key: the method, if the module has several.
        preprocess_output_passthrough_enabled: `tf_preprocessor` returns a pair: the method's
            input, and a second argument for `tf_postprocessor`, such as strings.

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
    preprocess_output_passthrough_enabled: bool = False

    def __post_init__(self):
        if not self.signature_key:
            raise InvalidArgumentError("`signature_key` must be set.")

    def get_signature_keys(self) -> Sequence[str]:
        """The keys of the signature, one or several."""
        if isinstance(self.signature_key, str):
            return [self.signature_key]
        return self.signature_key

    def get_input_signature(self) -> Any:
        """Returns the input signature, from here or from `tf_preprocessor`; an error without."""
        found = self.input_signature
        if found is None and self.tf_preprocessor is not None:
            found = input_signature(self.tf_preprocessor)
        if found is None:
            raise InvalidArgumentError(
                "Neither the ServingConfig nor its `tf_preprocessor` sets an `input_signature`.",
                where=f"ServingConfig {self.signature_key!r}",
                write='input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")]',
            )
        return found

    def get_infer_step(
        self, infer_step_fns: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        """The method of this signature, of the methods by their keys, or of the only one."""
        if callable(infer_step_fns):
            return infer_step_fns
        only = next(iter(infer_step_fns)) if len(infer_step_fns) == 1 else ""
        key = only if self.method_key is None else self.method_key
        if key not in infer_step_fns:
            raise InvalidArgumentError(
                "`method_key` must be the key of a method.",
                where=f"ServingConfig {self.signature_key!r}",
                got=repr(self.method_key),
                write=f"one of {list(infer_step_fns)}",
            )
        return infer_step_fns[key]

    def bind(
        self,
        infer_step_fns: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        require_numpy: bool = True,
    ) -> Mapping[str, Callable[..., Any]]:
        """Returns the method between its processors, for each signature key.

        With `require_numpy` it is given and returns numpy arrays, as jax functions need.
        """
        step = self.get_infer_step(infer_step_fns)
        before = self.tf_preprocessor and as_function(self.tf_preprocessor)
        after = self.tf_postprocessor and as_function(self.tf_postprocessor)
        convert = _to_numpy if require_numpy else lambda output: output

        def inference_fn(*inputs: PyTree) -> Any:
            if before is None and len(inputs) != 1:
                raise InvalidArgumentError(
                    "A method of a JaxModule takes one input, which may be a pytree.",
                    where=f"ServingConfig {self.signature_key!r}",
                    got=f"{len(inputs)} inputs",
                    write="one nested `input_signature`, or a `tf_preprocessor` that returns one",
                )
            input_of_method, extra = convert(inputs[0] if before is None else before(*inputs)), ()
            if before is not None and self.preprocess_output_passthrough_enabled:
                if not isinstance(input_of_method, tuple) or len(input_of_method) != 2:
                    raise InvalidArgumentError(
                        "With a passthrough, the preprocessor output is a tuple of two elements.",
                        where=f"ServingConfig {self.signature_key!r}",
                        got=str(input_of_method),
                        write="return {...for the jax function...}, {...for tf_postprocessor...}",
                    )
                input_of_method, *extra = input_of_method
            output = step(input_of_method)
            return output if after is None else convert(after(output, *extra))

        return dict.fromkeys(self.get_signature_keys(), inference_fn)


def _to_numpy(output: T) -> T:
    return jax.tree_util.tree_map(lambda x: x.numpy() if hasattr(x, "numpy") else x, output)


def make_e2e_inference_fn(model_fn: Callable[..., Any], serving_config: ServingConfig) -> Any:
    """A `tf.function` of a whole signature: preprocessor, method and postprocessor."""
    function, *_ = serving_config.bind(model_fn, require_numpy=False).values()
    return graph_function(function, serving_config.get_input_signature())


def graph_function(function: Callable[..., Any], input_signature: Sequence[PyTree]) -> Any:
    """The function as TensorFlow saves it, without changes to its Python code."""
    return tf.function(function, input_signature=input_signature, autograph=False)
