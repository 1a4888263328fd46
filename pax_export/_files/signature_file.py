"""The path of a signature, inside a folder or next to a file, and a check for such files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pax_export._files import bounded
from pax_export._files.overwrite_guard import Belongs

#: The name in a folder, which is that of the tools of model-signing.
NAME = "model.sig"
#: The suffix after the name of the file.
SUFFIX = ".sig"
#: A signature names every file, and has some 200 bytes for each.
LARGEST = 1 << 26
_KIND = "application/vnd.dev.sigstore.bundle"


def of_folder(path: Path) -> Path:
    return path / NAME


def of_file(path: Path) -> Path:
    """The path of the signature of a file."""
    return path.with_name(path.name + SUFFIX)


def recognize_signature(path: Path) -> Belongs | None:
    """Returns the files of a signature at a path, which are none but itself; None without one."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(bounded.read_bytes(path, LARGEST))
        if isinstance(content, dict) and str(content.get("mediaType")).startswith(_KIND):
            return lambda name: False
    return None
