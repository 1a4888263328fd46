"""Calls that test an export, with jax's gradients of parameters and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.types import Equation
from pax_export.export.lowering.variables import Store
from pax_export.export.portable.program import rewritten, traced
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.traced import pull_back
from pax_export.export.validation.cases import CaseStep, ProgramCases
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case


class GradientCases(ProgramCases):
    """The calls of a program, one of them with gradients."""

    def __init__(self, program: Program, store: Store, examples: Sequence[Any], trainable: bool,
                 changes: Sequence[str] = ()):  # fmt: skip
        leaves = [store.variables[index].value for index in store.of_leaf]
        super().__init__(program, leaves, examples)
        trained = [store.variables[index].trainable for index in store.of_leaf]
        inputs = [dtypes.is_floating(each.struct.dtype) for each in program.inputs.flat]
        wanted = [*trained, *inputs] if trainable else []
        self._wrt = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        names = [store.variables[index].name for index in store.of_leaf]
        self._names = [*names, *(each.name for each in program.inputs.flat)]
        self._of = [i for i, each in enumerate(program.outputs) if dtypes.is_floating(each.dtype)]
        self._changes = [f"state:{each}" for each in changes]

    def named_results(self, results: Sequence[Any]) -> Arrays:
        names = [*self.output_names, *self._changes]
        return dict(zip(names, map(np.asarray, results)))

    def gradient_steps(self, case: Case) -> Iterator[CaseStep]:
        if self._wrt and self._of:
            what = f"the gradients of {self.key}"
            yield CaseStep(what, partial(self._with_gradients, case), 3.0, is_gradient=True)

    def _with_gradients(self, case: Case) -> Case:
        case = dataclasses.replace(case, expected=dict(case.expected), cotangents={})
        random = np.random.default_rng(1)
        for index in self._of:
            like = case.expected[self.output_names[index]]
            cotangent = random.normal(size=like.shape).astype(like.dtype)
            case.cotangents[self.output_names[index]] = cotangent
        operands = [*self.leaves, *case.inputs.values()]
        program = rewritten(jax.make_jaxpr(self.traced.function)(operands), _clamped)
        in_range = jaxpr_as_fun(program)
        function = jax.jit(pull_back(lambda xs: in_range(*xs), self._wrt, self._of))
        cotangents = list(case.cotangents.values())

        def run(operands: Sequence[Any]) -> Arrays:
            return self._named(function(list(operands), cotangents))

        case.expected.update(run(operands))
        case.alternatives = partial(self.alternatives, case, run)
        return case

    def _named(self, found: Sequence[Any]) -> Arrays:
        named: dict[str, np.ndarray] = {}
        for index, value in zip(self._wrt, found):
            name, value = f"gradient:{self._names[index]}", np.asarray(value)
            named[name] = named[name] + value if name in named else value  # tied leaves add up
        return named


def _clamped(equation: Equation) -> Any:
    """A gather whose indices are promised to be in range, as one that clamps them.

    jax clamps them, and on CPUs drops the slopes of those that break the promise.
    """
    if equation.primitive.name != "gather" or "PROMISE" not in str(equation.params["mode"]):
        return None
    params = {**equation.params, "mode": jax.lax.GatherScatterMode.CLIP}
    return traced(partial(equation.primitive.bind, **params), equation.invars)
