"""Cases: calls of signatures with expected results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError, PaxError
from pax_export._jax import scope_constraints
from pax_export._jaxpr import jaxpr_dtypes, jaxpr_size
from pax_export._types import DTypeLike, PyTree, TracedProgram
from pax_export.export.artifact.dimensions import RandomCall, RandomInput, random_calls
from pax_export.export.artifact.report import Report, SignatureInfo
from pax_export.export.artifact.structure import collect, rebuild
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import DEFAULT, make_exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.spec import Inputs, bind_inputs
from pax_export.export.validation.budget import Budget
from pax_export.export.validation.integers import compare_quantized
from pax_export.export.validation.probes import probes
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import TOLERANCE, Case, compare_either

#: Advice if random inputs may be the cause of a failure.
EXAMPLES = "examples=[...], arguments that mean something to the model, if random ones do not"
#: Programs of at most this many operations compile quickly at each size.
FEW_OPERATIONS = 100
#: The cost of a call at size 1, relative to another size.
_OF_ONE = 4.0


def given_calls(
    structs: Mapping[str, jax.ShapeDtypeStruct],
    examples: Sequence[Arrays] = (),
    outputs: Sequence[Sequence[Any]] = (),
) -> list[tuple[str, Arrays, float]]:
    """Labelled inputs for a signature, examples or random, each with its cost in first calls.

    Sizes of 1 come last: XLA compiles products with one row slowly. Sizes leave some output
    elements, if any do.
    """
    if examples:
        return [(f"(example {number})", given, 1.0) for number, given in enumerate(examples)]
    outside = {name: dtypes.stored(struct) for name, struct in structs.items()}
    given = {
        name: RandomInput(dtypes.shape_of(struct), np.dtype(struct.dtype))
        for name, struct in outside.items()
    }
    calls = [
        (each.label, each.inputs)
        for each in random_calls(given, constraints(structs.values()), outputs=_texts(outputs))
    ]
    costs = [1.0] * (len(calls) - 1) + [_OF_ONE]
    return [(*call, cost) for call, cost in zip([*calls[1:], *calls[:1]], costs)]


def _texts(shapes: Sequence[Sequence[Any]]) -> list[tuple[int | str, ...]]:
    return [tuple(n if isinstance(n, int) else str(n) for n in shape) for shape in shapes]


def random_cases(
    signature: str,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    expected: Callable[[Arrays], Arrays],
    budget: Budget | None = None,
    examples: Sequence[Arrays] = (),
    after: Callable[[Case, float], Iterator[Case]] | None = None,
    outputs: Sequence[Sequence[Any]] = (),
    is_small: bool = False,
    program: Any = None,
) -> Iterator[Case]:
    """Yields as many calls as the budget allows, with examples or random numbers.

    `after` gets the first case and its seconds. With a `program`, extreme numbers follow.
    """
    budget, seconds = budget or Budget(), -math.inf
    for label, inputs, cost in given_calls(structs, examples, outputs):
        if not is_small and budget.leaves_out(seconds * cost, f"{signature} {label}".strip()):
            continue
        begin = time.perf_counter()
        advice = "" if examples else EXAMPLES
        case = Case(signature, inputs, expected(inputs), label=label, advice=advice)
        yield case
        seconds = time.perf_counter() - begin
        if program is not None:
            known = None if is_small else seconds
            yield from probes(case, program, expected, budget, known, bool(examples))
            program = None
        if after is not None:
            yield from after(case, seconds)
            after = None


def constraints(structs: Iterable[jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    """Returns the constraints of the symbolic sizes."""
    symbolic = [size for each in structs for size in each.shape if not isinstance(size, int)]
    return tuple(dict.fromkeys(text for size in symbolic for text in scope_constraints(size.scope)))


def output_cases(
    program: Program, store: Store, budget: Budget | None = None, examples: Sequence[Any] = ()
) -> Iterator[Case]:
    """Returns calls of one program, for formats that compute outputs only."""
    leaves = [store.variables[place].value for place in store.of_leaf]

    def run(operands: Sequence[Any]) -> Arrays:
        results = program.traced.run(operands)
        return dict(zip(program.output_names, map(np.asarray, results)))

    def expected(inputs: Arrays) -> Arrays:
        return run([*leaves, *inputs.values()])

    structs = {entry.name: entry.struct for entry in program.inputs.flat}
    given = named_examples(program.inputs, examples, program.key)
    outputs = [struct.shape for struct in program.outputs]
    is_small = jaxpr_size(program.traced.whole) <= FEW_OPERATIONS
    traced = program.traced.program
    made = random_cases(
        program.key, structs, expected, budget, given, None, outputs, is_small, traced
    )
    for case in made:
        operands = [*leaves, *case.inputs.values()]
        case.rounding = partial(tolerances, run, operands, case.expected, traced)
        yield case


class ReferenceModel:
    """The model that was exported, to test an existing export against."""

    def __init__(self, model: Any, report: Report, names: Mapping[str, str]):
        chosen = {key: names.get(key, self._method_name(model, key)) for key in report.signatures}
        self._exportable = make_exportable(model, chosen, _outputs_of(report))
        self._methods = {each.key: each for each in self._exportable.methods}
        is_quantized = any(leaf.name.endswith(".integers") for leaf in self._exportable.leaves)
        told = report.details.get("quantized", {})
        kinds = ("kernels add",) if is_quantized else ("kernels add", "weights lose")
        self._losses = [told[each] for each in kinds if "mean" in told.get(each, ())]

    @staticmethod
    def _method_name(model: Any, key: str) -> str:
        return key if key != DEFAULT and callable(getattr(type(model), key, None)) else "__call__"

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
        case.rounding = lambda: tolerances(run, operands, arrays, jax.make_jaxpr(results)(operands))
        given = {entry.name: got[entry.name] for entry in info.outputs}
        return compare_quantized(case, given, self._losses) or compare_either(case, given)


def _outputs_of(report: Report) -> str:
    """The exporter's option for half-precision outputs."""
    outputs = (entry for each in report.signatures.values() for entry in each.outputs)
    return (
        "model" if any(entry.dtype in ("float16", "bfloat16") for entry in outputs) else "float32"
    )


def named_examples(inputs: Inputs, examples: Sequence[Any], key: str) -> list[Arrays]:
    """Returns the examples of one signature as flat arrays by input name."""
    kinds = {entry.name: dtypes.stored(entry.struct).dtype for entry in inputs.flat}
    where = f"examples of {key}"
    write = "a list of calls, each a tuple of arrays, the only one, or a dict of all by name"
    if not isinstance(examples, Iterable):
        raise InvalidArgumentTypeError(
            "examples: expected a list of calls.", where=where, got=repr(examples), write=write
        )
    named = [bind_inputs(inputs, given, where) for given in examples]
    try:
        return [{name: _example_array(each[name], kinds[name]) for name in kinds} for each in named]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(
            "An example is not an array.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            write=write,
        ) from error


def _example_array(value: Any, dtype: Any) -> np.ndarray:
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
_FLOAT32 = float(np.finfo(np.float32).eps)

Run = Callable[[Sequence[Any]], Mapping[str, Any]]


def tolerances(
    run: Run, operands: Sequence[Any], exact: Arrays, program: TracedProgram
) -> Iterator[dict[str, Any]]:
    """Allowed differences of each result, after little noise and then more.

    A number for fractional results; for others a mask. `program` is the jaxpr.
    """
    allowed: dict[str, Any] = {}
    noises: list[Callable[[Any], float]] = [partial(_noise_level, size) for size in _SIZES]
    if (bit := _coarsest_eps(program)) > _FLOAT32:
        noises.append(lambda dtype: max(_noise_level(_SIZES[-1], dtype), bit / 2))
    for noise in noises:
        for seed in range(_TRIES):
            random = np.random.default_rng(seed)
            moved = run([_add_noise(value, noise, random) for value in operands])
            for name, value in moved.items():
                if name in exact:
                    allowed[name] = _widen_by(allowed.get(name), exact[name], np.asarray(value))
        yield allowed


def _coarsest_eps(program: TracedProgram) -> float:
    """Returns the coarsest machine epsilon among the dtypes of a program."""
    floats = (dtype for dtype in jaxpr_dtypes(program) if dtypes.is_floating(dtype))
    return max((float(jax.numpy.finfo(dtype).eps) for dtype in floats), default=0.0)


def _noise_level(size: int, dtype: DTypeLike) -> float:
    """Returns the relative noise of a dtype."""
    bit = float(jax.numpy.finfo(dtype).eps)
    return max(_SIZES[0] * bit, min(size * bit, _PART * TOLERANCE.get(np.dtype(dtype).name, 0.0)))


def _add_noise(value: PyTree, noise: Callable[[Any], float], random: np.random.Generator) -> Any:
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return value
    factors = 1 + noise(value.dtype) * random.normal(size=value.shape)
    return (np.asarray(value) * factors).astype(value.dtype)


def _widen_by(before: PyTree, exact: np.ndarray, moved: np.ndarray) -> Any:
    """The tolerance of a result, given one more that jax computed."""
    if exact.dtype.name not in TOLERANCE:
        differs = np.asarray(exact != moved)
        return differs if before is None else before | differs
    with np.errstate(invalid="ignore"):
        apart = np.abs(_wide(exact) - _wide(moved))
    largest = float(np.max(apart, initial=0.0, where=np.isfinite(apart)))
    return max(before or 0.0, _ALLOWED * largest)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
