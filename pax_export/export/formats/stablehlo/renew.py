"""Functions of a bundle, also where this jax does not read the bytes of the jax that wrote them.

jax reads its own bytes for half a year, and reads none of a jax that is newer
by a version of its format.  The portable modules beside them are read for five
years; with the types that the report has, they are made functions again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export

from pax_export._errors import ExportPathError
from pax_export._files import checksums
from pax_export._files import directory as _directory
from pax_export.export.artifact.report import (
    Report,
    package_versions,
    read_report,
    report_of_dict,
    write_report,
)
from pax_export.export.formats.stablehlo import exported as _exported
from pax_export.export.formats.stablehlo import files
from pax_export.export.formats.stablehlo.exported import Exported, Module
from pax_export.export.lowering.lower import Portable
from pax_export.export.tracing import dtypes


def read_function(directory: Path, report: Report, key: str) -> Exported:
    """The function of a bundle, by its jax bytes or by its portable modules."""
    file = report.details["functions"][key]["file"]
    try:
        return files.read_function(directory, file)
    except ExportPathError as error:
        made = _from_modules(directory, report, key)
        if made is None:
            raise error
        return made


def _from_modules(directory: Path, report: Report, key: str) -> Exported | None:
    entry = report.details["functions"][key]
    if not entry["kept"]:
        return None
    modules = []
    for order, (kept, neutral) in enumerate(zip(entry["kept"], entry["neutral"])):
        content = files.read_module(directory, entry["file"], order)
        if content is None:
            return None
        modules.append(Module(Portable(content, ()), tuple(kept), neutral))
    weights, inputs, outputs = _types(report, key)
    return _exported.remade(key, modules, weights, inputs, outputs, report.platforms)


def _types(report: Report, key: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The types of a function's weights, inputs and results, as the report has them."""
    info = report.signatures[key]
    scope = jax_export.SymbolicScope(info.constraints)

    def struct(entry: Any) -> jax.ShapeDtypeStruct:
        text = ", ".join(map(str, entry.shape))
        shape = jax_export.symbolic_shape(text, scope=scope) if text else ()
        return jax.ShapeDtypeStruct(shape, dtypes.numpy_dtype(entry.dtype))

    variables = {each.name: struct(each) for each in report.variables}
    inputs = {entry.name: struct(entry) for entry in info.inputs}
    outputs: dict[str, Any] = {"output": {each.name: struct(each) for each in info.outputs}}
    if info.assigns:
        outputs["weight"] = {name: variables[name] for name in info.assigns}
    used = {name for kind, name in report.details["functions"][key]["operands"] if kind == "weight"}
    weights = {name: value for name, value in variables.items() if name in used}
    return weights, inputs, outputs


def renew(path: str | os.PathLike[str]) -> Report:
    """Makes a StableHLO bundle again, as this jax writes it.

    The bytes of jax are promised to be read for half a year.  The portable
    modules and the weights beside them are not bound to that: from them this
    makes the bytes anew, in the same place, whole or not at all.

    Args:
        path: the folder that `to_stablehlo` wrote.

    Returns:
        The report of the new bundle.

    Raises:
        ExportPathError: it is no bundle, files are damaged, or it holds
            nothing but the bytes of jax.

    Example:
        >>> import tempfile, jax, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = folder + "/linear"
        ...     _ = pax.export.to_stablehlo(pax.Linear(3, 2), path, pax.export.spec("batch, 3"))
        ...     pax.export.renew(path).versions["jax"] == jax.__version__
        True
    """
    path = Path(path)
    report = read_report(path)
    if report.target != "stablehlo":
        raise ExportPathError(
            "This is no StableHLO bundle.", where=str(path), got=f"target {report.target}"
        )
    checksums.check(path)
    made: Mapping[str, Exported | None] = {
        key: _from_modules(path, report, key) for key in report.signatures
    }
    missing = [key for key, exported in made.items() if exported is None]
    if missing:
        raise ExportPathError(
            "This bundle has no portable modules to make it from.",
            where=str(path),
            got=", ".join(missing),
            write="to_stablehlo again, with the model and its weights from weights.safetensors",
        )
    with _directory.replaced(path, overwrite=True) as directory:
        return _rewrite(path, directory, report, made)


def _rewrite(path: Path, directory: Path, report: Report, made: Mapping[str, Any]) -> Report:
    order = report.details["vjp_order"]
    written = {f"{report.details['functions'][key]['file']}.jax_export" for key in made}
    for file in path.iterdir():
        if file.name not in written:
            (directory / file.name).write_bytes(file.read_bytes())
    for key, exported in made.items():
        files.write_function(
            directory, report.details["functions"][key]["file"], exported, order, ()
        )
    data = report.as_dict() | {"versions": package_versions()}
    new = report_of_dict(data)
    write_report(new, directory)
    checksums.write(directory)
    return new
