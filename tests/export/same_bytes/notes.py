"""Notes of all exports: taking them, and comparing those of two commits."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import pax_export as pax
from tests.export.same_bytes import contents, public_names
from tests.export.same_bytes.exports import Export, exports

_PACKAGES = (
    "jax", "jaxlib", "numpy", "tensorflow", "ai-edge-litert", "onnx", "flatbuffers",
    "safetensors", "optax", "protobuf",
)  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_ENABLE_X64")
_SEED = 42

Notes = dict[str, Any]


def take(keep: Path | None = None, only: Sequence[str] | None = None, tell: bool = False) -> Notes:
    """Writes the exports, and notes what was written.

    Args:
        keep: a folder for the exports; otherwise they are deleted.
        only: patterns of ``kind/name``.
        tell: print each on stderr, with the seconds it took.
    """
    files: dict[str, str] = {}
    refused: dict[str, str] = {}
    not_here: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for each in exports():
        name = f"{each.kind}/{each.name}"
        if not _chosen(name, only):
            continue
        if missing := each.missing():
            not_here.setdefault(each.kind, missing)
            continue
        began = time.monotonic()
        with _folder(keep, name) as folder:
            _write(each, name, folder, files, refused, left_out)
        if tell:
            print(f"{time.monotonic() - began:6.2f} s  {name}", file=sys.stderr, flush=True)
    names, unloaded = public_names.names()
    return {
        "environment": environment(),
        "files": files,
        "refused": refused,
        "not_here": not_here,
        "left_out": left_out,
        "names": names,
        "names_not_here": unloaded,
        "signatures": public_names.signatures(names),
    }


def environment() -> dict[str, Any]:
    """What the bytes depend on, beside the sources."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {_processor()}",
        "devices": len(jax.devices()),
        "pax_export": pax.__version__,
        **{package: _version(package) for package in _PACKAGES},
        **{variable: os.environ.get(variable) for variable in _VARIABLES},
    }


def summary(notes: Notes) -> str:
    """What was noted, in a few lines."""
    lines = [f"{len(notes['files'])} files, {len(notes['refused'])} refusals"]
    lines += [f"refused: {name}: {_first(text)}" for name, text in notes["refused"].items()]
    lines += [f"left out: {name}: {why}" for name, why in notes["left_out"].items()]
    lines += [f"not here: {kind}: no {', '.join(what)}" for kind, what in notes["not_here"].items()]
    if unloaded := notes["names_not_here"]:
        lines.append(f"not here: the names of {', '.join(unloaded)}")
    return "\n".join(lines)


def not_compared(old: Notes, new: Notes) -> Iterator[str]:
    """The kinds and modules that one of the two environments does not have."""
    for kind in sorted({**old["not_here"], **new["not_here"]}):
        yield f"{kind}: no {', '.join(new['not_here'].get(kind) or old['not_here'][kind])}"
    if unloaded := sorted({**old["names_not_here"], **new["names_not_here"]}):
        yield f"the names of {', '.join(unloaded)}"


def differences(old: Notes, new: Notes, only: Sequence[str] | None = None) -> Iterator[str]:
    """Each in one line.

    Args:
        old: notes of the one commit.
        new: of the other.
        only: patterns of the exports that are compared.
    """
    absent = {*old["not_here"], *new["not_here"]}
    unloaded = {*old["names_not_here"], *new["names_not_here"]}

    def counts(section: str, key: str) -> bool:
        if section in ("files", "refused"):
            kind, name = key.split("/")[:2]
            return kind not in absent and _chosen(f"{kind}/{name.split(':')[0]}", only)
        module = key.rpartition(".")[0] if section == "signatures" else key
        return module not in unloaded

    for section in ("environment", "files", "refused", "names", "signatures"):
        before, after = old[section], new[section]
        for key in sorted({*before, *after}):
            if before.get(key, ()) != after.get(key, ()) and counts(section, key):
                yield f"{section}: {key}: {_change(before, after, key)}"


def _write(
    each: Export,
    name: str,
    folder: Path,
    files: dict[str, str],
    refused: dict[str, str],
    left_out: dict[str, str],
) -> None:
    pax.seed_rng_key(_SEED)
    place = folder / f"model{each.suffix}"
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            report = each.write(place)
    except Exception as error:  # also of a mistake: then it is a difference
        refused[name] = contents.said(error, folder)
        return
    if report is not None:
        files[f"{name}/str(report)"] = contents.noted(contents.printed(report))
    files.update({f"{name}/{file}": note for file, note in contents.notes(place)})
    left_out.update({f"{name}/{file}": why for file, why in contents.left_out(place)})


@contextlib.contextmanager
def _folder(keep: Path | None, name: str) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        folder = keep / name
        folder.mkdir(parents=True)  # a second run there would be refused: take another folder
        yield folder


def _chosen(name: str, only: Sequence[str] | None) -> bool:
    return not only or any(fnmatch.fnmatch(name, pattern) for pattern in only)


def _change(before: dict[str, Any], after: dict[str, Any], key: str) -> str:
    if key not in after:
        return "gone"
    if key not in before:
        return f"new: {_first(after[key])}"
    one, other = before[key], after[key]
    if isinstance(one, list) and isinstance(other, list):
        gone, new = sorted({*one} - {*other}), sorted({*other} - {*one})
        return f"gone: {', '.join(gone) or 'none'}; new: {', '.join(new) or 'none'}"
    return f"{one!r} became {other!r}"


def _first(text: Any) -> str:
    return str(text).splitlines()[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The model of the CPU and its vector instructions, by which XLA chooses its own."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [flag for flag in fields.get("flags", "").split() if flag.startswith(("avx", "fma"))]
    return f"{fields.get('model name', platform.processor())}, {' '.join(flags)}"
