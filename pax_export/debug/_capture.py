"""`capture` and `statistics`: intermediate values of a net by module path, and their summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pax_export._foundations import tables
from pax_export._foundations.errors import (
    InvalidArgumentError,
    UnsupportedOperationError,
)
from pax_export._foundations.jax import scan_operands
from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    inner_programs,
    interpret,
    walk_equations,
)
from pax_export._foundations.types import ArrayLike, Equation, PyTree, TracedProgram, TreeDef
from pax_export.core import (
    Labeling,
    Module,
    Node,
    Selector,
    is_array,
    named_modules,
    path_name,
    purecall,
    record_calls,
    require_module,
    with_labels,
)
from pax_export.debug._nans import FunctionCall

R = TypeVar("R")


@dataclass
class _Marks:
    """Marks the outputs of chosen modules, as a recorder of labeled modules."""

    paths: frozenset[str]
    trees: dict[str, Any] = field(default_factory=dict)

    def called(self, path: str, module: Node, arguments: Sequence[Any], output: R) -> R:
        if path not in self.paths:
            return output
        leaves, tree = jax.tree_util.tree_flatten(output)
        self.trees.setdefault(path, tree)
        marked = [
            checkpoint_name(leaf, f"{PREFIX}{path} {number}") if is_array(leaf) else leaf
            for number, leaf in enumerate(leaves)
        ]
        return jax.tree_util.tree_unflatten(tree, marked)


class Capture:
    """A net whose calls also return the outputs of chosen modules; created by `capture`.

    It is a function of arrays, for `jax.jit`, `jax.vmap` and `jax.grad`.

    Attributes:
        net: the net.
        paths: the paths of the chosen modules.

    Example:
        >>> import pax_export as pax
        >>> pax.debug.capture(pax.Sequential(pax.Linear(1, 1)), "modules.*").paths
        ('modules.0',)
    """

    def __init__(self, net: Module, paths: tuple[str, ...]):
        self.net, self.paths = net, paths

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> tuple[Any, dict[str, Any]]:
        """Calls the net.

        Returns:
            The output, and the outputs of the modules by path.  A module called several times has a
            tuple of values; in a `scan` the values of all steps are stacked along a first axis, in
            a `while` they are those of the last iteration.
        """
        output, captured, trees = self._run_captured(args, kwargs, {})
        return output, {path: _value(path, trees[path], captured) for path in trees}

    def gradients(
        self, loss: Callable[[Any], Any], *args: object, **kwargs: object
    ) -> dict[str, Any]:
        """Returns gradients of a loss with respect to the outputs of modules.

        Args:
            loss: a function from the net's output to a scalar.
            *args: the net's inputs.
            **kwargs: the net's keyword inputs.

        Returns:
            Arrays with the shapes of the outputs, by path.

        Example:
            >>> import jax.numpy as jnp, pax_export as pax
            >>> net = pax.Sequential(pax.Linear(2, 3), pax.Lambda(lambda x: 2 * x))
            >>> capture = pax.debug.capture(net, "modules.0")
            >>> capture.gradients(jnp.sum, jnp.ones((1, 2)))["modules.0"]
            Array([[2., 2., 2.]], dtype=float32)
        """
        shapes = jax.eval_shape(lambda: self._run_captured(args, kwargs, {})[1])
        zeros = {
            name: list(map(_zeros, values))
            for name, values in shapes.items()
            if all(jnp.issubdtype(each.dtype, jnp.inexact) for each in values)
        }
        trees: dict[str, Any] = {}

        def of_added(added: Mapping[str, Any]) -> Any:
            output, _, found = self._run_captured(args, kwargs, added)
            trees.update(found)
            return loss(output)

        found = jax.grad(of_added)(zeros)
        return {path: _value(path, trees[path], found) for path in trees if _has_value(path, found)}

    def _run_captured(
        self, args: tuple, kwargs: dict[str, Any], added: Mapping[str, Any]
    ) -> tuple[Any, dict[str, list[Any]], dict[str, Any]]:
        structures: list[TreeDef] = []

        def called(net: Module, *args: ArrayLike, **kwargs: ArrayLike) -> Any:
            output = purecall(net, *args, **kwargs)[1]
            structures.append(jax.tree_util.tree_structure(output))
            return output

        call = FunctionCall(called, (self.net, *args), kwargs)

        def trace(label: Labeling) -> Any:
            marks = _Marks(frozenset(self.paths))
            with record_calls(marks):
                return call.traced(label), marks

        program, marks = with_labels(trace)
        harvest = Harvest(added)
        flat = harvest.run(program, call.data)
        return jax.tree_util.tree_unflatten(structures[-1], flat), harvest.taken, marks.trees


def _value(path: str, tree: TreeDef, captured: Mapping[str, Any]) -> Any:
    """The output of a module; a tuple for several calls."""
    flat = [captured.get(f"{path} {number}", [None]) for number in range(tree.num_leaves)]
    calls = [jax.tree_util.tree_unflatten(tree, list(each)) for each in zip(*flat)]
    return calls[0] if len(calls) == 1 else tuple(calls)


def _has_value(path: str, captured: Mapping[str, Any]) -> bool:
    return any(name.rpartition(" ")[0] == path for name in captured)


def capture(net: Module, paths: Selector = ...) -> Capture:
    """Makes a net that also returns the outputs of chosen modules.

    Args:
        net: a module.
        paths: the modules: a path, as for `Module.at`, a class, a selection, a
            function ``(path, module) -> bool``, or a list of these; all by default.

    Returns:
        A function with the net's arguments that returns ``(output, values by path)``.

    Raises:
        InvalidArgumentError: a path matches no module.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Linear(2, 3), jax.nn.relu, pax.Linear(3, 1))
        >>> output, values = pax.debug.capture(net, pax.Linear)(jnp.ones((4, 2)))
        >>> {path: value.shape for path, value in values.items()}
        {'modules.0': (4, 3), 'modules.2': (4, 1)}
    """
    require_module(net, "capture")
    return Capture(net, selected_paths(net, paths))


def selected_paths(net: Module, selection: Selector) -> tuple[str, ...]:
    """Returns the paths of the selected modules, in tree order.

    ``selection`` is a path as for `Module.at`, a class, a function of a module or of path and
    module, a selection of ``net.at(...)``, or several of these; ``...`` means all.

    Raises:
        InvalidArgumentError: a selector matches no module.
    """
    modules = named_modules(net)
    if selection is ...:
        return tuple(path for path, _ in modules)
    chosen = frozenset(net.at(selection).names())
    found = tuple(path for path, _ in modules if path in chosen)
    if not found:
        raise InvalidArgumentError(
            "The selection has no modules.",
            where=type(net).__qualname__,
            got=repr(selection)[:120],
            write="the paths of modules, such as pax.Linear or 'blocks.*'",
        )
    return found


# --- values marked by `jax.ad_checkpoint.checkpoint_name`, also in loops ------------------------

PREFIX = "pax_export captures "

Values = dict[str, list[Any]]


@dataclass
class Harvest:
    """The values that an evaluation extracts and adds."""

    added: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by name, in the same order
    taken: Values = field(default_factory=dict)  # by name, in the order of the program

    def run(self, program: TracedProgram, arguments: Sequence[Any]) -> list[Any]:
        """Evaluates a program; its results."""
        return interpret(program, arguments, self._operate_equation)

    def _operate_equation(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        name = equation.primitive.name
        mark = _mark_name(equation)
        if mark is not None:
            return [self._take_value(mark, operands[0])]
        if next(_mark_names(equation), None) is None:
            return bind_equation(equation, operands)
        if called_program(equation) is not None and not has_own_derivative(equation):
            return None
        if name in _LOOPS:
            return _LOOPS[name](self, equation, operands)
        raise UnsupportedOperationError(
            "A value cannot be taken out of this operation.",
            where=", ".join(sorted(set(_mark_names(equation)))),
            got=f"a module that is called inside of {name}",
            write="a function without a derivative of its own around the call",
        )

    def _take_value(self, name: str, value: jax.Array) -> Any:
        index = len(self.taken.setdefault(name, []))
        if name in self.added:
            value = value + self.added[name][index]
        self.taken[name].append(value)
        return value

    def _added_within(self, equation: Equation) -> dict[str, list[Any]]:
        """Values added inside a loop: the next ones of each name."""
        counts: dict[str, int] = {}
        for name in _mark_names(equation):
            counts[name] = counts.get(name, 0) + 1
        return {
            name: list(self.added[name][len(self.taken.get(name, ())) :][:count])
            for name, count in counts.items()
            if name in self.added
        }

    def _extend_taken(self, found: Values) -> None:
        for name, values in found.items():
            self.taken.setdefault(name, []).extend(values)

    # --- loops and branches -----------------------------------------------------

    def _harvest_scan(self, equation: Equation, operands: list[Any]) -> list[Any]:
        """The values of all rounds, stacked on a first axis."""
        params = equation.params
        fixed, start, inputs = scan_operands(params, operands)
        carried = len(start)
        added = self._added_within(equation)

        def body(carry: list[jax.Array], x: tuple[list[jax.Array], Any]) -> Any:
            values, more = x
            inner = Harvest(more)
            outputs = inner.run(params["jaxpr"], [*fixed, *carry, *values])
            return outputs[:carried], (outputs[carried:], inner.taken)

        carry, (outputs, captured) = jax.lax.scan(
            body,
            start,
            (inputs, added),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self._extend_taken(captured)
        return [*carry, *outputs]

    def _harvest_while(self, equation: Equation, operands: list[Any]) -> list[Any]:
        """Returns the values of the last iteration; zeros if there is none."""
        params = equation.params
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        test, fixed = operands[:of_test], operands[of_test : of_test + of_body]
        start = operands[of_test + of_body :]
        self._refuse_added(equation)

        def body(state: tuple[list[jax.Array], Any]) -> Any:
            inner = Harvest()
            return inner.run(params["body_jaxpr"], [*fixed, *state[0]]), inner.taken

        shapes = jax.eval_shape(lambda: body((list(start), None)))[1]
        zeros = jax.tree_util.tree_map(_zeros, shapes)
        outputs, captured = jax.lax.while_loop(
            lambda state: Harvest().run(params["cond_jaxpr"], [*test, *state[0]])[0],
            body,
            (list(start), zeros),
        )
        self._extend_taken(captured)
        return outputs

    def _harvest_cond(self, equation: Equation, operands: list[Any]) -> list[Any]:
        """The values of the branch that runs, and zeros for the other branches."""
        self._refuse_added(equation)
        index, *arguments = operands
        branches = equation.params["branches"]

        def harvested(branch: TracedProgram) -> tuple[list[Any], Values]:
            inner = Harvest()
            return inner.run(branch, arguments), inner.taken

        shapes: Values = {}
        for branch in branches:
            for name, values in jax.eval_shape(lambda b=branch: harvested(b))[1].items():
                known = shapes.setdefault(name, [])
                known += values[len(known) :]

        def run(branch: TracedProgram) -> Any:
            def call(_: None) -> Any:
                outputs, captured = harvested(branch)
                for name, values in shapes.items():
                    known = captured.setdefault(name, [])
                    known += map(_zeros, values[len(known) :])
                return outputs, captured

            return call

        outputs, captured = jax.lax.switch(index, [run(branch) for branch in branches], None)
        self._extend_taken(captured)
        return outputs

    def _refuse_added(self, equation: Equation) -> None:
        names = sorted(set(_mark_names(equation)) & set(self.added))
        if names:
            raise UnsupportedOperationError(
                "Gradients with respect to a value inside this operation are not supported.",
                where=", ".join(names),
                got=f"a module that is called inside of {equation.primitive.name}",
                write="a path outside of it",
            )


_LOOPS = {
    "scan": Harvest._harvest_scan,
    "while": Harvest._harvest_while,
    "cond": Harvest._harvest_cond,
}


def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    return jnp.zeros(shape.shape, shape.dtype)


def _mark_name(equation: Equation) -> str | None:
    """The name that an operation marks its value with; None for any other operation."""
    if equation.primitive.name != "name" or not equation.params["name"].startswith(PREFIX):
        return None
    return equation.params["name"].removeprefix(PREFIX)


def _mark_names(equation: Equation) -> Iterator[str]:
    """The marks inside of an operation, as often as they occur."""
    for program in inner_programs(equation):
        for inner, _ in walk_equations(program):
            if (mark := _mark_name(inner)) is not None:
                yield mark


# --- `statistics`: summary statistics of the outputs of all modules ---


@dataclass(frozen=True)
class Statistics:
    """Summary statistics of one array.

    Attributes:
        mean: the mean; like all but `nan`, without NaN.
        std: the standard deviation.
        min: the smallest element.
        max: the largest element.
        nan: the share of NaN.
        zeros: the share of zeros.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.debug.statistics(pax.Identity(), jnp.array([0.0, 2.0]))[""].zeros
        0.5
    """

    mean: float
    std: float
    min: float
    max: float
    nan: float
    zeros: float


class Table(dict):
    """`Statistics` by path; it prints as a table."""

    def _table_lines(self) -> list[list[str]]:
        names = list(Statistics.__dataclass_fields__)
        return [["path", *names]] + [
            [path or "(root)", *(f"{getattr(row, name):.4g}" for name in names)]
            for path, row in self.items()
        ]

    def _repr_html_(self) -> str:
        head, *rows = self._table_lines()
        return tables.block("", tables.grid(head, rows))

    def __str__(self) -> str:
        lines = self._table_lines()
        return "\n".join(tables.aligned(lines, (number > 0 for number in range(len(lines[0])))))


def statistics(net: Module, *inputs: PyTree, paths: Selector = ..., **kwargs: object) -> Table:
    """Calls a net, and returns statistics of the outputs of its modules.

    Args:
        net: a module.
        *inputs: its inputs.
        paths: the modules, as for `capture`.
        **kwargs: its keyword inputs.

    Returns:
        A dict from paths to `Statistics`, which prints as a table.  A module that
        returns several arrays has a row for each.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Lambda(lambda x: x - 2), jax.nn.relu)
        >>> print(pax.debug.statistics(net, jnp.arange(5.0)))
        path       mean    std  min  max  nan  zeros
        (root)      0.6    0.8    0    2    0    0.6
        modules.0     0  1.414   -2    2    0    0.2
        modules.1   0.6    0.8    0    2    0    0.6
    """
    captured = capture(net, paths)

    @jax.jit
    def numbers(arrays: list[Any]) -> list[Any]:
        return [_statistics_of(array) for array in arrays]

    values = captured(*inputs, **kwargs)[1]
    named: list[tuple[str, Any]] = []
    for path in (path for path in captured.paths if path in values):
        for key, leaf in jax.tree_util.tree_flatten_with_path(values[path])[0]:
            if is_array(leaf) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.number):
                named.append((".".join(filter(None, [path, path_name(key)])), leaf))
    rows = numbers([leaf for _, leaf in named])
    return Table((name, Statistics(*map(float, row))) for (name, _), row in zip(named, rows))


def _statistics_of(array: jax.Array) -> list[Any]:
    values = jnp.abs(array) if jnp.iscomplexobj(array) else array
    values = values.astype(jnp.float32)
    nan = jnp.isnan(values)
    return [
        jnp.nanmean(values),
        jnp.nanstd(values),
        jnp.nanmin(values),
        jnp.nanmax(values),
        nan.mean(),
        (values == 0).mean(),
    ]
