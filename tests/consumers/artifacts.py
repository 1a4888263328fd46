"""Where exports for other processes lie, and in which form.

Imported by both sides: by the tests that export, which have jax, and by those
that serve, which have TensorFlow, numpy and pytest only.

    ROOT/.../NAME/model      the SavedModel
    ROOT/.../NAME/cases.npz  for each batch size, what goes in and what comes out:
                             "7/in/x", "7/out/logits", "7/gradient/weight"
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "PAX_EXPORT_ARTIFACTS"
BATCHES = (1, 2, 7, 64)

#: What every exporting environment writes.
NAMES = ("conv_net", "function", "trainable", "stateful", "linear_algebra")


def root() -> Path | None:
    """The directory that the environment names, if it names one."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else None


def found(directory: Path) -> list[Path]:
    """All artifacts below a directory."""
    return sorted(file.parent for file in directory.rglob("cases.npz"))
