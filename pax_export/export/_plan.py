"""An export before anything is written: programs lowered, variables laid out, tests ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export.export import _consumers, _dtypes, _lowering, _programs, _validate
from pax_export.export._exportable import Exportable
from pax_export.export._manifest import ArrayInfo, SignatureInfo, VariableInfo
from pax_export.export._programs import Program
from pax_export.export._signature import Call, Gradient, Signature
from pax_export.export._structure import describe
from pax_export.export._variables import Store


@dataclass(frozen=True)
class _Pullback:
    """The gradient of a program, traced."""

    traced: _lowering.Traced
    wrt: tuple[int, ...]  # operands of the program
    of: tuple[int, ...]  # its results


@dataclass(frozen=True)
class Plan:
    """Everything that a writer needs, and what a validation compares with."""

    model: Exportable
    programs: tuple[Program, ...]
    pullbacks: tuple[_Pullback | None, ...]
    store: Store
    signatures: tuple[Signature, ...]
    platforms: tuple[str, ...]

    @property
    def _modules(self) -> list[_lowering.Lowered]:
        calls = [each.forward for each in self.signatures]
        calls += [each.gradient.call for each in self.signatures if each.gradient]
        return [call.lowered for call in calls]

    @property
    def stablehlo(self) -> _consumers.Version:
        """The newest version of StableHLO that a module needs."""
        return max(each.portable.stablehlo for each in self._modules)

    @property
    def calling_convention(self) -> int:
        """The newest calling convention that a module needs."""
        return max(each.calling_convention for each in self._modules)

    @property
    def oldest_tensorflow(self) -> _consumers.Version:
        """The oldest TensorFlow that runs all signatures."""
        return _consumers.oldest_tensorflow(self.stablehlo, self.calling_convention)

    def cases(self) -> list[_validate.Case]:
        """Random calls of all signatures, with what jax says of them."""
        return [
            case
            for program, pullback, signature in zip(self.programs, self.pullbacks, self.signatures)
            for case in _cases(self, program, pullback, signature)
        ]

    def variable_infos(self) -> tuple[VariableInfo, ...]:
        """The stored arrays, for the report."""
        return tuple(
            VariableInfo(
                name=variable.name,
                shape=tuple(np.shape(variable.value)),
                dtype=np.dtype(variable.value.dtype).name,
                bytes=int(variable.value.size * variable.value.dtype.itemsize),
                trainable=variable.trainable,
                leaves=tuple(variable.leaves),
            )
            for variable in self.store.variables
        )

    def signature_infos(self) -> dict[str, SignatureInfo]:
        """The signatures, for the report."""
        return {
            program.key: _info(program, signature, self.store)
            for program, signature in zip(self.programs, self.signatures)
        }


def trace(
    model: Exportable,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    constraints: Sequence[str],
    several: bool,
) -> tuple[Program, ...]:
    """Traces every method of a model."""
    return _programs.trace_all(model, inputs, kwargs, constraints, several)


def lower(
    model: Exportable,
    programs: Sequence[Program],
    state: str,
    trainable: bool,
    platforms: Sequence[str],
) -> Plan:
    """Lowers all programs, with their gradients, and lays out the variables.

    Raises:
        StateChangeError: a call changes state that matters, and is frozen.
        UnsupportedOperationError: something exists in jax only.
        ConsumerError: no TensorFlow can read the model.
    """
    counts = [None if state == "update" else len(each.output_names) for each in programs]
    modules = [
        _lowering.lower(each.traced, platforms, count, each.operand_names)
        for each, count in zip(programs, counts)
    ]
    read = {index for each in programs for index in each.read}
    changed: set[int] = set()
    for program in programs:
        if state == "update":
            _programs.check_updates(program, model.leaves)
            changed.update(program.changed)
        else:
            _programs.refuse_changes(program, model.leaves, read)
    store = Store(model.leaves, changed, trainable)
    pullbacks, signatures = [], []
    for program, module in zip(programs, modules):
        pullback = _pullback(model, program) if trainable else None
        pullbacks.append(pullback)
        gradient = _gradient(pullback, program, store, platforms)
        signatures.append(_signature(program, module, gradient, store, state == "update"))
    return Plan(
        model, tuple(programs), tuple(pullbacks), store, tuple(signatures), tuple(platforms)
    )


def _is_floating(struct: jax.ShapeDtypeStruct) -> bool:
    return not _dtypes.is_key(struct.dtype) and bool(
        jax.numpy.issubdtype(struct.dtype, jax.numpy.inexact)
    )


def _pullback(model: Exportable, program: Program) -> _Pullback | None:
    """The gradient with respect to what the outputs read and what can have one."""

    def has_gradient(operand: int) -> bool:
        if operand < len(model.leaves):
            return model.leaves[operand].trainable
        return _is_floating(program.traced.structs[operand])

    wrt = tuple(filter(has_gradient, sorted(program.read)))
    of = tuple(index for index, struct in enumerate(program.outputs) if _is_floating(struct))
    return _Pullback(_lowering.vjp(program.traced, wrt, of), wrt, of) if wrt and of else None


def _gradient(
    pullback: _Pullback | None, program: Program, store: Store, platforms: Sequence[str]
) -> Gradient | None:
    if pullback is None:
        return None
    lowered = _lowering.lower(pullback.traced, platforms, names=program.operand_names)
    constants = tuple(store.of_constant(value) for value in lowered.constants)
    return Gradient(Call(lowered, (), constants), pullback.wrt, pullback.of)


def _signature(
    program: Program,
    module: _lowering.Lowered,
    gradient: Gradient | None,
    store: Store,
    update: bool,
) -> Signature:
    constants = tuple(store.of_constant(value) for value in module.constants)
    return Signature(
        key=program.key,
        input_names=tuple(entry.name for entry in program.inputs.flat),
        input_structs=tuple(_dtypes.stored(entry.struct) for entry in program.inputs.flat),
        output_names=program.output_names,
        forward=Call(module, tuple(store.of_leaf), constants),
        assigned=tuple(store.of_leaf[index] for index in program.changed) if update else (),
        gradient=gradient,
    )


def _cases(
    plan: Plan, program: Program, pullback: _Pullback | None, signature: Signature
) -> Iterator[_validate.Case]:
    """Calls of one signature; the first of them with gradients, where it has some."""
    leaves = [plan.store.variables[place].value for place in plan.store.of_leaf]

    def expected(inputs: dict[str, np.ndarray], chosen: dict[str, int]) -> dict[str, np.ndarray]:
        results = program.traced.jitted([*leaves, *inputs.values()])
        outputs = dict(zip(program.output_names, map(np.asarray, results)))
        for place, value in zip(signature.assigned, results[len(program.output_names) :]):
            variable, new = plan.store.variables[place], np.asarray(value)
            if new.tobytes() != np.asarray(variable.value).tobytes():
                outputs[f"variable:{variable.name}"] = new
        return outputs

    structs = dict(zip(signature.input_names, (entry.struct for entry in program.inputs.flat)))
    for case in _validate.cases(program.key, structs, program.inputs.dimensions, expected):
        if pullback is not None:
            _add_gradients(plan, program, pullback, signature, leaves, case)
            pullback = None  # once: each size is one more program to compile
        yield case


def _add_gradients(
    plan: Plan,
    program: Program,
    pullback: _Pullback,
    signature: Signature,
    leaves: list[Any],
    case: _validate.Case,
) -> None:
    random = np.random.default_rng(1)
    for index in pullback.of:
        name = program.output_names[index]
        like = case.expected[name]
        case.cotangents[name] = random.normal(size=like.shape).astype(like.dtype)
    # Traced again: a trace with symbolic shapes has these written all over it.
    gradient = jax.jit(_lowering.pull_back(program.traced.function, pullback.wrt, pullback.of))
    found = gradient([*leaves, *case.inputs.values()], list(case.cotangents.values()))
    variables = plan.store.variables
    named: dict[str, Any] = {
        each.name: np.zeros_like(each.value) for each in variables if each.trainable
    }
    for name, struct in zip(signature.input_names, signature.input_structs):
        if _is_floating(struct):
            named[name] = np.zeros_like(case.inputs[name])
    for index, value in zip(pullback.wrt, found):
        if index < len(leaves):
            name = variables[plan.store.of_leaf[index]].name
        else:
            name = signature.input_names[index - len(leaves)]
        named[name] = named[name] + np.asarray(value)  # tied leaves add up
    case.expected.update({f"gradient:{name}": value for name, value in named.items()})


def _info(program: Program, signature: Signature, store: Store) -> SignatureInfo:
    inputs = program.inputs
    names = iter(signature.input_names)
    arguments = {name: describe(tree, names) for name, tree in inputs.arguments.items()}
    modules = [signature.forward] + ([signature.gradient.call] if signature.gradient else [])
    return SignatureInfo(
        inputs=tuple(
            ArrayInfo(entry.name, entry.path, _shape(struct), np.dtype(struct.dtype).name)
            for entry, struct in zip(inputs.flat, map(_stored, inputs.flat))
        ),
        outputs=tuple(
            ArrayInfo(name, name, _shape(struct), np.dtype(struct.dtype).name)
            for name, struct in zip(program.output_names, program.outputs)
        ),
        arguments=arguments,
        positional=inputs.positional,
        result=program.output_structure,
        assigns=tuple(store.variables[place].name for place in signature.assigned),
        differentiable=signature.gradient is not None,
        stablehlo=_consumers.text(max(each.lowered.portable.stablehlo for each in modules)),
        module_bytes=sum(len(each.lowered.portable.module) for each in modules),
    )


def _stored(entry: Any) -> jax.ShapeDtypeStruct:
    return _dtypes.stored(entry.struct)


def _shape(struct: jax.ShapeDtypeStruct) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in struct.shape)
