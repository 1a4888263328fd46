"""Cases of a lowered model: outputs, gradients and new state of its signatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export.export.lowering.lower import Call, Gradient, Signature
from pax_export.export.lowering.lowered_model import LoweredModel
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.traced import pull_back
from pax_export.export.validation.cases import (
    CaseStep,
    ProgramCases,
    Run,
    cases_in_turns,
    input_structs,
    named_examples,
    with_cotangents,
)
from pax_export.export.validation.decompositions import judge_results
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Alternative, Case

#: Programs up to this size in bytes, a signature with its gradient, compile quickly, unless they
#: have many operations: for repeated layers, bytes grow slowly.
_SMALL = 9000
#: How much farther decompositions may be apart: a random matrix may be nearly singular.
_ILL_CONDITIONED = 10.0


def model_cases(
    model: LoweredModel,
    examples: Mapping[str, Sequence[Any]] | None = None,
    budget: Budget | None = None,
    more: Mapping[str, Mapping[str, Arrays]] | None = None,
) -> Iterator[Case]:
    """Calls of all signatures with gradients and new state, by examples or random numbers.

    There are `more` calls of some signatures, by their labels.
    """
    parts = [
        _ModelCases(
            model, program, signature,
            (examples or {}).get(program.key, ()), (more or {}).get(program.key, {}),
        )
        for program, signature in zip(model.programs, model.signatures)
    ]  # fmt: skip
    return cases_in_turns(parts, budget or Budget())


class _ModelCases(ProgramCases):
    def __init__(
        self,
        model: LoweredModel,
        program: Program,
        signature: Signature,
        examples: Sequence[Any],
        more: Mapping[str, Arrays],
    ):
        names = (model.store.variables[number].name for number in model.store.of_leaf)
        around = signature.processing
        leaves = [model.weights[name] for name in names]
        super().__init__(program, leaves, () if around else examples)
        self.advice = "" if examples else self.advice
        self._processed = named_examples(around.inputs, examples, self.key) if around else []
        self._model, self._signature, self._trains = model, signature, program.trains
        self._more = more
        self._function = program.traced.function
        gradient = signature.gradient
        calls = [signature.forward, *([gradient.call] if gradient else [])]
        self.is_small = self.is_small and sum(map(_module_size, calls)) <= _SMALL

    def steps(self) -> list[CaseStep]:
        """Returns the calls without gradients: of the model, and with its processors."""
        steps, around = super().steps(), self._signature.processing
        make = self._processed_case if around else self.make_case
        more = [
            CaseStep(f"{self.key} {label}".strip(), partial(make, label, arrays))
            for label, arrays in self._more.items()
        ]
        if around is None:
            return [*steps, *more]
        structs = input_structs(around.inputs)
        whole = self.labeled_steps(self._processed_case, structs, self._processed)
        # One of each kind comes first.
        return [*steps[:1], *whole[:1], *steps[1:], *whole[1:], *more]

    def make_case(self, label: str, inputs: Arrays) -> Case:
        case = super().make_case(label, inputs)
        if self._trains:
            assigned = [self._model.store.variables[i] for i in self._signature.assigned]
            case.unchanged = {f"variable:{each.name}": each.value for each in assigned}
        case.stage = "model" if self._signature.processing is not None else ""
        return case

    def probes(self, case: Case, budget: Budget) -> Iterator[Case]:
        """Yields calls with extreme inputs; none if such calls would change state."""
        if not (case.stage or self._signature.assigned):
            yield from super().probes(case, budget)

    def gradient_steps(self, case: Case) -> Iterator[CaseStep]:
        gradient = self._signature.gradient
        if gradient is not None:
            # XLA needs more for a larger program than in proportion to its size.
            before, after = map(_module_size, (self._signature.forward, gradient.call))
            make = partial(self._with_gradients, gradient, case)
            cost = 1.0 + (after / before) ** 2
            yield CaseStep(f"the gradients of {self.key}", make, cost, is_gradient=True)

    def named_results(self, results: Sequence[Any]) -> Arrays:
        named = super().named_results(results)
        for number, value in zip(self._signature.assigned, results[len(self.output_names) :]):
            variable, new = self._model.store.variables[number], np.asarray(value)
            if new.tobytes() != np.asarray(variable.value).tobytes():
                named[f"variable:{variable.name}"] = new
        return named

    def _processed_case(self, label: str, inputs: Arrays) -> Case:
        """Returns a call with processors; the model's inputs are known only after it has run."""
        case = Case(self.key, inputs, {}, label=label, stage="all", advice=self.advice)

        def expect(got: Arrays) -> Arrays:
            inputs = {name: got.pop(f"input:{number}") for number, name in enumerate(self.structs)}
            inner = Case(case.signature, inputs, self.expected(inputs))
            case.alternatives = partial(self.alternatives, inner)
            return inner.expected

        case.expect = expect
        return case

    def alternatives(self, case: Case, gradients: Run | None = None) -> Iterator[Alternative]:
        """Yields also results with the choices of the export's rules for decompositions."""
        yield from super().alternatives(case, gradients)
        forward, gradient = self._signature.forward.lowered, self._signature.gradient
        operands = [*self.leaves, *case.inputs.values()]
        results, apart = dict(case.expected), dict[str, float]()
        judged = []
        if forward.neutral:
            judged.append(judge_results(self._function, operands, self.named_results))
        if gradient and case.cotangents and gradient.call.lowered.neutral:
            wrt, count = gradient.wrt, len(operands)
            back = pull_back(self._function, wrt, gradient.of)
            judged.append(
                judge_results(
                    lambda values: back(values[:count], values[count:]),
                    [*operands, *case.cotangents.values()],
                    lambda found: self._named_gradients(case, wrt, found),
                )
            )
        for found, more in judged:
            results.update(found)
            apart.update(more)
        if judged:
            yield results, apart, _ILL_CONDITIONED

    def _with_gradients(self, gradient: Gradient, case: Case) -> Case:
        case = with_cotangents(case, (self.output_names[index] for index in gradient.of))
        # Traced again: a trace with symbolic shapes has these written all over it.
        function = jax.jit(pull_back(self._function, gradient.wrt, gradient.of))
        cotangents = list(case.cotangents.values())

        def run(operands: Sequence[Any]) -> Arrays:
            found = function(list(operands), cotangents)
            return self._named_gradients(case, gradient.wrt, found)

        case.expected.update(run([*self.leaves, *case.inputs.values()]))
        case.alternatives = partial(self.alternatives, case, run)
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
    return max(1, len(call.lowered.portable.module))  # none of a graph, which XLA does not compile
