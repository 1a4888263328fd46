"""Whether a change of the sources changes what is exported.

    python -m tests.export.same_bytes before.json --keep before     # on the old commit
    python -m tests.export.same_bytes after.json --keep after --compare before.json

Exports every layer and model of the tests in every format, with weights from one seed, and
records a hash of every file and the text of every refusal.  Records of two commits can be
compared if they were made in one environment on one machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

import pax_export as pax
from pax_export.export import spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.consumers.models import MODELS
from tests.contract.table import ALWAYS, NEVER, ROWS, Row, call
from tests.export.targets import TARGETS

FORMATS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "saved_model": (to_saved_model, {"trainable": True}, ""),
    "stablehlo": (to_stablehlo, {"vjp_order": 1}, ""),
    "tflite": (to_tflite, {}, ".tflite"),
    "onnx": (to_onnx, {}, ".onnx"),
}
#: Other options, for some rows.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "saved_model": ({"vjp_order": 2, "trainable": True}, {"platforms": ("cpu",)}),
    "stablehlo": ({"weights": "constants"}, {"vjp_order": 2}),
    "tflite": ({"quantize": "float16"}, {"quantize": "dynamic"}),
    "onnx": ({"opset": 23}, {"exact": True}, {"fold": False}),
}
SOME = ("Linear", "Conv2D", "BatchNorm2D", "LSTM", "Transformer", "Sequential", "GraphModule")
#: Files with wall times, rounding, versions, or random numbers of TensorFlow.
LEFT_OUT = ("pax_export.json", "pax_export.html", "SHA256SUMS", "fingerprint.pb")

Record = dict[str, dict[str, str]]


class InTrainMode(pax.Module):
    """A layer that trains where it is served: `to_saved_model` puts modules in eval mode."""

    def __init__(self, row: Row):
        super().__init__()
        self.layer = row.build()
        self.row = row

    def __call__(self, *inputs: Any) -> Any:
        after, output = pax.module_and_value(self.row.call)(self.layer.train(), *inputs)
        self.layer = after.eval()
        return output


def exports() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """The name of each export, ``format/model``, and what writes it to a path."""
    for form, (to, options, suffix) in FORMATS.items():

        def made(
            name: str, build: Any, inputs: Any, *, form=form, to=to, suffix=suffix, **more: Any
        ) -> Any:
            more.setdefault("validate", False)
            return f"{form}/{name}{suffix}", lambda path: to(build(), path, inputs, **more)

        for row in ROWS:
            yield made(
                row.name, *_of(row, row.build, row.call), **_method(row, row.call), **options
            )
            if row.changes_state != NEVER and form in ("saved_model", "stablehlo"):
                build = lambda row=row: InTrainMode(row)  # noqa: E731
                apply = lambda model, *inputs: model(*inputs)  # noqa: E731
                more = _method(row, apply) | {"state": "update"}
                yield made(f"{row.name} in train mode", *_of(row, build, apply), **more)
            if row.name in SOME and row.changes_state != ALWAYS and row.call is call:
                for number, variant in enumerate(VARIANTS[form]):
                    yield made(f"{row.name} {number}", *_of(row, row.build, row.call), **variant)
        for target in TARGETS:
            yield made(f"model {target.name}", target.build, target.inputs, validate=True)
    for name, (build, shape, options) in MODELS.items():
        yield (
            f"saved_model/served {name}",
            lambda path, build=build, shape=shape, options=options: to_saved_model(
                build(), path, spec(shape), **{**options, "validate": False}
            ),
        )


def _of(row: Row, build: Callable[[], Any], apply: Callable[..., Any]) -> tuple[Any, Any]:
    inputs = tuple([spec(shape, row.dtype) for shape in row.symbolic])
    return build, inputs if apply is call else {"serving_default": inputs}


def _method(row: Row, apply: Callable[..., Any]) -> dict[str, Any]:
    """A signature whose parameters name the inputs, where a plain call is none."""
    if apply is call:
        return {}
    of = (lambda m: apply(m), lambda m, x: apply(m, x), lambda m, x, y: apply(m, x, y))
    return {"methods": {"serving_default": of[len(row.symbolic)]}}


def programs(place: Path) -> Iterator[tuple[str, bytes]]:
    """The files of an export with their bytes, without reports and what no two runs share."""
    for file in [place] if place.is_file() else sorted(place.rglob("*")):
        if file.is_file() and file.name not in LEFT_OUT and not file.name.endswith(".onnx.html"):
            content = file.read_bytes()
            if file.suffix == ".tflite":  # the report is a zip archive behind the model
                with zipfile.ZipFile(file) as archive:
                    content = content[: archive.infolist()[0].header_offset]
            elif file.suffix == ".onnx":
                import onnx

                model = onnx.load_from_string(content)
                del model.metadata_props[:]
                content = model.SerializeToString(deterministic=True)
            yield file.name if file == place else file.relative_to(place).as_posix(), content


def record(keep: Path | None = None, only: Sequence[str] = ()) -> Record:
    """Writes the exports, and records what was written.

    Args:
        keep: a folder for the exports; otherwise they are deleted.
        only: patterns of ``format/model``.
    """
    files, refused = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, write in exports():
            if only and not any(fnmatch.fnmatch(name, pattern) for pattern in only):
                continue
            place = (keep or Path(temporary)) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            pax.seed_rng_key(42)
            try:
                write(place)
            except Exception as error:  # a mistake, too, is a difference
                refused[name] = f"{type(error).__name__}: {error}".replace(str(place), "<place>")
            else:
                for file, content in programs(place):
                    digest = hashlib.sha256(content).hexdigest()
                    files[f"{name}: {file}"] = f"{digest}, {len(content)} bytes"
    versions = {each.name: each.version for each in distributions()}
    return {"environment": versions, "files": files, "refused": refused}


def differences(old: Record, new: Record, only: Sequence[str] = ()) -> Iterator[str]:
    """One line for each."""
    for section, before in old.items():
        for key in sorted({*before, *new[section]}):
            one, other = before.get(key, "none"), new[section].get(key, "none")
            name = key.partition(": ")[0]
            chosen = not only or any(fnmatch.fnmatch(name, pattern) for pattern in only)
            if one != other and (chosen or section == "environment"):
                yield f"{section}: {key}: {one!r} became {other!r}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.export.same_bytes")
    parser.add_argument("out", type=Path, help="the file of records to write")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="records to compare with")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the exports there")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN")
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    jax.config.update("jax_traceback_in_locations_limit", 0)  # lines of callers in bundles
    found = record(given.keep, given.only)
    given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(found['files'])} files, {len(found['refused'])} refusals")
    if given.compare is None:
        return 0
    lines = list(differences(json.loads(given.compare.read_text()), found, given.only))
    print(*lines, f"{len(lines)} differences", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
