"""`export_as`: exports a model in a format of another distribution."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.types import Equation, TracedProgram
from pax_export.export.artifact.embedded import append_zip
from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.options import ExportOptions, Request, takes_options
from pax_export.export.artifact.report import Report, package_versions, report_text
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.pipeline.format_exporter import (
    FormatExporter,
    ProgramContents,
    portable_program,
    store_of,
)
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.portable import PassOptions, PortableProgram, Weight, decompose, optimized
from pax_export.export.tracing.exportable import Exportable, Model
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import attach_operations, other_target

_AS_TRACED = PassOptions(fold=False, keep=False, move=False)


@dataclass(frozen=True)
class FormatProgram:
    """One signature of a model, for the writer of a format.

    Attributes:
        key: the signature key, e.g. ``"serving_default"``.
        jaxpr: a `jax.extend.core.ClosedJaxpr`.  Its operands are the weights, then the inputs; its
            results are the outputs.  Calls are inlined; loops and branches are jax's own.
        weights: the arrays that the program reads, by name, in the order of the operands.
        inputs: shapes and dtypes by name, in the order of the operands; a size may be symbolic.
        outputs: shapes and dtypes by name, in the order of the results.

    Example:
        >>> import jax, pax_export as pax
        >>> def write(place, programs):
        ...     (program,) = programs
        ...     print(program.key, list(program.weights), program.inputs["x"].shape)
        ...     print([each.primitive.name for each in program.jaxpr.jaxpr.eqns])
        ...     function = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr))
        ...     operands = [*program.weights.values(), *program.inputs.values()]
        ...     place.write_text(jax.export.export(function)(*operands).mlir_module())
    """

    key: str
    jaxpr: TracedProgram
    weights: Mapping[str, np.ndarray]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]

    def decomposed(self, has: Callable[[Equation], bool]) -> FormatProgram:
        """Returns a program in which operations that the format lacks are decomposed.

        Args:
            has: whether the format has the operation of an equation.  It is also called for the
                operations of decompositions.  Operations without a decomposition are unchanged.
        """
        leaves = [Weight(*each) for each in self.weights.items()]
        program = decompose(self.jaxpr, has, normal_forms=False)
        flat = optimized(program, leaves, {}, _AS_TRACED, len(self.outputs))
        return _format_program(self.key, flat, self.inputs, self.outputs)

    def unsupported(self, equation: Equation, reason: str = "") -> UnsupportedOperationError:
        """Returns the error for an operation that the format cannot express.

        The writer of the format raises it; it names the module and source line of the operation.

        Args:
            equation: an equation of the jaxpr.
            reason: the reason, if it concerns operands or parameters.
        """
        text = f"The format has no operation {equation.primitive.name}"
        error = UnsupportedOperationError(
            f"{text}: {reason}" if reason else text,
            where=self.key,
            write="the same in other operations of jax.numpy and jax.lax, or "
            + other_target(equation.primitive.name),
        )
        return attach_operations(error, [(equation,)])


def _format_program(
    key: str,
    portable: PortableProgram,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
) -> FormatProgram:
    weights: dict[str, np.ndarray] = {}
    for each in portable.weights:
        name = each.name or f"literal.{len(weights)}"
        weights[name] = np.asarray(each.array)
    return FormatProgram(key, portable.program, weights, inputs, outputs)


#: Writes the programs to a file or into a folder; returns facts for the report.
Write = Callable[[Path, Sequence[FormatProgram]], Mapping[str, Any] | None]


@takes_options
def export_as(
    format: Format,
    write: Write,
    model: Model,
    path: str | os.PathLike[str],
    inputs: Any,
    **options: Unpack[ExportOptions],
) -> Report:
    """Exports a model in a format of another distribution.

    The model is traced, written to a temporary path, called at several sizes with ``format.run``,
    compared with jax, and moved to its path only if the results agree. The report is written into
    the folder, or appended to the file as a zip archive.

    Args:
        format: the format.
        write: writes the programs to a path that does not exist, or into an empty folder.  It may
            return ``details`` for the report, JSON values by name; ``runs_in`` is the runtime.
        model: as for `to_saved_model`.
        path: the file or folder to create.
        inputs: as for `to_saved_model`.
        **options: those of every writer, `ExportOptions`.

    Returns:
        The report.

    Raises:
        PaxError: a subclass for each error, as for `to_saved_model`.

    Example:
        A format of numpy arrays; ``run`` is for models of one product.

        >>> import sys, tempfile, types
        >>> import numpy as np
        >>> import pax_export as pax
        >>> from pax_export.export.formats import Format, export_as
        >>> def write(place, programs):
        ...     with place.open("wb") as file:
        ...         np.savez(file, **programs[0].weights)
        >>> def run(path, calls):
        ...     with np.load(path) as stored:
        ...         return [{"output": call["inputs"]["x"] @ stored["weight"]} for call in calls]
        >>> arrays = types.ModuleType("arrays")  # a module of a distribution, as a rule
        >>> sys.modules["arrays"], arrays.run = arrays, run
        >>> row = Format("arrays", "arrays", "arrays:to_arrays", "arrays:load", "arrays:run",
        ...              suffix=".npz")
        >>> layer = pax.Linear(3, 2, with_bias=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = folder + "/linear.npz"
        ...     report = export_as(row, write, layer, path, pax.export.spec("batch, 3"))
        >>> report.validated
        'here'
        >>> del sys.modules["arrays"]
    """
    request = Request.of(export_as, model, path, inputs, **options)
    return run_export(_CustomExporter(format, write, request.calls(request.keys)), request)


@dataclass(frozen=True)
class _CustomExporter(FormatExporter):
    format: Format  # type: ignore[misc]  # a class of ours has one, and this any
    write: Write
    examples: Mapping[str, Sequence[Any]]

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> _CustomContents:
        store = store_of(model, programs)
        return _CustomContents(
            model.name, store.infos(), programs, store, self.examples, self.write
        )


@dataclass(frozen=True)
class _CustomContents(ProgramContents):
    function: Write

    def write(self, path: Path) -> Mapping[str, Any]:
        programs = [
            _format_program(
                each.key,
                portable_program(each, self.store, _AS_TRACED),
                {entry.name: entry.struct for entry in each.inputs.flat},
                dict(zip(each.output_names, each.outputs)),
            )
            for each in self.programs
        ]
        return self.function(path, programs) or {}

    def report_fields(
        self, path: Path, written: Mapping[str, Any], run: ExportRun
    ) -> dict[str, Any]:
        files = path.rglob("*") if path.is_dir() else [path]
        return {
            "signatures": {each.key: signature_info(each) for each in self.programs},
            "graph_bytes": sum(each.stat().st_size for each in files),
            "platforms": ("cpu",),
            "versions": package_versions(),
            "details": dict(written),
        }

    def write_report(self, report: Report, path: Path, written: Mapping[str, Any]) -> None:
        if path.is_dir():
            super().write_report(report, path, written)
        else:
            append_zip(path, report_text(report))
