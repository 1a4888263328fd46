"""`to_onnx`: exports a model as an ONNX file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

from pax_export._foundations.check import checked_choice, checked_integer
from pax_export._foundations.errors import (
    InvalidArgumentError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export._foundations.files import checksums
from pax_export._foundations.optional import find, require
from pax_export.export.artifact.calling import LoadedFile
from pax_export.export.artifact.embedded import append_field
from pax_export.export.artifact.options import ExportOptions, Request, takes_options
from pax_export.export.artifact.report import (
    DATA,
    DATA_SHA256,
    SHA256,
    TESTED_IN,
    Report,
    package_versions,
    report_text,
)
from pax_export.export.formats.onnx import ONNX, file
from pax_export.export.formats.onnx import runtimes as other_runtimes
from pax_export.export.formats.onnx.model import OnnxOptions, converted, with_names_of_their_own
from pax_export.export.formats.onnx.run import opened
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.pipeline.format_exporter import (
    FormatExporter,
    ProgramContents,
    store_of,
)
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.portable import has_half_between
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.validation.integers import (
    Arithmetic,
    arithmetic_details,
    check_integers,
    kernels_add,
    whole_leaves,
)
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.validate import validate as validated_calls

OPSET = 21
#: Reductions over axes that are operands, bits, and scatters of extremes are as old as this.
_OLDEST = 18
#: The first onnxruntime that reads an opset.
_LEAST = {18: " 1.14 or newer", 19: " 1.15 or newer", 20: " 1.17 or newer", 21: " 1.18 or newer"}


@takes_options
def to_onnx(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    opset: int = OPSET,
    fold: bool = True,
    exact: bool = False,
    accuracy_level: Literal[1, 4] = 4,
    external_data: bool = False,
    runtimes: Sequence[str] = (),
    **options: Unpack[ExportOptions],
) -> Report:
    """Writes a model as an ONNX file for onnxruntime and other runtimes.

    Operations of jax become operators of ONNX.  The weights are initializers with the names of
    the leaves.

    Args:
        model: as for `to_saved_model`.
        path: the file to create, usually ``*.onnx``.
        inputs: as for `to_saved_model`; symbolic dimensions keep their names.
        opset: the version of ONNX's operators, 18 or newer, that the installed onnx has.
        fold: compute at export what depends only on weights: a BatchNorm is folded into the
            convolution before it, kernels get the runtime's layout.  The report names these
            weights.  With False each leaf is in the file unchanged.
        exact: NaN, ties and signs of zero as in jax.  With False the runtime's own operators are
            used for ``relu``, ``clip``, ``gelu``, ``softmax``, pools and others; the report says
            which may differ.
        accuracy_level: the accuracy of products of quantized weights.  4: after a
            `DequantizeLinear`, for which onnxruntime has kernels that round activations to 8
            bits; the report has their difference.  1: in float32, at the speed of float32.
        external_data: write weights of 1 KiB and more into a separate file
            (``model.onnx.HASH.data``, named in the model).  Those of models of more than 2 GiB, the
            limit of an ONNX file, always are.
        runtimes: other runtimes to validate in: ``"openvino"``, ``"iree"``, ``"web"``
            (onnxruntime-web, in Node.js).  The report has their differences from jax.
        **options: those of every writer, `ExportOptions`.

    Returns:
        The report, which can be printed, and is stored in the file as the entry
        ``pax_export.json`` of its metadata.

    Raises:
        UnsupportedOperationError: ONNX cannot express an operation; the message has the layer and
            line that use it.
        PaxError: a subclass for each error, as for `to_saved_model`.

    Example:
        >>> import importlib.util, tempfile, jax.numpy as jnp
        >>> from pax_export.export import spec, to_onnx
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> if importlib.util.find_spec("onnxruntime"):  # pip install "pax-export[onnx]"
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         report = to_onnx(double, folder + "/double.onnx", spec("batch, 3"))

    """
    checked_integer(opset, "opset", 1, what="An opset", write=f"opset={OPSET}")
    checked_choice(accuracy_level, (1, 4), "accuracy_level")
    if opset < _OLDEST:
        raise UnsupportedOperationError(
            f"Models are written for opset {_OLDEST} and newer ones.",
            got=f"opset={opset}",
            write=f"opset={_OLDEST}",
        )
    request = Request.of(to_onnx, model, path, inputs, **options)
    keys = request.keys
    if len(keys) != 1:
        raise InvalidArgumentError(
            "An ONNX file holds one function.",
            got=f"methods={sorted(keys)}",
            write="a file for each method",
        )
    wanted = OnnxOptions(
        opset=opset,
        fold=fold,
        exact=exact,
        accuracy_level=accuracy_level,
        external_data=external_data,
    )
    names = (runtimes,) if isinstance(runtimes, str) else tuple(runtimes)
    others = tuple(name for name in names if name != "onnxruntime")  # which is asked anyway
    for name in others:
        checked_choice(name, ("onnxruntime", *other_runtimes.NAMES), "runtimes")
    if others and request.validate in (False, "process"):
        raise InvalidArgumentError(
            "Other runtimes require the default validation.",
            got=f"runtimes={runtimes!r}, validate={request.validate!r}",
            write="validate=True",
        )
    return run_export(OnnxExporter(wanted, request.calls(keys), others), request)


@dataclass(frozen=True)
class OnnxExporter(FormatExporter):
    format = ONNX
    loads = "onnx"
    one_by_one = True

    options: OnnxOptions
    examples: Mapping[str, Sequence[Any]]
    runtimes: tuple[str, ...] = ()

    def find(self, request: Request) -> None:
        for package in ("onnx", *(["onnxruntime"] if request.validate else [])):
            find(package, "onnx", "to_onnx")
        other_runtimes.check(self.runtimes)

    def partial(self) -> OnnxExporter:
        return dataclasses.replace(self, runtimes=())

    def load(self, request: Request) -> None:
        newest = require("onnx", "onnx", "to_onnx").defs.onnx_opset_version()
        if self.options.opset > newest:
            raise UnsupportedOperationError(
                f"The installed onnx writes models for opsets up to {newest}.",
                got=f"opset={self.options.opset}",
                write=f"opset={newest}",
            )
        if request.validate:
            require("onnxruntime", "onnx", "to_onnx")

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> OnnxContents:
        named = list(map(with_names_of_their_own, programs))
        store = store_of(model, named)
        infos = store.infos()
        return OnnxContents(model.name, infos, named, store, self.examples, self.options)


class OnnxModelFile(NamedTuple):
    folded: tuple[str, ...]
    notes: tuple[str, ...]
    arithmetic: Arithmetic
    data: file.ExternalData | None


@dataclass(frozen=True)
class OnnxContents(ProgramContents):
    options: OnnxOptions
    #: Report entries about quantized weights, once known.
    integers: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: By the names of other runtimes that were asked, the largest difference there.
    tested_in: dict[str, float] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> OnnxModelFile:
        (program,) = self.programs
        conversion = converted(program, self.store, self.options)
        onnx = require("onnx", "onnx", "to_onnx")
        data = file.write(
            onnx, conversion.model, conversion.arrays, path, self.options.external_data
        )
        whole = {each.leaf: each for each in whole_leaves(conversion.arrays, self.stored())}
        if quantized := {**whole, **conversion.quantized}:  # those of a loop are whole leaves
            arrays = {each.name: each for each in onnx.load(path).graph.initializer}
            to_array = onnx.numpy_helper.to_array
            written = ((each, to_array(arrays[name])) for name, each in quantized.items())
            self.integers.update(check_integers(written, self.stored()))
        return OnnxModelFile(conversion.folded, conversion.notes, conversion.arithmetic, data)

    def test(self, exporter: FormatExporter, path: Path, run: ExportRun) -> dict[str, float]:
        level = self.options.accuracy_level if self.integers else 1
        is_rounded = any(name.endswith(".outputs.low") for name in self.stored())
        programs = (each.traced.program for each in self.programs)
        if level == 4 and (is_rounded or any(map(has_half_between, programs))):
            options = dataclasses.replace(self.options, accuracy_level=1)
            exactly = dataclasses.replace(self, options=options, integers={})
            errors = exactly.test_apart(exporter, run)  # and with half precision
        else:
            errors = super().test(exporter, path, run)
            for name in exporter.runtimes if isinstance(exporter, OnnxExporter) else ():
                self.tested_in[name] = self._largest_error(name, exporter, path, run)
        if level == 4:
            _, call = opened(str(path))
            self.integers["kernels add"] = kernels_add(self.cases(Budget()), call)
        return errors

    def _largest_error(
        self, name: str, exporter: FormatExporter, path: Path, run: ExportRun
    ) -> float:
        budget = Budget(probes="few")
        cases = self.cases(budget)
        here = partial(other_runtimes.run, name)
        try:
            errors = validated_calls(exporter.format, path, cases, False, exporter.factor, here)
        except ValidationError as error:
            error.where = f"{error.where}, in {name}"
            raise
        far = dict.fromkeys(f"{each.case.signature}: {each.output}" for each in budget.differences)
        if far:
            outputs = ", ".join(far)
            text = f"differs from jax in {name} at: {outputs} where inputs are up to 1e4"
            run.budget.differs.append(text)
        return max(errors.values(), default=0.0)

    def report_fields(self, path: Path, written: OnnxModelFile, run: ExportRun) -> dict[str, Any]:
        opset, data = self.options.opset, written.data
        details = {
            "folded": list(written.folded),
            "kept": list(written.notes),
            **arithmetic_details(self.integers, self.options.accuracy_level, [written.arithmetic]),
            TESTED_IN: self.tested_in,
            "opset": opset,
            **({DATA: data.name, DATA_SHA256: data.digest} if data else {}),
            "runs_in": f"onnxruntime{_LEAST.get(opset, '')}, and what reads opset {opset}",
            SHA256: checksums.digest(path),
        }
        return {
            "signatures": {each.key: signature_info(each) for each in self.programs},
            "graph_bytes": path.stat().st_size,
            "platforms": ("cpu", "cuda", "rocm"),
            "versions": package_versions("onnx"),
            "details": {name: value for name, value in details.items() if value},
        }

    def write_report(self, report: Report, path: Path, written: Any) -> None:
        append_field(path, report_text(report))


def load(path: Path, report: Report) -> LoadedFile:
    require("onnxruntime", "onnx", "load")
    return LoadedFile(report, *opened(str(path)))
