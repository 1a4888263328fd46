"""Faults planted in what is written: one operation of an export computes something else.

Each planter changes the written program of one format, the one of the whole model and of its
parts alike, as a wrong rule of a converter or a wrong kernel of a runtime would.  The operation
that it hits says itself where it comes from, in the locations of StableHLO, the callers of
ONNX's converter, or the equation that a rule of TFLite is given.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from pax_export._jaxpr import called_program
from pax_export.export.lowering import lower

KINDS = ("constant", "padding", "axis", "dtype")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One of the operations alike, and what is changed in it."""

    kind: str
    operation: str  # how operations that are alike look
    number: int  # which of these


@dataclasses.dataclass
class Planter:
    """Plants a fault wherever a program is written; without one, notes those that there are.

    Attributes:
        sources: what the operations that were hit say of where they come from, the first of the
            whole model.
        again: more numbers of the operation that was hit in the whole model: a function that is
            called twice has it once, and a part of the model, which has no calls, twice.
    """

    fault: Fault | None = None
    again: set[int] = dataclasses.field(default_factory=set)
    found: list[Fault] = dataclasses.field(default_factory=list)
    sources: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # primitive, scope
    programs: int = 0  # that were written, of which the first has no gradients

    def meets(
        self,
        kind: str,
        operation: str,
        seen: Counter,
        source: tuple[str, str],
        is_first: bool = True,
    ) -> bool:
        """Whether an operation that allows such a fault is the one to be changed."""
        seen[kind, operation] += 1
        fault = Fault(kind, operation, seen[kind, operation])
        if self.fault is None:
            self.found += [fault] if self.programs <= 1 and is_first else []
        elif fault == self.fault or (
            self.programs > 1
            and (kind, operation) == (self.fault.kind, self.fault.operation)
            and fault.number in self.again
        ):
            self.sources.append(source)
            return True
        return False


def _shifted(pairs: Any) -> Any:
    """Padding that gives as many numbers, from another place."""
    low, high = pairs[0]
    return [(low + 1, high - 1) if high else (low - 1, high + 1), *pairs[1:]]


# --- SavedModel: StableHLO ----------------------------------------------------------------


@contextmanager
def in_saved_model(planter: Planter) -> Iterator[None]:
    write, pipeline = lower._write_oldest, lower._PIPELINE
    strip = ",strip-debuginfo"
    assert strip in pipeline

    def planted(module: Any, context: Any) -> Any:
        seen: Counter = Counter()
        planter.programs += 1
        hit = None
        with context:
            for operation, look, is_first in list(_visits(module)):
                for kind, change in _STABLEHLO.items():
                    made = change(operation)
                    if made is None:
                        continue
                    source = _source(operation)
                    if planter.meets(kind, look, seen, source, is_first):
                        hit = kind, operation
                        with ir.Location.unknown():
                            made()
                    elif planter.programs == 1 and hit == (kind, operation):
                        planter.again.add(seen[kind, look])
            passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        return write(module, context)

    with (
        mock.patch.object(lower, "_write_oldest", planted),
        mock.patch.object(lower, "_PIPELINE", pipeline.replace(strip, "")),
    ):
        yield


def _visits(module: Any) -> Iterator[tuple[Any, str, bool]]:
    """Operations in the order of calls, how each looks, and whether it is the first time.

    A part has in one program what the whole has in functions that are called.
    """
    functions = {ir.StringAttr(each.attributes["sym_name"]).value: each for each in module.body}
    seen: set[Any] = set()

    def go(function: Any) -> Iterator[tuple[Any, str, bool]]:
        (block,) = function.operation.regions[0]
        for each in list(block):
            operation = each.operation
            if operation.name == "func.call":
                callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                yield from go(functions[callee])
                continue
            results = [str(value.type) for value in operation.results]
            look = " ".join((operation.name.removeprefix("stablehlo."), *results))
            yield operation, look, operation not in seen
            seen.add(operation)

    yield from go(functions["main"])


def _source(operation: Any) -> tuple[str, str]:
    """The primitive and the scope of an operation.

    Where jax writes a primitive by a function of its own, as it does the logistic one, the
    operations in that have its line twice, and their own names: then its line says which it is.
    """
    text = str(operation.location)
    names = re.findall(r'"([^"]*)"', text)
    scope = next((name for name in names if not name.endswith(".py")), "")
    made = re.match(r'loc\("[^"]*"\(callsite\(callsite\(', text)
    place = re.search(r'([^"/]+\.py)":(\d+):(\d+)', text)
    if made and place:
        return _AT + ":".join(place.groups()), scope
    return scope.rsplit("/", 1)[-1], scope


_AT = "at "


def _is_float(value: Any) -> bool:
    return str(ir.RankedTensorType(value.type).element_type) == "f32"


def _hlo_constant(operation: Any) -> Callable[[], None] | None:
    if operation.name.removeprefix("stablehlo.") not in _OF_CONSTANTS:
        return None
    for number, given in enumerate(operation.operands):
        around = given.owner
        made = around.operation if isinstance(around, (ir.Operation, ir.OpView)) else None
        held = made
        if made is not None and made.name == "stablehlo.broadcast_in_dim":
            owner = made.operands[0].owner
            held = owner.operation if isinstance(owner, (ir.Operation, ir.OpView)) else None
        if held is None or held.name != "stablehlo.constant" or not _is_float(held.results[0]):
            continue
        attribute = ir.DenseElementsAttr(held.attributes["value"])
        if not attribute.is_splat or not np.isfinite(attribute.get_splat_value().value):
            continue
        value = attribute.get_splat_value().value

        wrong = value * 1.5 + 0.25

        def change(
            number: int = number, made: Any = made, attribute: Any = attribute, wrong: Any = wrong
        ) -> None:
            element = ir.FloatAttr.get(ir.F32Type.get(), wrong)
            with ir.InsertionPoint(operation):
                other = ir.DenseElementsAttr.get_splat(attribute.type, element)
                new = stablehlo.ConstantOp(other).result
                if made.name == "stablehlo.broadcast_in_dim":
                    copied = made.clone()
                    copied.operands[0] = new
                    new = copied.results[0]
            operation.operands[number] = new

        return change
    return None


def _hlo_padding(operation: Any) -> Callable[[], None] | None:
    if operation.name not in ("stablehlo.convolution", "stablehlo.reduce_window"):
        return None
    if "padding" not in operation.attributes:
        return None
    pairs = np.array(ir.DenseElementsAttr(operation.attributes["padding"]))
    where = [n for n, pair in enumerate(pairs) if pair.any()]
    if not where:
        return None

    def change() -> None:
        other = pairs.copy()
        other[where[0]] = _shifted([tuple(map(int, pairs[where[0]]))])[0]
        operation.attributes["padding"] = ir.DenseElementsAttr.get(other.astype(np.int64))

    return change


def _sizes(value: Any) -> list[int]:
    return lower._shape(ir.RankedTensorType(value.type))


def _hlo_axis(operation: Any) -> Callable[[], None] | None:
    if operation.name == "stablehlo.reduce":
        of, name = _sizes(operation.operands[0]), "dimensions"
        axes = list(ir.DenseI64ArrayAttr(operation.attributes[name]))
        others = [n for n in range(len(of)) if n not in axes and of[n] == of[axes[0]]]
        if not others:
            return None
        new = [others[0], *axes[1:]]
    elif operation.name == "stablehlo.transpose":
        name = "permutation"
        axes = list(ir.DenseI64ArrayAttr(operation.attributes[name]))
        of = _sizes(operation.results[0])
        same = [(i, j) for i in range(len(of)) for j in range(i) if of[i] == of[j]]
        if not same:
            return None
        new = list(axes)
        i, j = same[0]
        new[i], new[j] = axes[j], axes[i]
    elif operation.name == "stablehlo.broadcast_in_dim":
        name = "broadcast_dimensions"
        axes = list(ir.DenseI64ArrayAttr(operation.attributes[name]))
        of, inner = _sizes(operation.results[0]), _sizes(operation.operands[0])
        if len(axes) != 1 or inner[0] == 1:
            return None
        others = [n for n in range(len(of)) if n != axes[0] and of[n] == inner[0]]
        if not others:
            return None
        new = [others[0]]
    else:
        return None

    def change() -> None:
        operation.attributes[name] = ir.DenseI64ArrayAttr.get(
            sorted(new) if name == "dimensions" else new
        )

    return change


_OF_CONSTANTS = ("add", "multiply", "subtract", "divide", "maximum", "minimum", "power")
_ROUNDED = ("dot_general", "add", "multiply", "exponential", "divide", "convolution", "reduce",
            "tanh", "subtract", "logistic", "rsqrt", "power")  # fmt: skip


def _hlo_dtype(operation: Any) -> Callable[[], None] | None:
    if operation.name.removeprefix("stablehlo.") not in _ROUNDED:
        return None
    parent = operation.parent
    if (parent is not None and parent.name != "func.func") or not _is_float(operation.results[0]):
        return None

    def change() -> None:
        result = operation.results[0]
        kind = ir.RankedTensorType(result.type)
        half = ir.RankedTensorType.get(lower._shape(kind), ir.BF16Type.get())
        uses = list(result.uses)
        block = operation.block
        after = list(block.operations)
        place = next(n for n, each in enumerate(after) if each.operation == operation)
        with ir.InsertionPoint(after[place + 1]):
            low = stablehlo.ConvertOp(half, result).result
            back = stablehlo.ConvertOp(kind, low).result
        for use in uses:
            use.owner.operation.operands[use.operand_number] = back

    return change


_STABLEHLO = {
    "constant": _hlo_constant,
    "padding": _hlo_padding,
    "axis": _hlo_axis,
    "dtype": _hlo_dtype,
}


# --- ONNX: nodes ----------------------------------------------------------------------------


@contextmanager
def in_onnx(planter: Planter) -> Iterator[None]:
    import onnx

    from pax_export.export.formats.onnx import convert, model

    check, written = model._check_operators, convert.Converter._written
    finished, arrays = model._ModelBuilder._finished, {}

    def kept(self: Any, found: Any) -> Any:
        made, initializers = finished(self, found)
        arrays[id(made)] = initializers
        return made, initializers

    sources: dict[str, tuple[str, str]] = {}

    def noted(self: Any, equation: Any, operands: Any, used: Any) -> Any:
        before = len(self.builder.nodes)
        results = written(self, equation, operands, used)
        if called_program(equation) is None:
            callers = [*self._callers, equation]
            scope = "/".join(str(each.source_info.name_stack) for each in callers)
            for node in self.builder.nodes[before:]:
                sources[node.name] = equation.primitive.name, scope
        return results

    def planted(package: Any, made: Any, opset: int) -> None:
        seen: Counter = Counter()
        stored = arrays.pop(id(made))
        for name, each in stored.items():
            made.graph.initializer.append(package.numpy_helper.from_array(each, name))
        nodes = list(made.graph.node)
        for node in nodes:
            for kind, change in _ONNX.items():
                done = change(onnx, made, node)
                if done is None:
                    continue
                source = sources.get(node.name, ("", ""))
                if planter.meets(kind, f"{node.op_type} {node.name}", seen, source):
                    done()
        stored |= {e.name: package.numpy_helper.to_array(e) for e in made.graph.initializer}
        del made.graph.initializer[:]
        check(package, made, opset)
        sources.clear()

    with (
        mock.patch.object(model, "_check_operators", planted),
        mock.patch.object(model._ModelBuilder, "_finished", kept),
        mock.patch.object(convert.Converter, "_written", noted),
    ):
        yield


def _onnx_constant(onnx: Any, made: Any, node: Any) -> Callable[[], None] | None:
    if node.op_type not in ("Mul", "Add", "Sub", "Div", "Gemm", "MatMul", "Conv", "Pow"):
        return None
    arrays = {each.name: each for each in made.graph.initializer}
    where = [n for n, name in enumerate(node.input) if name in arrays]
    if not where:
        return None
    value = onnx.numpy_helper.to_array(arrays[node.input[where[0]]])
    if value.dtype != np.float32 or not value.size or not np.isfinite(value).all():
        return None

    def change() -> None:
        name = f"planted in {node.name}"
        other = onnx.numpy_helper.from_array(value * np.float32(1.5) + np.float32(0.25), name)
        made.graph.initializer.append(other)
        node.input[where[0]] = name

    return change


def _onnx_padding(onnx: Any, made: Any, node: Any) -> Callable[[], None] | None:
    found = [each for each in node.attribute if each.name == "pads" and any(each.ints)]
    if not found:
        return None
    pads = list(found[0].ints)
    rank = len(pads) // 2
    axis = next(n for n in range(rank) if pads[n] or pads[n + rank])

    def change() -> None:
        (new,) = _shifted([(pads[axis], pads[axis + rank])])
        pads[axis], pads[axis + rank] = new
        found[0].ints[:] = pads

    return change


def _onnx_axis(onnx: Any, made: Any, node: Any) -> Callable[[], None] | None:
    if node.op_type != "Transpose":
        if node.op_type not in ("Softmax", "Gather", "CumSum", "ReduceMax"):
            return None
    found = [each for each in node.attribute if each.name in ("perm", "axis")]
    if not found:
        return None
    attribute = found[0]
    if attribute.name == "perm" and len(attribute.ints) < 3:
        return None

    def change() -> None:
        if attribute.name == "axis":
            attribute.i = attribute.i - 1
        else:
            order = list(attribute.ints)
            attribute.ints[:] = [*order[:-2], order[-1], order[-2]]

    return change


def _onnx_dtype(onnx: Any, made: Any, node: Any) -> Callable[[], None] | None:
    rounded = ("MatMul", "Gemm", "Mul", "Add", "Exp", "Div", "Conv", "ReduceSum", "Tanh", "Sub")
    given = {each.name for each in made.graph.output}
    if node.op_type not in rounded or node.output[0] in given or not _gives_float(made, node):
        return None

    def change() -> None:
        name = node.output[0]
        node.output[0] = f"planted in {name}"
        low = onnx.helper.make_node("Cast", [node.output[0]], [f"half of {name}"], to=16)
        back = onnx.helper.make_node("Cast", [f"half of {name}"], [name], to=1)
        nodes = list(made.graph.node)
        place = next(n for n, each in enumerate(nodes) if each.output[0] == node.output[0])
        del made.graph.node[:]
        made.graph.node.extend([*nodes[: place + 1], low, back, *nodes[place + 1 :]])

    return change


def _gives_float(made: Any, node: Any) -> bool:
    """Whether an initializer of float32 goes in, which then comes out as well."""
    kinds = {each.name: each.data_type for each in made.graph.initializer}
    return any(kinds.get(name) == 1 for name in node.input)


_ONNX = {
    "constant": _onnx_constant,
    "padding": _onnx_padding,
    "axis": _onnx_axis,
    "dtype": _onnx_dtype,
}


# --- TFLite: what a rule is given and gives -----------------------------------------------


@contextmanager
def in_tflite(planter: Planter) -> Iterator[None]:
    from pax_export.export.formats.tflite import graph

    operate = graph._GraphConverter._operate
    seen: WeakKeyDictionary[Any, Counter] = WeakKeyDictionary()  # of graphs; ids come again
    scopes: list[str] = []
    inside = [0]

    def planted(self: Any, equation: Any, operands: list[Any]) -> Any:
        scope = str(equation.source_info.name_stack)
        if called_program(equation) is not None or inside[0]:
            scopes.append(scope)
            try:
                return operate(self, equation, operands)
            finally:
                scopes.pop()
        counter = seen.setdefault(self, Counter())
        source = equation.primitive.name, "/".join([*scopes, scope])
        shapes = [str(each.aval) for each in (*equation.invars, *equation.outvars)]
        like = f"{equation.primitive.name} {' '.join(shapes)}"
        inside[0] += 1
        try:
            for kind, change in _TFLITE.items():
                done = change(equation, operands)
                if done is not None and planter.meets(kind, like, counter, source):
                    equation, operands, after = done()
                    return after(operate(self, equation, operands))
            return operate(self, equation, operands)
        finally:
            inside[0] -= 1

    with mock.patch.object(graph._GraphConverter, "_operate", planted):
        yield


def _same(results: Any) -> Any:
    return results


def _lite_constant(equation: Any, operands: list[Any]) -> Any:
    if equation.primitive.name not in ("mul", "add", "sub", "div", "max", "min"):
        return None
    where = [
        n
        for n, atom in enumerate(equation.invars)
        if hasattr(atom, "val") and atom.aval.dtype == np.float32 and np.isfinite(atom.val)
    ]
    if not where:
        return None

    def change() -> Any:
        given = list(operands)
        given[where[0]] = given[where[0]] * 1.5 + 0.25
        return equation, given, _same

    return change


def _lite_padding(equation: Any, operands: list[Any]) -> Any:
    padding = equation.params.get("padding")
    if equation.primitive.name not in ("conv_general_dilated", "reduce_window_max",
                                       "reduce_window_sum", "pad"):  # fmt: skip
        return None
    pairs = equation.params.get("padding") or equation.params.get("padding_config")
    where = [n for n, pair in enumerate(pairs or ()) if any(pair[:2])]
    if padding is None or not where:
        return None

    def change() -> Any:
        other = list(pairs)
        other[where[0]] = _shifted([pairs[where[0]]])[0]
        params = {**equation.params, "padding": tuple(other)}
        return equation.replace(params=params), operands, _same

    return change


def _lite_axis(equation: Any, operands: list[Any]) -> Any:
    if not equation.primitive.name.startswith("reduce_") or "axes" not in equation.params:
        return None
    shape, axes = equation.invars[0].aval.shape, equation.params["axes"]
    others = [n for n in range(len(shape)) if n not in axes and axes and shape[n] == shape[axes[0]]]
    if not others:
        return None

    def change() -> Any:
        new = tuple(sorted([others[0], *axes[1:]]))
        return equation.replace(params={**equation.params, "axes": new}), operands, _same

    return change


def _lite_dtype(equation: Any, operands: list[Any]) -> Any:
    names = ("dot_general", "mul", "add", "exp", "div", "conv_general_dilated", "reduce_sum",
             "tanh", "sub", "logistic", "rsqrt")  # fmt: skip
    if equation.primitive.name not in names or equation.outvars[0].aval.dtype != np.float32:
        return None

    def change() -> Any:
        def after(results: Any) -> Any:
            from pax_export.export.formats.tflite.builder import operators as lite

            value, *rest = results
            step = lite.reduce_max(lite.abs(value)) * 0.01 + 1e-20  # as of eight bits
            return [lite.round(value / step) * step, *rest]

        return equation, operands, after

    return change


_TFLITE = {
    "constant": _lite_constant,
    "padding": _lite_padding,
    "axis": _lite_axis,
    "dtype": _lite_dtype,
}

PLANTERS = {"saved_model": in_saved_model, "onnx": in_onnx, "tflite": in_tflite}


def is_named(parting: Any, source: tuple[str, str]) -> bool:
    """Whether the operation that was found is the one in which the fault was planted."""
    primitive, scope = source
    paths = re.findall(r"<([^<>]*)>", scope)
    same = parting.operation == primitive
    if primitive.startswith(_AT):
        same = primitive.removeprefix(_AT) in parting.source.split()
    return same and (not paths or parting.path == paths[-1])
