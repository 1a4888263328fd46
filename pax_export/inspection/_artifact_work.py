"""How much arithmetic a call of an export does, by signature: counted in what was written."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax import export as jax_export

from pax_export._files import bounded
from pax_export.export.artifact import inspect as foreign
from pax_export.export.artifact.report import ArrayInfo, Report
from pax_export.inspection import _onnx_rules, _tflite_rules
from pax_export.inspection._file_graph import Program
from pax_export.inspection._file_work import Language, work_of_program
from pax_export.inspection._module_work import work_of_module
from pax_export.inspection._onnx_graph import program_of
from pax_export.inspection._saved_graph import modules_of
from pax_export.inspection._tflite_graph import programs_of
from pax_export.inspection._work import Work, total

_UNKNOWN = "pax_export_unknown"
_ALL = "all of it"
#: A protobuf message cannot be longer.
_LARGEST = 2**31 - 1


def works_of(
    path: Path, report: Report | None, inputs: Mapping[str, Sequence[ArrayInfo]]
) -> dict[str, Work]:
    """The work of each signature, as far as its program can be read.

    Args:
        path: of the export.
        report: what it says of itself; None for somebody else's SavedModel.
        inputs: by signature.
    """
    if report is not None and report.target in ("tflite", "onnx"):
        return _works_of_file(path, report, inputs)
    try:
        modules = _modules(path, report, list(inputs))
    except (OSError, ValueError) as error:
        return {key: _nothing(error) for key in inputs}
    return {
        key: _work(modules.get(key, ()), entries, _constraints(report, key))
        for key, entries in inputs.items()
    }


def _works_of_file(
    path: Path, report: Report, inputs: Mapping[str, Sequence[ArrayInfo]]
) -> dict[str, Work]:
    language = _tflite_rules.LANGUAGE if report.target == "tflite" else _onnx_rules.LANGUAGE
    try:
        programs = _programs(path, report, list(inputs))
    except Exception as error:  # of a file that was changed by somebody else
        return {key: _nothing(error) for key in inputs}
    return {
        key: _work_of_file(programs.get(key), entries, _constraints(report, key), language)
        for key, entries in inputs.items()
    }


def _programs(path: Path, report: Report, keys: Sequence[str]) -> dict[str, Program]:
    """The programs in a file, of which no more is read than they are."""
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if report.target == "tflite":
        return programs_of(content)
    (key,) = keys
    return {key: program_of(content)}


def _work_of_file(
    program: Program | None,
    inputs: Sequence[ArrayInfo],
    constraints: Sequence[str],
    language: Language,
) -> Work:
    if program is None:
        return Work(uncounted={f"{_ALL}: the file has no such signature"})
    try:
        scope = jax_export.SymbolicScope(constraints)
        sizes = {each.name: _sizes(each, scope) for each in inputs}
        return work_of_program(program, sizes, language)
    except Exception as error:  # of a file that was changed by somebody else
        return _nothing(error)


def _nothing(error: Exception) -> Work:
    text = str(error).splitlines() or [""]
    return Work(uncounted={f"{_ALL}: {type(error).__name__}: {text[0]:.100}"})


def _constraints(report: Report | None, key: str) -> Sequence[str]:
    return report.signatures[key].constraints if report else ()


def _work(
    modules: Sequence[bytes], inputs: Sequence[ArrayInfo], constraints: Sequence[str]
) -> Work:
    work = Work()
    try:
        scope = jax_export.SymbolicScope(constraints)
        (unknown,) = jax_export.symbolic_shape(_UNKNOWN, scope=scope)
        sizes = [_sizes(each, scope) for each in inputs if not all(map(_is_number, each.shape))]
        for content in modules:
            _add(work, work_of_module(content, sizes, unknown))
    except Exception as error:  # of a program that was made or changed by somebody else
        return _nothing(error)
    if not modules:
        work.uncounted.add(f"{_ALL}: no StableHLO is in this export")
    elif _UNKNOWN in str(total(work)):
        work.uncounted.add(f"{_ALL}: it depends on sizes that only a call knows")
    return work


def is_counted(work: Work) -> bool:
    """Whether anything can be said of it."""
    return not any(each.startswith(_ALL) for each in work.uncounted)


def _add(work: Work, more: Work) -> None:
    work.flops[""] += total(more)
    work.transcendentals[""] += more.transcendentals[""]
    work.uncounted |= more.uncounted
    for dtype, flops in more.dtypes[""].items():
        work.dtypes[""][dtype] = work.dtypes[""].get(dtype, 0) + flops


def _is_number(size: int | str) -> bool:
    return isinstance(size, int)


def _sizes(entry: ArrayInfo, scope: Any) -> tuple[Any, ...]:
    """The sizes of an input; one that somebody else left open is called after its place."""
    letters = "".join(each if each.isalnum() and each.isascii() else "_" for each in entry.name)
    names = [
        f"{letters if letters[:1].isalpha() else 'x'}_{axis}" if size == "?" else str(size)
        for axis, size in enumerate(entry.shape)
    ]
    return tuple(jax_export.symbolic_shape(", ".join(names), scope=scope))


def _modules(path: Path, report: Report | None, keys: Sequence[str]) -> dict[str, list[bytes]]:
    if report is None or report.target == "saved_model":
        content = bounded.read_bytes(path / foreign.GRAPH_FILE, _LARGEST)
        return modules_of(content, keys)
    if report.target == "stablehlo":
        return dict(_of_bundle(path, report))
    return {}


def _of_bundle(path: Path, report: Report) -> Iterator[tuple[str, list[bytes]]]:
    functions = report.details.get("functions", {})
    for key, entry in functions.items() if isinstance(functions, dict) else ():
        file = path / f"{Path(str(entry.get('file'))).name}.mlirbc"
        if file.is_file():
            yield key, [file.read_bytes()]
