"""The rows of an export, read as data: nothing of it is loaded or run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._optional import require
from pax_export.export.artifact import inspect as foreign
from pax_export.export.artifact.report import ArrayInfo, VariableInfo, read_report
from pax_export.inspection._artifact_work import is_counted, works_of
from pax_export.inspection._inspection import Inspection
from pax_export.inspection._row import Row
from pax_export.inspection._work import Work, number, plain, total

_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_VALUE = "VARIABLE_VALUE"
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def inspected(path: Path) -> Inspection:
    """A row for the export, for each signature of several, and for each array."""
    if foreign.is_foreign(path):
        found: Any = foreign.describe(path)
        title, report = "SavedModel", None
        signatures = {
            key: (signature["inputs"], signature["outputs"])
            for key, signature in found.signatures.items()
        }
        taken = {key: inputs for key, (inputs, _) in signatures.items()}
    else:
        found = report = read_report(path)
        title = report.model
        signatures = {
            key: (signature.inputs, signature.outputs)
            for key, signature in report.signatures.items()
        }
        # The program is called with what a preprocessor gives.
        taken = {key: each.preprocess or each.inputs for key, each in report.signatures.items()}
    works = works_of(path, report, taken)
    uncounted = {each for work in works.values() for each in work.uncounted}
    return Inspection(tuple(_rows(found, title, signatures, works)), tuple(sorted(uncounted)))


def _rows(
    found: Any, title: str, signatures: Mapping[str, Any], works: Mapping[str, Work]
) -> Iterator[Row]:
    single = len(signatures) == 1
    only = next(iter(signatures.values()), ((), ())) if single else ((), ())
    yield Row(
        path="",
        kind="module",
        class_name=title,
        mode="eval",
        inputs=_texts(only[0]),
        outputs=_texts(only[1]),
        dtype=",".join(dict.fromkeys(variable.dtype for variable in found.variables)),
        role="trainable" if any(variable.trainable for variable in found.variables) else "",
        parameters=sum(_size(variable) for variable in found.variables),
        bytes=found.variable_bytes,
        **(_counts(next(iter(works.values()))) if single else {}),
    )
    if len(signatures) > 1:
        for key, (inputs, outputs) in signatures.items():
            named = {"inputs": _texts(inputs), "outputs": _texts(outputs)}
            yield Row(key, "signature", 1, **named, **_counts(works[key]))
    for variable in found.variables:
        yield Row(
            path=leaf_path(variable),
            kind="array",
            depth=1,
            shape=tuple(variable.shape),
            dtype=variable.dtype,
            role="trainable" if variable.trainable else "frozen",
            parameters=_size(variable),
            bytes=variable.bytes,
        )


def _counts(work: Work) -> dict[str, Any]:
    """What a row says of the work of a call; nothing if nothing of it is known."""
    if not is_counted(work):
        return {}
    dtypes = {name: number(count) for name, count in work.dtypes[""].items()}
    return {
        "flops": plain(total(work)),
        "transcendentals": plain(sum(work.transcendentals.values(), 0)),
        "computed_in": max(dtypes, key=lambda name: dtypes[name], default=""),
    }


def leaf_path(variable: VariableInfo) -> str:
    """The path of the leaf that a variable holds; of somebody else's, its name."""
    if not variable.leaves:
        return variable.name
    return _STEP.sub(r".\1", variable.leaves[0]).lstrip(".")


def _texts(arrays: tuple[ArrayInfo, ...]) -> tuple[str, ...]:
    return tuple(f"{each.name}: {each.dtype}[{','.join(map(str, each.shape))}]" for each in arrays)


def _size(variable: VariableInfo) -> int:
    size = 1
    for each in variable.shape:
        size *= max(each, 0)
    return size


def arrays_of(path: Path) -> Mapping[str, Any]:
    """The arrays of an export that keeps them by name, by the paths of their leaves."""
    if foreign.is_foreign(path):
        return _variables(path)
    report = read_report(path)
    paths = {variable.name: leaf_path(variable) for variable in report.variables}
    stored: Mapping[str, Any] = {}
    if report.target == "saved_model":
        stored = _variables(path)
    elif (path / "weights.safetensors").is_file():
        opened = require("safetensors", "stablehlo", "inspect").safe_open
        with opened(path / "weights.safetensors", framework="flax") as file:
            stored = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return {paths.get(name, name): array for name, array in stored.items()}


def _variables(path: Path) -> dict[str, Any]:
    """The variables of a SavedModel by their names."""
    train = require("tensorflow.train", "tensorflow", "inspect")
    graphs = require("tensorflow.core.protobuf.trackable_object_graph_pb2", "tensorflow", "inspect")
    with foreign.unreadable(path):
        reader = train.load_checkpoint(str(path / "variables" / "variables"))
        graph = graphs.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor(_OBJECTS))
        return {
            each.full_name: reader.get_tensor(each.checkpoint_key)
            for node in graph.nodes
            for each in node.attributes
            if each.name == _VALUE
        }
