"""SavedModels as data, those of other programs too, and what each TensorFlow can read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pax_export._foundations.errors import (
    ConsumerError,
    ExportPathError,
    InvalidArgumentError,
    PaxError,
)
from pax_export._foundations.files.system import read_small_file
from pax_export._foundations.optional import require
from pax_export._foundations.tables import bytes_text
from pax_export.export.artifact.dimensions import ANY_RANK, UNKNOWN
from pax_export.export.artifact.report import REPORT_FILE, ArrayInfo, VariableInfo

_MAGIC = b"ML\xefR"
_VERSION = re.compile(rb"StableHLO_v(\d+)\.(\d+)\.(\d+)\0")
#: Custom calls into libraries that only jax brings.
_JAX_ONLY = re.compile(
    rb"\b(?:lapack|cusolver|cublas|hipsolver|magma|xla_python|xla_ffi_python)\w*"
)


@dataclass(frozen=True)
class XlaModule:
    stablehlo: str | None  # None if it is no portable artifact
    calling_convention: int
    platforms: tuple[str, ...]
    bytes: int
    jax_only: tuple[str, ...]  # custom calls that TensorFlow does not have


@dataclass(frozen=True)
class Foreign:
    """A SavedModel without a report."""

    signatures: dict[str, dict[str, tuple[ArrayInfo, ...]]]  # by key, inputs and outputs
    variables: tuple[VariableInfo, ...]
    variable_bytes: int
    graph_bytes: int  # of saved_model.pb
    tensorflow: str  # the release that wrote it
    modules: tuple[XlaModule, ...]
    oldest_tensorflow: str | None  # that runs the modules; None if none does
    problem: str  # why no release runs it, or empty

    def as_dict(self) -> dict[str, Any]:
        return {"target": "saved_model", "foreign": True, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = ["a SavedModel without a report of pax_export"]
        for key, signature in self.signatures.items():
            lines.append(f"  {key}")
            lines += (f"    in   {entry}" for entry in signature["inputs"])
            lines += (f"    out  {entry}" for entry in signature["outputs"])
        trainable = sum(variable.trainable for variable in self.variables)
        lines += [
            f"  variables   {len(self.variables)} ({trainable} trainable), "
            f"{bytes_text(self.variable_bytes)}",
            f"  graph       {bytes_text(self.graph_bytes)}",
            *(f"  module      {_module_text(module)}" for module in self.modules),
            f"  runs in     {self._runs_in()}",
            f"  made by     tensorflow {self.tensorflow}",
        ]
        return "\n".join(lines)

    def _runs_in(self) -> str:
        if self.problem:
            return f"no TensorFlow: {self.problem}"
        if self.oldest_tensorflow is None:
            return f"TensorFlow; it was written by {self.tensorflow}"
        return f"TensorFlow {self.oldest_tensorflow} and newer"


def _module_text(module: XlaModule) -> str:
    version = f"StableHLO {module.stablehlo}" if module.stablehlo else "no portable artifact"
    platforms = ", ".join(module.platforms) or "any platform"
    return (
        f"{version}, calling convention {module.calling_convention}, {platforms}, "
        f"{bytes_text(module.bytes)}"
    )


def is_foreign(path: Path) -> bool:
    return (path / GRAPH_FILE).is_file() and not (path / REPORT_FILE).exists()


def describe(path: Path) -> Foreign:
    model = read_saved_model(path, "inspect")
    with unreadable_as_error(path):
        (graph, *_) = model.meta_graphs
        dtypes = require("tensorflow.dtypes", "tensorflow", "inspect")
        signatures = {
            key: {
                "inputs": _array_infos(signature.inputs, dtypes),
                "outputs": _array_infos(signature.outputs, dtypes),
            }
            for key, signature in sorted(graph.signature_def.items())
            if key != INITIALIZER
        }
        variables = tuple(_read_variables(graph.object_graph_def.nodes, dtypes))
        modules = tuple(_read_modules(graph.graph_def))
        oldest, problem = _oldest_tensorflow(modules)
        return Foreign(
            signatures=signatures,
            variables=variables,
            variable_bytes=sum(variable.bytes for variable in variables),
            graph_bytes=(path / GRAPH_FILE).stat().st_size,
            tensorflow=graph.meta_info_def.tensorflow_version,
            modules=modules,
            oldest_tensorflow=oldest,
            problem=problem,
        )


def _array_infos(tensors: Any, dtypes: Any) -> tuple[ArrayInfo, ...]:
    return tuple(
        ArrayInfo(name, name, _read_shape(info.tensor_shape), dtypes.as_dtype(info.dtype).name)
        for name, info in sorted(tensors.items())
    )


def _read_shape(shape: Any) -> tuple[int | str, ...]:
    if shape.unknown_rank:
        return (ANY_RANK,)
    return tuple(each.size if each.size >= 0 else UNKNOWN for each in shape.dim)


def _read_variables(nodes: Iterable[Any], dtypes: Any) -> Iterator[VariableInfo]:
    for node in nodes:
        if node.HasField("variable"):
            variable = node.variable
            dtype = dtypes.as_dtype(variable.dtype)
            sizes = tuple(each.size for each in variable.shape.dim)
            size = math.prod(max(each, 0) for each in sizes) * dtype.size
            yield VariableInfo(variable.name, sizes, dtype.name, size, variable.trainable, ())


def _read_modules(graph: Any) -> Iterator[XlaModule]:
    nodes = [node for function in graph.library.function for node in function.node_def]
    for node in (*graph.node, *nodes):
        if node.op == "XlaCallModule":
            module = node.attr["module"].s
            yield XlaModule(
                stablehlo=stablehlo_version(module),
                calling_convention=node.attr["version"].i,
                platforms=tuple(each.decode().lower() for each in node.attr["platforms"].list.s),
                bytes=len(module),
                jax_only=tuple(sorted({each.decode() for each in _JAX_ONLY.findall(module)})),
            )


def stablehlo_version(module: bytes) -> str | None:
    r"""The version for which a portable artifact was written, from its header.

    Example:
        >>> stablehlo_version(b"ML\xefR\x0dStableHLO_v1.13.7\x00...")
        '1.13.7'
    """
    found = _VERSION.search(module, 0, 64) if module.startswith(_MAGIC) else None
    return ".".join(part.decode() for part in found.groups()) if found else None


def _oldest_tensorflow(modules: tuple[XlaModule, ...]) -> tuple[str | None, str]:
    """Returns the oldest TensorFlow that runs all modules, or the reason why none does."""
    missing = sorted({name for module in modules for name in module.jax_only})
    if missing:
        return None, f"it calls {', '.join(missing)}, which only jax has"
    known = [module for module in modules if module.stablehlo]
    if not known:
        return None, ""
    newest = max(tuple(map(int, str(module.stablehlo).split("."))) for module in known)
    convention = max(module.calling_convention for module in modules)
    try:
        return format_version(oldest_tensorflow(newest, convention)), ""
    except ConsumerError as error:
        return None, f"it needs {error.got}; `pax-export retarget` mends it"


GRAPH_FILE = "saved_model.pb"
#: The signature that runs once, when the model is loaded, with the paths of the assets.
INITIALIZER = "__saved_model_init_op"
#: A protobuf message cannot be longer.
_LARGEST = 2**31 - 1


def read_saved_model(directory: Path, purpose: str) -> Any:
    """The protocol buffer of a SavedModel, with one graph at least."""
    file = directory / GRAPH_FILE
    try:
        data = read_small_file(file, _LARGEST)
    except OSError as error:
        raise ExportPathError(
            "The path is not a SavedModel.",
            where=str(directory),
            got=f"no file {GRAPH_FILE}" if isinstance(error, FileNotFoundError) else str(error),
            write=f"a directory that holds {GRAPH_FILE}, as tf.saved_model.save writes it",
        ) from error
    model = require("tensorflow.core.protobuf.saved_model_pb2", "tensorflow", purpose).SavedModel()
    with unreadable_as_error(directory):
        model.ParseFromString(data)
        if not model.meta_graphs:
            raise ValueError("it has no graph")
    return model


@contextmanager
def damage_as_error(what: str, path: Path, write: str, *passed: type[Exception]) -> Iterator[None]:
    """Converts exceptions to one error, but ours and `passed`: others have no common class."""
    try:
        yield
    except (PaxError, *passed):
        raise
    except Exception as error:  # of any reader; a mistake of ours would be called damage
        got = f"{type(error).__name__}: {error}"[:500]
        raise ExportPathError(what, where=str(path), got=got, write=write) from error


def unreadable_as_error(directory: Path) -> AbstractContextManager[None]:
    """Converts exceptions of protobuf, whose classes differ between versions, to one error."""
    file, write = directory / GRAPH_FILE, f"the {GRAPH_FILE} as it was written"
    return damage_as_error("The SavedModel cannot be read.", file, write)


Version = tuple[int, ...]

#: TensorFlow release, the newest StableHLO it reads, its newest calling convention.
TENSORFLOW: tuple[tuple[Version, Version, int], ...] = (
    ((2, 15), (0, 14, 0), 8),
    ((2, 18), (1, 3, 0), 9),
    ((2, 19), (1, 9, 0), 9),
    ((2, 20), (1, 12, 0), 10),
    ((2, 21), (1, 13, 0), 10),
)

#: The targets to try, oldest first: the oldest that any StableHLO still
#: written version, then the version that each release reads.
TARGETS: tuple[Version, ...] = ((0, 9, 0), *(stablehlo for _, stablehlo, _ in TENSORFLOW))

#: 4-bit integers are in every StableHLO, and XLA in TensorFlow 2.15 has none.
FOUR_BITS: Version = (1, 3, 0)

#: Custom calls that XLA in TensorFlow expands itself, on every platform.
CUSTOM_CALLS = frozenset("""
    Sharding SPMDFullToShardShape SPMDShardToFullShape shape_assertion
    stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator stablehlo.dynamic_top_k
""".split())  # fmt: skip


def format_version(version: Version) -> str:
    """A version as people write it: ``"2.15"``."""
    return ".".join(map(str, version))


def oldest_tensorflow(stablehlo: Version, calling_convention: int) -> Version:
    for release, reads, convention in TENSORFLOW:
        if stablehlo <= reads and calling_convention <= convention:
            return release
    raise ConsumerError(
        "No TensorFlow release can read this model.",
        got=f"StableHLO {format_version(stablehlo)}, calling convention {calling_convention}",
    )


def parse_consumer(consumer: str | None) -> Version | None:
    """Reads ``"tensorflow>=2.17"``.

    Example:
        >>> parse_consumer("tensorflow>=2.17")
        (2, 17)
    """
    if consumer is None:
        return None
    match = re.fullmatch(r"\s*tensorflow\s*>=\s*(\d+)\.(\d+)[.\d]*\s*", str(consumer))
    if match is None:
        raise InvalidArgumentError(
            "The consumer is unknown.", got=repr(consumer), write='consumer="tensorflow>=2.17"'
        )
    return int(match[1]), int(match[2])


def check_consumer(consumer: str | None, oldest: Version, signature: str) -> None:
    """Refuses a model that needs a newer TensorFlow than its consumer has."""
    wanted = parse_consumer(consumer)
    if wanted is not None and oldest > wanted:
        raise ConsumerError(
            "The model uses operations that the consumer does not support.",
            where=signature,
            got=consumer,
            write=f'consumer="tensorflow>={format_version(oldest)}", or leave consumer= out',
        )
