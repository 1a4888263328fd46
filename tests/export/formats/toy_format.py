"""A format of its own in one file: the variables as npz, and a program that knows one model.

What `CONTRIBUTING.md` says of a new format is done here, for a format that runs nothing but
``x @ weight + bias`` with numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pax_export.export.artifact.embedded import append_zip
from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.report import package_versions, report_text
from pax_export.export.formats.loaded_file import LoadedFile
from pax_export.export.lowering.lowered_model import LoweredModel, lower
from pax_export.export.pipeline.format_exporter import Contents, FormatExporter, Request
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.validation.cases import output_cases

TOY = Format(
    name="toy",
    title="a toy",
    export="tests.export.formats.toy_format:to_toy",
    load="tests.export.formats.toy_format:load",
    run="tests.export.formats.toy_format:run",
    suffix=".toy",
    options={"scale": {"type": float, "help": "of toy: what the bias is multiplied by"}},
    run_imports=("jax", "pax_export"),
)


def to_toy(
    model, path, inputs, *,
    kwargs=None, methods=None, constraints=(), scale=1.0, validate=True, overwrite=False,
):  # fmt: skip
    request = Request(model, path, inputs, kwargs, methods, constraints, validate, overwrite)
    return run_export(ToyExporter(scale), request)


@dataclass(frozen=True)
class ToyExporter(FormatExporter):
    format = TOY

    scale: float

    def lower(self, model, programs, request):
        lowered = lower(model, programs, "frozen", False, ("cpu",), vjp_order=0)
        return ToyContents(model.name, lowered.store.infos(), lowered, self.scale)


@dataclass(frozen=True)
class ToyContents(Contents):
    lowered: LoweredModel
    scale: float

    def write(self, place):
        arrays = {each.name: np.asarray(each.value) for each in self.lowered.store.variables}
        with place.open("wb") as file:
            np.savez(file, weight=arrays["weight"], bias=self.scale * arrays["bias"])

    def cases(self, budget):
        return output_cases(self.lowered.programs[0], self.lowered.store, budget)

    def report_fields(self, place, written, run):
        return {
            "signatures": self.lowered.signature_infos(),
            "graph_bytes": 0,
            "platforms": ("cpu",),
            "versions": package_versions(),
            "details": {"runs_in": "numpy"},
        }

    def write_report(self, report, place, written):
        append_zip(place, report_text(report))


def function(path):
    with np.load(path) as stored:
        weight, bias = stored["weight"], stored["bias"]
    return lambda inputs: {"output": (inputs["x"] @ weight + bias).astype(np.float32)}


def run(path, cases):
    return [function(path)(case["inputs"]) for case in cases]


def load(path: Path, report):
    call = function(path)
    return LoadedFile(report, None, lambda key, inputs: call(inputs))
