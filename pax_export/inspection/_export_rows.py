"""The rows of an export, read as data without loading it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations.optional import require
from pax_export._foundations.types import PyTree
from pax_export.export.artifact import saved_models
from pax_export.export.artifact.report import (
    ArrayInfo,
    SignatureInfo,
    VariableInfo,
    read_report,
)
from pax_export.inspection._table import Inspection, Row

_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_VALUE = "VARIABLE_VALUE"
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def inspect_export(path: Path) -> Inspection:
    """A row for the export, for each signature of several, and for each array."""
    if saved_models.is_foreign(path):
        found: Any = saved_models.describe(path)
        calls = {
            key: {name: _array_texts(arrays) for name, arrays in each.items()}
            for key, each in found.signatures.items()
        }
        return Inspection(tuple(_make_rows(found, "SavedModel", calls)))
    report = read_report(path)
    uncounted = {each for signature in report.signatures.values() for each in signature.uncounted}
    calls = {key: _call_fields(each) for key, each in report.signatures.items()}
    return Inspection(tuple(_make_rows(report, report.model, calls)), tuple(sorted(uncounted)))


def _make_rows(found: PyTree, title: str, calls: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yields the rows of an export; `calls` are the columns about each signature."""
    only = [*calls.values()] if len(calls) == 1 else [{}]
    trained = {variable.name for variable in found.variables if _is_trained(variable)}
    counted = trained or {variable.name for variable in found.variables}  # the file may not say
    yield Row(
        path="",
        kind="module",
        class_name=title,
        mode="eval",
        dtype=",".join(dict.fromkeys(variable.dtype for variable in found.variables)),
        role="trainable" if trained else "",
        parameters=sum(_count_elements(each) for each in found.variables if each.name in counted),
        bytes=found.variable_bytes,
        **only[0],
    )
    if len(calls) > 1:
        for key, fields in calls.items():
            yield Row(key, "signature", 1, **fields)
    for variable in found.variables:
        yield Row(
            path=leaf_path(variable),
            kind="array",
            depth=1,
            shape=tuple(variable.shape),
            dtype=variable.dtype,
            role="trainable" if variable.name in trained else "",
            parameters=_count_elements(variable) if variable.name in counted else 0,
            bytes=variable.bytes,
        )


def _is_trained(variable: VariableInfo) -> bool:
    """Whether training changes it; other arrays are state or frozen, which a file does not say."""
    return variable.parameter or variable.trainable


def _call_fields(signature: SignatureInfo) -> dict[str, Any]:
    """The columns of a row about a call."""
    return {
        "inputs": _array_texts(signature.inputs),
        "outputs": _array_texts(signature.outputs),
        "flops": signature.flops,
        "transcendentals": signature.transcendentals,
        "computed_in": signature.computed_in,
    }


def leaf_path(variable: VariableInfo) -> str:
    """Returns the path of the leaf of a variable; for another program's export, its name."""
    if not variable.leaves:
        return variable.name
    return _STEP.sub(r".\1", variable.leaves[0]).lstrip(".")


def _array_texts(arrays: tuple[ArrayInfo, ...]) -> tuple[str, ...]:
    return tuple(f"{each.name}: {each.dtype}[{','.join(map(str, each.shape))}]" for each in arrays)


def _count_elements(variable: VariableInfo) -> int:
    size = 1
    for each in variable.shape:
        size *= max(each, 0)
    return size


def arrays_of(path: Path) -> Mapping[str, Any]:
    """The arrays of an export that keeps them by name, by the paths of their leaves."""
    if saved_models.is_foreign(path):
        return _saved_variables(path)
    report = read_report(path)
    paths = {variable.name: leaf_path(variable) for variable in report.variables}
    stored: Mapping[str, Any] = {}
    if report.target == "saved_model":
        stored = _saved_variables(path)
    elif (path / "weights.safetensors").is_file():
        opened = require("safetensors", "stablehlo", "inspect").safe_open
        with opened(path / "weights.safetensors", framework="flax") as file:
            stored = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return {paths.get(name, name): array for name, array in stored.items()}


def _saved_variables(path: Path) -> dict[str, Any]:
    """The variables of a SavedModel by their names."""
    train = require("tensorflow.train", "tensorflow", "inspect")
    graphs = require("tensorflow.core.protobuf.trackable_object_graph_pb2", "tensorflow", "inspect")
    with saved_models.unreadable_as_error(path):
        reader = train.load_checkpoint(str(path / "variables" / "variables"))
        graph = graphs.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor(_OBJECTS))
        return {
            each.full_name: reader.get_tensor(each.checkpoint_key)
            for node in graph.nodes
            for each in node.attributes
            if each.name == _VALUE
        }
