"""Cases of a model: signatures, then gradients, then other sizes, within a budget of time.

Each case compiles another XLA program, so the first one predicts the cost of the rest.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export._errors import PaxError, ValidationError
from pax_export._jaxpr import jaxpr_size
from pax_export.export.lowering.lower import Call, Gradient, Pullback, Signature
from pax_export.export.lowering.lowered_model import LoweredModel
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.spec import Inputs
from pax_export.export.tracing.traced import pull_back
from pax_export.export.validation.budget import Budget
from pax_export.export.validation.cases import (
    EXAMPLES,
    FEW_OPERATIONS,
    given_calls,
    named_examples,
    tolerances,
)
from pax_export.export.validation.decompositions import judge_results
from pax_export.export.validation.probes import probes
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case


def model_cases(
    model: LoweredModel,
    examples: Mapping[str, Sequence[Any]] | None = None,
    budget: Budget | None = None,
) -> Iterator[Case]:
    """Calls of all signatures with gradients and new state, by examples or random numbers.

    The next call must be requested after the last one ran: the budget measures it.
    """
    budget = budget or Budget()
    parts = [
        _OfSignature(model, *each, (examples or {}).get(each[0].key, ()))
        for each in zip(model.programs, model.pullbacks, model.signatures)
    ]
    turns = [_Rounds(part, part.steps()) for part in parts]
    for turn in turns:
        yield from turn.first(budget)
    for gradients in (True, False):
        for turn in turns:
            yield from turn.rest(budget, gradients)


#: Programs up to this size in bytes, a signature with its gradient, compile quickly, unless they
#: have more operations than this: for repeated layers, bytes grow slowly.
_SMALL = 9000


class _RefusedError(Exception):
    """Jax itself cannot make this call of the model."""


@contextmanager
def _raise_refusals() -> Iterator[None]:
    """Converts errors of a model traced for any size into `_RefusedError`."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[:1]
        raise _RefusedError(": ".join((type(error).__name__, *line))[:300]) from error


@dataclass(frozen=True)
class _CaseCall:
    """One call, and its cost relative to the first."""

    what: str
    make: Callable[[], Case]
    cost: float = 1.0
    is_gradient: bool = False


@dataclass
class _Rounds:
    part: _OfSignature
    steps: list[_CaseCall]
    seconds: float = 0.0  # that the first call took

    def first(self, budget: Budget) -> Iterator[Case]:
        """The first call that jax does not refuse."""
        refused = None
        while self.steps:
            step, begin = self.steps.pop(0), time.perf_counter()
            try:
                case = step.make()
            except _RefusedError as error:
                refused = error
                budget.left_out.append(f"{step.what}, which jax refuses: {error}")
                continue
            made = time.perf_counter() - begin
            yield case
            # TensorFlow, which has this program already, compiles the next one as jax does.
            self.seconds = max(2 * made, time.perf_counter() - begin)
            self.steps = [*self.part.gradient_steps(case), *self.steps]
            yield from self.part.probes(case, budget, self.seconds)
            return
        if refused is not None:
            raise ValidationError(
                "The model cannot be called, so its export cannot be compared.",
                where=self.part.key,
                got=str(refused),
                write=self.part.advice or "examples that the model can be called with",
            ) from refused.__cause__

    def rest(self, budget: Budget, gradients: bool) -> Iterator[Case]:
        for step in self.steps:
            if step.is_gradient != gradients:
                continue
            is_small = self.part.is_small
            if not is_small and budget.leaves_out(self.seconds * step.cost, step.what):
                continue
            try:
                case = step.make()
            except _RefusedError as error:
                budget.left_out.append(f"{step.what}, which jax refuses: {error}")
                continue
            yield case


class _OfSignature:
    """The calls of one signature, with jax's results."""

    def __init__(
        self,
        model: LoweredModel,
        program: Program,
        pullback: Pullback | None,
        signature: Signature,
        examples: Sequence[Any],
    ):
        self.key = program.key
        self.advice = "" if examples else EXAMPLES
        self._model = model
        self._program = program
        self._pullback = pullback
        self._signature = signature
        self._examples = examples
        self._outputs = [struct.shape for struct in program.outputs]
        names = (model.store.variables[place].name for place in model.store.of_leaf)
        self._leaves = [model.weights[name] for name in names]

    def steps(self) -> list[_CaseCall]:
        """Yields the calls without gradients: of the model, and with its processors."""
        around, inputs = self._signature.processing, self._program.inputs
        examples = () if around else named_examples(inputs, self._examples, self.key)
        steps = [
            _CaseCall(self._case_text(label), partial(self._model_case, label, given), cost)
            for label, given, cost in given_calls(_input_structs(inputs), examples, self._outputs)
        ]
        if around is not None:
            examples = named_examples(around.inputs, self._examples, self.key)
            whole = [
                _CaseCall(self._case_text(label), partial(self._processed_case, label, given), cost)
                for label, given, cost in given_calls(
                    _input_structs(around.inputs), examples, self._outputs
                )
            ]
            # One of each kind comes first.
            steps = [*steps[:1], *whole[:1], *steps[1:], *whole[1:]]
        return steps

    def _case_text(self, label: str) -> str:
        return f"{self.key} {label}".strip()

    def _model_case(self, label: str, inputs: Arrays) -> Case:
        with _raise_refusals():
            expected = self._expected(inputs)
        case = Case(self.key, inputs, expected, label=label, advice=self.advice)
        if self._program.trains:
            assigned = [self._model.store.variables[i] for i in self._signature.assigned]
            case.unchanged = {f"variable:{each.name}": each.value for each in assigned}
        case.rounding = self._rounding_of(case)
        case.general = self._general_of(case)
        case.stage = "model" if self._signature.processing is not None else ""
        return case

    def probes(self, case: Case, budget: Budget, seconds: float) -> Iterator[Case]:
        """Yields calls with extreme inputs; none if such calls would change state."""
        if case.stage or self._signature.assigned:
            return
        program = self._program.traced.program
        known = None if self.is_small else seconds
        for each in probes(case, program, self._expected, budget, known, bool(self._examples)):
            each.rounding, each.general = self._rounding_of(each), self._general_of(each)
            yield each

    def gradient_steps(self, case: Case) -> Iterator[_CaseCall]:
        """Yields the call again with gradients, if there are any."""
        gradient, pullback = self._signature.gradient, self._pullback
        if pullback is not None and gradient is not None:
            # XLA needs more for a larger program than in proportion to its size.
            before, after = map(_module_size, (self._signature.forward, gradient.call))
            make = partial(self._with_gradients, pullback, gradient, case)
            cost = 1.0 + (after / before) ** 2
            yield _CaseCall(f"the gradients of {self.key}", make, cost, is_gradient=True)

    @property
    def is_small(self) -> bool:
        """Whether all calls of this signature are fast, so that none is omitted."""
        gradient = self._signature.gradient
        calls = [self._signature.forward, *([gradient.call] if gradient else [])]
        few = jaxpr_size(self._program.traced.whole) <= FEW_OPERATIONS
        return few and sum(map(_module_size, calls)) <= _SMALL

    def _expected(self, inputs: Arrays) -> Arrays:
        return self._named_outputs(self._program.traced.run([*self._leaves, *inputs.values()]))

    def _rounding_of(
        self, case: Case, gradients: Callable[[Sequence[Any]], Arrays] | None = None
    ) -> Callable[[], Iterator[dict[str, Any]]]:
        """Returns the effect of rounding; tiny gradients may flip whole optimizer steps."""

        def run(operands: Sequence[Any]) -> Arrays:
            results = self._named_outputs(self._program.traced.run(operands))
            return {**case.unchanged, **results, **(gradients(operands) if gradients else {})}

        def tried() -> Iterator[dict[str, Any]]:
            exact = {**case.unchanged, **case.expected}
            operands = [*self._leaves, *case.inputs.values()]
            return tolerances(run, operands, exact, self._program.traced.program)

        return tried

    def _named_outputs(self, results: Sequence[Any]) -> Arrays:
        names = self._program.output_names
        outputs = dict(zip(names, map(np.asarray, results)))
        for place, value in zip(self._signature.assigned, results[len(names) :]):
            variable, new = self._model.store.variables[place], np.asarray(value)
            if new.tobytes() != np.asarray(variable.value).tobytes():
                outputs[f"variable:{variable.name}"] = new
        return outputs

    def _processed_case(self, label: str, inputs: Arrays) -> Case:
        """Returns a call with processors; the model's inputs are known only after it has run."""
        names = [entry.name for entry in self._program.inputs.flat]
        case = Case(self.key, inputs, {}, label=label, stage="all", advice=self.advice)

        def expect(got: Arrays) -> Arrays:
            given = {name: got.pop(f"input:{place}") for place, name in enumerate(names)}
            inner = Case(case.signature, given, self._expected(given))
            case.rounding, case.general = self._rounding_of(inner), self._general_of(inner)
            return inner.expected

        case.expect = expect
        return case

    def _general_of(self, case: Case) -> Callable[[], tuple[Arrays, dict[str, float]]] | None:
        """Returns the results of jax's CPU for an export with other decomposition rules."""
        forward, gradient = self._signature.forward.lowered, self._signature.gradient
        if not (forward.neutral or (gradient and gradient.call.lowered.neutral)):
            return None

        def run() -> tuple[Arrays, dict[str, float]]:
            function = self._program.traced.function
            operands = [*self._leaves, *case.inputs.values()]
            results, apart = dict(case.expected), dict[str, float]()
            if forward.neutral:
                found, apart = judge_results(function, operands, self._named_outputs)
                results.update(found)
            if gradient and case.cotangents and gradient.call.lowered.neutral:
                wrt, count = gradient.wrt, len(operands)
                back = pull_back(function, wrt, gradient.of)
                found, more = judge_results(
                    lambda values: back(values[:count], values[count:]),
                    [*operands, *case.cotangents.values()],
                    lambda found: self._named_gradients(case, wrt, found),
                )
                results.update(found)
                apart.update(more)
            return results, apart

        return run

    def _with_gradients(self, pullback: Pullback, gradient: Gradient, case: Case) -> Case:
        case = dataclasses.replace(case, expected=dict(case.expected), cotangents={})
        random = np.random.default_rng(1)
        for index in pullback.of:
            name = self._program.output_names[index]
            like = case.expected[name]
            case.cotangents[name] = random.normal(size=like.shape).astype(like.dtype)
        # Traced again: a trace with symbolic shapes has these written all over it.
        function = jax.jit(pull_back(self._program.traced.function, pullback.wrt, pullback.of))
        cotangents = list(case.cotangents.values())

        def run(operands: Sequence[Any]) -> Arrays:
            found = function(list(operands), cotangents)
            return self._named_gradients(case, pullback.wrt, found)

        with _raise_refusals():
            case.expected.update(run([*self._leaves, *case.inputs.values()]))
        case.rounding, case.general = self._rounding_of(case, run), self._general_of(case)
        return case

    def _named_gradients(self, case: Case, wrt: Sequence[int], found: Sequence[Any]) -> Arrays:
        """Returns gradients by the runtimes' names; missing ones are zero."""
        variables, leaves = self._model.store.variables, self._model.store.of_leaf
        signature = self._signature
        named: dict[str, np.ndarray] = {}
        for index, value in zip(wrt, found):
            if index < len(leaves):
                name = variables[leaves[index]].name
            else:
                name = signature.input_names[index - len(leaves)]
            value = np.asarray(value)  # the memory of a jax array itself
            named[name] = named[name] + value if name in named else value  # tied leaves add up
        like = {each.name: each.value for each in variables if each.trainable}
        for name, struct in zip(signature.input_names, signature.input_structs):
            if dtypes.is_floating(struct.dtype):
                like[name] = case.inputs[name]
        for name in like.keys() - named.keys():
            zero = np.zeros((), like[name].dtype)
            named[name] = np.broadcast_to(zero, np.shape(like[name]))
        return {f"gradient:{name}": named[name] for name in like}


def _module_size(call: Call) -> int:
    return len(call.lowered.portable.module)


def _input_structs(inputs: Inputs) -> dict[str, jax.ShapeDtypeStruct]:
    return {entry.name: entry.struct for entry in inputs.flat}
