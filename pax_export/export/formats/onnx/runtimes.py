"""Calls of an ONNX model in other runtimes than onnxruntime, to test it there.

Each runs in a separate process with a time limit, because it may hang or crash.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pax_export._foundations.errors import MissingPackageError, UnsupportedOperationError
from pax_export._foundations.optional import find
from pax_export.export.formats.onnx import ONNX
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import in_process

#: By the name of a runtime, the packages that it needs, each of an extra of that name.
_PACKAGES = {"openvino": ("openvino",), "iree": ("iree.compiler", "iree.runtime"), "web": ()}
NAMES = tuple(_PACKAGES)
#: The npm package of `web`.
WEB = "onnxruntime-web"
_FILE = "pax_export.export.formats.onnx.run"
#: The time limit of a runtime for all calls of a model, in seconds.
SECONDS = 600.0


def check(runtimes: Sequence[str], purpose: str = "to_onnx(..., runtimes=[{!r}])") -> None:
    """Refuses runtimes that are not installed, with the command that installs them."""
    for name in runtimes:
        for package in _PACKAGES[name]:
            find(package, name, purpose.format(name))
    if "web" in runtimes and not _web_found():
        raise MissingPackageError(
            f"{purpose.format('web')} needs Node.js and the npm package {WEB}, "
            "which are not found from here.",
            write=f"npm install {WEB}, in the working directory or a folder of NODE_PATH",
        )


def version(name: str) -> str:
    """Returns the version of an installed runtime; empty if unknown."""
    if name == "web":
        find = f"path.dirname(require.resolve({WEB!r}))"
        read = f"fs.readFileSync(path.join({find}, '..', 'package.json'))"
        done = _node(f"process.stdout.write(JSON.parse({read}).version)")
        return done.stdout if not done.returncode else ""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version({"iree": "iree-base-runtime"}.get(name, name))
    return ""


def run(
    name: str, file: str, cases: Iterable[Mapping[str, Any]], seconds: float = SECONDS
) -> list[Arrays]:
    """Runs calls in a runtime, in a separate process; returns the outputs of each.

    Raises:
        UnsupportedOperationError: it refuses the model, crashes, or exceeds the time limit.
    """
    calls = [{"signature": "", "inputs": case["inputs"]} for case in cases]
    runtime = replace(ONNX, run=f"{_FILE}:{name}")
    try:
        answers = in_process(runtime, Path(file), calls, "once", seconds)
    except TimeoutError as error:
        raise _refused(name, "does not finish with", f"{error}, and was stopped") from error
    except RuntimeError as error:
        raise _refused(name, "crashes with", str(error)) from error
    if "error" in answers[0]:
        raise _refused(name, "does not run", str(answers[0]["error"]))
    return [each["results"] for each in answers]


def _refused(name: str, does: str, got: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"The runtime {name} {does} this model.",
        where=f"runtimes=[{name!r}]",
        got=got[:1500],
        write="other runtimes, or another form of the operation",
    )


def _web_found() -> bool:
    return bool(shutil.which("node")) and not _node(f"require.resolve({WEB!r})").returncode


def _node(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60)
