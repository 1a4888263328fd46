"""Writes a StableHLO bundle, and reads it: jax's bytes, portable modules, weights, hashes.

pax_export.json          the report
SHA256SUMS               a hash of every other file
weights.safetensors      the weights, by name
NAME.jax_export          what `jax.export.deserialize` reads
NAME.mlirbc, NAME.mlir   portable StableHLO, as bytes and as text
NAME.vjp1.mlirbc, ...    its gradient, and the gradient of that
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pax_export._errors import ExportPathError, InvalidArgumentError
from pax_export._optional import require
from pax_export.export.formats.stablehlo.exported import Exported, Module
from pax_export.weights import load_weights, save_weights

WEIGHTS = "weights.safetensors"
#: Constants of more elements are left out of the text; the bytes have them.
_LARGEST_CONSTANT = 256

#: What jax says of nodes that are neither dict, list, tuple nor None.
_UNREGISTERED = "unregistered type"
_REGISTER = (
    "jax.export.register_namedtuple_serialization or register_pytree_node_serialization, before "
    "the export and before each load"
)


def write_function(
    directory: Path, name: str, exported: Exported, order: int, modules: Sequence[Module]
) -> None:
    """Writes one function, with its gradients up to an order."""
    require("flatbuffers", "stablehlo", "to_stablehlo")
    try:
        content = exported.serialize(vjp_order=order)
    except ValueError as error:
        if _UNREGISTERED not in str(error):
            raise
        raise InvalidArgumentError(
            "jax has not been told how to write a node of the arguments or results.",
            where=name,
            got=str(error).split(". ")[0],
            write=_REGISTER,
        ) from error
    _file(directory, name, "jax_export").write_bytes(content)
    for place, module in enumerate(modules):
        _module(directory, name, place).write_bytes(module.portable.module)
    if modules:
        text = _text(modules[0].portable.module)
        _file(directory, name, "mlir").write_text(text, encoding="utf-8")


def write_weights(directory: Path, weights: Mapping[str, Any]) -> None:
    """Writes the weights; no file if there are none."""
    if weights:
        save_weights(jax.tree.map(jax.numpy.asarray, dict(weights)), directory / WEIGHTS)


def _text(module: bytes) -> str:
    with mlir.make_ir_context() as context:
        parsed = stablehlo.deserialize_portable_artifact(context, module)
        return f"{parsed.operation.get_asm(large_elements_limit=_LARGEST_CONSTANT)}\n"


def read_function(directory: Path, name: str) -> Exported:
    """Reads what jax reads."""
    require("flatbuffers", "stablehlo", "load")
    file = _file(directory, name, "jax_export")
    try:
        exported = jax_export.deserialize(bytearray(file.read_bytes()))
        _parse(exported.mlir_module_serialized)
        return exported
    except Exception as error:
        raise ExportPathError(
            "This jax does not read this file.",
            where=str(file),
            got=f"{type(error).__name__}: {error}"[:300],
            write=_REGISTER
            if _UNREGISTERED in str(error)
            else "the jax that wrote it (see pax_export.json), or one less than half a year newer",
        ) from error


def _parse(module: bytes) -> None:
    """Raises if this jax cannot read a module, which it would tell at the first call."""
    with mlir.make_ir_context() as context:
        handler: Any = context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            stablehlo.deserialize_portable_artifact(context, module)
        finally:
            handler.detach()


def read_module(directory: Path, name: str, order: int) -> bytes | None:
    """Reads a portable module; None if there is none."""
    file = _module(directory, name, order)
    return file.read_bytes() if file.is_file() else None


def read_weights(directory: Path, structs: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the weights, which must be these."""
    loaded = load_weights(dict(structs), directory / WEIGHTS) if structs else {}
    return {name: loaded[name] for name in structs}


def _file(directory: Path, name: str, ending: str) -> Path:
    return directory / f"{name}.{ending}"


def _module(directory: Path, name: str, order: int) -> Path:
    return _file(directory, name, f"vjp{order}.mlirbc" if order else "mlirbc")
