"""LoweredModel: lowered programs, variables and validation cases."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from pax_export._foundations.errors import (
    InvalidArgumentError,
    NotDifferentiableError,
    PaxError,
    named_line,
)
from pax_export._foundations.jax import needed_part
from pax_export.export.artifact import saved_models
from pax_export.export.artifact.report import ArrayInfo, SignatureInfo
from pax_export.export.lowering.lower import (
    CALLING_CONVENTION,
    Call,
    Gradient,
    Lowered,
    Processing,
    Signature,
    lower_traced,
)
from pax_export.export.lowering.variables import Store
from pax_export.export.portable.for_xla import StoredIntegers, dequantized_ahead
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.flops import work_fields, work_of
from pax_export.export.tracing.inputs import Inputs
from pax_export.export.tracing.programs import Program, check_updates
from pax_export.export.tracing.trace_errors import line_of_model
from pax_export.export.tracing.traced import Traced, trace, vjp
from pax_export.precision.quantized import dequantized

#: Lowers a traced program, or its first results, for platforms; see `lower_traced`.
Lower = Callable[..., Lowered]


@dataclass(frozen=True)
class LoweredModel:
    """A lowered model: everything that a format writes, and validation compares."""

    programs: tuple[Program, ...]
    store: Store
    signatures: tuple[Signature, ...]
    platforms: tuple[str, ...]
    #: Computes the variables of the store that are not stored, from those that are.
    initializer: Call | None = None

    @property
    def _modules(self) -> list[Lowered]:
        first = [] if self.initializer is None else [self.initializer.lowered]
        return [*first, *(module for each in self.signatures for module in each.modules)]

    @property
    def stablehlo(self) -> saved_models.Version:
        return max(each.portable.stablehlo for each in self._modules)

    @property
    def oldest_tensorflow(self) -> saved_models.Version:
        return saved_models.oldest_tensorflow(self.stablehlo, CALLING_CONVENTION)

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """Returns the variables by name, as arrays whose memory jax and TensorFlow can share.

        Both would copy numpy arrays in every call.
        """
        weights = {}
        for variable in self.store.stored:
            array = jax.numpy.asarray(variable.value)
            same = array.dtype == variable.value.dtype  # not narrowed
            weights[variable.name] = array if same else variable.value
        return weights

    def with_reason(self, text: str) -> LoweredModel:
        """Returns the model with the reason why its signatures have no gradients."""
        reason = " ".join(text.split())[:_LONGEST]
        signatures = (dataclasses.replace(each, no_gradient=reason) for each in self.signatures)
        return dataclasses.replace(self, signatures=tuple(signatures))

    def signature_infos(self) -> dict[str, SignatureInfo]:
        infos = {}
        for program, signature in zip(self.programs, self.signatures):
            modules = [each.portable for each in signature.modules]
            infos[program.key] = signature_info(
                program,
                signature.processing,
                assigns=tuple(self.store.variables[number].name for number in signature.assigned),
                differentiable=signature.gradient is not None,
                vjp_order=len(signature.gradients),
                differentiated_by=signature.differentiated_by,
                no_gradient=signature.no_gradient,
                stablehlo=saved_models.format_version(max(each.stablehlo for each in modules)),
                module_bytes=sum(len(each.module) for each in modules),
            )
        return infos


def lower_model(
    model: Exportable,
    programs: Sequence[Program],
    state: str,
    trainable: bool,
    platforms: Sequence[str],
    vjp_order: int | None = None,
    defer: bool = False,
    initialize: bool = False,
    lower: Lower = lower_traced,
) -> LoweredModel:
    """Lowers all programs, with their gradients, and lays out the variables.

    With `defer`, leaves on several devices or on disk stay there until they are read.  With
    `initialize`, numbers of quantized weights are variables, computed when an export is loaded.
    `lower` lowers a traced program.
    """
    order = vjp_orders(vjp_order, trainable)
    updates = [state == "update" or each.trains for each in programs]
    changed: set[int] = set()
    for program, update in zip(programs, updates):
        if update:
            check_updates(program, model.leaves)
            changed.update(program.changed)
    read = {name for each in programs for name in each.constants}
    leaves = (replace(each, trainable=each.trainable and each.name not in read)
              for each in model.leaves)  # fmt: skip
    model = replace(model, leaves=tuple(leaves)) if read else model
    fixed = {
        number
        for number, leaf in enumerate(model.leaves)
        if initialize and number not in changed and not (trainable and leaf.trainable)
    }
    ahead = [dequantized_ahead(each.traced.program, fixed) for each in programs]
    written = [
        dataclasses.replace(each, traced=each.traced.with_program(program)) if weights else each
        for each, (program, weights) in zip(programs, ahead)
    ]
    modules = [_lower(*each, platforms, lower) for each in zip(written, updates)]
    store = Store(model.leaves, changed, trainable, defer)
    lowering = _Lowering(model, store, platforms, trainable, lower)
    signatures = []
    for program, module, update, (_, weights) in zip(written, modules, updates, ahead):
        often = (0, 0) if program.trains else order
        signatures.append(lowering.signature(program, module, often, update, weights))
    if vjp_order and not any(each.gradient for each in signatures):
        raise NotDifferentiableError(
            "The model has no differentiable inputs or parameters.",
            where=", ".join(each.key for each in signatures),
            got=f"vjp_order={vjp_order}, and {_NOTHING}",
            write="vjp_order=0, or no vjp_order at all",
        )
    initializer = _initializer(store, platforms, lower) if store.computed else None
    return LoweredModel(tuple(programs), store, tuple(signatures), tuple(platforms), initializer)


def _initializer(store: Store, platforms: Sequence[str], lower: Lower) -> Call:
    """Returns the program that computes quantized weights, in the order of their variables."""
    found = [store.variables[index].computed_from for index in store.computed]
    weights = [each for each in found if each is not None]
    read = tuple(dict.fromkeys(index for indices, _ in weights for index in indices))

    def numbers(arrays: list[Any]) -> list[Any]:
        by_index = dict(zip(read, arrays))
        return [
            dequantized(*(by_index[index] for index in indices), form=form)
            for indices, form in weights
        ]

    structs = [dtypes.stored(dtypes.struct_of(store.variables[at].value)) for at in read]
    return Call(lower(trace(numbers, structs, outlined=False), platforms), read, ())


def lower_signature(
    model: Exportable,
    program: Program,
    store: Store,
    trainable: bool,
    platforms: Sequence[str],
    lower: Lower = lower_traced,
) -> Signature:
    """Lowers one more program over variables that are laid out already.

    The arrays that it closes over are added to the store.
    """
    module = _lower(program, False, platforms, lower)
    order = vjp_orders(1 if trainable else 0, trainable)
    return _Lowering(model, store, platforms, trainable, lower).signature(program, module, order)


def _lower(program: Program, update: bool, platforms: Sequence[str], lower: Lower) -> Lowered:
    count = None if update else len(program.output_names)
    return lower(program.traced, platforms, count, program.operand_names)


def signature_info(
    program: Program, around: Processing | None = None, **facts: object
) -> SignatureInfo:
    """Describes a function: its arrays, and the structure of arguments and result."""
    inputs = around.inputs if around else program.inputs
    constraints = dict.fromkeys((*inputs.constraints, *program.inputs.constraints))
    work = work_of(needed_part(program.traced.program, len(program.output_names)))
    return SignatureInfo(
        inputs=_inputs(inputs),
        outputs=around.outputs if around else output_infos(program),
        arguments=inputs.structure(),
        positional=inputs.positional,
        result=around.structure if around else program.output_structure,
        preprocess=_inputs(program.inputs) if around and around.preprocess else None,
        postprocess=output_infos(program) if around and around.postprocess else None,
        constraints=tuple(constraints),
        sizes=() if around else tuple(filter(None, program.sizes)),
        **work_fields(work),
        uncounted=tuple(sorted(work.uncounted)),
        renamed=tuple(_renamed(inputs, program)),
        constants=program.constants,
        **{"assigns": (), "differentiable": False, "stablehlo": "", "module_bytes": 0, **facts},
    )


def _renamed(inputs: Inputs, program: Program) -> Iterator[str]:
    """Yields the names that a signature cannot have, because of their letters or of others."""
    asked = [(each.asked, each.name, f"the argument {each.path}") for each in inputs.flat]
    outputs = zip(program.output_paths, program.output_names)
    for old, new, what in (*asked, *((*each, "an output") for each in outputs)):
        if old not in ("", new):
            yield f"{old!r}, {what}, to {new}"


def output_infos(program: Program) -> tuple[ArrayInfo, ...]:
    named = zip(program.output_names, program.outputs)
    return tuple(array_info(name, name, each) for name, each in named)


def _inputs(inputs: Inputs) -> tuple[ArrayInfo, ...]:
    return tuple(
        array_info(entry.name, entry.path, dtypes.stored(entry.struct)) for entry in inputs.flat
    )


def array_info(name: str, path: str, struct: jax.ShapeDtypeStruct) -> ArrayInfo:
    return ArrayInfo(name, path, dtypes.shape_of(struct), dtypes.name_of(struct.dtype))


def vjp_orders(requested: object, trainable: bool) -> tuple[int, int]:
    """Returns the requested and the required number of derivatives of an export."""
    if requested is None:
        # Optional gradients are omitted if they cannot be computed.
        return (2, 1) if trainable else (1, 0)
    if requested not in (0, 1, 2) or isinstance(requested, bool) or (trainable and requested == 0):
        raise InvalidArgumentError(
            "vjp_order must be 0, 1 or 2, and not 0 for trainable variables.",
            got=f"vjp_order={requested!r}",
            write="vjp_order=1" if trainable else "vjp_order=0, 1 or 2",
        )
    return requested, requested


_NOTHING = "no floating-point output depends on a floating-point input or trainable variable"


@dataclass(frozen=True)
class _Lowering:
    """The lowering of programs over the same variables, for the same platforms."""

    model: Exportable
    store: Store
    platforms: Sequence[str]
    trainable: bool
    lower: Lower = lower_traced

    def signature(
        self,
        program: Program,
        module: Lowered,
        order: tuple[int, int],
        update: bool = False,
        weights: Sequence[StoredIntegers] = (),
    ) -> Signature:
        """A lowered program with its gradients; their constants are added to the store."""
        store = self.store
        gradient, reason = self._differentiate(program, module, order)
        constants = tuple(store.of_constant(value) for value in module.constants)
        variables = list(store.of_leaf)
        for each in weights:
            numbers = tuple(store.of_leaf[at] for at in (each.integers, *each.scales))
            variables[each.integers] = store.of_numbers(numbers, each.form)
        return Signature(
            key=program.key,
            input_names=tuple(entry.name for entry in program.inputs.flat),
            input_structs=tuple(dtypes.stored(entry.struct) for entry in program.inputs.flat),
            output_names=program.output_names,
            forward=Call(module, tuple(variables), constants),
            assigned=tuple(store.of_leaf[index] for index in program.changed) if update else (),
            gradient=gradient,
            no_gradient=reason,
        )

    def _differentiate(
        self, program: Program, forward: Lowered, order: tuple[int, int]
    ) -> tuple[Gradient | None, str]:
        """Traces and lowers the gradient of a program.

        It is with respect to the differentiable operands that outputs depend on. Returns also the
        reason why it, or its own gradient, is missing.
        """
        wanted, required = order
        if not wanted:
            return None, ""
        leaves = self.model.leaves

        def has_gradient(operand: int) -> bool:
            if operand < len(leaves):
                return self.trainable and leaves[operand].trainable
            return dtypes.is_floating(program.traced.structs[operand].dtype)

        wrt = tuple(filter(has_gradient, sorted(program.read)))
        of = _floating(program.outputs)
        if not (wrt and of):
            return None, f"no gradients: {_NOTHING}"
        found = self._attempt(program, program.traced, wrt, of, required >= 1, forward)
        if isinstance(found, str):
            return None, f"no gradients: {found}"
        first, gradient = found
        if wanted < 2:
            return gradient, ""
        count = len(first.structs)  # again with respect to the same operands, and the cotangents
        wrt, of = (*wrt, *range(count - len(of), count)), _floating(first.results)
        second = self._attempt(program, first, wrt, of, required >= 2, gradient.call.lowered)
        if isinstance(second, str):
            return gradient, f"no gradients of gradients: {second}"
        return dataclasses.replace(gradient, next=second[1]), ""

    def _attempt(
        self,
        program: Program,
        traced: Traced,
        wrt: tuple[int, ...],
        of: tuple[int, ...],
        required: bool,
        before: Lowered,
    ) -> tuple[Traced, Gradient] | str:
        """Returns a gradient, or a description of the error if it is not required."""
        try:
            pullback = vjp(traced, wrt, of)
            lowered = replace(before, constants=(), used=(), results=pullback.results)
            if not before.differentiates:
                lowered = self.lower(pullback, self.platforms)
        # jax, and any custom derivative, may raise any exception here: of an unknown
        # size, of a loop, of a shape.  The model itself has been traced and lowered by now.
        except Exception as error:  # the report has it
            if not required:
                return f"jax cannot make them: {_describe_error(error)}"
            if isinstance(error, PaxError):
                raise
            raise NotDifferentiableError(
                "jax cannot compute the requested gradient.",
                where=program.key,
                got=_describe_error(error),
                write="a lower vjp_order, and trainable=False if that is 0",
            ) from error
        older, newer = before.oldest_tensorflow, lowered.oldest_tensorflow
        if newer > older and not required:
            needs, has = map(saved_models.format_version, (newer, older))
            what = f"they need TensorFlow {needs}, and the model itself {has}"
            return f"{what}; vjp_order= keeps them"
        constants = tuple(self.store.of_constant(value) for value in lowered.constants)
        structs = (*pullback.structs, *map(dtypes.struct_of, lowered.constants))
        return pullback, Gradient(Call(lowered, (), constants), wrt, of, structs)


def _floating(structs: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, struct in enumerate(structs) if dtypes.is_floating(struct.dtype))


_LONGEST = 300


def _describe_error(error: Exception) -> str:
    """Describes an error by its class, first line, and line in the model."""
    line = line_of_model(error)
    return named_line(error, _LONGEST) + (f" ({line})" if line else "")
