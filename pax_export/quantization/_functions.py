"""Functions of params that may be quantized: their weights, and products with these."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.jax import run_inside, scan_operands
from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    interpret,
)
from pax_export._foundations.types import Array, Equation, PyTree, TracedProgram
from pax_export.core import Selector, is_array
from pax_export.export.tracing.exportable import CALL
from pax_export.export.tracing.models import form_of
from pax_export.precision.quantized import ArrayLike, QuantizedArray, quantized_dot, rows
from pax_export.quantization._batches import called
from pax_export.quantization._weights import Left, QuantizableArray, targets_of_tree


class QuantizedFunction:
    """A function whose params may be quantized without its knowledge.

    It is traced with float arrays in place of quantized weights.  In its program, products with a
    quantized weight are computed as in `Linear` and `Conv`; other operations get the dequantized
    array.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, params: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
        whole = (params, args, kwargs)
        leaves, structure = jax.tree_util.tree_flatten(whole, is_leaf=_is_quantized)
        if not any(map(_is_quantized, leaves)):
            return self.function(params, *args, **kwargs)
        numbers = [at for at, leaf in enumerate(leaves) if _is_quantized(leaf) or is_array(leaf)]
        operands = [leaves[at] for at in numbers]
        results: list[Any] = []

        def traced(*arrays: PyTree) -> list[Any]:
            known = dict(zip(numbers, arrays))
            whole = [known.get(at, leaf) for at, leaf in enumerate(leaves)]
            params, args, kwargs = structure.unflatten(whole)
            flat, tree = jax.tree_util.tree_flatten(self.function(params, *args, **kwargs))
            results[:] = tree, flat
            return [each for each in flat if is_array(each)]

        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_quantized(x) else x for x in operands
        ]
        program = jax.make_jaxpr(traced)(*structs)
        weights = [_ProgramWeight(x) if _is_quantized(x) else x for x in operands]
        computed = iter(_run(program, weights))
        tree, flat = results
        return tree.unflatten([next(computed) if is_array(each) else each for each in flat])


def _is_quantized(leaf: object) -> bool:
    return isinstance(leaf, ArrayLike)


class WeightsOfFunction:
    """The arrays of params that a function multiplies or looks up rows of: see `WeightsOfModule`.

    Raises:
        InvalidArgumentTypeError: not a model, or parts of one are chosen.
        InvalidArgumentError: it has no arrays, or its products are unknown without a call.
    """

    def __init__(self, net: object, at: Selector, calls: Sequence[Sequence[Any]]):
        has_function = isinstance(net, tuple) and len(net) == 2 and callable(net[1])
        params, function = _pair_of(net)
        if at is not None:
            raise InvalidArgumentTypeError(
                "Only modules of pax_export have parts to quantize.",
                where="quantize(at=...)",
                got=f"{type(net).__name__} with at={at!r}"[:200],
                write="quantize(net, batches), or quantize(module, at=...)",
            )
        if not any(map(is_array, jax.tree_util.tree_leaves(params))):
            raise InvalidArgumentError(
                "A function without params has no weights to quantize.",
                where="quantize(net)",
                got=f"the function {getattr(function, '__name__', '')}",
                write="a module, a model of another framework, or (params, function)",
            )
        if not (calls or has_function):
            raise InvalidArgumentError(
                "A third-party model requires batches.",
                where="quantize(batches=...)",
                got=f"{type(net).__name__} without batches",
                write="quantize(net, [x])",
            )
        of_call = _targets_of_call(params, function, calls[0]) if calls else None
        self.whole, self.targets = (params, function), list(of_call or targets_of_tree(params))

    def put(self, arrays: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
        new = {id(each.weight): arrays[each.name] for each in self.targets if each.name in arrays}
        params = jax.tree_util.tree_map(
            lambda leaf: new.get(id(leaf), leaf), self.whole[0], is_leaf=_is_quantized
        )
        return self.of_leaves(params)

    def of_leaves(self, tree: PyTree) -> tuple[Any, Callable[..., Any]]:
        return tree, self.whole[1]

    def others(self, done: set[str]) -> Mapping[str, Left]:
        return {}


def _pair_of(net: Any) -> tuple[Any, QuantizedFunction]:
    """Returns the params and the function of a model of another framework, or of a pair."""
    if isinstance(net, tuple) and len(net) == 2 and isinstance(net[1], QuantizedFunction):
        return net
    form = form_of(net)
    entry: Any = form.method(CALL)

    def function(params: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
        return entry.call(form.to_model(params), *args, **kwargs)[0]

    function.__name__ = form.name
    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
    with contextlib.suppress(TypeError, ValueError):  # functions that show none
        inputs = [*inspect.signature(entry.signature_of).parameters.values()][entry.skip :]
        function.__signature__ = inspect.Signature([first, *inputs])
    return form.tree, QuantizedFunction(function)


# --- the axes of weights ---------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass
class _Noted(ArrayLike):
    """A weight that records the axes over which products sum."""

    array: Any
    name: str = field(metadata={"static": True})
    notes: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def dequantized(self) -> jax.Array:
        return self.array


class _Notes:
    """The records, by the names of weights; static, since it is compared by identity."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}


def _targets_of_call(
    params: PyTree, function: QuantizedFunction, batch: Sequence[Any]
) -> Iterator[QuantizableArray]:
    """The arrays of params, with the axes over which products of a call sum."""
    notes = _Notes()
    found = {id(target.weight): target for target in targets_of_tree(params)}

    def noted(leaf: PyTree) -> Any:
        target = found.get(id(leaf))
        if target is None or not is_array(leaf):
            return leaf
        return _Noted(jnp.asarray(leaf), target.name, notes)

    noted_params = jax.tree_util.tree_map(noted, params, is_leaf=_is_quantized)
    called(functools.partial(jax.eval_shape, function, noted_params), tuple(batch))
    for target in found.values():
        if _is_quantized(target.weight):
            yield target
        elif target.name in notes.by_name:
            yield target._replace(**notes.by_name[target.name])
        else:
            yield target._replace(reduced=())


# --- products in programs --------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ProgramWeight:
    """A quantized weight in a program, with its axes possibly transposed."""

    array: Any
    order: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    def axis(self, index: int) -> int:
        """The axis of the array, counted from the last (-1), that is the one at an index."""
        return (index if self.order is None else self.order[index]) - len(self.array.shape)

    def numbers(self) -> jax.Array:
        numbers = self.array.dequantized()
        return numbers if self.order is None else numbers.transpose(self.order)

    def noted(self, summed: Sequence[int], rank: int, is_table: bool = False) -> None:
        """Notes the axes over which a product sums, that of groups last, and those of a layer."""
        if isinstance(self.array, _Noted):
            axes = [self.axis(index) for index in summed]
            found: dict[str, Any] = {"axis": axes[-1], "rank": rank, "is_table": is_table}
            found["reduced"] = tuple(sorted(axes))
            self.array.notes.by_name.setdefault(self.array.name, found)

    def rows(self) -> Any:
        """Returns the weight if a loop can read its rows as they are stored, else its numbers."""
        size = self.array.shape[0]
        leaves = jax.tree_util.tree_leaves(self.array)
        is_whole = all(each.shape[:1] == (size,) for each in leaves)
        return self if self.order is None and is_whole else self.numbers()


def _run(program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
    return interpret(program, operands, _operate)


def _operate(equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
    name = equation.primitive.name
    if not any(isinstance(each, _ProgramWeight) for each in operands):
        return bind_equation(equation, operands)
    result = _RULES[name](equation, *operands) if name in _RULES else None
    if result is not None:
        return [result]
    opened = run_inside(equation, _for_loop(equation, operands), _run)
    if opened is not None:
        return opened
    if called_program(equation) is not None and not has_own_derivative(equation):
        return None
    return bind_equation(equation, [_numbers(each) for each in operands])


def _numbers(operand: Array | _ProgramWeight) -> Any:
    return operand.numbers() if isinstance(operand, _ProgramWeight) else operand


def _for_loop(equation: Equation, operands: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        consts, carried, inputs = scan_operands(params, operands)
        inputs = [each.rows() if isinstance(each, _ProgramWeight) else each for each in inputs]
        return [*consts, *map(_numbers, carried), *inputs]
    if name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        return [*operands[:first], *map(_numbers, operands[first:])]
    return operands


def _transpose(equation: Equation, weight: _ProgramWeight) -> Any:
    order = equation.params["permutation"]
    before = order if weight.order is None else [weight.order[at] for at in order]
    return dataclasses.replace(weight, order=tuple(before))


def _convert(equation: Equation, weight: _ProgramWeight) -> Any:
    dtype, array = equation.params["new_dtype"], weight.array
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    if isinstance(array, _Noted):
        array = dataclasses.replace(array, array=array.array.astype(dtype))
    elif isinstance(array, QuantizedArray):
        array = array.replace(form=array.form._replace(dtype=jnp.dtype(dtype).name))
    else:
        return None
    return dataclasses.replace(weight, array=array)


def _dot(equation: Equation, left: Array | _ProgramWeight, right: Array | _ProgramWeight) -> Any:
    (of_left, of_right), batched = equation.params["dimension_numbers"]
    weight, x = (left, right) if isinstance(left, _ProgramWeight) else (right, left)
    if not isinstance(weight, _ProgramWeight) or isinstance(x, _ProgramWeight):
        return None
    summed, of_x = (of_left, of_right) if weight is left else (of_right, of_left)
    weight.noted(sorted(summed), len(weight.array.shape))
    array = weight.array
    if len(array.shape) == 2 and len(summed) == 1 and len(x.shape) > 0 and not any(batched):
        contracted = weight.axis(summed[0])
        if isinstance(array, QuantizedArray) and array.form.axis == contracted:
            x = array.rounded_inputs(jnp.moveaxis(x, of_x[0], -1))
            result = quantized_dot(x, *array.stored, form=array.form, contracted=contracted)
            result = jnp.moveaxis(result, -1, 0) if weight is left else result
            return result.astype(jnp.result_type(equation.outvars[0].aval))
    x = array.rounded_inputs(x, [axis - len(x.shape) for axis in of_x])
    operands = [weight.numbers(), x] if weight is left else [x, weight.numbers()]
    return bind_equation(equation, operands)[0]


def _convolve(equation: Equation, x: Array, kernel: Array | _ProgramWeight) -> Any:
    if not isinstance(kernel, _ProgramWeight):
        return None
    _, of_inputs, *spatial = equation.params["dimension_numbers"].rhs_spec
    kernel.noted((*spatial, of_inputs), len(spatial) + 2)
    x = kernel.array.rounded_inputs(_numbers(x), range(1 - len(x.shape), 0))
    result = bind_equation(equation, [x, kernel.numbers()])[0]
    features = equation.params["dimension_numbers"].out_spec[1]
    return kernel.array.bounded_outputs(result, features - result.ndim)


def _gather(equation: Equation, table: Array | _ProgramWeight, index: Array) -> Any:
    """Rows of a table, as an embedding takes them."""
    numbers, params = equation.params["dimension_numbers"], equation.params
    if not isinstance(table, _ProgramWeight):
        return None
    is_rows = (
        len(table.array.shape) == 2
        and table.order is None
        and numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and numbers.offset_dims == (len(index.shape) - 1,)
        and params["slice_sizes"] == (1, table.array.shape[1])
    )
    if not is_rows:
        return None
    table.noted((1,), 2, is_table=True)
    if not isinstance(table.array, QuantizedArray):
        return None
    at = index[..., 0]
    result = rows(table.array, jnp.clip(at, 0, table.array.shape[0] - 1))
    if params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return result
    return jnp.where(((at >= 0) & (at < table.array.shape[0]))[..., None], result, jnp.nan)


_RULES: dict[str, Callable[..., Any]] = {
    "transpose": _transpose,
    "convert_element_type": _convert,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
    "gather": _gather,
}
