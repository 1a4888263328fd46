"""How much arithmetic a StableHLO module does: gone through operation by operation.

Sizes are numbers or symbols of jax.  A module with symbolic sizes computes them while it
runs; here they are followed through that arithmetic, so counts are formulas in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pax_export.inspection._module_shapes import Known, followed, shapes_of
from pax_export.inspection._work import Work, counted, number, total

#: What jax calls an operation, by its name in StableHLO; others are called alike.
_NAMES = {
    **{"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "remainder": "rem"},
    **{"maximum": "max", "minimum": "min", "negate": "neg", "compare": "eq", "select": "select_n"},
    **{"convert": "convert_element_type", "round_nearest_even": "round", "popcnt": "clz"},
    **{"round_nearest_afz": "round", "count_leading_zeros": "clz", "shift_left": "shift_left"},
    **{"exponential": "exp", "exponential_minus_one": "expm1", "log_plus_one": "log1p"},
    **{"sine": "sin", "cosine": "cos", "power": "pow", "dynamic_conv": "convolution"},
    **{"dynamic_broadcast_in_dim": "reshape", "dynamic_reshape": "reshape", "constant": "iota"},
    **{"dynamic_iota": "iota", "real_dynamic_slice": "slice", "dynamic_pad": "pad"},
    **{"reverse": "rev", "dynamic_gather": "gather", "bitcast_convert": "copy"},
    **{"get_dimension_size": "reshape", "partition_id": "iota", "create_token": "iota"},
}
_OF_CUSTOM_CALLS = {"mhlo.erf": "erf", "mhlo.topk": "top_k", "Sharding": "copy"}
#: Functions that call each other twice, one after the other, would never end.
_MOST_STEPS = 2_000_000
_OF_CHECKS = ("shape_assertion",)
#: Composites that are counted as one operation, whatever they are made of.
_WHOLE = ("erf", "top_k", "tan", "asin", "acos", "sinh", "cosh", "atan")


def work_of_module(content: bytes, sizes: Sequence[Sequence[Any]], unknown: Any) -> Work:
    """Counts a call of a portable artifact.

    Args:
        content: its bytes.
        sizes: the shapes of the inputs that have symbolic sizes, in their order.
        unknown: what stands for a size that nobody can tell.
    """
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, content)
        functions = {
            ir.StringAttr(each.attributes["sym_name"]).value: each
            for each in module.body.operations
        }
        counting = _Counting(functions, unknown)
        main = functions["main"].regions[0].blocks[0]
        counting.block(main, _given(main, sizes, unknown), 1)
    return counting.work


def _given(block: Any, sizes: Sequence[Sequence[Any]], unknown: Any) -> list[Known]:
    """The arguments of the main function, those of symbolic sizes with the next that fit."""
    left = list(sizes)
    found = []
    for argument in block.arguments:
        fixed = shapes_of(argument.type)
        if all(size is not None for size in fixed):
            found.append(Known(fixed))
            continue
        while left and not _fits(left[0], fixed):
            left.pop(0)  # an input that the function does not read
        given = left.pop(0) if left else [unknown if size is None else size for size in fixed]
        found.append(Known(tuple(given)))
    return found


def _fits(sizes: Sequence[Any], fixed: Sequence[int | None]) -> bool:
    return len(sizes) == len(fixed) and all(
        known is None or known == size for known, size in zip(fixed, sizes)
    )


@dataclass
class _Operation:
    """An operation as the rules of `_work` take one of jax."""

    primitive: Any
    invars: list[Any]
    outvars: list[Any]
    params: dict[str, Any]


class _Counting:
    def __init__(self, functions: dict[str, Any], unknown: Any, steps: list[int] | None = None):
        self.functions, self.unknown = functions, unknown
        self.steps = [0] if steps is None else steps  # of all that count together
        self.work = Work()

    def block(self, block: Any, given: Sequence[Known], times: Any, around: Any = None) -> list:
        """Goes through a block, whose arguments are known; what it returns."""
        values: dict[Any, Known] = dict(around or {})
        values.update(zip(block.arguments, given))
        for operation in block.operations:
            self.steps[0] += 1
            if self.steps[0] > _MOST_STEPS:
                raise ValueError("its functions call each other too often to be counted")
            operands = [values[each] for each in operation.operands]
            if operation.operation.name.endswith("return"):
                return operands
            values.update(zip(operation.results, self._results(operation, operands, times, values)))
        return []

    def _results(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        name = operation.operation.name.partition(".")[2]
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, operation, operands, times, values)
        results = followed(name, operation, operands, self.unknown)
        # Arithmetic of sizes is no work on numbers.
        if not any(each.value is not None for each in results):
            self._count(name, operation, operands, results, times)
        return results

    def _count(
        self, name: str, operation: Any, operands: list[Known], results: list[Known], times: Any
    ) -> None:
        params = _PARAMETERS[name](operation) if name in _PARAMETERS else {}
        called = {"convolution": "conv_general_dilated"}.get(_NAMES.get(name, name))
        made = _Operation(
            SimpleNamespace(name=called or _NAMES.get(name, name)),
            _variables(operands, operation.operands),
            _variables(results, operation.results),
            params,
        )
        if not counted(made, "", times, self.work):
            self.work.uncounted.add(name)

    def _inner(self, block: Any, times: Any) -> Any:
        """How much a block of numbers does, such as what a reduction joins two by."""
        inner = _Counting(self.functions, self.unknown, self.steps)
        inner.block(block, [Known(shapes_of(each.type)) for each in block.arguments], 1)
        self.work.uncounted |= inner.work.uncounted
        return total(inner.work) * times

    def _add(self, flops: Any, dtype: str = "") -> None:
        self.work.flops[""] += flops
        self.work.dtypes[""][dtype] = self.work.dtypes[""].get(dtype, 0) + flops

    # --- what holds programs ----------------------------------------------------

    def call(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        return self.block(self.functions[name].regions[0].blocks[0], operands, times)

    def composite(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        name = ir.StringAttr(operation.attributes["name"]).value.partition(".")[2]
        inside = ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value
        block = self.functions[inside].regions[0].blocks[0]
        if name not in _WHOLE:
            return self.block(block, operands, times)
        results = _Counting(self.functions, self.unknown, self.steps).block(block, operands, 1)
        self._count(name, operation, operands, results, times)
        return results

    def custom_call(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        target = ir.StringAttr(operation.attributes["call_target_name"]).value
        results = followed("custom_call", operation, operands, self.unknown)
        if target not in _OF_CHECKS:
            name = _OF_CUSTOM_CALLS.get(target, target)
            self._count(name, operation, operands, results, times)
        return results

    def case(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        """Of branches the heaviest, as for jax's programs."""
        tried = []
        for region in operation.regions:
            inner = _Counting(self.functions, self.unknown, self.steps)
            results = inner.block(region.blocks[0], [], times, values)
            tried.append((number(total(inner.work)), inner.work, results))
        _, work, results = max(tried, key=lambda each: each[0])
        self._take(work)
        return results

    def _take(self, work: Work) -> None:
        self.work.uncounted |= work.uncounted
        for dtype, flops in work.dtypes[""].items():
            self._add(flops, dtype)
        self.work.transcendentals[""] += work.transcendentals[""]

    def while_loop(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        test, body = (region.blocks[0] for region in operation.regions)
        rounds = _rounds(test, body, operands, values)
        if rounds is None:
            self.work.uncounted.add("while (its body counts once)")
            rounds = 1
        *_, end = body.operations
        same = [a == b for a, b in zip(body.arguments, end.operands)]
        given = [each if kept else Known(each.shape) for each, kept in zip(operands, same)]
        self.block(body, given, times * rounds, values)
        return given

    def reduce(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        results = followed("reduce", operation, operands, self.unknown)
        joined = operands[0].size - results[0].size
        self._add(self._inner(operation.regions[0].blocks[0], times * joined), _dtype(operation))
        return results

    def window(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        results = followed("reduce_window", operation, operands, self.unknown)
        width = int(np.prod(list(operation.attributes["window_dimensions"])))
        work = results[0].size * (width - 1)
        self._add(self._inner(operation.regions[0].blocks[0], times * work), _dtype(operation))
        return results

    def scatter(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        updates = operands[-1].size
        self._add(self._inner(operation.regions[0].blocks[0], times * updates), _dtype(operation))
        return followed("scatter", operation, operands, self.unknown)

    def scatter_window(
        self, operation: Any, operands: list[Known], times: Any, values: Any
    ) -> list:
        self._add(2 * times * operands[1].size, _dtype(operation))
        return followed("scatter", operation, operands, self.unknown)

    def sort(self, operation: Any, operands: list[Known], times: Any, values: Any) -> list:
        results = followed("sort", operation, operands, self.unknown)
        self._count("sort", operation, operands, results, times)
        return results


_SPECIAL = {
    "call": _Counting.call,
    "composite": _Counting.composite,
    "custom_call": _Counting.custom_call,
    "case": _Counting.case,
    "if": _Counting.case,
    "while": _Counting.while_loop,
    "reduce": _Counting.reduce,
    "reduce_window": _Counting.window,
    "scatter": _Counting.scatter,
    "select_and_scatter": _Counting.scatter_window,
    "sort": _Counting.sort,
}


def _variables(known: Sequence[Known], values: Any) -> list[Any]:
    return [
        SimpleNamespace(aval=SimpleNamespace(shape=each.shape, dtype=_element(value.type)))
        for each, value in zip(known, values)
    ]


_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}


def _element(kind: Any) -> str:
    text = str(getattr(kind, "element_type", kind))
    return _DTYPES.get(text, text)


def _dtype(operation: Any) -> str:
    return _element(operation.operands[0].type)


def _rounds(test: Any, body: Any, start: Sequence[Known], values: Any) -> Any:
    """How often a loop runs that counts up to what is known; None for any other loop."""
    *_, end = test.operations
    decided = end.operands[0].owner
    if getattr(decided, "name", "") != "stablehlo.compare":
        return None
    direction = str(decided.attributes["comparison_direction"])
    counter, limit = decided.operands
    arguments = list(test.arguments)
    if "LT" not in direction or counter not in arguments:
        return None
    place = arguments.index(counter)
    last = _value(limit, test, start, values)
    first = start[place].value
    added = list(body.operations)[-1].operands[place].owner
    if getattr(added, "name", "") != "stablehlo.add" or last is None or first is None:
        return None
    step = [_value(each, body, (), values) for each in added.operands]
    mine = [each == body.arguments[place] for each in added.operands]
    if not any(mine) or step[not mine.index(True)] != [1]:
        return None
    return last[0] - first[0]


def _value(value: Any, block: Any, start: Sequence[Known], values: Any) -> Any:
    """The numbers in a value of a block, if they are known before it runs."""
    if value in values:
        return values[value].value
    arguments = list(block.arguments)
    if value in arguments:
        return start[arguments.index(value)].value if start else None
    owner = value.owner
    if getattr(owner, "name", "") == "stablehlo.constant":
        return followed("constant", owner, [], None)[0].value
    return None


def _dot(operation: Any) -> dict[str, Any]:
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    contracted = tuple(numbers.lhs_contracting_dimensions)
    return {"dimension_numbers": ((contracted, ()), ((), ()))}


def _convolution(operation: Any) -> dict[str, Any]:
    found = operation.attributes
    numbers = stablehlo.ConvDimensionNumbers(found["dimension_numbers"])
    spec = SimpleNamespace(
        lhs_spec=(numbers.input_batch_dimension, numbers.input_feature_dimension,
                  *numbers.input_spatial_dimensions),
        rhs_spec=(numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension,
                  *numbers.kernel_spatial_dimensions),
        out_spec=(numbers.output_batch_dimension, numbers.output_feature_dimension,
                  *numbers.output_spatial_dimensions),
    )  # fmt: skip
    count = len(spec.lhs_spec) - 2
    ones = [1] * count
    padding = np.array(found["padding"]).reshape(-1, 2) if "padding" in found else [[0, 0]] * count
    return {
        "dimension_numbers": spec,
        "window_strides": list(found["window_strides"]) if "window_strides" in found else ones,
        "padding": [tuple(map(int, each)) for each in padding],
        "lhs_dilation": list(found["lhs_dilation"]) if "lhs_dilation" in found else ones,
        "rhs_dilation": list(found["rhs_dilation"]) if "rhs_dilation" in found else ones,
        "batch_group_count": ir.IntegerAttr(found["batch_group_count"]).value,
    }


def _fft(operation: Any) -> dict[str, Any]:
    return {"fft_lengths": list(operation.attributes["fft_length"])}


_PARAMETERS = {
    "dot_general": _dot,
    "convolution": _convolution,
    "dynamic_conv": _convolution,
    "fft": _fft,
}
