"""The report of an export: contents, sizes, requirements and validation.

It can be printed, and is stored with the model as ``pax_export.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pax_export._foundations import tables
from pax_export._foundations.errors import ExportPathError, a_few
from pax_export._foundations.files.system import as_path, read_small_file, unusual_type
from pax_export._foundations.tables import bytes_text
from pax_export.export.artifact import dimensions, embedded, structure
from pax_export.export.artifact.formats import exporters, find

REPORT_FILE = embedded.NAME
#: The signature that a call without a name means.
DEFAULT = "serving_default"
_FORMAT = 1
#: Where `details` keep the hash of a file, without the report in it.
SHA256 = "sha256"
#: The name of its external data file, and the hash of that file.
DATA, DATA_SHA256 = "external_data", "external_data_sha256"
#: How a server runs the export.
SERVED = "served"
#: The largest difference in other runtimes that were asked, by their names.
TESTED_IN = "largest_error_in"
#: Runtime name -> results of `certify`.
CERTIFIED = "certified"
#: The roundings to half precision that a file computes in float32.
HALF = "half precision"
_UNSHOWN = ("runs_in", SERVED, SHA256, DATA_SHA256)
_MUCH = 0.1  # of the outputs, if a file loses it
_FEW = 8  # names that are printed one by one

#: How an export was tested.
Validated = Literal["here", "process", "variables"] | None


@dataclass(frozen=True)
class ArrayInfo:
    name: str
    path: str  # of the argument or output in Python, with dots
    shape: tuple[int | str, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class SignatureInfo:
    """A callable function of an export.

    `arguments` and `result` have the nested structure of the Python call, with names of inputs and
    outputs instead of arrays. `preprocess` is the output of a preprocessor, `postprocess` the input
    of a postprocessor. `constraints` are those of the symbolic dimensions. `no_gradient` explains
    missing gradients. `flops` and `transcendentals` are those of a call, numbers or formulas of
    symbolic sizes, mostly in the dtype `computed_in`; `uncounted` has the names of operations
    without a count. `renamed` has the names that differ from those that were asked for,
    `constants` the arrays of the model that it reads as values of numpy. `sizes` are symbolic
    sizes that the model can take, for calls with random numbers.
    """

    inputs: tuple[ArrayInfo, ...]
    outputs: tuple[ArrayInfo, ...]
    arguments: dict[str, Any]
    positional: tuple[str, ...]
    result: dict[str, Any]
    assigns: tuple[str, ...]  # the variables that a call changes
    differentiable: bool
    stablehlo: str
    module_bytes: int
    preprocess: tuple[ArrayInfo, ...] | None = None
    postprocess: tuple[ArrayInfo, ...] | None = None
    vjp_order: int = 0  # how many derivatives are stored
    differentiated_by: str = ""  # whose rules gradients are: "jax" or "TensorFlow"
    constraints: tuple[str, ...] = ()
    no_gradient: str = ""
    flops: int | str | None = None
    transcendentals: int | str | None = None
    computed_in: str = ""
    uncounted: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    sizes: tuple[dict[str, int], ...] = ()
    constants: tuple[str, ...] = ()

    @property
    def gradients_text(self) -> str:
        """By whose rules it is differentiated, and how often; empty if the report does not say."""
        if self.differentiated_by == "TensorFlow":
            return "gradients by TensorFlow itself, to any order"
        often = " and their gradients" if self.vjp_order > 1 else ""
        return f"gradients{often} by jax's rules" if self.differentiated_by else ""


@dataclass(frozen=True)
class VariableInfo:
    """A stored array: `trainable` in the runtime; `parameter` of the model, and not frozen."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool
    leaves: tuple[str, ...]  # none for an array that a method closes over
    parameter: bool = False


@dataclass(frozen=True)
class Report:
    """The report of an export.

    Attributes:
        model: the name of the exported class or function.
        signatures: the functions by key.
        variables: the stored arrays.
        variable_bytes: the size of all variables together.
        graph_bytes: the size of ``saved_model.pb``, or of everything but weights.
        platforms: the platforms it was lowered for.
        oldest_tensorflow: the oldest release that runs it, e.g. ``"2.15"``;
            empty for other runtimes.
        stablehlo: the required version of StableHLO; empty without StableHLO.
        calling_convention: the calling convention of its StableHLO modules; 0 without them.
        versions: the versions of the packages that wrote and ran it.
        validated: ``"process"``, ``"here"``, ``"variables"`` (without calls) or ``None``.
        left_out: calls that the validation skipped to save time, or why it was skipped:
            ``"not validated: TensorFlow is not installed"``.
        differs: differences from jax for extreme inputs, most of them found by
            ``validate="full"``: ``"differs from jax at: sin in inner (serving_default: output
            where x is 1e+20)"``.
        largest_error: the largest absolute difference from jax, by
            ``"signature: output"``.
        seconds: wall time by phase.
        target: ``"saved_model"``, ``"stablehlo"``, ``"tflite"``, ``"onnx"`` or ``"web"``; of a
            language model also ``"genai"``, ``"gguf"``, ``"litertlm"`` or ``"transformers"``.
        details: specific to the target, e.g. ``{"opset": 23}``.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = pax.export.to_saved_model(
        ...         pax.Linear(3, 2), folder + "/linear", pax.export.spec("batch, 3")
        ...     )
        >>> report.variable_bytes, [variable.name for variable in report.variables]
        (32, ['weight', 'bias'])
        >>> report.largest_error["serving_default: output"] < 1e-6
        True
    """

    model: str
    signatures: dict[str, SignatureInfo]
    variables: tuple[VariableInfo, ...]
    variable_bytes: int
    graph_bytes: int
    platforms: tuple[str, ...]
    oldest_tensorflow: str
    stablehlo: str
    calling_convention: int
    versions: dict[str, str]
    validated: Validated
    largest_error: dict[str, float]
    seconds: dict[str, float]
    target: str = "saved_model"
    details: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Report:
        """Reads the report of an export, without TensorFlow.

        Args:
            path: the path of the export, a directory or a file.

        Raises:
            ExportPathError: the export is missing, or its report is unreadable.
        """
        return read_report(path)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, as in ``pax_export.json``."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def _repr_html_(self) -> str:
        """Signatures as a table with a line for each array, and the facts below it."""
        title, *lines = str(self).splitlines()
        count = next(n for n, line in enumerate(lines) if line.startswith("  variables "))
        rows, key = [], ""
        for line in lines[:count]:
            if not line.startswith("    "):
                key = line.strip()
                continue
            word, _, text = line.strip().partition(" ")
            rows.append((key, word, text.strip()))
            key = ""
        facts = [line.strip().split("  ", 1) for line in lines[count:]]
        return tables.block(
            title,
            tables.grid(("signature", "", ""), rows),
            tables.grid((), [[cell.strip() for cell in fact] for fact in facts]),
        )

    def __str__(self) -> str:
        known = find(self.target)
        lines = [f"{self.model} as {known.title if known else self.target}"]
        for key, signature in self.signatures.items():
            lines.append(f"  {key}")
            lines += (f"    in   {entry}" for entry in signature.inputs)
            lines += (
                f"    with {name} = {value!r}"
                for name, value in structure.fixed_arguments(signature.arguments).items()
            )
            lines += (f"      to the model    {entry}" for entry in signature.preprocess or ())
            lines += (f"      from the model  {entry}" for entry in signature.postprocess or ())
            lines += (f"    out  {self._output_text(key, entry)}" for entry in signature.outputs)
            lines += (f"    renamed {text}" for text in signature.renamed)
            few = [a_few(signature.constants, _FEW)] if signature.constants else []
            lines += (f"    constant {names}, whose values Python reads" for names in few)
            lines += (f"    where {text}" for text in signature.constraints)
            lines += (f"    {text}" for text in [signature.gradients_text] if text)
            lines += (f"    {text}" for text in [signature.no_gradient] if text)
            few = signature.assigns if len(signature.assigns) <= _FEW else ()
            lines += (f"    sets {name}" for name in few)
            if signature.assigns and not few:
                lines.append(f"    sets {len(signature.assigns)} variables")
        seconds = ", ".join(f"{k} {v:.2f}" for k, v in self.seconds.items())
        lines += [
            f"  variables   {self._variables_text()}, {bytes_text(self.variable_bytes)}",
            "  graph       " + ", ".join(self._graph_parts()),
            f"  runs in     {self._runs_in()}",
            *(f"  served      {self.details[key]}" for key in (SERVED,) if key in self.details),
            "  made by     " + ", ".join(f"{k} {v}" for k, v in self.versions.items()),
            "  validated   " + self._validation_text(),
            *(f"  certified   {text}" for text in self.certified),
            *(f"  left out    {text}" for text in self.left_out),
            *(f"  load alone  {text}" for text in self.needs_load),
            *self._folded_lines(),
            *quantized_lines(self),
            *(f"  differs     {text.removeprefix('differs ')}" for text in self.differs),
            *(f"  seconds     {text}" for text in [seconds] if text),
        ]
        return "\n".join(lines)

    @property
    def needs_load(self) -> tuple[str, ...]:
        """The inputs and outputs that the runtime by itself does not exchange with numpy."""
        known = find(self.target)
        arrays = [a for each in self.signatures.values() for a in (*each.inputs, *each.outputs)]
        found = [a for a in arrays if known is not None and a.dtype in known.not_in_numpy]
        return tuple(
            f"{each.name}: numpy has no {each.dtype} for the runtime by itself; what "
            "pax_export.export.load gives takes and returns it"
            for each in found
        )

    @property
    def tested_in(self) -> dict[str, str]:
        """The largest error in each of the other runtimes of the validation."""
        found = self.details.get(TESTED_IN)
        errors = found if isinstance(found, dict) else {}
        return {k: f"{e:.1e}" for k, e in errors.items() if isinstance(e, (int, float))}

    @property
    def certified(self) -> tuple[str, ...]:
        """The runtimes of `pax-export certify`, and their differences."""
        found = self.details.get(CERTIFIED)
        results = found.items() if isinstance(found, dict) else ()
        return tuple(certified_text(name, each) for name, each in results if isinstance(each, dict))

    def _variables_text(self) -> str:
        counts = {
            "parameters": sum(each.parameter for each in self.variables),
            "trainable": sum(each.trainable for each in self.variables),
        }
        shown = [f"{n} {word}" for word, n in counts.items() if n or word == "parameters"]
        return f"{len(self.variables)} ({', '.join(shown)})"

    def _folded_lines(self) -> list[str]:
        names, notes = self.details.get("folded", ()), self.details.get("kept", ())
        lines = [f"  folded      {len(names)} weights: {a_few(names, _FEW)}"] * bool(names)
        return [*lines, *(f"  kept        {text}" for text in notes)]

    def _graph_parts(self) -> list[str]:
        parts = [bytes_text(self.graph_bytes)] * bool(self.graph_bytes)
        if self.stablehlo:
            parts += [f"StableHLO {self.stablehlo}"]
        if self.calling_convention:
            parts += [f"calling convention {self.calling_convention}"]
        shown = {k: v for k, v in self.details.items() if isinstance(v, (int, str))}
        return parts + [f"{k}={v}" for k, v in shown.items() if k not in _UNSHOWN]

    def _runs_in(self) -> str:
        if "runs_in" in self.details:
            return self.details["runs_in"]
        platforms = ", ".join(self.platforms)
        return f"TensorFlow {self.oldest_tensorflow} and newer, lowered for {platforms}"

    def _output_text(self, key: str, entry: ArrayInfo) -> str:
        error = self.largest_error.get(f"{key}: {entry.name}")
        return str(entry) if error is None else f"{entry}  (largest error {error:.1e})"

    def _validation_text(self) -> str:
        text = {
            None: "no",
            "here": "in this process",
            "process": "in a fresh process without jax",
            "variables": "the variables alone, without calls",
        }[self.validated]
        errors = self.tested_in.items()
        if self.untested:
            text += f", without {', '.join(self.untested)}"
        return "; ".join([text, *(f"{name}: largest error {error}" for name, error in errors)])

    @property
    def untested(self) -> tuple[str, ...]:
        """The signatures of which a validation by calls compared no element of an output."""
        if self.validated not in ("here", "process"):
            return ()
        return tuple(key for key in self.signatures if not is_tested(key, self.largest_error))


def is_tested(key: str, errors: Mapping[str, float]) -> bool:
    """Whether an element of an output of this signature was compared."""
    names = (name.removeprefix(f"{key}: ") for name in errors if name.startswith(f"{key}: "))
    return any(not name.startswith(("gradient:", "variable:")) for name in names)


def certified_text(name: str, fields: Mapping[str, Any]) -> str:
    runs = f"{name} {fields.get('version', '')}".strip() + f" on {fields.get('machine', '?')}"
    if "problem" in fields:
        return f"{runs}: {fields['problem']}"
    far = "with the reported shapes and dtypes"
    if isinstance(error := fields.get("largest_error"), (int, float)):
        far = f"at most {error:.1e} from {fields.get('compared_with', '?')}"
    return f"{runs}: {fields.get('calls', '?')} calls, {far}"


def package_versions(*packages: str) -> dict[str, str]:
    """The versions of the packages that take part in an export, jax among them."""
    found = {name: version(name) for name in ("jax", "jaxlib", *packages)}
    return {"pax_export": sys.modules["pax_export"].__version__, **found}


def report_text(report: Report) -> str:
    return json.dumps(report.as_dict(), indent=1) + "\n"


def write_report(report: Report, directory: Path) -> None:
    (directory / REPORT_FILE).write_text(report_text(report), encoding="utf-8")


#: Files of language models, which have no report, and the runtimes that open them.
_RUNTIMES = {".gguf": "llama.cpp", ".litertlm": "LiteRT-LM"}


def _without_report(path: Path) -> str:
    if not path.exists():
        return "no such file or directory"
    if not path.is_file():
        return f"no file {REPORT_FILE}"
    runtime = _RUNTIMES.get(path.suffix)
    beside = f"; {runtime} runs a language model without `load`" if runtime else ""
    return f"a file without {REPORT_FILE} in it{beside}"


def read_report(path: str | os.PathLike[str]) -> Report:
    file = path = as_path(path)
    try:
        if (kind := unusual_type(path)) and not path.is_dir():
            raise OSError(f"not a regular file, but {kind}")
        if path.is_file():
            stored = embedded.read(path)
        else:
            file = path / REPORT_FILE
            stored = read_small_file(file, embedded.BYTES).decode()
        if stored is None:
            raise FileNotFoundError
        return _parse_report(stored)
    except FileNotFoundError as error:
        raise ExportPathError(
            "The path is not an export of pax_export.",
            where=str(path),
            got=_without_report(path),
            write=f"what {exporters()} wrote",
        ) from error
    except _OF_NO_REPORT as error:
        raise ExportPathError(
            "The report of this export cannot be read.", where=str(file), got=repr(error)[:500]
        ) from error


#: Exceptions for damaged or malicious reports.
_OF_NO_REPORT = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    MemoryError,
    OverflowError,
)


def _parse_report(text: str) -> Report:
    data = embedded.parse_json(text)
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    if data.pop("format") != _FORMAT:
        raise ValueError("it was written by a newer pax_export")
    report: Report = structure.read(Report, data)
    for key, info in report.signatures.items():
        inputs = {entry.name for entry in info.inputs}
        for name, tree in info.arguments.items():
            structure.check(tree, inputs, f"the argument {name} of {key}")
        structure.check(info.result, {entry.name for entry in info.outputs}, f"the result of {key}")
        shapes = [each.shape for each in (*info.inputs, *info.outputs)]
        for size in chain(*shapes, *(dimensions.sides(text)[::2] for text in info.constraints)):
            dimensions.check(size)
        if not set(info.positional) <= set(info.arguments):
            raise ValueError(f"{key} has positional arguments that are not there")
    for name in (*_UNSHOWN, DATA):
        if not isinstance(report.details.get(name, ""), str):
            raise ValueError(f"details.{name} is not a str")
    return report


def quantized_lines(report: Report) -> list[str]:
    """Formats the quantized weights, their loss, and the effect of the runtime's kernels."""
    details = report.details.get("quantized", {})
    lines = []
    if "weights" in details:
        schemes = " and ".join(f"int{each}" for each in details["bits"])
        schemes += f" ({' and '.join(details['schemes'])})" if "schemes" in details else ""
        text = f"{details['weights']} weights in {schemes}, the integers of the model"
        text += _products_text(details)
        if "accuracy_level" in details:
            text += f", accuracy_level={details['accuracy_level']}"
        lines.append(f"  quantized   {text}")
    if lost := details.get("weights lose"):
        lines.append(f"  weights lose {_loss_text(lost)}")
    if added := details.get("kernels add"):
        lines.append(f"  kernels add {_loss_text(added)}")
        if added.get("mean", 0) > _MUCH * added.get("scale", 0):
            lines.append(
                f"    which is {added['mean'] / added['scale']:.0%} of the outputs; fix: "
                "accuracy_level=1, which does not round between layers, or other activations= of "
                "pax.quantize, by examples= of what the model is called with"
            )
    if half := report.details.get(HALF):
        lines.append(
            f"  half        {half['roundings']} roundings to {' and '.join(half['dtypes'])}, two "
            "casts each, which the runtime computes in float32; a model in float32 is faster: "
            'pax.precision.remove_policies(net), or net.at("**").cast("float32")'
        )
    return lines


def _products_text(details: Mapping[str, Any]) -> str:
    """What a file computes in integers."""
    if "multiplied" not in details:  # a runtime without such products, or a report of before
        return "; products in float32" if details.get("in integers") == 0 else ""
    count, integers = details["multiplied"], details["in integers"]
    if not count:
        return ""
    rest = ", the others in float32" if 0 < integers < count else ""
    return f"; {integers} of {count} multiplied in integers{rest}"


def _loss_text(found: Mapping[str, Any]) -> str:
    parts = []
    if "mean" in found:
        far = f"{found['largest']:.3g} at most, {found['mean']:.3g} in the mean"
        parts.append(f"{far}, of {found['scale']:.3g}")
    if "kl" in found:
        parts.append(f"KL {found['kl']:.3g} nats, {found['same_largest']:.2%} same largest")
    if "metric" in found:
        parts.append("metric {:.6g} to {:.6g}".format(*found["metric"]))
    if "bytes" in found:
        parts.append(" to ".join(map(bytes_text, found["bytes"])))
    if "seconds" in found:
        times = " to ".join(f"{each * 1e3:.3g}" for each in found["seconds"])
        parts.append(f"a call {times} ms")
    return "; ".join(parts)
