"""`to_tflite`: exports a model as a TFLite file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.files import checksums
from pax_export._foundations.optional import find, require
from pax_export.export.artifact.calling import LoadedFile
from pax_export.export.artifact.embedded import append_zip
from pax_export.export.artifact.options import ExportOptions, Request, takes_options
from pax_export.export.artifact.report import SHA256, Report, package_versions, report_text
from pax_export.export.formats.tflite import TFLITE
from pax_export.export.formats.tflite.builder.encode import encode, graphs_of
from pax_export.export.formats.tflite.builder.fusions import (
    computed_weights,
    multiply_integers,
    simplify,
)
from pax_export.export.formats.tflite.builder.graph import constants_shared
from pax_export.export.formats.tflite.builder.integers import (
    arithmetic,
    read_integers,
    store_integers,
    store_small,
)
from pax_export.export.formats.tflite.graph import Weights, make_signature
from pax_export.export.formats.tflite.run import opened, run
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.pipeline.format_exporter import (
    FormatExporter,
    ProgramContents,
    store_of,
)
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import not_finite, run_export
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.validation.integers import (
    Arithmetic,
    arithmetic_details,
    check_integers,
    kernels_add,
)
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.serve import Run

_LITERT = "ai_edge_litert.interpreter"
#: How much farther from jax than rounding the numbers of a quantized model are.
_FACTORS = {None: 1.0, "float16": 50.0, "dynamic": 1000.0}


@takes_options
def to_tflite(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    quantize: Literal["float16", "dynamic"] | None = None,
    fold: bool = True,
    exact: bool = False,
    accuracy_level: Literal[1, 4] = 4,
    **options: Unpack[ExportOptions],
) -> Report:
    """Writes a model as a TFLite file for LiteRT on phones and small computers.

    It consists of TFLite's built-in operators only, and is written without TensorFlow and its
    converter.

    Args:
        model: as for `to_saved_model`.
        path: the file to create, usually ``*.tflite``.
        inputs: as for `to_saved_model`; symbolic dimensions may change from call to call, at some
            cost: static sizes make a smaller and faster model.
        quantize: ``"float16"`` stores the weights as float16; ``"dynamic"`` stores large ones as
            int8, and computes with these.  Integers from layer to layer are those of a net that
            ``pax.quantize(net, batches, activations="static")`` returns.
        fold: compute at export what depends only on weights: a BatchNorm is folded into the
            convolution before it.  The report names these weights.  With False each is in the
            file, some of them in TFLite's layout.
        exact: compute functions such as ``softmax`` and ``gelu`` by jax's own operations instead
            of TFLite's operators for them.
        accuracy_level: the accuracy of products of quantized weights (`pax_export.quantize`).  4:
            by LiteRT's integer kernels, which round activations to 8 bits; the report has their
            difference.  1: in float32, at most as fast as float32.
        **options: those of every writer, `ExportOptions`.

    Returns:
        The report, which can be printed, and is stored in the file (``unzip -p model.tflite
        pax_export.json`` prints it).

    Raises:
        UnsupportedOperationError: TFLite cannot express an operation; the message names it.
        PaxError: a subclass for each error, as for `to_saved_model`.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from pax_export.export import load, spec, to_tflite
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = to_tflite(double, folder + "/double.tflite", spec("2, 3"))
        ...     doubled = load(folder + "/double.tflite")
        ...     doubled([[1, 2, 3], [4, 5, 6]]).tolist()
        [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]

    """
    int8 = 'for int8 the net that pax.quantize(net, [x], activations="static") returns'
    checked_choice(quantize, (None, "float16", "dynamic"), "quantize", otherwise=int8)
    checked_choice(accuracy_level, (1, 4), "accuracy_level")
    request = Request.of(to_tflite, model, path, inputs, **options)
    wanted = TfliteOptions(quantize, fold=fold, exact=exact, accuracy_level=accuracy_level)
    return run_export(_TfliteExporter(wanted, request.calls(request.keys)), request)


@dataclass(frozen=True)
class TfliteOptions:
    quantize: str | None
    fold: bool
    exact: bool
    accuracy_level: int


@dataclass(frozen=True)
class _TfliteExporter(FormatExporter):
    format = TFLITE
    one_by_one = True

    options: TfliteOptions
    examples: Mapping[str, Sequence[Any]]

    @property
    def factor(self) -> float:
        return _FACTORS[self.options.quantize]

    def find(self, request: Request) -> None:
        for package in ("flatbuffers", "ai_edge_litert"):
            find(package, "tflite", "to_tflite")

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> _TfliteContents:
        store = store_of(model, programs)
        return _TfliteContents(
            model.name, store.infos(), programs, store, self.examples, self.options
        )

    def run_here(self) -> Run:
        return run


class _Written(NamedTuple):
    """The parts of the report about the written file: what is folded and not optimized."""

    folded: list[str]
    notes: list[str]
    arithmetic: Arithmetic


@dataclass(frozen=True)
class _TfliteContents(ProgramContents):
    options: TfliteOptions
    #: Report entries about quantized weights, once known.
    integers: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> _Written:
        if self.options.quantize == "dynamic" and (names := not_finite(self.stored())):
            raise UnsupportedOperationError(
                "Weights that are NaN or infinite cannot be stored as int8.",
                where=names,
                got='quantize="dynamic"',
                write="finite weights, from before the training diverged",
            )
        options = self.options
        with constants_shared():
            weights = Weights(self.store)
            flags = options.exact, options.fold, options.accuracy_level == 4
            converted = [make_signature(each, weights, *flags) for each in self.programs]
            signatures = [signature for signature, _ in converted]
            graphs = [each.graph for each in signatures]
            notes = dict.fromkeys(note for _, notes in converted for note in notes)
            for each in graphs_of(graphs):
                simplify(each)
            folded = computed_weights(graphs) if options.fold else ()
            if options.accuracy_level == 4:
                multiply_integers(graphs)
            store_integers(graphs, options.accuracy_level)
        if options.quantize is not None:
            store_small(graphs, options.quantize)
        path.write_bytes(encode(signatures))
        found = read_integers(graphs, path, self.stored())
        self.integers.update(check_integers(found, self.stored()))
        return _Written(sorted(folded), list(notes), arithmetic(graphs))

    def test(self, exporter: FormatExporter, path: Path, run: ExportRun) -> dict[str, float]:
        if not self.integers or self.options.accuracy_level == 1:
            return super().test(exporter, path, run)
        # Kernels that round activations do not show whether a file is right: the same one
        # without them is tested.
        options = replace(self.options, accuracy_level=1)
        errors = replace(self, options=options, integers={}).test_apart(exporter, run)
        signatures = {each.key: signature_info(each) for each in self.programs}
        _, call = opened(str(path), signatures)
        self.integers["kernels add"] = kernels_add(self.cases(Budget()), call)
        return errors

    def report_fields(self, path: Path, written: _Written, run: ExportRun) -> dict[str, Any]:
        details = {
            "runs_in": "LiteRT",
            SHA256: checksums.digest(path),
            "folded": written.folded,
            "kept": written.notes,
            "quantize": self.options.quantize,
            **arithmetic_details(self.integers, self.options.accuracy_level, [written.arithmetic]),
        }
        return {
            "signatures": {each.key: signature_info(each) for each in self.programs},
            "graph_bytes": path.stat().st_size,
            "platforms": ("cpu",),
            "versions": package_versions("flatbuffers"),
            "details": {name: value for name, value in details.items() if value},
        }

    def write_report(self, report: Report, path: Path, written: Any) -> None:
        append_zip(path, report_text(report))


def load(path: Path, report: Report) -> LoadedFile:
    require(_LITERT, "tflite", "load")
    return LoadedFile(report, *opened(str(path), report.signatures))
