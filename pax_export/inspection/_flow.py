"""What flows between the modules of a net in one call: a graph, made of the traced program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pax_export._jaxpr import called_program, inner_programs, is_literal
from pax_export.core import describe_array, path_in
from pax_export.inspection._calls import Trace

#: Operations that only look at a value in another way: an edge goes through them.
_LOOKS = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims convert_element_type transpose copy "
    "stop_gradient optimization_barrier copy_p reduce_precision sharding_constraint name".split()
)


@dataclass(frozen=True)
class Node:
    """A module, an operation between modules, an input or an output.

    Attributes:
        kind: ``"module"``, ``"operation"``, ``"input"`` or ``"output"``.
        title: the class (``Lambda(relu)`` of a function), or the name of the operation or
            argument.
        path: of a module, its path.
    """

    kind: str
    title: str
    path: str = ""


@dataclass
class Flow:
    """Nodes by number, and edges ``(from, to) -> the arrays that go there``."""

    nodes: list[Node] = field(default_factory=list)
    edges: dict[tuple[int, int], list[str]] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def connect(self, source: int, target: int, text: str) -> None:
        texts = self.edges.setdefault((source, target), [])
        if text not in texts:
            texts.append(text)


def flow_of(trace: Trace, classes: Mapping[str, str], depth: int) -> Flow:
    """The graph of a traced call.

    ``classes`` has the title of each module by its path; modules that lie deeper than
    ``depth`` modules are part of the one around them.
    """
    return _Reader(trace, classes, depth).flow


class _Reader:
    def __init__(self, trace: Trace, classes: Mapping[str, str], depth: int):
        self.flow, self.classes = Flow(), classes
        self.shown = {path for path in trace.calls if 0 < self._depth(path) <= depth}
        self.containers = {each for path in self.shown for each in self._around(path)} | {""}
        self.modules: dict[str, int] = {}
        jaxpr = trace.program
        sources: dict[Any, int] = {}
        count = len(trace.inputs)
        for name, variable in zip(trace.inputs, jaxpr.invars[len(jaxpr.invars) - count :]):
            sources[variable] = self.flow.add(Node("input", name))
        self._read(jaxpr, sources, "")
        self._outputs(jaxpr.outvars[len(jaxpr.outvars) - trace.output_count :], sources)

    def _depth(self, path: str) -> int:
        return sum(1 for _ in self._around(path)) if path else 0

    def _around(self, path: str) -> Iterable[str]:
        """The modules in which one lies."""
        while path:
            path = path.rpartition(".")[0]
            if path in self.classes:
                yield path

    def _outputs(self, variables: Sequence[Any], sources: Mapping[Any, int]) -> None:
        for number, variable in enumerate(variables):
            name = "output" if len(variables) == 1 else f"output {number}"
            node = self.flow.add(Node("output", name))
            if not is_literal(variable) and variable in sources:
                self.flow.connect(sources[variable], node, describe_array(variable.aval))

    def _read(self, jaxpr: Any, sources: dict[Any, int], around: str) -> None:
        for equation in jaxpr.eqns:
            path = path_in(equation, around)
            name = equation.primitive.name
            inner = _one_to_one(equation)
            if inner is not None and self._has_modules(inner, path):
                self._open(equation, inner, sources, path)
                continue
            given = [v for v in equation.invars if not is_literal(v) and v in sources]
            home = self._home(path)
            if home is None and name in _LOOKS and len(given) == 1:
                sources.update(dict.fromkeys(equation.outvars, sources[given[0]]))
                continue
            if home is None and not given:
                continue  # a constant
            node = self._operation(equation) if home is None else self._module(home)
            for variable in given:
                if sources[variable] != node:
                    self.flow.connect(sources[variable], node, describe_array(variable.aval))
            sources.update(dict.fromkeys(equation.outvars, node))

    def _open(self, equation: Any, inner: Any, sources: dict[Any, int], path: str) -> None:
        inside = {
            variable: sources[outer]
            for variable, outer in zip(inner.invars, equation.invars)
            if not is_literal(outer) and outer in sources
        }
        self._read(inner, inside, path)
        for outer, variable in zip(equation.outvars, inner.outvars):
            if not is_literal(variable) and variable in inside:
                sources[outer] = inside[variable]

    def _has_modules(self, jaxpr: Any, around: str) -> bool:
        """Whether a program calls modules that have nodes of their own."""
        home = self._home(around)
        for equation in jaxpr.eqns:
            path = path_in(equation, around)
            if self._home(path) != home:
                return True
            inner = (getattr(each, "jaxpr", each) for each in inner_programs(equation))
            if any(self._has_modules(each, path) for each in inner):
                return True
        return False

    def _home(self, path: str) -> str | None:
        """The module whose node an operation belongs to; None between modules."""
        for each in (path, *self._around(path)):
            if each in self.shown:
                return None if each in self.containers else each
            if each in self.containers:
                return None
        return None

    def _module(self, path: str) -> int:
        if path not in self.modules:
            node = Node("module", self.classes[path], path)
            self.modules[path] = self.flow.add(node)
        return self.modules[path]

    def _operation(self, equation: Any) -> int:
        return self.flow.add(Node("operation", _title(equation).strip("_")))


def _one_to_one(equation: Any) -> Any:
    """The program whose operands and results are those of an operation; None if it has none."""
    program = called_program(equation)
    if equation.primitive.name == "scan":
        program = equation.params["jaxpr"]
    return getattr(program, "jaxpr", program)


def _title(equation: Any) -> str:
    """The name of the jitted function that an operation calls, or its own."""
    name = equation.params.get("name")
    if isinstance(name, str) and name:
        return name
    if equation.primitive.name.startswith("custom_"):  # as relu: what it wraps has the name
        for program in inner_programs(equation):
            for inner in getattr(program, "jaxpr", program).eqns:
                return _title(inner)
    return equation.primitive.name
