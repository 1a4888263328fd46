"""An export before anything is written: programs lowered, variables laid out, tests ready."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export.export.artifact import compatibility
from pax_export.export.artifact.report import ArrayInfo, SignatureInfo, VariableInfo
from pax_export.export.lowering.gradients import Order, differentiate
from pax_export.export.lowering.lower import Lowered
from pax_export.export.lowering.lower import lower as lower_program
from pax_export.export.lowering.signature import Call, Gradient, Processing, Pullback, Signature
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program, check_updates, refuse_changes
from pax_export.export.tracing.spec import Inputs


@dataclass(frozen=True)
class LoweredModel:
    """Everything that a format writes of a model, and what its test compares with."""

    model: Exportable
    programs: tuple[Program, ...]
    pullbacks: tuple[Pullback | None, ...]
    store: Store
    signatures: tuple[Signature, ...]
    platforms: tuple[str, ...]

    @property
    def _modules(self) -> list[Lowered]:
        calls = [each.forward for each in self.signatures]
        for each in self.signatures:
            calls += [gradient.call for gradient in each.gradients]
        return [call.lowered for call in calls]

    @property
    def stablehlo(self) -> compatibility.Version:
        """The newest version of StableHLO that a module needs."""
        return max(each.portable.stablehlo for each in self._modules)

    @property
    def calling_convention(self) -> int:
        """The newest calling convention that a module needs."""
        return max(each.calling_convention for each in self._modules)

    @property
    def oldest_tensorflow(self) -> compatibility.Version:
        """The oldest TensorFlow that runs all signatures."""
        return compatibility.oldest_tensorflow(self.stablehlo, self.calling_convention)

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """The variables by name, for tests: arrays whose memory jax and TensorFlow can share.

        Either of them would copy arrays of numpy, at every call.
        """
        weights = {}
        for variable in self.store.variables:
            held = jax.numpy.asarray(variable.value)
            same = held.dtype == variable.value.dtype  # not narrowed
            weights[variable.name] = held if same else variable.value
        return weights

    def variable_infos(self) -> tuple[VariableInfo, ...]:
        """The stored arrays, for the report."""
        return variable_infos(self.store)

    def signature_infos(self) -> dict[str, SignatureInfo]:
        """The signatures, for the report."""
        return {
            program.key: _info(program, signature, self.store)
            for program, signature in zip(self.programs, self.signatures)
        }


def lower(
    model: Exportable,
    programs: Sequence[Program],
    state: str,
    trainable: bool,
    platforms: Sequence[str],
    vjp_order: int | None = None,
    defer: bool = False,
) -> LoweredModel:
    """Lowers all programs, with their gradients, and lays out the variables.

    With `defer`, leaves on several devices or on disk stay there until they are read.
    """
    order = Order.of(vjp_order, trainable)
    updates = [state == "update" or each.trains for each in programs]
    counts = [None if update else len(each.output_names) for each, update in zip(programs, updates)]
    modules = [
        lower_program(each.traced, platforms, count, each.operand_names)
        for each, count in zip(programs, counts)
    ]
    read = {index for each in programs for index in each.read}
    changed: set[int] = set()
    for program, update in zip(programs, updates):
        if update:
            check_updates(program, model.leaves)
            changed.update(program.changed)
        else:
            refuse_changes(program, model.leaves, read)
    store = Store(model.leaves, changed, trainable, defer)
    pullbacks, signatures = [], []
    for program, module, update in zip(programs, modules, updates):
        often = Order(0, 0) if program.trains else order
        pullback, gradient = differentiate(
            model, program, module, store, platforms, often, trainable
        )
        pullbacks.append(pullback)
        signatures.append(_signature(program, module, gradient, store, update))
    return LoweredModel(
        model, tuple(programs), tuple(pullbacks), store, tuple(signatures), tuple(platforms)
    )


def sign(
    model: Exportable, program: Program, store: Store, trainable: bool, platforms: Sequence[str]
) -> Signature:
    """Lowers one more program over variables that are laid out already.

    The arrays that it closes over are added to the store.
    """
    count = len(program.output_names)
    module = lower_program(program.traced, platforms, count, program.operand_names)
    order = Order.of(1 if trainable else 0, trainable)
    _, gradient = differentiate(model, program, module, store, platforms, order, trainable)
    return _signature(program, module, gradient, store, update=False)


def _signature(
    program: Program,
    module: Lowered,
    gradient: Gradient | None,
    store: Store,
    update: bool,
) -> Signature:
    constants = tuple(store.of_constant(value) for value in module.constants)
    return Signature(
        key=program.key,
        input_names=tuple(entry.name for entry in program.inputs.flat),
        input_structs=tuple(dtypes.stored(entry.struct) for entry in program.inputs.flat),
        output_names=program.output_names,
        forward=Call(module, tuple(store.of_leaf), constants),
        assigned=tuple(store.of_leaf[index] for index in program.changed) if update else (),
        gradient=gradient,
    )


def _info(program: Program, signature: Signature, store: Store) -> SignatureInfo:
    modules = [signature.forward, *(gradient.call for gradient in signature.gradients)]
    return signature_info(
        program,
        signature.processing,
        assigns=tuple(store.variables[place].name for place in signature.assigned),
        differentiable=signature.gradient is not None,
        vjp_order=len(signature.gradients),
        stablehlo=compatibility.text(max(each.lowered.portable.stablehlo for each in modules)),
        module_bytes=sum(len(each.lowered.portable.module) for each in modules),
    )


def variable_infos(store: Store) -> tuple[VariableInfo, ...]:
    """The stored arrays."""
    return tuple(
        VariableInfo(
            name=variable.name,
            shape=tuple(np.shape(variable.value)),
            dtype=np.dtype(variable.value.dtype).name,
            bytes=int(variable.value.size * variable.value.dtype.itemsize),
            trainable=variable.trainable,
            leaves=tuple(variable.leaves),
        )
        for variable in store.variables
    )


def signature_info(
    program: Program,
    around: Processing | None = None,
    *,
    assigns: tuple[str, ...] = (),
    differentiable: bool = False,
    vjp_order: int = 0,
    stablehlo: str = "",
    module_bytes: int = 0,
) -> SignatureInfo:
    """One function: its arrays, and the structure of its arguments and of its result."""
    inputs = around.inputs if around else program.inputs
    constraints = dict.fromkeys((*inputs.constraints, *program.inputs.constraints))
    return SignatureInfo(
        inputs=_inputs(inputs),
        outputs=around.outputs if around else output_infos(program),
        arguments=inputs.structure(),
        positional=inputs.positional,
        result=around.structure if around else program.output_structure,
        preprocess=_inputs(program.inputs) if around and around.preprocess else None,
        postprocess=output_infos(program) if around and around.postprocess else None,
        assigns=assigns,
        differentiable=differentiable,
        vjp_order=vjp_order,
        stablehlo=stablehlo,
        module_bytes=module_bytes,
        constraints=tuple(constraints),
    )


def output_infos(program: Program) -> tuple[ArrayInfo, ...]:
    """What a model gives."""
    names = program.output_names
    return tuple(array_info(name, name, each) for name, each in zip(names, program.outputs))


def _inputs(inputs: Inputs) -> tuple[ArrayInfo, ...]:
    return tuple(
        array_info(entry.name, entry.path, dtypes.stored(entry.struct)) for entry in inputs.flat
    )


def array_info(name: str, path: str, struct: jax.ShapeDtypeStruct) -> ArrayInfo:
    """One input or output."""
    return ArrayInfo(name, path, _shape(struct), dtypes.name_of(struct.dtype))


def _shape(struct: jax.ShapeDtypeStruct) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in struct.shape)
