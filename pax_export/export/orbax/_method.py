"""A jax function over the variables of a model, callable from TensorFlow.

It is traced and lowered once per input type; symbolic sizes count as one type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._foundations.check import as_strings
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.export.artifact.formats import PLATFORMS
from pax_export.export.artifact.options import checked_platforms
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats.saved_model.operations.program import lower_to_graph
from pax_export.export.formats.saved_model.with_tensorflow import signature_function
from pax_export.export.lowering.lower import lower_traced
from pax_export.export.lowering.lowered_model import lower_signature
from pax_export.export.orbax._params import (
    Model,
    broadcast_prefix,
    shapes_of_results,
    symbolic_shape,
)
from pax_export.export.orbax.dtensor_utils import tf
from pax_export.export.tracing.dtypes import check
from pax_export.export.tracing.exportable import Exportable, ModelMethod
from pax_export.export.tracing.inputs import Input, Inputs
from pax_export.export.tracing.names import dotted_name, signature_names
from pax_export.export.tracing.programs import refuse_dropped_state, trace_one

_CONSTRAINTS = 'jax2tf_kwargs={"polymorphic_constraints": ("b >= 2",)}'


class TensorFlowMethod:
    """One method of a `JaxModule`; call it within a TensorFlow function.

    Keyword arguments are options of jax2tf; nothing depends on `enable_xla` and the checks, which
    jax2tf ignores as well.
    """

    def __init__(
        self,
        key: str,
        apply_fn: Callable[[Any, Any], Any],
        shape: PyTree,
        trains: bool,
        *,
        with_gradient: bool | None = None,
        polymorphic_constraints: str | Sequence[str] | None = None,
        native_serialization_platforms: str | Sequence[str] | None = None,
        native_serialization: bool | None = None,
        enable_xla: bool | None = None,
        native_serialization_disabled_checks: Sequence[Any] = (),
    ):
        if with_gradient is not None and bool(with_gradient) != trains:
            raise InvalidArgumentError(
                "`with_gradient` of jax2tf_kwargs and `trainable` of the JaxModule differ.",
                where=key,
                got=f"with_gradient={bool(with_gradient)}, {trains} of trainable variables",
                write="trainable=True for gradients, and no `with_gradient`",
            )
        self._key, self._apply_fn, self._shape, self._trains = key, apply_fn, shape, trains
        platforms = native_serialization_platforms
        self._platforms = PLATFORMS if platforms is None else checked_platforms(platforms)
        #: Whether it is one operation that XLA compiles, or operations of TensorFlow.
        self.native = native_serialization is None or bool(native_serialization)
        self._constraints = as_strings(
            "polymorphic_constraints", polymorphic_constraints or (), _CONSTRAINTS
        )

    def over(self, model: Model, added: Callable[[list[Any]], None]) -> Callable[[Any], Any]:
        """The method over these params; `added` receives variables for closed-over arrays."""
        kinds: dict[Any, Callable[..., Any]] = {}  # the lowered method, for each kind of input

        def call(x: PyTree) -> Any:
            leaves, tree = jax.tree_util.tree_flatten_with_path(x)
            names = [dotted_name("x", path) for path, _ in leaves]
            tensors = [_to_tensor(leaf, name) for (_, leaf), name in zip(leaves, names)]
            known = [tensor.shape.as_list() for tensor in tensors]
            specs = broadcast_prefix(self._shape, x, "input_polymorphic_shape")
            scope = jax_export.SymbolicScope(self._constraints)
            shapes = [symbolic_shape(*each, scope) for each in zip(names, known, specs)]
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
        def call(arrays: list[Any], x: PyTree) -> tuple[Any, list[Any]]:
            return self._apply_fn(model.rebuild(arrays), x), arrays

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
            exportable, program, model.store, self._trains, self._platforms,
            lower_traced if self.native else lower_to_graph,
        )  # fmt: skip
        function = signature_function(signature, model.store)
        shapes, input_shapes = [
            [struct.shape for struct in each] for each in (program.outputs, structs)
        ]

        def lowered(tensors: list[Any], known: list[Any]) -> Any:
            results = function(model.variables, tensors)
            outputs = [results[name] for name in signature.output_names]
            for tensor, shape in zip(outputs, shapes_of_results(shapes, input_shapes, known)):
                tensor.set_shape(shape)
            by_name = dict(zip(program.output_names, outputs))
            return rebuild(program.output_structure, by_name.__getitem__)

        return lowered


def _to_tensor(leaf: ArrayLike, name: str) -> Any:
    """An input as a tensor of a dtype that jax has."""
    tensor: Any = tf.convert_to_tensor(leaf)
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    if dtype.kind in "fc" and dtype.itemsize > np.dtype("float32").itemsize:
        # As jax takes arrays of numpy; integers would come out as other numbers.
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        return tf.cast(tensor, narrow.name) if narrow != dtype else tensor
    check(dtype, name)
    return tensor
