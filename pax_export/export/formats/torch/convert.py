"""Traced programs as graphs of torch, and a module that runs them."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export.export.formats.torch import fuse, rules
from pax_export.export.formats.torch.attention import attention_kept
from pax_export.export.formats.torch.graph import TorchGraph, prune_graph
from pax_export.export.formats.torch.module import TorchMethod, TorchModule, argument_names
from pax_export.export.formats.torch.own_rules import OwnRule, with_own_rules
from pax_export.export.formats.torch.run import collect, rebuild
from pax_export.export.formats.torch.values import RULES, TorchValue, carrier, is_wrapped
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline.format_exporter import portable_program
from pax_export.export.portable import (
    NotInTargetError,
    NotWrittenError,
    PassOptions,
    PortableProgram,
    in_parts,
    written_fast,
)
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import refuse_operation

if TYPE_CHECKING:
    import jax
    from torch.fx import Graph, Node

    from pax_export.export.portable.program import Weight

RULES.load(rules)
_WRITE = "the same in other operations of jax.numpy and jax.lax"


def make_module(
    name: str,
    programs: Sequence[Program],
    store: Store,
    trainable: bool,
    live: bool,
    changes: Mapping[str, Sequence[str]],
) -> tuple[TorchModule, dict[str, tuple[str, ...]]]:
    """The module of a model with a method for each program, and notes for the report by key."""
    module = TorchModule.of_name(name)
    notes: dict[str, tuple[str, ...]] = {}
    for program in programs:
        own: list[OwnRule] = []
        if trainable:
            rewritten, own = with_own_rules(program.traced.program)
            traced = dataclasses.replace(program.traced, program=rewritten)
            program = dataclasses.replace(program, traced=traced)
        writer = _Writer(module, program, store, own, live, trainable, changes[program.key])

        def read(options: PassOptions | None, program: Program = program) -> PortableProgram:
            updates = bool(changes[program.key])
            result = portable_program(program, store, options, updates=updates)
            return result if options is None else attention_kept(result, trainable)

        method, portable = written_fast(read, PassOptions(fold=not trainable), writer.write_method)
        module.add_method(method)
        notes[program.key] = portable.notes
    for each in store.stored if trainable else ():  # a state dict has all leaves
        module.add_array(each.name, each.value, each.parameter, each.trainable)
    return module, notes


class _Writer:
    def __init__(
        self,
        module: TorchModule,
        program: Program,
        store: Store,
        own: Sequence[OwnRule],
        live: bool,
        trains: bool,
        changes: Sequence[str],
    ):
        self._changes = changes
        self._module, self._program = module, program
        self._variables = {each.name: each for each in store.variables}
        self._builder = TorchGraph(program.inputs.dimensions, own, live, trains)

    def write_method(self, portable: PortableProgram) -> TorchMethod:
        builder, program = self._builder, self._program
        try:
            with builder.new_graph(self._module) as frame:
                names = argument_names(program.inputs.structure())
                weight_nodes = [
                    frame.graph.placeholder(re.sub(r"\W", "_", f"weight_{number}_{each.name}"))
                    for number, each in enumerate(portable.weights)
                ]
                arguments = {name: frame.graph.placeholder(name) for name in names.values()}
                inputs = self._inputs(arguments, names)
                structs = program.traced.structs[-len(inputs) :] if inputs else ()
                paths, values = [], []
                for node, weight in zip(weight_nodes, portable.weights):
                    paths.append(self._place(weight))
                    values.extend(self._weight(node, weight))
                stored = zip(weight_nodes, paths, portable.weights)
                anchors = [(node, weight.array.shape) for node, path, weight in stored if path]
                builder.begin_graph([*zip(inputs, (each.shape for each in structs)), *anchors])
                input_values = [self._taken(n, s) for n, s in zip(inputs, structs)]
                found = builder.write(portable.program, [*values, *input_values])
                outputs = dict(zip(program.output_names, found))
                results = dict(zip(program.output_names, program.traced.results))
                output_tree = rebuild(
                    program.output_structure, lambda name: self._given(outputs[name], results[name])
                )
                changed = zip(found[len(outputs) :], program.traced.results[len(outputs) :])
                state = [self._given(*each) for each in changed]
                frame.graph.output((output_tree, tuple(state)) if self._changes else output_tree)
                for each in map(self._variables.__getitem__, self._changes):
                    self._module.add_array(each.name, each.value, each.parameter, each.trainable)
                prune_graph(frame.graph)
                self._join(frame.graph, dict(zip(weight_nodes, paths)))
                keep = []
                for node, path in zip(weight_nodes, paths):
                    if node.users:
                        keep.append(path)
                    else:
                        frame.graph.erase_node(node)
                return TorchMethod(
                    program.key, frame.graph, tuple(keep), tuple(names.values()),
                    tuple(self._changes), program.trains,
                )  # fmt: skip
        except NotInTargetError as error:
            raise UnsupportedOperationError(
                f"torch cannot express {error}.", where=program.key, write=_WRITE
            ) from error
        except NotWrittenError as error:
            raise refuse_operation("torch", error, program.key, _WRITE) from error

    def _join(self, graph: Graph, paths: Mapping[Any, str]) -> None:
        """Joins calls, and lays the memory of weights out for them."""
        read = {node: path for node, path in paths.items() if path and node.users}
        arrays = {node: self._module.array(path) for node, path in read.items()}
        trained = {node for node, each in arrays.items() if each.requires_grad}
        fuse.Joiner(graph, arrays, trained).join()
        prune_graph(graph)
        for node, order in fuse.memory_orders(graph, list(read)).items():
            self._module.lay_out(read[node], order)

    def _inputs(self, arguments: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
        """The nodes of the flat inputs, inside of the arguments."""
        found: dict[str, Any] = {}
        for name, structure in self._program.inputs.structure().items():
            if name in names:
                found |= collect(structure, arguments[names[name]], self._builder.take_item)
        return [found[entry.name] for entry in self._program.inputs.flat]

    def _place(self, weight: Weight) -> str:
        """The name of a weight in the module, under which it is stored if it is not yet."""
        name = weight.name
        if not name:
            return ""
        variable = self._variables.get(name) if not weight.sources else None
        name = re.sub(r"[^\w.]", "_", name)  # of one that was computed
        roles = (variable.parameter, variable.trainable) if variable else (False, False)
        self._module.add_array(name, weight.array, *roles)
        return name

    def _weight(self, node: Node, weight: Weight) -> list[TorchValue]:
        builder = self._builder
        if not weight.name:
            return [builder.constant_value(part) for part in in_parts(weight.array)]
        array = weight.array
        dtype = np.dtype(array.dtype)
        if dtype.kind == "c":
            half = np.dtype(f"float{4 * dtype.itemsize}")
            return [
                TorchValue(builder(kind, node), half, tuple(array.shape))
                for kind in ("real", "imag")
            ]
        return [self._taken(node, array)]

    def _taken(self, node: Node, struct: jax.ShapeDtypeStruct) -> TorchValue:
        dtype = np.dtype(struct.dtype)
        if is_wrapped(dtype):
            node = self._builder.cast_to(node, carrier(dtype))
        node.meta["shape"] = tuple(struct.shape)
        return TorchValue(node, dtype, tuple(struct.shape))

    def _given(self, value: TorchValue, struct: jax.ShapeDtypeStruct) -> Any:
        """An output in its own dtype; torch would return a number for a literal."""
        node, dtype = self._builder.node_of(value), np.dtype(struct.dtype)
        if dtype.name in ("int4", "uint4", "int2", "uint2"):
            return self._builder.cast_to(node, "int8")
        return self._builder.cast_to(node, dtype.name) if is_wrapped(dtype) else node
