"""A jax function and its params as a `tf.Module`.

A method is traced and lowered once per input type; symbolic sizes count as one type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._foundations.check import as_strings
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.files import atomic
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.export.artifact.formats import PLATFORMS
from pax_export.export.artifact.options import checked_platforms
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats.saved_model import writer
from pax_export.export.formats.saved_model.operations.program import lower_to_graph
from pax_export.export.lowering.lower import Call, Signature, lower_traced
from pax_export.export.lowering.lowered_model import lower_signature
from pax_export.export.lowering.variables import Store
from pax_export.export.orbax._params import (
    Model,
    broadcast_prefix,
    shapes_of_results,
    symbolic_shape,
)
from pax_export.export.orbax.dtensor_utils import tf
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable, ModelMethod
from pax_export.export.tracing.inputs import Input, Inputs
from pax_export.export.tracing.names import dotted_name, signature_names
from pax_export.export.tracing.programs import refuse_dropped_state, trace_one

__all__ = ["JaxModule"]

#: A function of params and inputs, each one pytree.
ApplyFn = Callable[[Any, Any], Any]


class JaxModule(tf.Module):
    """TensorFlow variables for the params of a jax function, and TensorFlow functions over them.

    Methods are lowered like those of `to_saved_model`, for TensorFlow 2.15 and later if the model
    allows it.

    Args:
        params: any pytree. Its arrays become variables named by path,
            ``layers.0.kernel``; other leaves are unchanged.
        apply_fn: a function of the params and one (nested) input, or a mapping
            of method keys to such functions.
        trainable: which params are trainable: True, False (default), or a
            prefix pytree of bools.
        input_polymorphic_shape: the symbolic shapes of the input, ``"b, ..."``
            for all its arrays or a pytree of such strings; for several methods,
            a mapping with the same keys. None: all sizes are static.
        jax2tf_kwargs: options of jax2tf: `with_gradient`, `polymorphic_constraints`,
            `native_serialization_platforms` (by default all four), and
            `native_serialization`: with False, the functions are TensorFlow's own
            operations, which a server runs without XLA; for several methods, a
            mapping. Options that jax2tf ignores are ignored.
        jit_compile: whether TensorFlow compiles the functions with XLA; for
            several methods also a mapping. None: unless `native_serialization=False`.
        name: the name of the module.
        pspecs: the partition specs of the params, within `maybe_enable_dtensor_export_on`.
        allow_multi_axis_sharding_conslidation: shard a dimension with several
            mesh axes over the largest of them.
        allow_multi_axis_sharding_consolidation: the same.

    Raises:
        InvalidArgumentError: arguments do not fit together.
        UnsupportedDtypeError: a param has a dtype that cannot be exported.

    Example:
        >>> import jax.numpy as jnp
        >>> module = JaxModule(
        ...     {"w": jnp.ones((3, 2))}, lambda params, x: x @ params["w"],
        ...     input_polymorphic_shape="b, ...",
        ... )
        >>> module.methods[JaxModule.DEFAULT_METHOD_KEY](jnp.ones((4, 3))).shape
        TensorShape([4, 2])
        >>> [variable.name for variable in module.variables]
        ['w:0']
    """

    DEFAULT_METHOD_KEY = "jax_module_default_method"

    def __init__(
        self,
        params: PyTree,
        apply_fn: ApplyFn | Mapping[str, ApplyFn],
        trainable: bool | PyTree | None = None,
        input_polymorphic_shape: PyTree | Mapping[str, PyTree] = None,
        jax2tf_kwargs: Mapping[str, Any] | None = None,
        jit_compile: bool | Mapping[str, bool] | None = None,
        name: str | None = None,
        pspecs: PyTree | None = None,
        allow_multi_axis_sharding_conslidation: bool | None = None,
        *,
        allow_multi_axis_sharding_consolidation: bool | None = None,
    ):
        super().__init__(name=name)
        functions, shapes, options, jit = _by_key(
            apply_fn, input_polymorphic_shape, jax2tf_kwargs, jit_compile
        )
        trainable = trainable or False
        self._with_gradient = any(jax.tree_util.tree_leaves(trainable))
        methods = {
            key: TensorFlowMethod(
                key, function, shapes[key], self._with_gradient, **(options[key] or {})
            )
            for key, function in functions.items()
        }
        # `tf.Module` would wrap these in its own containers.
        self._arguments = SimpleNamespace(
            functions=functions, shapes=shapes, options=options, jit=jit, methods=methods
        )
        either = allow_multi_axis_sharding_consolidation or allow_multi_axis_sharding_conslidation
        self._model = Model(params, trainable, pspecs, consolidate=bool(either))
        self._generation = 0
        self._bind_methods()

    def _bind_methods(self) -> None:
        """Makes the functions over the variables."""
        # A new list each time, because tf.Module saves the lists that it contains.
        self._closed_over: Any = []
        self._tf_var_leaves: Any = self._model.leaf_variables()
        self._methods: Any = {
            key: _make_function(
                method.over(self._model, self._closed_over.extend),
                method.native if jit is None else jit,
            )
            for (key, method), jit in zip(
                self._arguments.methods.items(), self._arguments.jit.values()
            )
        }
        self._generation += 1

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of TensorFlow, by their keys; each takes the input alone."""
        return self._methods

    @property
    def jax_methods(self) -> Mapping[str, Callable[..., Any]]:
        """The jax functions by key, with the current params."""
        params = self.model_params
        return {key: functools.partial(each, params) for key, each in self.apply_fn_map.items()}

    def update_variables(self, params: PyTree) -> None:
        """Assigns new values to all variables; if any does not fit, raises and assigns none.

        They are assigned one by one, without a second copy of all. Params that were one array and
        are no longer equal get separate variables; functions taken from `methods` before that no
        longer belong to the module.

        Args:
            params: a pytree with the structure, shapes and dtypes of the first.

        Raises:
            StructureMismatchError: the structure differs.
            InvalidArgumentError: a shape or dtype differs.

        Example:
            >>> import jax.numpy as jnp
            >>> module = JaxModule({"w": jnp.zeros(2)}, lambda params, x: x + params["w"])
            >>> module.update_variables({"w": jnp.ones(2)})
            >>> float(module.variables[0][0])
            1.0
        """
        arrays = self._model.check(params)
        if self._model.ties_hold(arrays):
            self._model.assign(params, arrays)
        else:
            self._model.lay_out(params, arrays)
            self._bind_methods()

    @property
    def with_gradient(self) -> bool:
        """Whether there are trainable variables."""
        return self._with_gradient

    @property
    def apply_fn_map(self) -> Mapping[str, ApplyFn]:
        """The functions of the module by key."""
        return self._arguments.functions

    @property
    def model_params(self) -> PyTree:
        """The params, as they were given last."""
        return self._model.params

    @property
    def jax2tf_kwargs_map(self) -> Mapping[str, Any]:
        """The `jax2tf_kwargs` of each method, or None."""
        return self._arguments.options

    @property
    def input_polymorphic_shape_map(self) -> Mapping[str, PyTree]:
        """The `input_polymorphic_shape` of each method."""
        return self._arguments.shapes

    def export_module(self) -> JaxModule:
        """The module that is exported: this one."""
        return self


def _make_function(call: Callable[[Any], Any], jit_compile: bool) -> Any:
    # TensorFlow derives the names of its functions from this one, and not every
    # reader takes those of lambdas.
    def predict_fn(x: PyTree) -> Any:
        return call(x)

    return tf.function(predict_fn, jit_compile=jit_compile, autograph=False)


def _by_key(
    functions: ApplyFn | Mapping[str, ApplyFn],
    shapes: PyTree,
    options: Mapping | None,
    jit: bool | Mapping | None,
) -> list[dict[str, Any]]:
    """Every argument as a mapping with the keys of the methods."""
    if callable(functions):
        each = (functions, shapes, options, jit)
        return [{JaxModule.DEFAULT_METHOD_KEY: value} for value in each]
    known = functions.values() if isinstance(functions, Mapping) else ()
    if not known or not all(map(callable, known)):
        raise InvalidArgumentTypeError(
            "`apply_fn` must be a function of params and input, or several by their keys.",
            got=repr(functions),
        )
    arguments = {
        "input_polymorphic_shape": dict.fromkeys(functions) if shapes is None else shapes,
        "jax2tf_kwargs": dict.fromkeys(functions) if options is None else options,
        "jit_compile": jit if isinstance(jit, Mapping) else dict.fromkeys(functions, jit),
    }
    for argument, value in arguments.items():
        if not (isinstance(value, Mapping) and set(value) == set(functions)):
            raise InvalidArgumentError(
                f"`{argument}` must have the same structure as that of `apply_fn`.",
                got=f"{argument}={value!r} for the methods {sorted(functions)}",
                write=f"{argument}={{" + ", ".join(f"{key!r}: ..." for key in functions) + "}",
            )
    return [{key: value[key] for key in functions} for value in (functions, *arguments.values())]


# --- methods ----------------------------------------------------------------

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
            types = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors]
            identity = (tree, str(shapes), tuple(map(str, types)))
            if identity not in kinds:
                structs = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, types)]
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
        function = _signature_function(signature, model.store)
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


def _signature_function(
    signature: Signature, store: Store
) -> Callable[[Sequence[Any], Sequence[Any]], dict[str, Any]]:
    """Returns a signature without gradients of gradients as a function of TensorFlow.

    It takes the arrays of all variables, and its inputs, and can be differentiated by both.
    """
    forward, gradient = signature.forward, signature.gradient
    constants = [*forward.constants, *(gradient.call.constants if gradient else ())]
    indices = [*forward.variables, *constants]
    first, inputs = len(forward.variables), signature.input_structs
    structs = [dtypes.struct_of(store.variables[index].value) for index in indices]
    structs[first:first] = inputs
    names = [f"operand_{index}" for index in range(len(structs))]
    if gradient is not None:
        # Cotangents stand before the constants of a gradient; here, all of these come first.
        count, more = len(structs) - len(gradient.call.constants), len(gradient.call.constants)
        end = count + len(gradient.of)
        used = tuple(
            index if index < count else index + more if index < end else index - len(gradient.of)
            for index in gradient.call.lowered.used
        )
        call = Call(replace(gradient.call.lowered, used=used), (), ())
        gradient = replace(gradient, call=call)
    stateless = replace(
        signature,
        input_names=tuple(names),
        input_structs=tuple(structs),
        forward=Call(forward.lowered, (), ()),
        gradient=gradient,
    )
    with atomic.scratch() as folder, tf.init_scope():
        writer.write(folder, Store((), (), False), [stateless], None)
        loaded = tf.saved_model.load(str(folder))

    def call_signature(variables: Sequence[Any], tensors: Sequence[Any]) -> dict[str, Any]:
        operands = [tf.convert_to_tensor(variables[index]) for index in indices]
        operands[first:first] = tensors
        return loaded.signatures[signature.key](**dict(zip(names, operands)))

    return call_signature


def _to_tensor(leaf: ArrayLike, name: str) -> Any:
    """An input as a tensor of a dtype that jax has."""
    tensor: Any = tf.convert_to_tensor(leaf)
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    if dtype.kind in "fc" and dtype.itemsize > np.dtype("float32").itemsize:
        # As jax takes arrays of numpy; integers would come out as other numbers.
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        return tf.cast(tensor, narrow.name) if narrow != dtype else tensor
    dtypes.check(dtype, name)
    return tensor
