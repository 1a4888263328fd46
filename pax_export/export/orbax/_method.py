"""A jax function over the variables of a model, callable from TensorFlow.

It is traced and lowered once per input type; symbolic sizes count as one type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError, UnsupportedDtypeError
from pax_export._str_arguments import as_strings
from pax_export._types import PyTree
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats.tf_functions import call_signature
from pax_export.export.lowering.lowered_model import lower_signature
from pax_export.export.orbax._params import Model
from pax_export.export.orbax._shapes import (
    CONSTRAINTS,
    broadcast_prefix,
    is_spec,
    shapes_of_results,
    symbolic_input_shapes,
)
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.utils import get_lowering_platforms
from pax_export.export.pipeline.arguments import PLATFORMS
from pax_export.export.tracing.dtypes import check
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.model_forms import ModelMethod
from pax_export.export.tracing.programs import Program, refuse_dropped_state, trace_one
from pax_export.export.tracing.spec import Input, Inputs, dotted_name, signature_names

_OPTIONS = {
    "with_gradient",
    "polymorphic_constraints",
    "native_serialization_platforms",
    # Nothing depends on these any more; jax2tf ignores the first two as well.
    "native_serialization",
    "enable_xla",
    "native_serialization_disabled_checks",
}


def _check_platforms(key: str, given: Mapping[str, Any], with_gradient: bool) -> tuple[str, ...]:
    """Returns the platforms of `jax2tf_kwargs`, after checking all options."""
    if "polymorphic_shapes" in given:
        raise InvalidArgumentError(
            "Do not use `polymorphic_shapes` in `jax2tf_kwargs`.",
            where=key,
            write="`input_polymorphic_shape=...` instead",
        )
    unknown = sorted(set(given) - _OPTIONS)
    if unknown:
        raise InvalidArgumentTypeError(
            f"`jax2tf_kwargs` has options unknown to jax2tf: {', '.join(unknown)}.",
            where=key,
            write=f"some of {', '.join(sorted(_OPTIONS))}",
        )
    asked = given.get("with_gradient")
    if asked is not None and bool(asked) != with_gradient:
        contains = "does not contain trainable" if asked else "contains trainable"
        raise InvalidArgumentError(
            f"`with_gradient={bool(asked)}` is specified in jax2tf_kwargs but the JaxModule "
            f"{contains} variables.",
            where=key,
            write="trainable=True, or equal values of both, or no `with_gradient`",
        )
    return tuple(get_lowering_platforms(given) or PLATFORMS)


def constraints_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the `polymorphic_constraints` of `jax2tf_kwargs`, also a single string."""
    given = options.get("polymorphic_constraints") or ()
    return as_strings("polymorphic_constraints", given, CONSTRAINTS)


class TensorFlowMethod:
    """One method of a `JaxModule`; call it within a TensorFlow function."""

    def __init__(
        self,
        key: str,
        apply_fn: Callable[[Any, Any], Any],
        shape: Any,
        jax2tf_kwargs: Mapping[str, Any] | None,
        with_gradient: bool,
    ):
        options = dict(jax2tf_kwargs or {})
        self._key = key
        self._apply_fn = apply_fn
        self._shape = shape
        self._platforms = _check_platforms(key, options, with_gradient)
        self._constraints = constraints_of(options)
        self._with_gradient = with_gradient

    def over(self, model: Model, added: Callable[[list[Any]], None]) -> Callable[[Any], Any]:
        """The method over these params; `added` receives variables for closed-over arrays."""
        kinds: dict[Any, Callable[..., Any]] = {}  # the lowered method, for each kind of input

        def call(x: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten_with_path(x)
            names = [dotted_name("x", path) for path, _ in leaves]
            tensors = [_to_tensor(leaf, name) for (_, leaf), name in zip(leaves, names)]
            known = [tensor.shape.as_list() for tensor in tensors]
            specs = broadcast_prefix(self._shape, x, "input_polymorphic_shape", is_spec)
            shapes = symbolic_input_shapes(names, known, specs, self._constraints)
            dtypes = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors]
            identity = (tree, str(shapes), tuple(map(str, dtypes)))
            if identity not in kinds:
                structs = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes)]
                kinds[identity] = self._lower_method(model, tree, names, structs)
                with tf.init_scope():
                    added(model.add_variables())
            return kinds[identity](tensors, known)

        return call

    def _lower_method(
        self, model: Model, tree: PyTree, names: list[str], structs: list[jax.ShapeDtypeStruct]
    ) -> Callable[..., Any]:
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
        method = ModelMethod(call, self._apply_fn, key=self._key)
        arrays = jax.tree_util.tree_structure([0] * len(model.leaves))
        exportable = Exportable(self._key, model.leaves, arrays, (method,))
        program = trace_one(exportable, method, inputs)
        refuse_dropped_state(exportable, program)
        signature = lower_signature(
            exportable, program, model.store, self._with_gradient, self._platforms
        )
        make = _make_rebuild(seen[-1], program)
        shapes, given = [[struct.shape for struct in each] for each in (program.outputs, structs)]

        def lowered(tensors: list[Any], known: list[Any]) -> Any:
            results = call_signature(signature, model.variables, tensors)
            outputs = [results[name] for name in signature.output_names]
            for tensor, shape in zip(outputs, shapes_of_results(shapes, given, known)):
                tensor.set_shape(shape)
            return make(outputs)

        return lowered


def _make_rebuild(tree: PyTree, program: Program) -> Callable[[list[Any]], Any]:
    """Returns a function that nests output arrays; types unknown to TensorFlow become dicts."""
    names = list(program.output_names)
    if _can_nest(jax.tree_util.tree_unflatten(tree, names)):
        return lambda outputs: jax.tree_util.tree_unflatten(tree, outputs)
    structure = program.output_structure
    return lambda outputs: rebuild(structure, dict(zip(names, outputs)).__getitem__)


def _can_nest(value: PyTree) -> bool:
    if isinstance(value, str) or value is None:
        return True
    if type(value) is dict:
        return all(isinstance(key, str) for key in value) and all(map(_can_nest, value.values()))
    return isinstance(value, (list, tuple)) and all(map(_can_nest, value))


def _to_tensor(leaf: PyTree, name: str) -> Any:
    """An input as a tensor of a dtype that jax has."""
    if not tf.is_tensor(leaf):
        leaf = tf.convert_to_tensor(leaf)
    if not isinstance(leaf, (tf.Tensor, tf.Variable)) or leaf.dtype in (tf.string, tf.variant):
        raise UnsupportedDtypeError(
            "A jax function takes dense tensors of numbers.",
            where=name,
            got=getattr(leaf.dtype, "name", type(leaf).__name__) + f" {type(leaf).__name__}",
            write="inputs that `tf_preprocessor` converts to numbers, or that bypass the model "
            "with `preprocess_output_passthrough_enabled=True`",
        )
    dtype = np.dtype(leaf.dtype.as_numpy_dtype)
    if dtype.kind in "fc" and dtype.itemsize > np.dtype("float32").itemsize:
        # As jax takes arrays of numpy; integers would come out as other numbers.
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        leaf = tf.cast(leaf, narrow.name) if narrow != dtype else leaf
    else:
        check(dtype, name)
    if leaf.shape.rank is None:
        raise InvalidArgumentError(
            "The rank of an input is unknown.",
            where=name,
            write="a tf.TensorSpec with a shape, or tf.ensure_shape in `tf_preprocessor`",
        )
    return leaf
