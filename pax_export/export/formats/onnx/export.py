"""`to_onnx`: a model in, a file for onnxruntime and its like, and a report out."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from pax_export._errors import ExportPathError, InvalidArgumentError, UnsupportedOperationError
from pax_export._files import bytes_text, checksums
from pax_export._jaxpr import call_inlined, jaxpr_sources
from pax_export._optional import find, require
from pax_export.export.artifact.embedded import append_field
from pax_export.export.artifact.formats import ONNX
from pax_export.export.artifact.report import SHA256, Report, package_versions, report_text
from pax_export.export.formats.loaded_file import LoadedFile
from pax_export.export.formats.onnx.run import opened
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline.run_export import Request, Writer, run_export
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program, refuse_changes
from pax_export.export.validation.cases import output_cases
from pax_export.export.validation.validate import Case

OPSET = 21
#: A protobuf message, and so an ONNX file, cannot be longer.
_LARGEST = 2**31 - 1


def to_onnx(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    methods: Mapping[str, Any] | None = None,
    constraints: Sequence[str] = (),
    opset: int = OPSET,
    validate: bool | Literal["full", "process"] = True,
    overwrite: bool = False,
    sign: str | os.PathLike[str] | None = None,
) -> Report:
    """Writes a model as an ONNX file, which onnxruntime and many others run.

    jax2onnx converts it.  The weights are initializers with the names of the
    leaves.

    Args:
        model: as for `to_saved_model`.
        path: the file to make, usually ``*.onnx``.
        inputs: as for `to_saved_model`; symbolic dimensions keep their names.
        kwargs: as for `to_saved_model`.
        methods: as for `to_saved_model`, but one only: an ONNX file holds one
            function.
        constraints: as for `to_saved_model`.
        opset: the version of ONNX's operators to write.
        validate: load what was written, make calls at several sizes with
            onnxruntime and compare with jax; ``"process"`` does it in a fresh
            process without jax.
        overwrite: replace an export of `pax_export` that is there; nothing else is
            ever replaced.
        sign: the file of a private key: the export is signed, in a file beside it
            (``model.onnx.sig``), for ``load(path, verify=...)`` with the public key.

    Returns:
        The report, which can be printed, and lies in the file as the entry
        ``pax_export.json`` of its metadata.

    Raises:
        UnsupportedOperationError: ONNX has no such operation; it is named, with
            the layer and line that use it.
        PaxError: of a class for each mistake, as for `to_saved_model`.

    Example:
        >>> import importlib.util, tempfile, jax.numpy as jnp
        >>> from pax_export.export import spec, to_onnx
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> if importlib.util.find_spec("jax2onnx"):  # pip install "pax-export[onnx]"
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         report = to_onnx(double, folder + "/double.onnx", spec("batch, 3"))
    """
    if isinstance(opset, bool) or not isinstance(opset, int) or opset < 1:
        raise InvalidArgumentError(
            "An opset is a number.", got=f"opset={opset!r}", write=f"opset={OPSET}"
        )
    if methods is not None and len(methods) != 1:
        raise InvalidArgumentError(
            "An ONNX file holds one function.",
            got=f"methods={sorted(methods)}",
            write="a file for each method",
        )
    given = inputs, kwargs, methods, constraints, validate, overwrite, sign
    request = Request(model, path, *given)
    return run_export(_OnnxWriter(opset), request)


class _OnnxWriter(Writer):
    format = ONNX
    loads = "jax2onnx"

    def __init__(self, opset: int):
        self._opset = opset

    def find(self, request: Request) -> None:
        for package in ("jax2onnx", *(["onnxruntime"] if request.validate else [])):
            find(package, "onnx", "to_onnx")

    def load(self, request: Request) -> None:
        require("jax2onnx", "onnx", "to_onnx")
        if request.validate:
            require("onnxruntime", "onnx", "to_onnx")

    def lower(self, model: Exportable, programs: Sequence[Program]) -> None:
        (self._program,) = programs
        refuse_changes(self._program, model.leaves, set(self._program.read))
        self._store = Store(model.leaves, (), trainable=True)
        constants = map(self._store.of_constant, self._program.traced.constants)
        places = [*self._store.of_leaf, *constants]
        self._names = [self._store.variables[place].name for place in places]
        self.variables = self._store.infos()
        if self.needed() > _LARGEST:
            raise UnsupportedOperationError(
                "An ONNX file holds 2 GiB at most.",
                got=bytes_text(self.needed()),
                write="fewer bits, e.g. bfloat16 weights, or another target, e.g. to_stablehlo",
            )

    def write(self, place: Path) -> None:
        place.write_bytes(converted(self._program, self._names, self.stored(), self._opset))

    def stored(self) -> Mapping[str, Any]:
        return {each.name: each.value for each in self._store.variables}

    def cases(self) -> list[Case]:
        return output_cases(self._program, self._store, self.budget)

    def facts(self, place: Path) -> dict[str, Any]:
        runs_in = f"onnxruntime, and what reads opset {self._opset}"
        return {
            "signatures": {self._program.key: signature_info(self._program)},
            "graph_bytes": place.stat().st_size,
            "platforms": ("cpu", "cuda", "rocm"),
            "versions": package_versions("jax2onnx", "onnx"),
            "details": {
                "opset": self._opset,
                "runs_in": runs_in,
                SHA256: checksums.digest(place),
            },
        }

    def attach(self, report: Report, place: Path) -> None:
        append_field(place, report_text(report))


def load(path: Path, report: Report) -> LoadedFile:
    require("onnxruntime", "onnx", "load")
    try:
        return LoadedFile(report, *opened(str(path)))
    except Exception as error:  # onnxruntime's errors have no common class
        raise ExportPathError(
            "onnxruntime cannot read this file.", where=str(path), got=str(error)[:500]
        ) from error


def converted(
    program: Program, names: Sequence[str], weights: Mapping[str, Any], opset: int
) -> bytes:
    """Converts a program to an ONNX model of a version of ONNX's operators.

    `names` are those of the weights that are its leaves and constants, in order.
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
