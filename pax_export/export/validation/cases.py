"""What a test does with an export: calls of its signatures, with what jax says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, PaxError
from pax_export._jax import scope_constraints
from pax_export.export.artifact.dimensions import RandomCall, RandomInput, random_calls
from pax_export.export.artifact.report import Report, SignatureInfo
from pax_export.export.artifact.structure import collect, rebuild
from pax_export.export.lowering.lower import Processing, Pullback, Signature
from pax_export.export.lowering.lowered_model import LoweredModel
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import DEFAULT, exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.spec import Inputs, bind
from pax_export.export.tracing.traced import pull_back
from pax_export.export.validation.decompositions import judged
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case, compare


def random_cases(
    signature: str,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    expected: Callable[[Arrays], Arrays],
    examples: Sequence[Arrays] = (),
) -> Iterator[Case]:
    """Calls of one signature: the examples, or random ones at several sizes."""
    for number, inputs in enumerate(examples):
        yield Case(signature, inputs, expected(inputs), label=f"(example {number})")
    if examples:
        return
    outside = {name: dtypes.stored(struct) for name, struct in structs.items()}
    given = {
        name: RandomInput(dtypes.shape_of(struct), np.dtype(struct.dtype))
        for name, struct in outside.items()
    }
    for each in random_calls(given, constraints(structs.values())):
        yield Case(signature, each.inputs, expected(each.inputs), label=each.label)


def constraints(structs: Iterable[jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    """What may be assumed of the symbolic sizes."""
    symbolic = [size for each in structs for size in each.shape if not isinstance(size, int)]
    return tuple(dict.fromkeys(text for size in symbolic for text in scope_constraints(size.scope)))


def output_cases(program: Program, store: Store) -> list[Case]:
    """Random calls of one program, for formats that compute outputs only."""
    leaves = [store.variables[place].value for place in store.of_leaf]

    def expected(inputs: Arrays) -> Arrays:
        results = program.traced.run([*leaves, *inputs.values()])
        return dict(zip(program.output_names, map(np.asarray, results)))

    structs = {entry.name: entry.struct for entry in program.inputs.flat}
    return list(random_cases(program.key, structs, expected))


def model_cases(
    model: LoweredModel, examples: Mapping[str, Sequence[Any]] | None = None
) -> list[Case]:
    """Calls of all signatures of a model, with gradients and new state.

    They are made with the examples of a signature, or with random numbers.
    """
    calls: list[Case] = []
    for each in zip(model.programs, model.pullbacks, model.signatures):
        calls += _OfSignature(model, *each).cases((examples or {}).get(each[0].key, ()))
    return calls


#: How often rounding errors are tried out, and how much more than theirs is allowed.
_PERTURBED, _TOLERATED = 3, 4.0


def _perturbed(value: Any, random: np.random.Generator) -> Any:
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        return value
    noise = 4 * float(jax.numpy.finfo(value.dtype).eps) * random.normal(size=value.shape)
    return (np.asarray(value) * (1 + noise)).astype(value.dtype)


class _OfSignature:
    def __init__(
        self, model: LoweredModel, program: Program, pullback: Pullback | None, signature: Signature
    ):
        self._model = model
        self._program = program
        self._pullback = pullback
        self._signature = signature
        names = (model.store.variables[place].name for place in model.store.of_leaf)
        self._leaves = [model.weights[name] for name in names]

    def cases(self, examples: Sequence[Any]) -> Iterator[Case]:
        """The calls; the first of them with gradients, where there are some."""
        program, around = self._program, self._signature.processing
        structs = {entry.name: entry.struct for entry in program.inputs.flat}
        given = _examples(program.inputs, examples if around is None else (), program.key)
        pullback = self._pullback
        for case in random_cases(program.key, structs, self._expected, given):
            if program.trains:
                self._add_tolerance(case)
            if pullback is not None:
                self._add_gradients(pullback, case)
                pullback = None  # once: each size is one more program to compile
            case.general = self._general(case)
            if around is not None:
                case.stage = "model"
            yield case
        if around is not None:
            yield from self._processed(around, examples)

    def _expected(self, inputs: Arrays) -> Arrays:
        return self._named(self._program.traced.run([*self._leaves, *inputs.values()]))

    def _add_tolerance(self, case: Case) -> None:
        """Allows a step of training to differ by as much as it does under rounding errors.

        A gradient that is zero but for rounding is a whole step for an
        optimizer that scales gradients by their size, in either direction.
        """
        variables = self._model.store.variables
        assigned = [variables[place] for place in self._signature.assigned]
        case.unchanged = {f"variable:{each.name}": each.value for each in assigned}
        exact = {**case.unchanged, **case.expected}
        for seed in range(_PERTURBED):
            random = np.random.default_rng(seed)
            operands = [_perturbed(v, random) for v in (*self._leaves, *case.inputs.values())]
            results = self._named(self._program.traced.run(operands))
            for name, value in {**case.unchanged, **results}.items():
                if name in case.unchanged and dtypes.is_floating(value.dtype):
                    apart = np.abs(np.subtract(value, exact[name], dtype=np.float64))
                    largest = float(np.max(apart, initial=0.0, where=np.isfinite(apart)))
                    case.tolerance[name] = max(case.tolerance.get(name, 0.0), _TOLERATED * largest)

    def _named(self, results: Sequence[Any]) -> Arrays:
        names = self._program.output_names
        outputs = dict(zip(names, map(np.asarray, results)))
        for place, value in zip(self._signature.assigned, results[len(names) :]):
            variable, new = self._model.store.variables[place], np.asarray(value)
            if new.tobytes() != np.asarray(variable.value).tobytes():
                outputs[f"variable:{variable.name}"] = new
        return outputs

    def _processed(self, around: Processing, examples: Sequence[Any]) -> Iterator[Case]:
        """Calls of the whole; what reaches the model is known only when they have been made."""
        names = [entry.name for entry in self._program.inputs.flat]
        structs = {entry.name: entry.struct for entry in around.inputs.flat}
        given = _examples(around.inputs, examples, self._program.key)
        for case in random_cases(self._program.key, structs, lambda _: {}, given):

            def expect(got: Arrays, case: Case = case) -> Arrays:
                inputs = {name: got.pop(f"input:{place}") for place, name in enumerate(names)}
                inner = Case(case.signature, inputs, self._expected(inputs))
                case.general = self._general(inner)
                return inner.expected

            case.stage, case.expect = "all", expect
            yield case

    def _general(self, case: Case) -> Callable[[], tuple[Arrays, dict[str, float]]] | None:
        """What jax's CPU says of a call whose export has other rules for decompositions."""
        forward, gradient = self._signature.forward.lowered, self._signature.gradient
        if not (forward.neutral or (gradient and gradient.call.lowered.neutral)):
            return None

        def run() -> tuple[Arrays, dict[str, float]]:
            function = self._program.traced.function
            operands = [*self._leaves, *case.inputs.values()]
            results, apart = dict(case.expected), dict[str, float]()
            if forward.neutral:
                found, apart = judged(function, operands, self._named)
                results.update(found)
            if gradient and case.cotangents and gradient.call.lowered.neutral:
                wrt, count = gradient.wrt, len(operands)
                back = pull_back(function, wrt, gradient.of)
                found, more = judged(
                    lambda values: back(values[:count], values[count:]),
                    [*operands, *case.cotangents.values()],
                    lambda found: self._named_gradients(case, wrt, found),
                )
                results.update(found)
                apart.update(more)
            return results, apart

        return run

    def _add_gradients(self, pullback: Pullback, case: Case) -> None:
        random = np.random.default_rng(1)
        for index in pullback.of:
            name = self._program.output_names[index]
            like = case.expected[name]
            case.cotangents[name] = random.normal(size=like.shape).astype(like.dtype)
        # Traced again: a trace with symbolic shapes has these written all over it.
        function = self._program.traced.function
        gradient = jax.jit(pull_back(function, pullback.wrt, pullback.of))
        found = gradient([*self._leaves, *case.inputs.values()], list(case.cotangents.values()))
        case.expected.update(self._named_gradients(case, pullback.wrt, found))

    def _named_gradients(self, case: Case, wrt: Sequence[int], found: Sequence[Any]) -> Arrays:
        """Gradients by the names that runtimes give them; those not there are zero."""
        variables, leaves = self._model.store.variables, self._model.store.of_leaf
        signature = self._signature
        named: dict[str, np.ndarray] = {}
        for index, value in zip(wrt, found):
            if index < len(leaves):
                name = variables[leaves[index]].name
            else:
                name = signature.input_names[index - len(leaves)]
            value = np.asarray(value)  # of a jax array, its own memory
            named[name] = named[name] + value if name in named else value  # tied leaves add up
        like = {each.name: each.value for each in variables if each.trainable}
        for name, struct in zip(signature.input_names, signature.input_structs):
            if dtypes.is_floating(struct.dtype):
                like[name] = case.inputs[name]
        for name in like.keys() - named.keys():
            zero = np.zeros((), like[name].dtype)
            named[name] = np.broadcast_to(zero, np.shape(like[name]))
        return {f"gradient:{name}": named[name] for name in like}


def _examples(inputs: Inputs, examples: Sequence[Any], key: str) -> list[Arrays]:
    kinds = {entry.name: dtypes.stored(entry.struct).dtype for entry in inputs.flat}
    named = [bind(inputs, given, f"examples of {key}") for given in examples]
    return [{name: _array(each[name], kinds[name]) for name in kinds} for each in named]


def _array(value: Any, dtype: Any) -> np.ndarray:
    if dtype != dtypes.STRING:
        return np.asarray(dtypes.store(value), dtype)
    texts = np.asarray(value, object)
    flat = [text.encode() if isinstance(text, str) else text for text in texts.ravel().tolist()]
    return np.array(flat, object).reshape(texts.shape)


class ReferenceModel:
    """The model that was exported, beside its export, for tests of exports that lie there."""

    def __init__(self, model: Any, report: Report, names: Mapping[str, str]):
        chosen = {key: names.get(key, self._name(model, key)) for key in report.signatures}
        self._exportable = exportable(model, chosen)
        self._methods = {each.key: each for each in self._exportable.methods}

    @staticmethod
    def _name(model: Any, key: str) -> str:
        return key if key != DEFAULT and callable(getattr(type(model), key, None)) else "__call__"

    def differences(
        self, key: str, call: RandomCall, info: SignatureInfo, got: Arrays
    ) -> dict[str, float]:
        arguments = {
            name: rebuild(tree, call.inputs.__getitem__) for name, tree in info.arguments.items()
        }
        args = tuple(arguments.pop(name) for name in info.positional)
        values = [leaf.value for leaf in self._exportable.leaves]
        expected: dict[str, Any] = {}
        try:
            output, _ = self._exportable.run(self._methods[key], values, args, arguments)
            collect(info.result, output, expected, "the result")
            arrays = {name: np.asarray(dtypes.store(value)) for name, value in expected.items()}
        except (PaxError, TypeError, ValueError, KeyError) as error:
            raise InvalidArgumentError(
                "The model to compare with cannot be called as the export can.",
                where=key,
                got=f"{type(error).__name__}: {error}",
                write="the factory that made the exported model; --method KEY=NAME names a method",
            ) from error
        values_got = {entry.name: got[entry.name] for entry in info.outputs}
        return compare(Case(key, call.inputs, arrays, label=call.label), values_got)
