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

import pytest

VARIABLE = "PAX_EXPORT_ARTIFACTS"
BATCHES = (1, 7)

#: Models that are written as graphs of TensorFlow's operations, too, which run without XLA.
OPERATIONS = (
    "conv_net", "lstm", "transformer", "random", "indexing", "linear_algebra", "quantized",
    "stateful",
)  # fmt: skip
_SUFFIX = "_operations"
#: What every exporting environment writes.
NAMES = (
    "conv_net", "lstm", "transformer", "resnet18", "graph", "function", "random", "indexing",
    "linear_algebra", "trainable", "quantized", "stateful", "mended",
    *(each + _SUFFIX for each in OPERATIONS),
)  # fmt: skip
#: Those that take long to compile are served at fewer sizes.
_FEWER = {"resnet18": (2,), "linear_algebra": (3,)}


def batches(name: str) -> tuple[int, ...]:
    """The sizes at which a model is served."""
    return _FEWER.get(name.removesuffix(_SUFFIX), BATCHES)


#: What is exported through orbax's interface, and served by a test of its own.
ORBAX = "orbax"


def root() -> Path | None:
    """The directory that the environment names, if it names one."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else None


def served_root() -> Path:
    """The directory that the environment names; the module that asks is skipped without one."""
    given = root()
    if given is None:
        pytest.skip(f"set {VARIABLE}, as the docstring says", allow_module_level=True)
    return given


def found(directory: Path) -> list[Path]:
    """All artifacts below a directory."""
    return sorted(file.parent for file in directory.rglob("cases.npz"))
