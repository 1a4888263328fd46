"""Programs and variables as the report describes them, for every target."""

from __future__ import annotations

import jax
import numpy as np

from pax_export.export.artifact.report import ArrayInfo, SignatureInfo, VariableInfo
from pax_export.export.lowering.signature import Processing
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.spec import Inputs


def of_variables(store: Store) -> tuple[VariableInfo, ...]:
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


def of_signature(
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
        outputs=around.outputs if around else outputs(program),
        arguments=inputs.structure(),
        positional=inputs.positional,
        result=around.structure if around else program.output_structure,
        preprocess=_inputs(program.inputs) if around and around.preprocess else None,
        postprocess=outputs(program) if around and around.postprocess else None,
        assigns=assigns,
        differentiable=differentiable,
        vjp_order=vjp_order,
        stablehlo=stablehlo,
        module_bytes=module_bytes,
        constraints=tuple(constraints),
    )


def outputs(program: Program) -> tuple[ArrayInfo, ...]:
    """What a model gives."""
    return tuple(
        array(name, name, struct) for name, struct in zip(program.output_names, program.outputs)
    )


def _inputs(inputs: Inputs) -> tuple[ArrayInfo, ...]:
    return tuple(
        array(entry.name, entry.path, dtypes.stored(entry.struct)) for entry in inputs.flat
    )


def array(name: str, path: str, struct: jax.ShapeDtypeStruct) -> ArrayInfo:
    """One input or output."""
    return ArrayInfo(name, path, _shape(struct), dtypes.name_of(struct.dtype))


def _shape(struct: jax.ShapeDtypeStruct) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in struct.shape)
