"""`inspect`: describes a net, or an export, as rows."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.optional import require
from pax_export._foundations.types import PyTree
from pax_export.core import (
    ROLES,
    STATE,
    TRAINABLE,
    Module,
    aspect_of,
    declared_at,
    describe_array,
    is_node,
    join_path,
    named_modules,
    named_roles,
)
from pax_export.export.artifact import saved_models
from pax_export.export.artifact.report import (
    ArrayInfo,
    Report,
    SignatureInfo,
    VariableInfo,
    read_report,
)
from pax_export.export.tracing.exportable import ExportLeaf as Exported
from pax_export.export.tracing.flops import Work, count_value, plain_count
from pax_export.export.tracing.models import make_exportable, unbind
from pax_export.inspection._drawing import function_of
from pax_export.inspection._flow import (
    Trace,
    arrays_of_call,
    time_shares,
    trace_call,
    traced_as_one,
)
from pax_export.inspection._table import Inspection, Row


def inspect(
    net: Module, *inputs: PyTree, kwargs: Mapping[str, Any] | None = None, measure: bool = False
) -> Inspection:
    """Describes a model or an export: one row per module and array.

    Nothing is computed and no array is created, unless time is measured: the call is traced with
    shapes only.  So the model may be abstract, such as ``jax.eval_shape(constructor)``, and larger
    than memory.

    Args:
        net: a module; another model that can be exported (a function, an Equinox module), whose
            arrays are rows below one row; or the path of an export: a SavedModel, also of another
            program, or a StableHLO bundle, TFLite or ONNX model of ours.  Exports are read as
            data; their report has the FLOPs of a call.
        *inputs: the inputs of its call: arrays, `jax.ShapeDtypeStruct`, or `export.spec`, whose
            sizes may be symbolic; FLOPs are formulas then.  Without inputs, shapes of activations
            and FLOPs are unknown.
        kwargs: keyword inputs.
        measure: whether to also time each module's call, separately and compiled, on random
            inputs; sizes must be numbers then.

    Returns:
        An `Inspection`.

    Raises:
        InvalidArgumentTypeError: neither a model nor a path; inputs for an export; ``measure``
            for anything but a module.
        ExportPathError: there is no export at the path.
        InvalidArgumentError: the inputs are not those of the call, or time is measured without
            inputs or for symbolic sizes. Other errors of the call are not changed.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(4, 8), pax.Linear(8, 2, with_bias=False))
        >>> found = pax.inspect(net, pax.export.spec("batch, 4"))
        >>> found.parameters, found.bytes, found.flops
        (56, 224, '104*batch')
        >>> print(pax.inspect(net).table(arrays=False))
        path         class       dtype    role       parameters  bytes
        (root)       Sequential  float32  trainable          56  224 B
          modules.0  Linear      float32  trainable          40  160 B
          modules.1  Linear      float32  trainable          16   64 B
        <BLANKLINE>
        56 parameters, all trainable, 224 B

    """
    if isinstance(net, (str, os.PathLike)) and not (inputs or kwargs or measure):
        return inspect_export(Path(net))
    model, function = unbind(net)
    known = bool(inputs or kwargs)
    if measure and not known and isinstance(model, Module):
        raise InvalidArgumentError(
            "The time of a call can only be measured with its inputs.",
            where=type(model).__name__,
            write="pax.inspect(net, x, measure=True) with an array x",
        )
    if isinstance(model, Module):
        trace = trace_call(model, inputs, kwargs, function) if known else None
        shares = time_shares(trace) if measure and trace else {}
        rows = _Rows(named_modules(model), leaves_of(model), trace, shares).in_order(model)
    elif isinstance(net, (str, os.PathLike)) or measure:
        raise InvalidArgumentTypeError(
            "inspect takes a model with its inputs, or the path of an export alone; it measures "
            "modules of pax_export.",
            got=type(net).__name__,
            write="pax.inspect(net), or pax.inspect(net, x) with the inputs of its call",
        )
    else:
        chosen = make_exportable(net, None)
        trace = traced_as_one(chosen, inputs, kwargs) if known else None
        leaves = [_net_array(each) for each in chosen.leaves]
        rows = _Rows([("", None)], leaves, trace, {}).below_one(chosen.name)
    return Inspection(tuple(rows), tuple(sorted(trace.work.uncounted)) if trace else ())


def _net_array(leaf: Exported) -> NetArray:
    role = TRAINABLE if leaf.trainable else STATE
    return NetArray(leaf.name, tuple(leaf.struct.shape), str(leaf.struct.dtype), role)


class _Rows:
    """The rows of a net; modules below each module are summed once, by paths."""

    def __init__(
        self,
        modules: Sequence[tuple[str, Any]],
        leaves: Sequence[NetArray],
        trace: Trace | None,
        shares: Mapping[str, float],
    ):
        self.trace, self.shares = trace, shares
        self.modules, self.leaves = modules, leaves
        self.module_paths = {path for path, _ in self.modules}
        self.parameters: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.roles: dict[str, set[str]] = defaultdict(set)
        self.dtypes: dict[str, dict[str, None]] = defaultdict(dict)
        for leaf in self.leaves:
            for path in _enclosing_paths(leaf.path):
                self.parameters[path] += 0 if leaf.role == STATE else leaf.size
                self.bytes[path] += leaf.bytes
                self.roles[path].add(leaf.role)
                self.dtypes[path][leaf.dtype] = None
        self.declared = _declarations(modules, leaves)
        work = trace.work if trace else Work()
        self.flops, self.transcendentals = _sum_up(work.flops), _sum_up(work.transcendentals)
        self.computed_in: dict[str, Counter[str]] = defaultdict(Counter)
        for own, counts in work.dtypes.items():
            for path in _enclosing_paths(own):
                self.computed_in[path].update({name: count_value(n) for name, n in counts.items()})

    def below_one(self, name: str) -> Iterator[Row]:
        """The model itself, then its arrays."""
        computed_in = _mode_of(self.computed_in[""])
        yield dataclasses.replace(self._counts("", name), computed_in=computed_in)
        yield from map(self._array_row, self.leaves)

    def in_order(self, net: Module) -> Iterator[Row]:
        """Modules in tree order, parents first."""
        modules, leaves = iter(self.modules), iter(self.leaves)
        arrays = set(map(id, jax.tree_util.tree_leaves(net)))
        order: list[bool] = []

        def visit(value: object) -> bool:
            if is_node(value) or id(value) in arrays:
                order.append(is_node(value))
            return False

        jax.tree_util.tree_leaves(net, is_leaf=visit)
        for module_comes in order:
            yield (
                self._module_row(*next(modules)) if module_comes else self._array_row(next(leaves))
            )

    def _module_row(self, path: str, module: Module) -> Row:
        return dataclasses.replace(
            self._counts(path, type(module).__name__),
            name=module.name,
            mode="train" if module.training else "eval",
            computed_in=self._computed_in(path, module),
            time_share=self.shares.get(path),
            function=function_of(module),
            declared=self.declared.get(path, ""),
        )

    def _counts(self, path: str, class_name: str) -> Row:
        call = self.trace.calls.get(path) if self.trace else None
        return Row(
            path=path,
            kind="module",
            depth=self._path_depth(path),
            class_name=class_name,
            inputs=_array_texts(call.arguments) if call else (),
            outputs=_array_texts(call.output) if call else (),
            calls=call.count if call else 0,
            dtype=",".join(self.dtypes[path]),
            role=next((role for role in ROLES if role in self.roles[path]), ""),
            parameters=self.parameters[path],
            bytes=self.bytes[path],
            flops=plain_count(self.flops.get(path, 0)) if self.trace else None,
            transcendentals=plain_count(self.transcendentals.get(path, 0)) if self.trace else None,
        )

    def _array_row(self, leaf: NetArray) -> Row:
        return Row(
            path=leaf.path,
            kind="array",
            depth=self._path_depth(leaf.path),
            shape=leaf.shape,
            dtype=leaf.dtype,
            role=leaf.role,
            declared=self.declared.get(leaf.path, ""),
            parameters=0 if leaf.role == STATE else leaf.size,
            bytes=leaf.bytes,
        )

    def _path_depth(self, path: str) -> int:
        return sum(each in self.module_paths for each in _enclosing_paths(path) if each != path)

    def _computed_in(self, path: str, module: Module) -> str:
        policy = aspect_of(type(module), "mp_policy")
        if self.trace and self.computed_in[path]:
            return _mode_of(self.computed_in[path])
        return np.dtype(policy.compute_dtype).name if policy is not None else ""


def _declarations(modules: Sequence[tuple[str, Any]], leaves: Sequence[NetArray]) -> dict[str, str]:
    """What classes say of arrays, by path; and the modules with arrays that say nothing."""
    found: dict[str, str] = {}
    silent: dict[str, bool] = {}
    for path, module in modules:
        declared = declared_at(module)
        silent[path] = not declared
        for name, each in declared.items():
            found[join_path(path, name)] = f"{each.declared.role} [{', '.join(each.axes)}]"
    for leaf in leaves:
        owner = next((path for path in _enclosing_paths(leaf.path) if path in silent), "")
        if leaf.path not in found and silent.get(owner):
            found[owner] = "no declaration"
    return found


def _enclosing_paths(path: str) -> Iterator[str]:
    """A path and those that it leads on from, the root's too."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _sum_up(counts: Mapping[str, Any]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for own, count in counts.items():
        for path in _enclosing_paths(own):
            total[path] = total.get(path, 0) + count
    return total


def _mode_of(counts: Counter[str]) -> str:
    return counts.most_common(1)[0][0] if counts else ""


def _array_texts(values: PyTree) -> tuple[str, ...]:
    return tuple(map(describe_array, arrays_of_call(values)))


@dataclass(frozen=True)
class NetArray:
    """One array of a net."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        # Keys of jax, and dtypes unknown to numpy, have an itemsize of their own.
        return self.size * _item_size(self.dtype)


def _item_size(dtype: str) -> int:
    if dtype.startswith("key<"):
        return 16 if "rbg" in dtype else 8
    return np.dtype(jax.numpy.dtype(dtype)).itemsize


def leaves_of(net: Module) -> list[NetArray]:
    """The arrays of a net in tree order."""
    return [
        NetArray(path, tuple(leaf.shape), str(leaf.dtype), role)
        for path, leaf, role in named_roles(net)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]


# --- exports, read as data without loading them ------------------------------------------

_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_VALUE = "VARIABLE_VALUE"
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def inspect_export(path: Path) -> Inspection:
    """A row for the export, for each signature of several, and for each array."""
    if saved_models.is_foreign(path):
        found = saved_models.describe(path)
        calls = {
            key: {name: _named_texts(arrays) for name, arrays in each.items()}
            for key, each in found.signatures.items()
        }
        return Inspection(tuple(_make_rows(found, "SavedModel", calls)))
    report = read_report(path)
    uncounted = {each for signature in report.signatures.values() for each in signature.uncounted}
    calls = {key: _call_fields(each) for key, each in report.signatures.items()}
    return Inspection(tuple(_make_rows(report, report.model, calls)), tuple(sorted(uncounted)))


def _make_rows(
    found: saved_models.Foreign | Report, title: str, calls: Mapping[str, Mapping[str, Any]]
) -> Iterator[Row]:
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
        "inputs": _named_texts(signature.inputs),
        "outputs": _named_texts(signature.outputs),
        "flops": signature.flops,
        "transcendentals": signature.transcendentals,
        "computed_in": signature.computed_in,
    }


def leaf_path(variable: VariableInfo) -> str:
    """Returns the path of the leaf of a variable; for another program's export, its name."""
    if not variable.leaves:
        return variable.name
    return _STEP.sub(r".\1", variable.leaves[0]).lstrip(".")


def _named_texts(arrays: tuple[ArrayInfo, ...]) -> tuple[str, ...]:
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
