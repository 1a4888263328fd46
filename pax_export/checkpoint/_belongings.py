"""Tells files of a checkpoint from other files, which are never deleted."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from pax_export._files.overwrite_guard import files
from pax_export.checkpoint._orbax import ABOUT, DELETED

#: Files that orbax writes in a step beside its trees, and in each tree.
_OF_STEP = re.compile(rf"_CHECKPOINT_METADATA|commit_success\.txt|{ABOUT}/[^/]+")
_OF_TREE = re.compile(
    r"[^/]+/(_METADATA|_sharding|commit_success\.txt|array_metadatas/process_\d+"
    r"|(ocdbt\.process_[^/]+/)?(manifest\.ocdbt|d/[^/]+))"
)


def strange_files(step: Path) -> list[str]:
    """Returns the files in a step's directory that are not part of a checkpoint."""
    names = list(files(step))
    if not (step / ABOUT).is_dir():
        return names
    return [name for name in names if not (_OF_STEP.fullmatch(name) or _OF_TREE.fullmatch(name))]


def remove_deleted(directory: Path) -> None:
    """Removes the checkpoints that were moved away for deletion."""
    folder = directory / DELETED
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.isdecimal():
                shutil.rmtree(folder / name, ignore_errors=True)
        folder.rmdir()
