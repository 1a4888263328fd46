"""Imports optional packages on use; the error names the packages of the extra in ``setup.cfg``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from pax_export._foundations.errors import MissingPackageError

_TENSORFLOW = "tensorflow>=2.21,<3"
_SAFETENSORS = ("safetensors>=0.7", "zlib-ng>=0.5")
#: The packages of each extra of ``setup.cfg``; under "all", those of the whole library.
PACKAGES = {
    "all": ("jax>=0.10.2", "jaxlib>=0.10.2", "numpy>=2.0", "jmp>=0.0.4", "google-crc32c>=1.7"),
    "tensorflow": (_TENSORFLOW,),
    "optax": ("optax>=0.2.5",),
    "opax": ("opax>=0.2.11",),
    "safetensors": _SAFETENSORS,
    "checkpoint": ("orbax-checkpoint>=0.12",),
    "stablehlo": (*_SAFETENSORS, "flatbuffers>=24.3.25"),
    "tflite": ("ai-edge-litert>=2.1", "flatbuffers>=24.3.25"),
    "onnx": ("onnx>=1.20", "onnxruntime>=1.24"),
    "litertlm": ("ai-edge-litert>=2.1", "flatbuffers>=24.3.25", "litert-lm-api>=0.18"),
    "llamacpp": (*_SAFETENSORS, "gguf>=0.17", "h5py>=3.11", "xllamacpp>=2026.10"),
    "transformers": (*_SAFETENSORS, "transformers>=5", "torch>=2.8"),
    "torch": ("torch>=2.8",),
    "genai": ("onnx>=1.20", "onnxruntime>=1.24", "onnxruntime-genai>=0.18"),
    "openvino": ("openvino>=2026.0",),
    "iree": ("iree-base-compiler>=3.0", "iree-base-runtime>=3.0"),
    "hub": ("huggingface_hub>=1.0",),
    "rich": ("rich>=13.7",),
    "drawing": ("fast-sugiyama>=0.5",),
    "adopt": (*_SAFETENSORS, "gguf>=0.17", "h5py>=3.11"),
    "tokenizers": ("tokenizers>=0.21", "jinja2>=3.1.6"),
    "examples": (
        _TENSORFLOW,
        "optax>=0.2.5",
        "rich>=13.7",
        "tokenizers>=0.21",
        "jinja2>=3.1.6",
        "scikit-learn>=1.5",
        "babel>=2.16",
        "matplotlib>=3.9",
        "gguf>=0.17",
    ),
}


def require(package: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional package for a `purpose`; an error says how to install its extra.

    Example:
        >>> require("json", "all", "this example").dumps({"a": 1})
        '{"a": 1}'
    """
    try:
        if package.split(".")[0] == "tensorflow":  # whose import tells of CPUs and GPUs otherwise
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        if package.split(".")[0] == "torch" and "tensorflow" in sys.modules:
            # The LLVM of Triton ends a process that has loaded the LLVM of TensorFlow.
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise _missing_package(package, extra, purpose) from error


def find(package: str, extra: str, purpose: str) -> ModuleSpec:
    """Finds an optional package, without importing it."""
    if spec := _spec_of(package):
        return spec
    raise _missing_package(package, extra, purpose)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return _spec_of(package) is not None


def _spec_of(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ImportError:  # whoever looks for modules here does not let it be imported
        return None


def _missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed.",
        write=f"{install(extra)} (the extra [{extra}] of pax-export)"
        if extra != "all"
        else install(extra),
    )


def install(extra: str) -> str:
    """The command that installs the packages of an extra.

    Example:
        >>> install("stablehlo")
        'python -m pip install "safetensors>=0.7" "zlib-ng>=0.5" "flatbuffers>=24.3.25"'
    """
    return " ".join(("python -m pip install", *(f'"{each}"' for each in PACKAGES[extra])))
