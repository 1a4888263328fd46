"""Extracts values marked by `jax.ad_checkpoint.checkpoint_name` from a program, also in loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import UnsupportedOperationError
from pax_export._jax import scan_operands
from pax_export._jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    inner_programs,
    interpret,
    walk_equations,
)
from pax_export._types import Equation, PyTree

PREFIX = "pax_export captures "

Values = dict[str, list[Any]]


@dataclass
class Harvest:
    """The values that an evaluation extracts and adds."""

    added: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by name, in the same order
    taken: Values = field(default_factory=dict)  # by name, in the order of the program

    def run(self, program: Any, arguments: Sequence[Any]) -> list[Any]:
        """Evaluates a program; its results."""
        return interpret(program, arguments, self._operate_equation)

    def _operate_equation(self, equation: Equation, given: list[Any]) -> Sequence[Any] | None:
        name = equation.primitive.name
        mark = _mark_name(equation)
        if mark is not None:
            return [self._take_value(mark, given[0])]
        if next(_mark_names(equation), None) is None:
            return bind_equation(equation, given)
        if called_program(equation) is not None and not has_own_derivative(equation):
            return None
        if name in _LOOPS:
            return _LOOPS[name](self, equation, given)
        raise UnsupportedOperationError(
            "A value cannot be taken out of this operation.",
            where=", ".join(sorted(set(_mark_names(equation)))),
            got=f"a module that is called inside of {name}",
            write="a function without a derivative of its own around the call",
        )

    def _take_value(self, name: str, value: object) -> Any:
        place = len(self.taken.setdefault(name, []))
        if name in self.added:
            value = value + self.added[name][place]
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

    def _harvest_scan(self, equation: Equation, given: list[Any]) -> list[Any]:
        """The values of all rounds, stacked on a first axis."""
        params = equation.params
        fixed, start, inputs = scan_operands(params, given)
        carried = len(start)
        added = self._added_within(equation)

        def body(carry: PyTree, x: PyTree) -> Any:
            values, more = x
            inner = Harvest(more)
            outputs = inner.run(params["jaxpr"], [*fixed, *carry, *values])
            return outputs[:carried], (outputs[carried:], inner.taken)

        carry, (outputs, taken) = jax.lax.scan(
            body,
            start,
            (inputs, added),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self._extend_taken(taken)
        return [*carry, *outputs]

    def _harvest_while(self, equation: Equation, given: list[Any]) -> list[Any]:
        """Returns the values of the last iteration; zeros if there is none."""
        params = equation.params
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        test, fixed = given[:of_test], given[of_test : of_test + of_body]
        start = given[of_test + of_body :]
        self._refuse_added(equation)

        def body(state: PyTree) -> Any:
            inner = Harvest()
            return inner.run(params["body_jaxpr"], [*fixed, *state[0]]), inner.taken

        shapes = jax.eval_shape(lambda: body((list(start), None)))[1]
        zeros = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        outputs, taken = jax.lax.while_loop(
            lambda state: Harvest().run(params["cond_jaxpr"], [*test, *state[0]])[0],
            body,
            (list(start), zeros),
        )
        self._extend_taken(taken)
        return outputs

    def _harvest_cond(self, equation: Equation, given: list[Any]) -> list[Any]:
        """The values of the branch that runs, and zeros for the other branches."""
        self._refuse_added(equation)
        index, *operands = given
        branches = equation.params["branches"]

        def harvested(branch: object) -> tuple[list[Any], Values]:
            inner = Harvest()
            return inner.run(branch, operands), inner.taken

        shapes: Values = {}
        for branch in branches:
            for name, values in jax.eval_shape(lambda b=branch: harvested(b))[1].items():
                known = shapes.setdefault(name, [])
                known += values[len(known) :]

        def run(branch: object) -> Any:
            def call(_: object) -> Any:
                outputs, taken = harvested(branch)
                filled = {
                    name: [*taken.get(name, ()), *map(_zeros, values[len(taken.get(name, ())) :])]
                    for name, values in shapes.items()
                }
                return outputs, filled

            return call

        outputs, taken = jax.lax.switch(index, [run(branch) for branch in branches], None)
        self._extend_taken(taken)
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


def _zeros(shape: PyTree) -> Any:
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
