"""Writes a module as programs of `torch.export`, one for each method, in one archive."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from pax_export._foundations.errors import (
    SymbolicDimensionError,
    UnsupportedOperationError,
    first_line,
)
from pax_export.export.artifact import dimensions
from pax_export.export.formats.torch.module import TorchModule
from pax_export.export.formats.torch.run import METHODS, archives, from_numpy, rebuild
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.programs import Program

if TYPE_CHECKING:
    from pax_export._foundations.types import Size

_ASSERT = torch.ops.aten._assert_scalar.default


def write_archive(
    module: TorchModule, programs: Sequence[Program], methods: Mapping[str, Any], path: Path
) -> None:
    exported = {}
    for program in programs:
        with module.as_forward(program.key):
            exported[methods[program.key]["program"]] = _exported(module, program, methods)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with path.open("wb") as file:
            try:
                archives().package_pt2(
                    file, exported_programs=exported, extra_files={METHODS: json.dumps(methods)}
                )
            except Exception as error:  # of torch, for any reason
                raise _refusal(error, programs[0]) from error


def _exported(module: TorchModule, program: Program, methods: Mapping[str, Any]) -> Any:
    sizes, arrays = _sizes(program), {}
    for entry in program.inputs.flat:
        struct = dtypes.stored(entry.struct)
        shape = dimensions.shape(dtypes.shape_of(struct), sizes)
        arrays[entry.name] = from_numpy(np.zeros(shape, struct.dtype))
    arguments = methods[program.key]["arguments"].values()
    examples = tuple(rebuild(tree, arrays.__getitem__) for tree in arguments)
    first: Exception | None = None
    # Named sizes are those of the model. Of others torch asks less: what it cannot prove for all
    # sizes, such as whether an array is contiguous, is no error.
    for is_named in (True, False) if sizes else (True,):
        dims = _Dims(program, is_named)
        shapes = {e.name: dims.of_shape(dtypes.stored(e.struct).shape) for e in program.inputs.flat}
        dynamic_shapes = tuple(rebuild(tree, shapes.__getitem__) for tree in arguments)
        try:
            with warnings.catch_warnings(), _any_size():
                warnings.simplefilter("ignore")
                exported = _cleaned(torch.export.export(
                    module, examples, dynamic_shapes=dynamic_shapes if sizes else None,
                    strict=False, prefer_deferred_runtime_asserts_over_guards=True,
                ))  # fmt: skip
        except Exception as error:  # of torch, for any reason
            first = first or error
            continue
        names: list[str] = []
        for tree in arguments:
            rebuild(tree, names.append)
        _refuse_other_sizes(exported, program, names)
        return exported
    assert first is not None
    raise _refusal(first, program) from first


def _refuse_other_sizes(exported: ExportedProgram, program: Program, names: Sequence[str]) -> None:
    """Raises if a program takes fewer sizes than its spec has: torch may fix or bound them.

    Args:
        exported: the program of torch.
        program: the program that it was made from.
        names: the inputs, in the order of torch.
    """
    entries, symbols = {each.name: each for each in program.inputs.flat}, {}
    user_inputs = exported.graph_signature.user_inputs
    nodes = {each.name: each for each in exported.graph.find_nodes(op="placeholder")}
    for name, node in zip(names, user_inputs):
        shape = dtypes.stored(entries[name].struct).shape
        for size, found in zip(shape, nodes[node].meta["val"].shape):
            if isinstance(size, int):
                continue
            if isinstance(found, int):
                raise _refused_size(program, f"{size} = {found}", f"{found} instead of {size}")
            if found.node.expr.is_Symbol:
                other = symbols.setdefault(found.node.expr, str(size))
                if other != str(size):
                    raise _refused_size(program, f"{other} == {size}")
    for symbol, name in symbols.items():
        least, most = _bounds(name, program)
        found = exported.range_constraints[symbol]
        if found.lower > least:
            raise _refused_size(program, f"{name} >= {found.lower}")
        if found.upper < (math.inf if most is None else most):
            raise _refused_size(program, f"{name} <= {found.upper}")
    for node in exported.graph.find_nodes(op="call_function", target=_ASSERT):
        value: Any = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else None
        if not isinstance(value, torch.SymBool):
            continue
        condition = value.node.expr
        for sizes in program.sizes:
            values = {each: dimensions.value(name, sizes) for each, name in symbols.items()}
            if condition.subs(values) == False:  # noqa: E712 - a symbol is neither
                raise _refused_size(program, str(condition.subs(symbols)))


def _refused_size(program: Program, found: str, instead: str = "") -> SymbolicDimensionError:
    return SymbolicDimensionError(
        "torch.export does not keep a size as symbolic as the spec.",
        where=program.key,
        got=found,
        write=f"a spec with {instead}" if instead else f'constraints=["{found}"]',
    )


def _cleaned(exported: ExportedProgram) -> ExportedProgram:
    """Removes asserts that sizes differ, or are not 1, and the lines of this package.

    Torch asserts that about the layout of memory: results do not depend on it, and validation makes
    a call with sizes of 1.
    """
    for part in exported.graph_module.modules():  # bodies of loops, too
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.find_nodes(op="call_function", target=_ASSERT):
            if re.search(r"expression (Ne\(|1 < )", str(node.args[1])):
                part.graph.erase_node(node)
        for node in part.graph.nodes:
            node.meta.pop("stack_trace", None)
        part.recompile()
    return exported


def _any_size() -> AbstractContextManager[Any]:
    """A block in which torch does not distinguish sizes of 1 to find out how memory is laid out.

    Without it, a program for any size is refused, or at sizes of 1 when it runs.
    """
    config = importlib.import_module("torch.fx.experimental._config")
    known = hasattr(config, "backed_size_oblivious")
    return config.patch(backed_size_oblivious=True) if known else nullcontext()


def _sizes(program: Program) -> dict[str, int]:
    """Sizes to trace with: unlike each other and any size that torch would fix."""
    names, constraints = program.inputs.dimensions, program.inputs.constraints
    shapes = [dtypes.shape_of(dtypes.stored(each.struct)) for each in program.inputs.flat]
    numbers = [each for shape in shapes for each in shape if isinstance(each, int)]
    for first in (7, 3, 17, 33, 65):
        unlike = (each for each in itertools.count(first, 2) if each not in numbers)
        chosen = dict(zip(names, unlike))
        values = [dimensions.value(size, chosen) for shape in shapes for size in shape]
        if all(dimensions.holds(each, chosen) for each in constraints) and min(values, default=1):
            return chosen
    return max(program.sizes, key=lambda each: min(each.values(), default=0), default={})


def _bounds(name: str, program: Program) -> tuple[int, int | None]:
    """The least and the largest value of a size, by the constraints."""
    least, most = 1, None
    for constraint in program.inputs.constraints:
        found = re.fullmatch(rf"\s*{re.escape(name)}\s*(<=|>=)\s*(\d+)\s*", constraint)
        if found and found[1] == ">=":
            least = max(least, int(found[2]))
        elif found:
            most = int(found[2])
    return least, most


class _Dims:
    """The dimensions of torch for the symbolic sizes of a program, with its bounds."""

    def __init__(self, program: Program, is_named: bool):
        self._dims: dict[str, Any] = {}
        self._is_named = is_named
        for name in program.inputs.dimensions:
            least, most = _bounds(name, program)
            dim = Dim(name, min=least, max=most) if is_named else Dim.DYNAMIC(min=least, max=most)
            self._dims[name] = dim

    def of_shape(self, shape: Sequence[Any]) -> dict[int, Any]:
        return {
            axis: self._of(size) for axis, size in enumerate(shape) if not isinstance(size, int)
        }

    def _of(self, size: Size) -> Any:
        if not self._is_named:
            return self._dims.get(str(size), Dim.DYNAMIC)
        try:
            return dimensions.evaluate_over(str(size), self._dims, _calculated)
        except (TypeError, NotImplementedError):  # torch's are linear in one name
            return Dim.DYNAMIC


def _calculated(operation: str, left: Dim | int, right: Dim | int) -> Any:
    if isinstance(left, int) and operation in ("add", "mul"):
        left, right = right, left
    if isinstance(right, int) and operation == "mul":
        return right * left
    if isinstance(right, int) and operation in ("add", "sub"):
        return left + right if operation == "add" else left - right
    raise NotImplementedError(operation)


def _refusal(error: Exception, program: Program) -> Exception:
    text, names = str(error), program.inputs.dimensions
    for name, value in re.findall(r"^\s*(\w+) = (.+)$", text, re.MULTILINE):
        if name in names and value.isdigit():
            return _refused_size(program, f"{name} = {value}", f"{value} instead of {name}")
        bounds = re.findall(r"(min|max)=(\d+)", value)
        if name in names and bounds:
            (kind, number), relation = bounds[0], {"min": ">=", "max": "<="}
            return _refused_size(program, f"{name} {relation[kind]} {number}")
    if "specialized" in text or "onstraint" in text:
        return _refused_size(program, first_line(error), "a number for the size")
    return UnsupportedOperationError(
        "torch.export cannot trace the model.",
        where=program.key,
        got=f"{type(error).__name__}: {text[:1000]}",
        write="pax.export.as_torch, a module in this process; or to_onnx",
    )
