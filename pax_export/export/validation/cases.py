"""Cases: calls of signatures with expected results."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    PaxError,
    ValidationError,
    named_line,
)
from pax_export._foundations.jax import scope_constraints
from pax_export._foundations.jaxpr import jaxpr_dtypes, jaxpr_primitives, jaxpr_size
from pax_export._foundations.types import Array, ArrayLike, DTypeLike, Equation, TracedProgram
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.dimensions import RandomCall, RandomInput, random_calls
from pax_export.export.artifact.report import DEFAULT, Report, SignatureInfo
from pax_export.export.artifact.structure import collect, rebuild
from pax_export.export.portable.program import rewritten, traced
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Model
from pax_export.export.tracing.inputs import Inputs, bind_inputs, constraints_on
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.validation.endless_loops import check_loops_end
from pax_export.export.validation.integers import compare_quantized
from pax_export.export.validation.probes import Budget, probes
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import (
    TOLERANCE,
    Alternative,
    Case,
    compare_either,
    widen,
)

#: Advice if random inputs may be the cause of a failure.
EXAMPLES = "examples=[...], arguments that mean something to the model, if random ones do not"
#: Programs of at most this many operations compile quickly at each size.
FEW_OPERATIONS = 100
#: The cost of a call at size 1, relative to another size.
_OF_ONE = 4.0
#: Returns results by name.
Run = Callable[[Sequence[Any]], Mapping[str, Any]]


def example_calls(
    structs: Mapping[str, jax.ShapeDtypeStruct],
    examples: Sequence[Arrays] = (),
    outputs: Sequence[Sequence[int | str]] = (),
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> list[tuple[str, Arrays, float]]:
    """Labeled inputs for a signature, examples or random, each with its cost in first calls.

    Sizes of 1 come last: XLA compiles products with one row slowly. Without `sizes`, they are
    chosen so that some output elements are left, if any are.
    """
    if examples:
        return [(f"(example {number})", arrays, 1.0) for number, arrays in enumerate(examples)]
    outside = {name: dtypes.stored(struct) for name, struct in structs.items()}
    arrays = {
        name: RandomInput(dtypes.shape_of(struct), np.dtype(struct.dtype))
        for name, struct in outside.items()
    }
    calls = [
        (each.label, each.inputs)
        for each in random_calls(arrays, constraints(structs.values()), sizes, outputs=outputs)
    ]
    costs = [1.0] * (len(calls) - 1) + [_OF_ONE]
    return [(*call, cost) for call, cost in zip([*calls[1:], *calls[:1]], costs)]


def constraints(structs: Iterable[jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    """Returns the constraints of the symbolic sizes."""
    symbolic = [size for each in structs for size in each.shape if not isinstance(size, int)]
    there = [name for size in symbolic for name in dimensions.names(str(size))]
    scopes = {id(size.scope): size.scope for size in symbolic}.values()
    texts = (constraints_on(there, scope_constraints(scope), scope) for scope in scopes)
    return tuple(dict.fromkeys(itertools.chain(*texts)))


@dataclass(frozen=True)
class CaseStep:
    """One call, and its cost relative to the first."""

    what: str
    make: Callable[[], Case | None]
    cost: float = 1.0
    is_gradient: bool = False


class SignatureCases:
    """The calls of one signature, with jax's results, by examples or random numbers.

    Attributes:
        key: the key of the signature.
        structs: the inputs by name.
        outputs: the shapes of the outputs, with text for symbolic sizes.
        examples: the inputs of the calls; random ones if there are none.
        is_small: whether all calls are fast, so that none is omitted.
        program: the jaxpr, for calls with extreme numbers; None for no such calls.
        sizes: the sizes of the calls; None if they are not known before.
    """

    def __init__(
        self,
        key: str,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        outputs: Sequence[Sequence[int | str]],
        examples: Sequence[Arrays],
        is_small: bool,
        program: TracedProgram | None = None,
        sizes: Sequence[Mapping[str, int]] | None = None,
    ):
        self.key, self.structs, self.outputs, self.sizes = key, structs, outputs, sizes
        self.examples, self.is_small, self.program = examples, is_small, program
        self.advice = "" if examples else EXAMPLES
        self._left: list[CaseStep] = []
        self._seconds = 0.0  # that the first call took
        self._refused: Exception | None = None

    def expected(self, inputs: Arrays) -> Arrays:
        """Returns jax's results by name."""
        raise NotImplementedError

    def check_end(self, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> None:
        """Refuses loops that do not end for random inputs."""
        if not self.examples and self.program is not None:
            if "while" in jaxpr_primitives(self.program):
                check_loops_end(function, operands, self.key)

    def gradient_steps(self, case: Case) -> Iterator[CaseStep]:
        """Yields the call again with gradients, if there are any."""
        yield from ()

    def make_case(self, label: str, inputs: Arrays) -> Case:
        return Case(self.key, inputs, self.expected(inputs), label=label, advice=self.advice)

    def steps(self) -> list[CaseStep]:
        """Returns the calls without gradients."""
        return self.labeled_steps(self.make_case, self.structs, self.examples, self.sizes)

    def labeled_steps(
        self,
        make: Callable[[str, Arrays], Case],
        structs: Mapping[str, jax.ShapeDtypeStruct],
        examples: Sequence[Arrays],
        sizes: Sequence[Mapping[str, int]] | None = None,
    ) -> list[CaseStep]:
        return [
            CaseStep(f"{self.key} {label}".strip(), partial(make, label, arrays), cost)
            for label, arrays, cost in example_calls(structs, examples, self.outputs, sizes)
        ]

    def probes(self, case: Case, budget: Budget) -> Iterator[Case]:
        """Yields calls with extreme inputs."""
        if self.program is not None:
            known = None if self.is_small else self._seconds
            has_examples = bool(self.examples)
            yield from probes(case, self.program, self.expected, budget, known, has_examples)

    def first(self, budget: Budget) -> Iterator[Case]:
        """Yields the first call that jax does not refuse, and calls with extreme inputs."""
        self._left = self.steps()
        while self._left:
            begin = time.perf_counter()
            case = self._make(self._left.pop(0), budget)
            if case is None:
                continue
            seconds = time.perf_counter() - begin
            yield case
            # The runtime, which has this program already, compiles the next one as jax does.
            self._seconds = max(2 * seconds, time.perf_counter() - begin)
            self._left = [*self.gradient_steps(case), *self._left]
            yield from self.probes(case, budget)
            return
        if self._refused is not None:
            raise ValidationError(
                "The model cannot be called, so its export cannot be compared.",
                where=self.key,
                got=named_line(self._refused),
                write=self.advice or "examples that the model can be called with",
            ) from self._refused

    def rest(self, budget: Budget, gradients: bool) -> Iterator[Case]:
        """Yields the calls with gradients, or all others, as far as the budget allows."""
        for step in self._left:
            left_out = step.is_gradient != gradients or (
                not self.is_small and budget.leaves_out(self._seconds * step.cost, step.what)
            )
            case = None if left_out else self._make(step, budget)
            if case is not None:
                yield case

    def _make(self, step: CaseStep, budget: Budget) -> Case | None:
        """Makes a call; None if jax refuses it: a model traced for any size may raise anything."""
        try:
            return step.make()
        except Exception as error:  # of the model
            # Our layers refuse sizes by this class; the others are about the export.
            if isinstance(error, PaxError) and not isinstance(error, InvalidArgumentError):
                raise
            # The report lists it under `left_out`.
            self._refused = error
            budget.left_out.append(f"{step.what}, which jax refuses: {named_line(error)}")
            return None


def with_cotangents(case: Case, outputs: Iterable[str]) -> Case:
    """A copy of a case with random cotangents of outputs; gradients are added to its results."""
    random, like = np.random.default_rng(1), {name: case.expected[name] for name in outputs}
    return dataclasses.replace(
        case,
        expected=dict(case.expected),
        cotangents={n: random.normal(size=x.shape).astype(x.dtype) for n, x in like.items()},
    )


def cases_in_turns(parts: Iterable[SignatureCases], budget: Budget) -> Iterator[Case]:
    """Yields calls of signatures: one of each, then gradients, then the rest.

    Each compiles another program, so the first predicts the cost of the others: the next call must
    be requested after the last one ran.
    """
    parts = list(parts)
    for part in parts:
        yield from part.first(budget)
    for gradients in (True, False):
        for part in parts:
            yield from part.rest(budget, gradients)


#: Calls that took as many seconds are made in a session whatever the budget.
_BRIEF = 1.0


def with_sessions(cases: Iterable[Case], budget: Budget, every: bool) -> Iterator[Case]:
    """Yields calls, and then one of each signature, or all, once more in a session."""
    served: dict[str, list[tuple[Case, float]]] = {}
    for case in cases:
        begin = time.perf_counter()
        yield case
        if case.probe is None and case.stage != "model" and not case.cotangents:
            seconds = time.perf_counter() - begin
            served.setdefault(case.signature, []).append((case, seconds))
    for key, calls in served.items():
        for case, seconds in calls if every else calls[:1]:
            what = f"{key} {case.label} in a session".replace("  ", " ")
            if seconds < _BRIEF or not budget.leaves_out(seconds, what):
                yield _in_session(case)


def _in_session(case: Case) -> Case:
    """The same call in a session; the expected outputs of `case` are known after it has run.

    With processors, which may be random, it only has to run.
    """

    def expect(got: Arrays) -> Arrays:
        if case.stage == "all":
            got.clear()
            return {}
        return {k: v for k, v in case.expected.items() if not k.startswith("variable:")}

    return Case(
        case.signature,
        case.inputs,
        {},
        label=f"{case.label} in a session".strip(),
        stage="session",
        advice=case.advice,
        alternatives=lambda: case.alternatives() if case.alternatives else (),
        expect=expect,
    )


class ProgramCases(SignatureCases):
    """The calls of a program, for formats that compute outputs only."""

    def __init__(self, program: Program, leaves: Sequence[Any], examples: Sequence[Any] = ()):
        super().__init__(
            program.key,
            input_structs(program.inputs),
            list(map(dtypes.shape_of, program.outputs)),
            named_examples(program.inputs, examples, program.key),
            jaxpr_size(program.traced.whole) <= FEW_OPERATIONS,
            program.traced.program,
            program.sizes,
        )
        self.traced, self.output_names, self.leaves = program.traced, program.output_names, leaves

    def named_results(self, results: Sequence[Any]) -> Arrays:
        return dict(zip(self.output_names, map(np.asarray, results)))

    def run(self, operands: Sequence[Any]) -> Arrays:
        return self.named_results(self.traced.run(operands))

    def expected(self, inputs: Arrays) -> Arrays:
        operands = [*self.leaves, *inputs.values()]
        self.check_end(lambda *values: self.traced.function(list(values)), operands)
        return self.run(operands)

    def make_case(self, label: str, inputs: Arrays) -> Case:
        case = super().make_case(label, inputs)
        case.alternatives = partial(self.alternatives, case)
        return case

    def probes(self, case: Case, budget: Budget) -> Iterator[Case]:
        for each in super().probes(case, budget):
            each.alternatives = partial(self.alternatives, each)
            yield each

    def alternatives(self, case: Case, gradients: Run | None = None) -> Iterator[Alternative]:
        """Yields results that are as right: jax's own, with the effect of rounding on them."""

        def run(operands: Sequence[Any]) -> Arrays:
            more = gradients(operands) if gradients else {}
            return {**case.unchanged, **self.run(operands), **more}

        exact = {**case.unchanged, **case.expected}
        operands = [*self.leaves, *case.inputs.values()]
        program: Any = self.program  # which calls of a model have
        if gradients is None and "sort" in jaxpr_primitives(program):
            stable = rewritten(jax.make_jaxpr(self.traced.function)(operands), _stable_sort)
            yield self.named_results(jaxpr_as_fun(stable)(*operands)), {}, 1.0
        for allowed in tolerances(run, operands, exact, program):
            yield case.expected, allowed, 1.0


def _stable_sort(equation: Equation) -> Any:
    """A sort that leaves the order of ties open, in the order in which exports leave them."""
    if equation.primitive.name != "sort" or equation.params["is_stable"]:
        return None
    stable = partial(equation.primitive.bind, **{**equation.params, "is_stable": True})
    return traced(stable, equation.invars)


def input_structs(inputs: Inputs) -> dict[str, jax.ShapeDtypeStruct]:
    return {entry.name: entry.struct for entry in inputs.flat}


class ReferenceModel:
    """The model that was exported, to test an existing export against."""

    def __init__(self, model: Model, report: Report, names: Mapping[str, str]):
        def method(key: str) -> str:
            has_it = key != DEFAULT and callable(getattr(type(model), key, None))
            return names.get(key, key if has_it else "__call__")

        chosen = {key: method(key) for key in report.signatures}
        kinds = {entry.dtype for each in report.signatures.values() for entry in each.outputs}
        outputs = "float32" if kinds.isdisjoint(("float16", "bfloat16")) else "model"
        self._exportable = make_exportable(model, chosen, outputs)
        self._methods = {each.key: each for each in self._exportable.methods}
        is_quantized = any(leaf.name.endswith(".integers") for leaf in self._exportable.leaves)
        details = report.details.get("quantized", {})
        kinds = ("kernels add",) if is_quantized else ("kernels add", "weights lose")
        self._losses = [details[each] for each in kinds if "mean" in details.get(each, ())]

    def differences(
        self, key: str, call: RandomCall, info: SignatureInfo, got: Arrays
    ) -> dict[str, float]:
        values = [leaf.value for leaf in self._exportable.leaves]

        def results(operands: Sequence[Any]) -> dict[str, Any]:
            inputs = dict(zip(call.inputs, operands[len(values) :]))
            arguments = {
                name: rebuild(tree, inputs.__getitem__) for name, tree in info.arguments.items()
            }
            args = tuple(arguments.pop(name) for name in info.positional)
            leaves, found = list(operands[: len(values)]), dict[str, Any]()
            output, _ = self._exportable.run(self._methods[key], leaves, args, arguments)
            collect(info.result, output, found, "the result")
            return found

        def run(operands: Sequence[Any]) -> Arrays:
            found = results(operands)
            return {name: np.asarray(dtypes.store(value)) for name, value in found.items()}

        operands = [*values, *call.inputs.values()]
        try:
            arrays = run(operands)
        except (PaxError, TypeError, ValueError, KeyError) as error:
            raise InvalidArgumentError(
                "The model to compare with cannot be called as the export can.",
                where=key,
                got=f"{type(error).__name__}: {error}",
                write="the factory that made the exported model; --method KEY=NAME names a method",
            ) from error
        case = Case(key, call.inputs, arrays, label=call.label)
        case.alternatives = lambda: (
            (arrays, allowed, 1.0)
            for allowed in tolerances(run, operands, arrays, jax.make_jaxpr(results)(operands))
        )
        outputs = {entry.name: got[entry.name] for entry in info.outputs}
        return compare_quantized(case, outputs, self._losses) or compare_either(case, outputs)


def named_examples(inputs: Inputs, examples: Sequence[Any], key: str) -> list[Arrays]:
    """Returns the examples of one signature as flat arrays by input name."""
    kinds = {entry.name: dtypes.stored(entry.struct).dtype for entry in inputs.flat}
    where = f"examples of {key}"
    write = "a list of calls, each a tuple of arrays, the only one, or a dict of all by name"
    if not isinstance(examples, Iterable):
        raise InvalidArgumentTypeError(
            "examples: expected a list of calls.", where=where, got=repr(examples), write=write
        )
    named = [bind_inputs(inputs, example, where) for example in examples]
    try:
        return [{name: _example_array(each[name], kinds[name]) for name in kinds} for each in named]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(
            "An example is not an array.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            write=write,
        ) from error


def _example_array(value: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    if dtype != dtypes.STRING:
        return np.asarray(dtypes.store(value), dtype)
    texts = np.asarray(value, object)
    flat = [text.encode() if isinstance(text, str) else text for text in texts.ravel().tolist()]
    return np.array(flat, object).reshape(texts.shape)


#: Size of the noise, in units of the last bit: as after one operation, and after many.
_SIZES = (4, 32, 256)
#: Number of trials, and allowed multiple of the change of jax's results.
_TRIES, _ALLOWED = 3, 4.0
#: Noise is at most this fraction of the usual tolerance.
_PART = 0.15


def tolerances(
    run: Run, operands: Sequence[Any], exact: Arrays, program: TracedProgram
) -> Iterator[dict[str, Any]]:
    """Allowed differences of each result, after little noise and then more.

    A number for fractional results; for others a mask. `program` is the jaxpr.
    """
    allowed: dict[str, Any] = {}
    noises: list[Callable[[Any], float]] = [partial(_noise_level, size) for size in _SIZES]
    if len(bits := _each_eps(program)) > 1:  # a rounding between them moves results
        noises.append(lambda dtype: max(_noise_level(_SIZES[-1], dtype), max(bits) / 2))
    for noise in noises:
        for seed in range(_TRIES):
            random = np.random.default_rng(seed)
            moved = run([_add_noise(value, noise, random) for value in operands])
            for name, value in moved.items():
                if name in exact:
                    allowed[name] = _widen_by(allowed.get(name), exact[name], np.asarray(value))
        yield allowed


def _each_eps(program: TracedProgram) -> set[float]:
    """Returns the machine epsilons of the dtypes of a program."""
    floats = (dtype for dtype in jaxpr_dtypes(program) if dtypes.is_floating(dtype))
    return {float(jax.numpy.finfo(dtype).eps) for dtype in floats}


def _noise_level(size: int, dtype: DTypeLike) -> float:
    """Returns the relative noise of a dtype."""
    bit = float(jax.numpy.finfo(dtype).eps)
    return max(_SIZES[0] * bit, min(size * bit, _PART * TOLERANCE.get(np.dtype(dtype).name, 0.0)))


def _add_noise(
    value: Array | np.ndarray, noise: Callable[[Any], float], random: np.random.Generator
) -> Any:
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return value
    factors = 1 + noise(value.dtype) * random.normal(size=value.shape)
    return (np.asarray(value) * factors).astype(value.dtype)


def _widen_by(before: float | np.ndarray | None, exact: np.ndarray, moved: np.ndarray) -> Any:
    """The tolerance of a result, given one more that jax computed."""
    if exact.dtype.name not in TOLERANCE:
        differs = np.asarray(exact != moved)
        return differs if before is None else before | differs
    with np.errstate(invalid="ignore"):
        apart = np.abs(widen(exact) - widen(moved))
    largest = float(np.max(apart, initial=0.0, where=np.isfinite(apart)))
    return max(before or 0.0, _ALLOWED * largest)
