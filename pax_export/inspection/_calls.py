"""Traces a net with abstract inputs, and records calls of modules and their cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pax_export._jax import needed_part
from pax_export._types import PyTree
from pax_export.core import (
    Labeling,
    is_array,
    is_node,
    module_and_value,
    record_calls,
    with_labels,
)
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.flops import Work, work_of
from pax_export.export.tracing.spec import resolve_inputs


@dataclass
class ModuleCall:
    """The first call of a module, and how often a program calls it."""

    module: Any
    arguments: Any  # (args, kwargs) with ShapeDtypeStructs
    output: Any  # likewise
    count: int = 1  # calls in the trace; a loop's body counts once


@dataclass
class Trace:
    """A traced call of a net."""

    calls: dict[str, ModuleCall] = field(default_factory=dict)  # by path of the module
    work: Work = field(default_factory=Work)  # flops by path
    program: Any = None  # without unneeded operations
    inputs: tuple[str, ...] = ()  # names of the inputs
    output_count: int = 0  # the last results are outputs

    def called(self, path: str, module: PyTree, arguments: Sequence[Any], output: PyTree) -> Any:
        """Notes a call, as a recorder of labeled modules."""
        if path in self.calls:
            self.calls[path].count += 1
        else:
            self.calls[path] = ModuleCall(*map(_to_structs, (module, arguments, output)))
        return output


def _to_structs(tree: PyTree) -> Any:
    return jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, tree
    )


def trace_call(
    net: PyTree,
    inputs: tuple,
    kwargs: Mapping[str, Any] | None,
    function: Callable[..., Any] | None = None,
) -> Trace:
    """Traces a call of a net, or another function of it; no arrays are created."""
    function = function or type(net).__call__
    resolved = resolve_inputs(function, 1, inputs, kwargs, ())
    args, named = jax.tree_util.tree_unflatten(
        resolved.tree, [entry.struct for entry in resolved.flat]
    )

    def labeled(label: Labeling) -> Trace:
        trace = Trace(inputs=tuple(entry.name for entry in resolved.flat))

        def call(module: PyTree, args: tuple, named: dict) -> Any:
            updated, output = module_and_value(function)(module, *args, **named)
            trace.output_count = len(jax.tree_util.tree_leaves(output))
            return updated, output  # a call in train mode changes state, too

        with record_calls(trace):
            trace.program = needed_part(jax.make_jaxpr(call)(label(net), args, named))
        return trace

    trace = with_labels(labeled)
    trace.work = work_of(trace.program)
    return trace


def traced_as_one(model: Exportable, inputs: tuple, kwargs: Mapping[str, Any] | None) -> Trace:
    """Traces a model that is not a module, as one part."""
    (method,) = model.methods
    resolved = resolve_inputs(method.signature_of, method.skip, inputs, kwargs, ())
    trace = Trace(inputs=tuple(entry.name for entry in resolved.flat))

    def call(values: list[Any], flat: list[Any]) -> Any:
        arguments = resolved.call(flat)
        output, _ = model.run(method, values, *arguments)
        trace.called("", None, arguments, output)
        trace.output_count = len(jax.tree_util.tree_leaves(output))
        return output

    structs = [leaf.struct for leaf in model.leaves], [entry.struct for entry in resolved.flat]
    trace.program = needed_part(jax.make_jaxpr(call)(*structs))
    trace.work = work_of(trace.program)
    return trace


def arrays_of_call(values: PyTree) -> list[Any]:
    """Returns the arrays among the arguments or results of a call; modules are omitted."""
    leaves = jax.tree_util.tree_leaves(values, is_leaf=is_node)
    return [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
