"""A jax function and its params as a `tf.Module`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
from jax import export as jax_export

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export.orbax import constants
from pax_export.export.orbax._method import TensorFlowMethod, constraints_of
from pax_export.export.orbax._params import Model
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.config import config
from pax_export.export.orbax.typing import ApplyFn, PyTree
from pax_export.export.orbax.utils import get_lowering_platforms

__all__ = ["ApplyFn", "JaxModule", "PyTree", "get_obx_export_tf_preprocess_only"]


def get_obx_export_tf_preprocess_only() -> bool:
    """Whether preprocessors are exported alone, without the model.

    Example:
        >>> get_obx_export_tf_preprocess_only()
        False
    """
    return config.obx_export_tf_preprocess_only


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
            `native_serialization_platforms` (by default all four); for several
            methods, a mapping. Options that jax2tf ignores are ignored.
        jit_compile: whether TensorFlow compiles the functions with XLA; for
            several methods also a mapping.
        name: the name of the module.
        pspecs: the partition specs of the params, within `maybe_enable_dtensor_export_on`.
        allow_multi_axis_sharding_conslidation: shard a dimension with several
            mesh axes over the largest of them.
        allow_multi_axis_sharding_consolidation: the same.
        export_version: only `ExportModelType.TF_SAVEDMODEL` is supported.
        input_polymorphic_shape_symbol_values: only for ``ORBAX_MODEL``.
        jax2obm_kwargs: only for ``ORBAX_MODEL``.
        jax2obm_options: only for ``ORBAX_MODEL``.

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

    DEFAULT_METHOD_KEY = constants.DEFAULT_METHOD_KEY

    def __init__(
        self,
        params: PyTree,
        apply_fn: ApplyFn | Mapping[str, ApplyFn],
        trainable: bool | PyTree | None = None,
        input_polymorphic_shape: PyTree | Mapping[str, PyTree] = None,
        jax2tf_kwargs: Mapping[str, Any] | None = None,
        jit_compile: bool | Mapping[str, bool] = True,
        name: str | None = None,
        pspecs: PyTree | None = None,
        allow_multi_axis_sharding_conslidation: bool | None = None,
        *,
        allow_multi_axis_sharding_consolidation: bool | None = None,
        export_version: constants.ExportModelType = constants.ExportModelType.TF_SAVEDMODEL,
        input_polymorphic_shape_symbol_values: object = None,
        jax2obm_kwargs: object = None,
        jax2obm_options: object = None,
    ):
        super().__init__(name=name)
        _check_version(export_version, input_polymorphic_shape_symbol_values)
        del jax2obm_kwargs, jax2obm_options
        functions, shapes, options, jit = _by_key(
            apply_fn, input_polymorphic_shape, jax2tf_kwargs, jit_compile
        )
        trainable = False if trainable is None else trainable
        self._with_gradient = any(jax.tree_util.tree_leaves(trainable))
        made = {
            key: TensorFlowMethod(key, function, shapes[key], options[key], self._with_gradient)
            for key, function in functions.items()
        }
        # `tf.Module` would wrap these in its own containers.
        self._given = SimpleNamespace(
            functions=functions, shapes=shapes, options=options, jit=jit, methods=made
        )
        self._model: Model | None = None
        self._generation = 0
        self._tf_var_leaves: Any = None
        self._closed_over: Any = []
        self._methods: Any = {}
        if get_obx_export_tf_preprocess_only():
            self._given.params = params  # no model contains them
        else:
            consolidate = allow_multi_axis_sharding_consolidation
            if consolidate is None:
                consolidate = allow_multi_axis_sharding_conslidation
            self._model = Model(params, trainable, pspecs, bool(consolidate))
            self._bind_methods(self._model)

    def _bind_methods(self, model: Model) -> None:
        """Makes the functions over the variables."""
        # A new list each time, because tf.Module saves the lists that it contains.
        self._closed_over = []
        self._tf_var_leaves = model.leaf_variables()
        self._methods = {
            key: _make_function(method.over(model, self._closed_over.extend), self._given.jit[key])
            for key, method in self._given.methods.items()
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
        """Assigns new values to all variables, or raises and assigns none.

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
        if self._model is None:
            self._given.params = params
            return
        arrays = self._model.check(params)
        if self._model.ties_hold(arrays):
            self._model.assign(params, arrays)
        else:
            self._model.lay_out(params, arrays)
            self._bind_methods(self._model)

    def _get_variable_tree(self) -> PyTree:
        """The params, with variables in the places of arrays."""
        return self._model.rebuild(self._model.leaf_variables()) if self._model else None

    @property
    def with_gradient(self) -> bool:
        """Whether there are trainable variables."""
        return self._with_gradient

    @property
    def apply_fn_map(self) -> Mapping[str, ApplyFn]:
        """The functions of the module by key."""
        return self._given.functions

    @property
    def model_params(self) -> PyTree:
        """The params, as they were given last."""
        return self._model.params if self._model else self._given.params

    @property
    def jax2tf_kwargs_map(self) -> Mapping[str, Any]:
        """The `jax2tf_kwargs` of each method, or None."""
        return self._given.options

    @property
    def input_polymorphic_shape_map(self) -> Mapping[str, PyTree]:
        """The `input_polymorphic_shape` of each method."""
        return self._given.shapes

    @property
    def export_version(self) -> constants.ExportModelType:
        """The type of model that an `ExportManager` of this module writes."""
        return constants.ExportModelType.TF_SAVEDMODEL

    def export_module(self) -> JaxModule:
        """The module that is exported: this one."""
        return self

    def orbax_module(self) -> JaxModule:
        """The same, by an older name."""
        return self

    def obm_module_to_jax_exported_map(
        self, model_inputs: PyTree
    ) -> Mapping[str, jax_export.Exported]:
        """Exports every method with `jax.export`, as functions of the params and the input.

        Args:
            model_inputs: an example input: arrays or `jax.ShapeDtypeStruct`.

        Example:
            >>> import jax.numpy as jnp
            >>> module = JaxModule({"w": jnp.ones(2)}, lambda params, x: x + params["w"])
            >>> [*module.obm_module_to_jax_exported_map(jnp.ones(2))]
            ['jax_module_default_method']
        """
        exported = {}
        for key, function in self.apply_fn_map.items():
            inputs, shape = model_inputs, self._given.shapes[key]
            options = self._given.options[key] or {}
            if shape is not None:
                inputs = jax_export.symbolic_args_specs(
                    inputs, shape, constraints=constraints_of(options)
                )
            platforms = get_lowering_platforms(options)
            jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
            export = jax_export.export(jitted, platforms=platforms and tuple(platforms))
            exported[key] = export(self.model_params, inputs)
        return exported


def _make_function(call: Callable[[Any], Any], jit_compile: bool) -> Any:
    # TensorFlow derives the names of its functions from this one, and not every
    # reader takes those of lambdas.
    def predict_fn(x: object) -> Any:
        return call(x)

    return tf.function(predict_fn, jit_compile=jit_compile, autograph=False)


def _check_version(version: object, symbol_values: object) -> None:
    kinds = constants.ExportModelType
    # Another enum of the same members is orbax's own.
    name = getattr(version, "name", None)
    if name == kinds.ORBAX_MODEL.name:
        raise InvalidArgumentError(
            "ExportModelType.ORBAX_MODEL has no public writer: orbax's writes nothing.",
            got="export_version=ORBAX_MODEL",
            write="pax_export.export.to_stablehlo, for an artifact with its weights apart, or "
            "ExportModelType.TF_SAVEDMODEL",
        )
    if name != kinds.TF_SAVEDMODEL.name:
        raise InvalidArgumentError(
            f"Unsupported export version: {version}, must be one of "
            f"{', '.join(kind.name for kind in kinds)}"
        )
    if symbol_values is not None:
        raise InvalidArgumentError(
            "`input_polymorphic_shape_symbol_values` is only supported for "
            "constants.ExportModelType.ORBAX_MODEL.",
            write="input_polymorphic_shape, with symbolic dimensions",
        )


def _by_key(functions: Any, shapes: Any, options: Any, jit: Any) -> list[dict[str, Any]]:
    """Every argument as a mapping with the keys of the methods."""
    if callable(functions):
        each = (functions, shapes, options, jit)
        return [{constants.DEFAULT_METHOD_KEY: value} for value in each]
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise InvalidArgumentTypeError(
            "`apply_fn` must be a function of the params and the input, or a mapping of keys "
            "to such functions.",
            got=repr(functions),
        )
    if not functions:
        raise InvalidArgumentError("`apply_fn` should be a non-empty mapping.")
    shapes = dict.fromkeys(functions) if shapes is None else shapes
    options = dict.fromkeys(functions) if options is None else options
    jit = jit if isinstance(jit, Mapping) else dict.fromkeys(functions, jit)
    for argument, otherwise, given in (
        ("input_polymorphic_shape", "either be None or ", shapes),
        ("jax2tf_kwargs", "either be unspecified or ", options),
        ("jit_compile", "either be a boolean or ", jit),
    ):
        if not (isinstance(given, Mapping) and set(given) == set(functions)):
            raise InvalidArgumentError(
                f"`{argument}` must {otherwise}have the same structure as that of `apply_fn`.",
                got=f"{argument}={given!r} for the methods {sorted(functions)}",
                write=f"{argument}={{" + ", ".join(f"{key!r}: ..." for key in functions) + "}",
            )
    return [dict(functions), dict(shapes), dict(options), dict(jit)]
