"""`to_web`: exports a model as a folder for browsers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Unpack

from pax_export._foundations.errors import NotValidatedWarning, UnsupportedDtypeError
from pax_export._foundations.files import checksums, own_files
from pax_export._foundations.optional import find, is_installed, require
from pax_export.export.artifact.calling import LoadedFile
from pax_export.export.artifact.options import ExportOptions, Request, takes_options
from pax_export.export.artifact.report import (
    ArrayInfo,
    Report,
    SignatureInfo,
    package_versions,
    write_report,
)
from pax_export.export.formats.onnx import WEB
from pax_export.export.formats.onnx.export import OPSET, OnnxContents, OnnxExporter, OnnxModelFile
from pax_export.export.formats.onnx.model import OnnxOptions, with_names_of_their_own
from pax_export.export.formats.onnx.run import opened
from pax_export.export.formats.onnx.web import browser, javascript_name, npm
from pax_export.export.formats.onnx.web.browser import model_file, page_file
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.pipeline.format_exporter import (
    FormatExporter,
    ProgramContents,
    store_of,
)
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.validation.integers import arithmetic_details

RUNTIME = "onnxruntime-web"
#: The typed arrays of JavaScript by dtype.
_ARRAYS = {
    **{f"float{bits}": f"Float{bits}Array" for bits in (16, 32, 64)},
    **{f"{u}int{bits}": f"{u.title()}Int{bits}Array" for u in ("", "u") for bits in (8, 16, 32)},
    **{"int64": "BigInt64Array", "uint64": "BigUint64Array", "bool": "Uint8Array"},
}
_SIGNATURES = "export const signatures = {};"
#: Files that are the same in each folder.
_COPIED = ("runtime.js", "page.js", "page.css")


@takes_options
def to_web(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    fold: bool = True,
    exact: bool = False,
    **options: Unpack[ExportOptions],
) -> Report:
    """Writes a model as a folder for any static web server.

    The folder has the model as ONNX, the module ``model.js`` with types in ``model.d.ts``,
    onnxruntime-web from npm, and a page to try the model.  Each signature is a function of the
    module: ``await model.encode({x})``; the signature ``serving_default``, of a model without
    `methods`, is ``model.predict``.  It uses WebGPU if the browser has an adapter, otherwise
    WebAssembly.  The calls of `validate` are made with WebAssembly in headless Chromium.  With
    ``validate=False`` it needs no Chromium; without npm it then writes a folder without
    onnxruntime-web, and warns.

    Args:
        model: as for `to_saved_model`.
        path: the folder to create.
        inputs: as for `to_saved_model`; with dtypes that JavaScript supports.
        fold: as for `to_onnx`.
        exact: as for `to_onnx`.
        **options: those of every writer, `ExportOptions`.

    Returns:
        The report, which is also in the folder as ``pax_export.json``.  `load` runs the folder with
        onnxruntime.

    Raises:
        MissingPackageError: npm or Chromium is not installed, or npm cannot download
            onnxruntime-web.
        UnsupportedDtypeError: JavaScript does not support the dtype of an input or output:
            bfloat16, complex numbers, strings.
        UnsupportedOperationError: ONNX or onnxruntime-web does not support an operation.
        ValidationError: a result differs from jax, or the browser crashes or does not
            answer.
        PaxError: a subclass for each error, as for `to_saved_model`.

    Example:
        >>> import shutil, tempfile, jax.numpy as jnp
        >>> from pax_export.export import spec, to_web
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> if shutil.which("npm") and shutil.which("chromium"):
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         report = to_web(double, folder + "/double", spec("batch, 3"))
    """
    request = Request.of(to_web, model, path, inputs, **options)
    wanted = OnnxOptions(OPSET, fold=fold, exact=exact, accuracy_level=1)
    return run_export(_WebExporter(wanted, request.calls(request.keys)), request)


@dataclass(frozen=True)
class _WebExporter(FormatExporter):
    format = WEB
    loads = "onnx"
    tests_reported = True
    one_by_one = True

    options: OnnxOptions
    examples: Mapping[str, Sequence[Any]]

    def find(self, request: Request) -> None:
        find("onnx", "onnx", "to_web")
        if request.validate:
            npm.check([npm.ONNXRUNTIME], "to_web")
            browser.check("to_web")

    def load(self, request: Request) -> None:
        require("onnx", "onnx", "to_web")

    def partial(self) -> FormatExporter | None:
        """Parts of a model are called in onnxruntime, which has the same operators."""
        return OnnxExporter(self.options, {}) if is_installed("onnxruntime") else None

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> _WebContents:
        named = list(map(with_names_of_their_own, programs))
        signatures = {each.key: signature_info(each) for each in named}
        _check_dtypes(signatures)
        store = store_of(model, named)
        infos = store.infos()
        shared = store, self.examples, self.options
        parts = {each.key: OnnxContents(model.name, infos, [each], *shared) for each in named}
        return _WebContents(model.name, infos, named, store, self.examples, parts, signatures)


def _check_dtypes(signatures: Mapping[str, SignatureInfo]) -> None:
    for key, info in signatures.items():
        for what, entries in (("input", info.inputs), ("output", info.outputs)):
            for each in entries:
                if each.dtype not in _ARRAYS:
                    raise UnsupportedDtypeError(
                        f"to_web: JavaScript has no arrays of {each.dtype}.",
                        where=f"{key}: {what} {each.name}",
                        got=str(each),
                        write="float32 there, and a cast inside of the model; of complex "
                        "numbers the real and the imaginary part",
                    )


@dataclass(frozen=True)
class _WebContents(ProgramContents):
    #: Signature key -> its contents.
    parts: Mapping[str, OnnxContents]
    signatures: Mapping[str, SignatureInfo]

    def write(self, path: Path) -> dict[str, OnnxModelFile]:
        keys = list(self.parts)
        written = {
            key: each.write(path / model_file(key, keys)) for key, each in self.parts.items()
        }
        beside = {key: [each.data.name] if each.data else [] for key, each in written.items()}
        write_page(path, self.name, module(self.signatures, beside), types(self.signatures))
        copy_packages(path, {RUNTIME: npm.ONNXRUNTIME})
        return written

    def report_fields(
        self, path: Path, written: Mapping[str, OnnxModelFile], run: ExportRun
    ) -> dict[str, Any]:
        if not (path / RUNTIME).is_dir():
            run.budget.left_out = [f"not copied, because npm is not installed: {npm.ONNXRUNTIME}"]
        files = [path / model_file(key, list(self.parts)) for key in self.parts]
        options = self.parts[self.programs[0].key].options
        integers = next(filter(None, (each.integers for each in self.parts.values())), {})
        counted = [each.arithmetic for each in written.values()]
        return {
            "signatures": dict(self.signatures),
            "graph_bytes": sum(each.stat().st_size for each in files),
            "platforms": ("cpu",),
            "versions": package_versions("onnx"),
            "details": {
                **{name: list(found) for name, found in (
                    ("folded", _union(each.folded for each in written.values())),
                    ("kept", _union(each.notes for each in written.values())),
                ) if found},
                **arithmetic_details(integers, options.accuracy_level, counted),
                "opset": options.opset,
                RUNTIME: npm.ONNXRUNTIME.version,
                "runs_in": "browsers, with WebGPU or WebAssembly",
            },
        }  # fmt: skip

    def write_report(self, report: Report, path: Path, written: object) -> None:
        write_report(report, path)
        names = sorted({*own_files.files(path)} - {checksums.FILE})
        checksums.write(path, files=names)


def _union(texts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for each in texts for text in each))


def copy_packages(folder: Path, packages: Mapping[str, npm.Package]) -> None:
    """Copies packages into folders of these names; without npm it warns that they are missing."""
    if npm.found():
        for name, package in packages.items():
            npm.copy(package, folder / name)
        return
    names = ", ".join(map(str, packages.values()))
    warning = NotValidatedWarning(
        f"The folder lacks {names}, because npm is not installed.",
        write="the same export where npm is installed",
    )
    warnings.warn(warning, stacklevel=3)


def write_page(folder: Path, title: str, module: str, types: str, **changed: str) -> None:
    """Writes the module and the page; `changed` are files that are not the usual ones."""
    texts = {name: page_file(name) for name in ("index.html", *_COPIED)}
    texts |= {name.replace("_", "."): text for name, text in changed.items()}
    texts["index.html"] = texts["index.html"].replace("TITLE", escape(title))
    package = {"private": True, "type": "module", "main": "model.js", "types": "model.d.ts"}
    texts |= {"model.js": module, "model.d.ts": types}
    texts["package.json"] = json.dumps(package, indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def module(signatures: Mapping[str, SignatureInfo], beside: Mapping[str, Sequence[str]]) -> str:
    """The text of ``model.js``."""

    def arrays(infos: Iterable[ArrayInfo]) -> dict[str, Any]:
        return {each.name: {"dtype": each.dtype, "shape": each.shape} for each in infos}

    keys = list(signatures)
    functions = {
        javascript_name(key, keys): {
            "file": model_file(key, keys),
            "data": beside[key],
            "inputs": arrays(info.inputs),
            "outputs": arrays(info.outputs),
        }
        for key, info in signatures.items()
    }
    text = json.dumps(functions, indent=2)
    return page_file("model.js").replace(_SIGNATURES, f"export const signatures = {text};")


def types(signatures: Mapping[str, SignatureInfo]) -> str:
    """The text of ``model.d.ts``."""

    def fields(infos: Iterable[ArrayInfo], kind: str) -> str:
        lines = (
            f"    /** {each.dtype}[{', '.join(map(str, each.shape))}] */\n"
            f"    {json.dumps(each.name)}: {kind}<{_ARRAYS[each.dtype]}>;\n"
            for each in infos
        )
        return "{\n" + "".join(lines) + "  }"

    named = {json.dumps(javascript_name(key, signatures)): x for key, x in signatures.items()}
    functions = "".join(
        f"  {name}(inputs: {fields(info.inputs, 'Input')}): "
        f"Promise<{fields(info.outputs, 'Tensor')}>;\n"
        for name, info in named.items()
    )
    return page_file("model.d.ts").replace("  // FUNCTIONS\n", functions)


def load(path: Path, report: Report) -> LoadedFile:
    require("onnxruntime", "onnx", "load")
    keys = list(report.signatures)
    found = {key: opened(str(path / model_file(key, keys))) for key in keys}
    sessions = {key: session for key, (session, _) in found.items()}
    return LoadedFile(report, sessions, lambda key, inputs: found[key][1](key, inputs))


def check(path: Path, report: Report, trusted: bool) -> None:
    """Refuses a folder that is not as it was written."""
    checksums.check(path)
