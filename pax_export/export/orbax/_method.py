"""One jax function over the variables of a model, as TensorFlow calls it.

It is traced and lowered by the same code as everything that this package
exports, once for each kind of input: sizes with a name are one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export._errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    UnsupportedDtypeError,
)
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats import tf_functions
from pax_export.export.lowering import lowered_model
from pax_export.export.lowering.signature import Signature
from pax_export.export.orbax import _shapes
from pax_export.export.orbax._model import Model
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.tracing import dtypes as _dtypes
from pax_export.export.tracing import programs
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.exportable import Method as Traceable
from pax_export.export.tracing.spec import Input, Inputs
from pax_export.export.tracing.structure import dotted, signature_names

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_OPTIONS = {
    "with_gradient",
    "polymorphic_constraints",
    "native_serialization_platforms",
    # Nothing depends on these any more; jax2tf ignores the first two as well.
    "native_serialization",
    "enable_xla",
    "native_serialization_disabled_checks",
}


@dataclass(frozen=True)
class Options:
    """What of `jax2tf_kwargs` has a meaning."""

    constraints: tuple[str, ...]
    platforms: tuple[str, ...]

    @classmethod
    def of(cls, key: str, given: Mapping[str, Any] | None, with_gradient: bool) -> Options:
        """Checks the options of one method.

        Raises:
            InvalidArgumentError: they contradict the other arguments.
            InvalidArgumentTypeError: there is no such option.
        """
        given = dict(given or {})
        if "polymorphic_shapes" in given:
            raise InvalidArgumentError(
                "Do not use `polymorphic_shapes` in `jax2tf_kwargs`.",
                where=key,
                write="`input_polymorphic_shape=...` instead",
            )
        unknown = sorted(set(given) - _OPTIONS)
        if unknown:
            raise InvalidArgumentTypeError(
                f"`jax2tf_kwargs` has options that jax2tf does not know: {', '.join(unknown)}.",
                where=key,
                write=f"some of {', '.join(sorted(_OPTIONS))}",
            )
        _check_gradient(key, given.get("with_gradient"), with_gradient)
        platforms = given.get("native_serialization_platforms") or PLATFORMS
        if isinstance(platforms, str):
            platforms = (platforms,)
        if not set(platforms) <= set(PLATFORMS):
            raise InvalidArgumentError(
                "`native_serialization_platforms` must be a sequence of platforms.",
                where=key,
                got=repr(platforms),
                write=", ".join(PLATFORMS),
            )
        return cls(tuple(given.get("polymorphic_constraints") or ()), tuple(platforms))


def _check_gradient(key: str, asked: bool | None, with_gradient: bool) -> None:
    if asked is None or bool(asked) == with_gradient:
        return
    contains = "does not contain trainable" if asked else "contains trainable"
    raise InvalidArgumentError(
        f"`with_gradient={bool(asked)}` is specified in jax2tf_kwargs but the JaxModule "
        f"{contains} variables.",
        where=key,
        write="trainable=True, or the two of them alike, or no `with_gradient`",
    )


@dataclass(frozen=True)
class _Kind:
    """A kind of input, lowered."""

    signature: Signature
    rebuild: Callable[[list[Any]], Any]
    shapes: tuple[tuple, ...]
    results: tuple[tuple, ...]


class Method:
    """One method of a `JaxModule`; call it within a TensorFlow function."""

    def __init__(
        self,
        key: str,
        apply_fn: Callable[[Any, Any], Any],
        shape: Any,
        options: Options,
        with_gradient: bool,
    ):
        self.key = key
        self._apply_fn = apply_fn
        self._shape = shape
        self._options = options
        self._with_gradient = with_gradient

    def over(self, model: Model, added: Callable[[list[Any]], None]) -> Callable[[Any], Any]:
        """The method over these variables.

        Args:
            model: the params.
            added: is told of variables that are made for closed-over arrays.
        """
        kinds: dict[Any, _Kind] = {}

        def call(x: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten(x)
            names = self._names(x)
            tensors = [_tensor(leaf, name) for leaf, name in zip(leaves, names)]
            known = [_known_shape(tensor, name) for tensor, name in zip(tensors, names)]
            shapes = self._symbolic(x, names, known)
            dtypes = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors]
            identity = (tree, str(shapes), tuple(map(str, dtypes)))
            if identity not in kinds:
                structs = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes)]
                kinds[identity] = self._lowered(model, tree, names, structs)
                with tf.init_scope():
                    added(model.add_variables())
            return _called(kinds[identity], model.variables, tensors, known)

        return call

    def _names(self, x: Any) -> list[str]:
        paths, _ = jax.tree_util.tree_flatten_with_path(x)
        return [dotted("x", path) for path, _ in paths]

    def _symbolic(self, x: Any, names: list[str], known: list[Any]) -> list[tuple]:
        specs = _shapes.broadcast(self._shape, x, "input_polymorphic_shape", _shapes.is_spec)
        return _shapes.symbolic(names, known, specs, self._options.constraints)

    def _lowered(
        self, model: Model, tree: Any, names: list[str], structs: list[jax.ShapeDtypeStruct]
    ) -> _Kind:
        seen: list[Any] = []

        def call(arrays: list[Any], x: Any) -> tuple[Any, list[Any]]:
            output = self._apply_fn(model.rebuild(arrays), x)
            seen.append(jax.tree_util.tree_structure(output))
            return output, arrays

        nested = jax.tree_util.tree_unflatten(tree, structs)
        inputs = Inputs(
            tuple(map(Input, signature_names(names), names, structs)),
            jax.tree_util.tree_structure(((nested,), {})),
            {"x": nested},
            ("x",),
        )
        method = Traceable(self.key, call, self._apply_fn, skip=1)
        arrays = jax.tree_util.tree_structure([0] * len(model.leaves))
        exportable = Exportable(self.key, model.leaves, arrays, (method,), keeps_state=False)
        program = programs.trace_one(exportable, method, inputs)
        signature = lowered_model.sign(
            exportable, program, model.store, self._with_gradient, self._options.platforms
        )
        return _Kind(
            signature,
            _rebuild(seen[-1], program),
            tuple(struct.shape for struct in structs),
            tuple(struct.shape for struct in program.outputs),
        )


def _called(kind: _Kind, variables: Sequence[Any], tensors: list[Any], known: list[Any]) -> Any:
    results = tf_functions.call_signature(kind.signature, variables, tensors)
    outputs = [results[name] for name in kind.signature.output_names]
    found = _shapes.sizes(kind.shapes, known)
    for tensor, shape in zip(outputs, kind.results):
        tensor.set_shape(_shapes.known_shape(shape, found))
    return kind.rebuild(outputs)


def _rebuild(tree: Any, program: programs.Program) -> Callable[[list[Any]], Any]:
    """Makes the output of its arrays; what TensorFlow cannot nest becomes a dict."""
    names = list(program.output_names)
    if _nests(jax.tree_util.tree_unflatten(tree, names)):
        return lambda outputs: jax.tree_util.tree_unflatten(tree, outputs)
    structure = program.output_structure
    return lambda outputs: rebuild(structure, dict(zip(names, outputs)).__getitem__)


def _nests(value: Any) -> bool:
    if isinstance(value, str) or value is None:
        return True
    if type(value) is dict:
        return all(isinstance(key, str) for key in value) and all(map(_nests, value.values()))
    return isinstance(value, (list, tuple)) and all(map(_nests, value))


def _tensor(leaf: Any, name: str) -> Any:
    """An input as a tensor of a dtype that jax has."""
    if not tf.is_tensor(leaf):
        leaf = tf.convert_to_tensor(leaf)
    if not isinstance(leaf, (tf.Tensor, tf.Variable)) or leaf.dtype in (tf.string, tf.variant):
        raise UnsupportedDtypeError(
            "A jax function takes dense tensors of numbers.",
            where=name,
            got=getattr(leaf.dtype, "name", type(leaf).__name__) + f" {type(leaf).__name__}",
            write="what becomes numbers in `tf_preprocessor`, or passes the model by with "
            "`preprocess_output_passthrough_enabled=True`",
        )
    dtype = np.dtype(leaf.dtype.as_numpy_dtype)
    if dtype.kind in "fc" and dtype.itemsize > np.dtype("float32").itemsize:
        # As jax takes arrays of numpy; integers would come out as other numbers.
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        return tf.cast(leaf, narrow.name) if narrow != dtype else leaf
    _dtypes.check(dtype, name)
    return leaf


def _known_shape(tensor: Any, name: str) -> list[int | None]:
    if tensor.shape.rank is None:
        raise InvalidArgumentError(
            "The number of dimensions of an input is not known.",
            where=name,
            write="a tf.TensorSpec with a shape, or tf.ensure_shape in `tf_preprocessor`",
        )
    return tensor.shape.as_list()
