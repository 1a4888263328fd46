"""From a traced program to an ONNX model, by jax2onnx."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import lax

from pax_export._errors import UnsupportedOperationError
from pax_export._jaxpr import call_inlined, jaxpr_sources
from pax_export._optional import require
from pax_export.export.tracing.programs import Program


def converted(
    program: Program, names: Sequence[str], weights: Mapping[str, Any], opset: int
) -> bytes:
    """Converts a program to an ONNX model.

    Args:
        program: the program.
        names: of the weights that are its leaves and constants, in order.
        weights: by name.
        opset: the version of ONNX's operators.
    """
    library = require("jax2onnx", "onnx", "to_onnx")
    taken = {name: jax.ShapeDtypeStruct(np.shape(v), v.dtype) for name, v in weights.items()}
    structs = program.traced.structs[len(program.traced.structs) - len(program.inputs.flat) :]
    inputs = [entry.name for entry in program.inputs.flat]
    with _quiet():
        try:
            model = library.to_onnx(
                _written_out(program, names, taken, structs),
                inputs=[*taken.values(), *structs],
                input_names=[*(f"weight:{name}" for name in taken), *inputs],
                output_names=list(program.output_names),
                model_name="pax_export",
                opset=opset,
                enable_double_precision=bool(jax.config.read("jax_enable_x64")),
            )
        except Exception as error:  # its rules fail with errors of all kinds
            raise _refused(error, program) from error
    _check_operators(model, opset)
    _store_weights(model, weights)
    return model.SerializeToString(deterministic=True)


def _written_out(
    program: Program, names: Sequence[str], taken: Mapping[str, Any], structs: Sequence[Any]
) -> Any:
    """The program as a function of its weights and inputs, without a call in it.

    jax2onnx exchanges functions of jax for its own while it traces, and these
    know neither every symbolic dimension nor every version of jax.  A program
    that is traced already, and whose calls are written out, does not meet them.
    """
    traced = program.traced
    leaves = len(traced.structs) - len(program.inputs.flat)

    def run(*operands: Any) -> list[Any]:
        weights = dict(zip(taken, operands))
        values = [weights[name] for name in names]
        constants = {id(old): new for old, new in zip(traced.constants, values[leaves:])}
        given = [*values[:leaves], *operands[len(taken) :]]
        results = call_inlined(traced.program, constants, given, RULES)
        return results[: len(program.output_names)]

    written = jax.make_jaxpr(run)(*taken.values(), *structs)
    return lambda *operands: call_inlined(written, {}, operands, {})


def _check_operators(model: Any, opset: int) -> None:
    """Refuses operators that the opset does not have yet, which the converter may write."""
    onnx = require("onnx", "onnx", "to_onnx")
    newer: dict[str, int] = {}
    for node in _nodes(model.graph):
        if not node.domain and not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            newer[node.op_type] = onnx.defs.get_schema(node.op_type).since_version
    if newer:
        raise UnsupportedOperationError(
            "This opset of ONNX does not have all operators of the model: "
            + ", ".join(sorted(newer))
            + ".",
            got=f"opset={opset}",
            write=f"opset={max(newer.values())}, if what will run the model has it",
        )


def _store_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Makes initializers, with the names of the leaves, of the inputs that stand for weights."""
    onnx = require("onnx", "onnx", "to_onnx")
    used = {name for node in _nodes(model.graph) for name in node.input}
    used.update(output.name for output in model.graph.output)
    kept = [entry for entry in model.graph.input if not entry.name.startswith("weight:")]
    for name, value in weights.items():
        if f"weight:{name}" in used:
            tensor = onnx.numpy_helper.from_array(np.asarray(value), f"weight:{name}")
            model.graph.initializer.append(tensor)
    del model.graph.input[:]
    model.graph.input.extend(kept)
    _rename(model.graph, {f"weight:{name}": name for name in weights}, onnx)


def _nodes(graph: Any) -> Iterator[Any]:
    """All nodes, those of the bodies of loops and branches too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _rename(graph: Any, wished: Mapping[str, str], onnx: Any) -> None:
    """Gives weights the names of their leaves, where nothing else has these."""
    taken = {name for node in _nodes(graph) for name in (*node.input, *node.output)}
    taken.update(entry.name for entry in graph.initializer)
    new = {old: name for old, name in wished.items() if name not in taken}
    for node in _nodes(graph):
        for index, name in enumerate(node.input):
            node.input[index] = new.get(name, name)
    for entry in (*graph.initializer, *graph.value_info):
        entry.name = new.get(entry.name, entry.name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps remarks of the converter about types that it does not write to itself."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _refused(error: Exception, program: Program) -> UnsupportedOperationError:
    match = re.search(r"primitive '?([\w-]+)'?", str(error))
    name = match[1] if match else ""
    places = dict.fromkeys(jaxpr_sources(program.traced.program, name)) if name else {}
    return UnsupportedOperationError(
        f"ONNX has no rule for the operation {name}."
        if name
        else "ONNX cannot express this model.",
        where=", ".join(places) or program.key,
        got=re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:500],
        write="the same in other operations of jax.numpy and jax.lax, a size instead of a "
        "symbolic dimension, or another target, e.g. to_saved_model",
    )


Sizes = Sequence[int]


def _pooled(combine: Callable, neutral: Callable) -> Callable:
    def rule(
        x: Any,
        *,
        window_dimensions: Sizes,
        window_strides: Sizes,
        padding: Sequence[tuple[int, int]],
        base_dilation: Sizes,
        window_dilation: Sizes,
    ) -> Any:
        negative = any(size < 0 for pair in padding for size in pair)
        if negative or any(size != 1 for size in base_dilation):
            return None  # nobody writes that in a model; the converter may refuse it
        for axis, width in enumerate(window_dimensions):
            low, high = padding[axis]
            step, apart = window_strides[axis], window_dilation[axis]
            if (width, step, low, high) != (1, 1, 0, 0):
                padded = _padded(x, axis, low, high, neutral(x.dtype))
                x = _slid(combine, padded, axis, width, step, apart)
        return x

    return rule


def _padded(x: Any, axis: int, low: int, high: int, value: Any) -> Any:
    # Not lax.pad: jax2onnx's rule for it does not take a symbolic batch.
    def block(size: int) -> list[Any]:
        shape = [size if index == axis else length for index, length in enumerate(x.shape)]
        return [lax.full(shape, value, x.dtype)] if size else []

    parts = [*block(low), x, *block(high)]
    return lax.concatenate(parts, axis) if len(parts) > 1 else x


def _slid(combine: Callable, x: Any, axis: int, width: int, step: int, apart: int) -> Any:
    count = (x.shape[axis] - (width - 1) * apart - 1) // step + 1
    slices = [
        lax.slice_in_dim(x, start, start + (count - 1) * step + 1, step, axis)
        for start in range(0, width * apart, apart)
    ]
    return functools.reduce(combine, slices)


def _least(dtype: Any) -> np.ndarray:
    if jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jax.numpy.iinfo(dtype).min, dtype)


#: By the name of the primitive: a function of its operands and parameters.
RULES: dict[str, Callable] = {
    "reduce_window_max": _pooled(lax.max, _least),
    "reduce_window_sum": _pooled(lax.add, lambda dtype: np.zeros((), dtype)),
}
