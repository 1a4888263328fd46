"""Reads, writes and renews StableHLO bundles, and the fields of their reports.

pax_export.json          the report
SHA256SUMS               a hash of every other file
weights.safetensors      the weights, by name
NAME.jax_export          what `jax.export.deserialize` reads
NAME.mlirbc, NAME.mlir   portable StableHLO, as bytes and as text
NAME.vjp1.mlirbc, ...    its gradient, and the gradient of that

jax reads its own bytes for half a year, and none of a newer format version. The portable modules
are readable for five years; with the types in the report, they become functions again.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import jax
from jax import export as jax_export
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pax_export._foundations.errors import (
    ExportPathError,
    InvalidArgumentError,
    PaxError,
    UntrustedExportError,
)
from pax_export._foundations.files import checksums
from pax_export._foundations.files.atomic import replace_directory
from pax_export._foundations.files.checksums import Checked
from pax_export._foundations.files.own_files import files, now_in
from pax_export._foundations.files.system import as_path
from pax_export._foundations.optional import require
from pax_export.export.artifact import structure
from pax_export.export.artifact.own_exports import write_anew
from pax_export.export.artifact.report import (
    REPORT_FILE,
    ArrayInfo,
    Report,
    SignatureInfo,
    VariableInfo,
    package_versions,
    read_report,
)
from pax_export.export.artifact.saved_models import damage_as_error
from pax_export.export.artifact.screening import EXPANDED, may_call
from pax_export.export.formats.stablehlo.exported import Exported, PortableModule, rebuild_functions
from pax_export.export.formats.stablehlo.library_calls import (
    ROUTINES,
    Looked,
    SizesError,
    check_program,
)
from pax_export.export.lowering.lower import Portable
from pax_export.export.tracing import dtypes
from pax_export.weights import load_weights, save_weights

WEIGHT, INPUT, OUTPUT = "weight", "input", "output"

Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FunctionDetails:
    """One function: its file, its flat operands and results, and those that its modules keep."""

    file: str
    operands: Names
    results: Names
    kept: tuple[tuple[int, ...], ...] = ()
    neutral: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Details:
    vjp_order: int
    weights: Literal["arguments", "constants"]
    functions: dict[str, FunctionDetails]


def details_of(report: Report) -> Details:
    """The details of a report; an ExportPathError if they are not those of its signatures."""
    known = {each.name for each in fields(Details)}
    details = {name: value for name, value in report.details.items() if name in known}
    try:
        found: Details = structure.read(Details, _as_json(details), "details")
        if found.vjp_order < 0:
            raise ValueError("details.vjp_order is less than zero")
        if set(found.functions) != set(report.signatures):
            raise ValueError("details.functions are not those of the signatures")
        weights = [each.name for each in report.variables]
        for key, each in found.functions.items():
            _check(each, report.signatures[key], weights, f"details.functions.{key}")
        return found
    except ValueError as error:
        raise ExportPathError(
            "The report of this export cannot be read.", where=report.model, got=repr(error)[:500]
        ) from error


def _check(function: FunctionDetails, info: SignatureInfo, weights: list[str], where: str) -> None:
    allowed = {
        "operands": {WEIGHT: weights, INPUT: [each.name for each in info.inputs]},
        "results": {WEIGHT: list(info.assigns), OUTPUT: [each.name for each in info.outputs]},
    }
    for what, names in allowed.items():
        listed: Names = getattr(function, what)
        wrong = [name for kind, name in listed if name not in names.get(kind, ())]
        if wrong or len(set(listed)) != len(listed):
            raise ValueError(f"{where}.{what} have unknown or repeated names")
        # Weights that a function does not read are none of its operands; all else is.
        needed = {(kind, name) for kind in names if kind != WEIGHT for name in names[kind]}
        if not needed <= set(listed):
            raise ValueError(f"{where}.{what} lack an input or output")
    if not set(info.assigns) <= set(weights):
        raise ValueError(f"{where} assigns an unknown weight")
    if not function.file or function.file.startswith(".") or {"/", "\\"} & set(function.file):
        raise ValueError(f"{where}.file is not a file name")


def _as_json(value: object) -> object:
    """Converts tuples to lists, as in JSON, so that new and stored reports compare equal."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


# --- Reads, writes and renews StableHLO bundles ---


WEIGHTS = "weights.safetensors"
#: Larger constants are omitted from the text; the bytes have them.
_LARGEST_CONSTANT = 256

#: The words of jax's error for nodes that are neither dict, list, tuple nor None.
_UNREGISTERED = "unregistered type"
_REGISTER = (
    "jax.export.register_namedtuple_serialization or register_pytree_node_serialization, before "
    "the export and before each load"
)


def write_function(
    directory: Path, name: str, exported: Exported, order: int, modules: Sequence[PortableModule]
) -> None:
    require("flatbuffers", "stablehlo", "to_stablehlo")
    try:
        content = exported.serialize(vjp_order=order)
    except ValueError as error:
        if _UNREGISTERED not in str(error):
            raise
        raise InvalidArgumentError(
            "jax cannot serialize a node of the arguments or results.",
            where=name,
            got=str(error).split(". ")[0],
            write=_REGISTER,
        ) from error
    (directory / f"{name}.jax_export").write_bytes(content)
    for index, module in enumerate(modules):
        (directory / _module_file(name, index)).write_bytes(module.portable.module)
    if modules:
        text = _module_text(modules[0].portable.module)
        (directory / f"{name}.mlir").write_text(text, encoding="utf-8")


def write_weights(directory: Path, weights: Mapping[str, Any]) -> None:
    if weights:
        save_weights(jax.tree.map(jax.numpy.asarray, dict(weights)), directory / WEIGHTS)


def _module_text(module: bytes) -> str:
    with mlir.make_ir_context() as context:
        parsed = stablehlo.deserialize_portable_artifact(context, module)
        return f"{parsed.operation.get_asm(large_elements_limit=_LARGEST_CONSTANT)}\n"


def _read_jax_bytes(checked: Checked, name: str) -> Exported:
    require("flatbuffers", "stablehlo", "load")
    file = checked.path(f"{name}.jax_export")
    try:
        content = file.read_bytes()
        exported = jax_export.deserialize(bytearray(content))
        return _looked_over(exported, file, may_call(content))
    except PaxError:
        raise
    except Exception as error:  # jax raises a bare StopIteration for damaged bytes
        raise ExportPathError(
            "This jax does not read this file.",
            where=str(file),
            got=f"{type(error).__name__}: {error}"[:300],
            write=_REGISTER
            if _UNREGISTERED in str(error)
            else "the jax that wrote it (see pax_export.json), or one less than half a year newer",
        ) from error


#: jax's calls of functions of Python, by their number in the process that made them.
_OF_PYTHON = re.compile(r"python_\w*callback")


def _looked_over(exported: Exported, file: Path, may_call: bool) -> Exported:
    """A function and its gradients, without calls that could end the process."""
    module = _look_over(exported.mlir_module_serialized, file).module
    changes: dict[str, Any] = {"mlir_module_serialized": module}
    if may_call and exported.has_vjp():  # gradients are not read otherwise
        gradient = _looked_over(exported.vjp(), file, may_call)
        changes["_get_vjp"] = lambda _: gradient
    return dataclasses.replace(exported, **changes)


def _look_over(module: bytes, file: Path) -> Looked:
    try:
        looked = check_program(module)
    except SizesError as error:
        raise ExportPathError(
            "A function of this bundle calls a library with arrays of other sizes than it takes.",
            where=str(file),
            got=str(error),
        ) from error
    called = sorted(filter(_OF_PYTHON.search, looked.names))
    if called:  # another process has another function by that number, or crashes for it has none
        raise ExportPathError(
            "A function of this bundle calls Python functions of the process that wrote it.",
            where=str(file),
            got=", ".join(called),
            write="to_stablehlo of a model without jax.pure_callback, jax.debug.print and the like",
        )
    return looked


def check(path: Path, report: Report, trusted: bool) -> None:
    """Refuses a bundle whose programs call functions that may do more than compute."""
    if trusted:
        return
    checked, details = checksums.check(path), details_of(report)
    for key in report.signatures:
        exported: Exported | None = read_function(checked, report, details, key)
        while exported is not None:
            module = exported.mlir_module_serialized
            names = check_program(module).names if may_call(module) else frozenset()
            unknown = sorted(names - EXPANDED - ROUTINES.keys())
            if unknown:
                raise UntrustedExportError(
                    "This bundle holds a program that may do more than compute.",
                    where=f"{path}: {key}",
                    got=f"calls of {', '.join(unknown)}",
                    write="trusted=True, if you trust its source and allow these operations",
                )
            exported = exported.vjp() if exported.has_vjp() else None


def read_weights(checked: Checked, structs: Mapping[str, Any]) -> dict[str, Any]:
    loaded = load_weights(dict(structs), checked.path(WEIGHTS)) if structs else {}
    return {name: loaded[name] for name in structs}


def _module_file(name: str, order: int) -> str:
    return f"{name}.vjp{order}.mlirbc" if order else f"{name}.mlirbc"


def read_function(checked: Checked, report: Report, details: Details, key: str) -> Exported:
    """The function of a bundle, by its jax bytes or by its portable modules."""
    entry = details.functions[key]
    try:
        function = _read_jax_bytes(checked, entry.file)
    except ExportPathError:
        function = _from_modules(checked, report, details, key)
        if function is None:
            raise
    sizes = len(function.in_avals), len(function.out_avals)
    reported = len(entry.operands), len(entry.results)
    if sizes != reported:
        raise ExportPathError(
            "The report of this export is that of another function.",
            where=key,
            got=f"{reported} operands and results, and {sizes} in the function",
        )
    return function


def _from_modules(checked: Checked, report: Report, details: Details, key: str) -> Exported | None:
    entry = details.functions[key]
    if not entry.kept:
        return None
    modules = []
    for order, (used, neutral) in enumerate(zip(entry.kept, entry.neutral)):
        name = _module_file(entry.file, order)
        if name not in checked.names:
            return None
        content = checked.path(name).read_bytes()
        looked = _look_over(content, checked.path(name))
        modules.append(PortableModule(Portable(looked.module, ()), used, neutral))
    read = {name for kind, name in entry.operands if kind == WEIGHT}
    weights, inputs, outputs = _report_types(report, key, read)
    return rebuild_functions(key, modules, weights, inputs, outputs, report.platforms)


def _report_types(
    report: Report, key: str, read: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The types of the weights that a function reads, its inputs and results, by the report."""
    info = report.signatures[key]
    scope = jax_export.SymbolicScope(info.constraints)

    def struct(entry: ArrayInfo | VariableInfo) -> jax.ShapeDtypeStruct:
        text = ", ".join(map(str, entry.shape))
        shape = jax_export.symbolic_shape(text, scope=scope) if text else ()
        return jax.ShapeDtypeStruct(shape, dtypes.numpy_dtype(entry.dtype))

    variables = {each.name: struct(each) for each in report.variables}
    inputs = {entry.name: struct(entry) for entry in info.inputs}
    outputs: dict[str, Any] = {"output": {each.name: struct(each) for each in info.outputs}}
    if info.assigns:
        outputs["weight"] = {name: variables[name] for name in info.assigns}
    weights = {name: value for name, value in variables.items() if name in read}
    return weights, inputs, outputs


def renew(path: str | os.PathLike[str]) -> Report:
    """Rewrites a StableHLO bundle with the current jax.

    jax guarantees to read its bytes for half a year. This rewrites them atomically, from the
    portable modules and the weights, which have no such limit.

    Args:
        path: the folder that `to_stablehlo` wrote.

    Returns:
        The report of the new bundle.

    Raises:
        ExportPathError: it is not a bundle, files are damaged, or it has only jax's bytes.

    Example:
        >>> import tempfile, jax, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = folder + "/linear"
        ...     _ = pax.export.to_stablehlo(pax.Linear(3, 2), path, pax.export.spec("batch, 3"))
        ...     pax.export.renew(path).versions["jax"] == jax.__version__
        True
    """
    path = as_path(path)
    report = read_report(path)
    if report.target != "stablehlo":
        raise ExportPathError(
            "The export is not a StableHLO bundle.", where=str(path), got=f"target {report.target}"
        )
    checked, details = checksums.check(path), details_of(report)
    checked.path(REPORT_FILE)
    with _of_what_it_says(path):
        functions: dict[str, Any] = {
            key: _from_modules(checked, report, details, key) for key in report.signatures
        }
    missing = [key for key, exported in functions.items() if exported is None]
    if missing:
        raise ExportPathError(
            "This bundle has no portable modules to make it from.",
            where=str(path),
            got=", ".join(missing),
            write="to_stablehlo again, with the model and its weights from weights.safetensors",
        )
    with replace_directory(path, now_in(path)) as directory:
        for name in files(path):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes((path / name).read_bytes())
        for key, exported in functions.items():
            name = details.functions[key].file
            with _of_what_it_says(path):
                write_function(directory, name, exported, details.vjp_order, ())
        new = dataclasses.replace(report, versions=package_versions())
        write_anew(path, directory, new)
    return new


def _of_what_it_says(path: Path) -> AbstractContextManager[None]:
    """Converts jax's exceptions for invalid types in a report, perhaps another's, to our error."""
    what = "The report of this bundle does not fit its programs."
    return damage_as_error(what, path, "a copy of it, as it was written", OSError)
