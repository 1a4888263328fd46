"""Inputs, outputs and calls of signatures: default values, batching, flat names of outputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.typing import PyTree
from pax_export.export.tracing.spec import dotted_name, signature_names


@dataclass
class TensorSpecWithDefault:
    """A `tf.TensorSpec` with a default value for an omitted input.

    Either all tensors of a Python argument have a default value, or none.

    Args:
        tensor_spec: the shape, dtype and name.
        default_val: the value; it becomes a tensor of this dtype.
        is_primary: whether other inputs are repeated to its batch, see
            `make_auto_batching_function`.

    Raises:
        InvalidArgumentError: the value is missing or has another shape.

    Example:
        >>> import tensorflow as tf
        >>> spec = TensorSpecWithDefault(tf.TensorSpec([None], tf.int32, "k"), [3])
        >>> spec.default_val.dtype
        tf.int32
    """

    tensor_spec: Any
    default_val: Any
    is_primary: bool = False

    def __post_init__(self):
        if self.default_val is None:
            raise InvalidArgumentError("Use TensorSpec if no defaults are needed.")
        if not isinstance(self.default_val, tf.Tensor):
            # Defaults in signatures of TensorFlow are tensors.
            self.default_val = tf.convert_to_tensor(self.default_val, self.tensor_spec.dtype)
        actual = tf.TensorSpec.from_tensor(self.default_val, name=self.tensor_spec.name)
        if not actual.is_subtype_of(self.tensor_spec):
            raise InvalidArgumentError(
                f"TensorSpec {self.tensor_spec} is not compatible with the default value "
                f"{self.default_val}"
            )


def remove_signature_defaults(input_signature: PyTree) -> PyTree:
    """The input signature with plain `tf.TensorSpec` entries.

    Example:
        >>> import tensorflow as tf
        >>> remove_signature_defaults([TensorSpecWithDefault(tf.TensorSpec([1]), [2.0])])
        [TensorSpec(shape=(1,), dtype=tf.float32, name=None)]
    """
    return jax.tree_util.tree_map(
        lambda x: x.tensor_spec if isinstance(x, TensorSpecWithDefault) else x, input_signature
    )


def _default_values(input_signature: Sequence[PyTree]) -> list[Any]:
    """The default value of each argument, or `inspect.Parameter.empty`."""
    values = []
    for argument in input_signature:
        leaves = jax.tree_util.tree_leaves(argument)
        with_default = [isinstance(leaf, TensorSpecWithDefault) for leaf in leaves]
        if not any(with_default):
            values.append(inspect.Parameter.empty)
        elif not all(with_default):
            raise InvalidArgumentError(
                "TensorSpecWithDefault must be defined for each tensor in the structure for the "
                "Python arg.",
                got=str(argument),
            )
        else:
            values.append(jax.tree_util.tree_map(lambda x: x.default_val, argument))
    return values


def with_default_args(tf_fn: Callable[..., Any], input_signature: Sequence[PyTree]) -> Any:
    """Returns a `tf.function` with the default values of an input signature.

    Args:
        tf_fn: the function, with one argument per part of the signature.
        input_signature: a sequence of `tf.TensorSpec`, `TensorSpecWithDefault`
            or nests of them.

    Raises:
        InvalidArgumentError: only some tensors of an argument have a default value.

    Example:
        >>> import tensorflow as tf
        >>> spec = TensorSpecWithDefault(tf.TensorSpec([], tf.float32, "x"), 2.0)
        >>> float(with_default_args(lambda x: 2 * x, [spec])())
        4.0
    """
    specs = remove_signature_defaults(input_signature)
    plain = tf.function(tf_fn, input_signature=specs, jit_compile=False, autograph=False)
    defaults = _default_values(input_signature)
    if all(value is inspect.Parameter.empty for value in defaults):
        return plain
    parameters = plain.function_spec.function_type.parameters.values()
    signature = inspect.Signature(
        [inspect.Parameter(p.name, p.kind, default=x) for p, x in zip(parameters, defaults)]
    )

    def with_defaults(*args: object, **kwargs: object) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tf_fn(*bound.args, **bound.kwargs)

    with_defaults.__signature__ = signature  # type: ignore[attr-defined]
    return tf.function(with_defaults, input_signature=specs, jit_compile=False, autograph=False)


def make_auto_batching_function(input_signature: Sequence[PyTree]) -> Callable[..., Any]:
    """A `tf.function` that repeats inputs of batch size 1 to the batch of the others.

    Args:
        input_signature: specs with a leading batch dimension. Plain `tf.TensorSpec` and those
            with `is_primary` are primary: they have one batch size, the others have it or 1.

    Raises:
        InvalidArgumentError: no tensor is primary.

    Example:
        >>> import tensorflow as tf
        >>> fn = make_auto_batching_function([
        ...     tf.TensorSpec([None], tf.int32, name="x"),
        ...     TensorSpecWithDefault(tf.TensorSpec([None], tf.int32, name="k"), [1]),
        ... ])
        >>> [part.shape for part in fn(tf.constant([5, 6]))]
        [TensorShape([2]), TensorShape([2])]
    """
    flat, tree = jax.tree_util.tree_flatten(tuple(input_signature))
    primary = [isinstance(x, tf.TensorSpec) or x.is_primary for x in flat]
    names = [spec.name for spec in remove_signature_defaults(flat)]
    if not any(primary):
        raise InvalidArgumentError(
            "No primary input tensors. A primary tensor is a tensor whose tensor spec is either "
            "a `tf.TensorSpec` or a `TensorSpecWithDefault` whose `is_primary` attribute is True.",
            got=f"input_signature={input_signature}",
        )

    def auto_batching_fn(*args: object) -> Any:
        tensors, given = jax.tree_util.tree_flatten(args)
        if given != tree:
            raise InvalidArgumentError(
                "The arguments have another structure than the input signature.",
                got=str(given),
                write=str(tree),
            )
        batch = tf.shape(tensors[primary.index(True)])[0]
        batched = [_same_batch(batch, *each) for each in zip(tensors, primary, names)]
        return jax.tree_util.tree_unflatten(tree, batched)

    return with_default_args(auto_batching_fn, input_signature)


def _same_batch(batch: Any, tensor: object, is_primary: bool, name: str | None) -> Any:
    size = tf.shape(tensor)[0]
    if is_primary:
        message = "All primary input tensors must have the same batch size."
        with tf.control_dependencies([tf.debugging.assert_equal(size, batch, message)]):
            return tf.identity(tensor)
    message = (
        f"The batch size of a non-primary input tensor (name={name}) must be 1 or the same as "
        "that of the primary tensors."
    )
    fits = tf.debugging.Assert(tf.logical_or(tf.equal(size, 1), tf.equal(size, batch)), [message])
    with tf.control_dependencies([fits]):
        times = tf.where(tf.equal(size, 1), batch, 1)
        return tf.repeat(tensor, times, axis=0)


def is_flat(output: Any) -> bool:
    """Returns whether TensorFlow accepts the output of a signature without changes."""
    parts = output.values() if isinstance(output, Mapping) else output
    return not isinstance(output, (Mapping, list, tuple)) or jax.tree_util.all_leaves(parts)


def flatten_output(output: Any) -> Any:
    """The arrays of a nested output by their names: ``a.0``, or ``output_0.a`` of a tuple."""
    if is_flat(output):
        return output
    paths, _ = jax.tree_util.tree_flatten_with_path(output)
    names = signature_names(
        f"output_{dotted_name('', path)}" if hasattr(path[0], "idx") else dotted_name("", path)
        for path, _ in paths
    )
    return dict(zip(names, (value for _, value in paths)))


class CallableSignatures:
    """The signatures of a SavedModel in a session of TensorFlow 1, with default values.

    Args:
        sess: a session with the model.
        signature_defs: its signatures by key.

    Example:
        >>> CallableSignatures.from_saved_model("served/1", ["serve"])  # doctest: +SKIP
    """

    def __init__(self, sess: Any, signature_defs: Mapping[str, Any]):
        self._sess = sess
        self._signatures = {
            key: functools.partial(self._call_signature, definition)
            for key, definition in signature_defs.items()
        }

    def _call_signature(self, definition: Any, **inputs: Any) -> dict[str, Any]:
        tensor = self._sess.graph.get_tensor_by_name
        unknown = sorted(set(inputs) - set(definition.inputs))
        if unknown:
            raise InvalidArgumentError(
                f"The signature has no input {', '.join(unknown)}.",
                got=str(sorted(inputs)),
                write=f"some of {', '.join(sorted(definition.inputs))}",
            )
        given = {
            tensor(definition.inputs[name].name): value.numpy()
            if isinstance(value, tf.Tensor)
            else value
            for name, value in inputs.items()
        }
        wanted = {name: tensor(each.name) for name, each in definition.outputs.items()}
        return self._sess.run(wanted, given)

    @classmethod
    def from_saved_model(
        cls, model_dir: str, tags: Sequence[str], sess_config: object = None
    ) -> CallableSignatures:
        """Loads a SavedModel into a session.

        Args:
            model_dir: the directory.
            tags: the tags of the graph to load, usually ``["serve"]``.
            sess_config: a ``ConfigProto`` for the session.
        """
        with tf.Graph().as_default():
            sess = tf.compat.v1.Session(config=sess_config)
        graph = tf.compat.v1.saved_model.loader.load(sess, list(tags), str(model_dir))
        return cls(sess, graph.signature_def)

    @property
    def signatures(self) -> Mapping[str, Callable[..., dict[str, Any]]]:
        """The functions by the keys of their signatures."""
        return self._signatures
