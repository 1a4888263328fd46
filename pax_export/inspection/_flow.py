"""Calls of modules in a traced net, their cost, and the data that flows between them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.jax import needed_part
from pax_export._foundations.jaxpr import called_program, inner_programs, interpret, walk_equations
from pax_export._foundations.types import Equation, PyTree, TracedProgram
from pax_export.core import (
    Labeling,
    Module,
    Node,
    describe_array,
    is_array,
    is_node,
    module_and_value,
    path_in,
    purecall,
    record_calls,
    with_labels,
)
from pax_export.export.artifact import dimensions
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.flops import Work, work_of
from pax_export.export.tracing.inputs import resolve_inputs

T = TypeVar("T")


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

    def called(self, path: str, module: Node | None, arguments: Sequence[Any], output: T) -> T:
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
    net: Module,
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

        def call(module: Module, args: tuple, named: dict) -> Any:
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


# --- the time of calls ------------------------------------------------------------------

_LEAST_SECONDS = 0.02  # of all repetitions together
_LEAST_REPETITIONS = 3


def time_shares(trace: Trace) -> dict[str, float]:
    """Time of each module, compiled and run alone on random inputs, as a share of the root's.

    XLA fuses across modules, so shares need not sum to one.
    """
    seconds = {path: _time_call(path, call) * call.count for path, call in trace.calls.items()}
    whole = seconds.get("") or max(seconds.values(), default=1.0)
    return {path: each / whole for path, each in seconds.items()}


def _time_call(path: str, call: ModuleCall) -> float:
    leaves, tree = jax.tree_util.tree_flatten((call.module, *call.arguments))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def run(arrays: list[Any]) -> Any:
        arrays_with_draws = list(leaves)
        for index, array in zip(places, arrays):
            arrays_with_draws[index] = array
        module, args, kwargs = jax.tree_util.tree_unflatten(tree, arrays_with_draws)
        output = purecall(module, *args, **kwargs)
        return [leaf for leaf in jax.tree_util.tree_leaves(output) if is_array(leaf)]

    random = np.random.default_rng(0)
    arrays = [_random_like(leaves[index], random, path) for index in places]
    compiled = jax.jit(run).lower(arrays).compile()
    jax.block_until_ready(compiled(arrays))
    took: list[float] = []
    while sum(took) < _LEAST_SECONDS or len(took) < _LEAST_REPETITIONS:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(arrays))
        took.append(time.perf_counter() - begin)
    return median(took)


def _random_like(leaf: jax.ShapeDtypeStruct, random: np.random.Generator, path: str) -> Any:
    if not all(isinstance(size, int) for size in leaf.shape):
        raise InvalidArgumentError(
            "The time of a call can only be measured with sizes that are numbers.",
            where=path or "(root)",
            got=str(tuple(map(str, leaf.shape))),
            write="pax.inspect(net, x, measure=True) with an array x",
        )
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jax.numpy.asarray(dimensions.random_array(leaf.shape, np.dtype(leaf.dtype), random))


# --- the data that flows between modules ----------------------------------------------


#: Operations that only rearrange a value: edges pass through them.
_LOOKS = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims convert_element_type transpose copy "
    "stop_gradient optimization_barrier copy_p reduce_precision sharding_constraint name".split()
)


@dataclass(frozen=True)
class FlowNode:
    """A module, an operation between modules, an input or an output."""

    kind: str  # "module", "operation", "input" or "output"
    title: str  # class, or name of the operation or argument
    path: str = ""  # of a module


@dataclass
class Flow:
    """Nodes by number, and edges ``(from, to) -> the arrays that go there``."""

    nodes: list[FlowNode] = field(default_factory=list)
    edges: dict[tuple[int, int], list[str]] = field(default_factory=dict)

    def add(self, node: FlowNode) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def connect(self, source: int, target: int, text: str) -> None:
        texts = self.edges.setdefault((source, target), [])
        if text not in texts:
            texts.append(text)


class FlowReader:
    """The graph of a traced call; modules deeper than `depth` belong to the one around them."""

    def __init__(self, trace: Trace, classes: Mapping[str, str], depth: int):
        self.flow, self.classes = Flow(), classes
        self.shown = {path for path in trace.calls if 0 < self._path_depth(path) <= depth}
        self.containers = {each for path in self.shown for each in self._paths_up(path)} | {""}
        self.modules: dict[str, int] = {}
        inputs = [self.flow.add(FlowNode("input", name)) for name in trace.inputs]
        jaxpr = trace.program
        # The jaxpr is not closed: its constants come before its operands.
        leaves = [None] * (len(jaxpr.constvars) + len(jaxpr.invars) - len(inputs))
        sources = self._read_program(jaxpr, [*leaves, *inputs], "")
        results = list(zip(sources, jaxpr.outvars))
        self._connect_outputs(results[len(results) - trace.output_count :])

    def _path_depth(self, path: str) -> int:
        return sum(1 for _ in self._paths_up(path)) if path else 0

    def _paths_up(self, path: str) -> Iterable[str]:
        """The enclosing modules of a module."""
        while path:
            path = path.rpartition(".")[0]
            if path in self.classes:
                yield path

    def _connect_outputs(self, results: Sequence[tuple[int | None, Any]]) -> None:
        for number, (source, variable) in enumerate(results):
            name = "output" if len(results) == 1 else f"output {number}"
            node = self.flow.add(FlowNode("output", name))
            if source is not None:
                self.flow.connect(source, node, describe_array(variable.aval))

    def _read_program(
        self, program: TracedProgram, edges: Sequence[int | None], around: str
    ) -> list[int | None]:
        """The source nodes of the results of a program."""

        def operate(equation: Equation, operands: list[int | None]) -> Sequence[int | None]:
            path = path_in(equation, around)
            inner = _one_to_one(equation)
            if inner is not None and self._has_modules(inner, path):
                return self._read_program(inner, operands, path)
            return [self._add_node(equation, operands, path)] * len(equation.outvars)

        return interpret(program, edges, operate, constant=lambda value: None)

    def _add_node(self, equation: Equation, operands: list[int | None], path: str) -> int | None:
        """Adds the node of an operation, with edges to it; None for one of constants only."""
        home = self._home_of(path)
        edges = [(x, atom) for x, atom in zip(operands, equation.invars) if x is not None]
        if home is None and equation.primitive.name in _LOOKS and len(edges) == 1:
            return edges[0][0]
        if home is None and not edges:
            return None
        node = self._operation_node(equation) if home is None else self._module_node(home)
        for source, atom in edges:
            if source != node:
                self.flow.connect(source, node, describe_array(atom.aval))
        return node

    def _has_modules(self, program: TracedProgram, around: str) -> bool:
        """Whether a program calls modules that have nodes of their own."""
        home = self._home_of(around)
        paths = (
            functools.reduce(lambda path, each: path_in(each, path), (*callers, equation), around)
            for equation, callers in walk_equations(program)
        )
        return any(self._home_of(path) != home for path in paths)

    def _home_of(self, path: str) -> str | None:
        """Returns the module whose node an operation belongs to; None between modules."""
        for each in (path, *self._paths_up(path)):
            if each in self.shown:
                return None if each in self.containers else each
            if each in self.containers:
                return None
        return None

    def _module_node(self, path: str) -> int:
        if path not in self.modules:
            node = FlowNode("module", self.classes[path], path)
            self.modules[path] = self.flow.add(node)
        return self.modules[path]

    def _operation_node(self, equation: Equation) -> int:
        return self.flow.add(FlowNode("operation", _operation_title(equation).strip("_")))


def _one_to_one(equation: Equation) -> Any:
    """Returns the program with the same operands and results as an operation, or None."""
    if equation.primitive.name == "scan":
        return equation.params["jaxpr"]
    return called_program(equation)


def _operation_title(equation: Equation) -> str:
    """Returns the name of the jitted function that an operation calls, or its own name."""
    name = equation.params.get("name")
    if isinstance(name, str) and name:
        return name
    if equation.primitive.name.startswith("custom_"):  # the wrapped function has the name
        for program in inner_programs(equation):
            for inner, _ in walk_equations(program):
                return _operation_title(inner)
    return equation.primitive.name
