"""The functions of a StableHLO bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.jaxpr import jaxpr_operations
from pax_export._foundations.types import Array, HasShape, TracedProgram
from pax_export.export.artifact.dimensions import is_inexact
from pax_export.export.artifact.report import ArrayInfo, SignatureInfo
from pax_export.export.formats.stablehlo import exported as _exported
from pax_export.export.formats.stablehlo.exported import Exported, PortableModule, structs_of
from pax_export.export.formats.stablehlo.files import INPUT, OUTPUT, WEIGHT
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.lowering.variables import Store
from pax_export.export.portable.any_size import lowerable
from pax_export.export.portable.for_xla import guaranteed
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.names import (
    describe_structure,
    dotted_name,
    signature_names,
    tree_names,
)
from pax_export.export.tracing.programs import Program, check_updates
from pax_export.export.tracing.source_lines import attach_operations, operations
from pax_export.export.tracing.trace_errors import named_refusals
from pax_export.export.validation.cases import (
    CaseStep,
    SignatureCases,
    constraints,
    with_cotangents,
)
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case

#: Calls of the user's own code.
_OUTSIDE = ("ffi_call", "pallas_call")
#: Programs of up to this size in bytes compile in no time, and so do their gradients.
_SMALL = 9000
#: The cost of a call with gradients, relative to one without.
_GRADIENT = 3.0


@dataclass(frozen=True)
class Function:
    """One function of a bundle.

    Its flat operands and results are named: weights, inputs and outputs.
    """

    key: str
    exported: Exported
    modules: tuple[PortableModule, ...]
    info: SignatureInfo
    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    weights: Mapping[str, Any]
    reference: Any  # the expected results, as a function of flat operands
    order: int
    remakable: bool = True
    program: Any = None  # as it was traced; None where jax.export has made it already

    def details(self, file: str) -> dict[str, Any]:
        """Returns the report's fields for calling and rebuilding the function."""
        modules = self.modules if self.remakable else ()
        return {
            "file": file,
            "operands": self.operands,
            "results": self.results,
            "kept": [module.used for module in modules],
            "neutral": [module.neutral for module in modules],
        }

    def cases(self, examples: Sequence[Arrays] = ()) -> Iterator[SignatureCases]:
        """Yields the calls of the function, if it needs no other devices than there may be here."""
        if self.exported.nr_devices == 1:
            yield _FunctionCases(self, examples)


class _FunctionCases(SignatureCases):
    def __init__(self, function: Function, examples: Sequence[Arrays]):
        exported = function.exported
        avals = dict(zip(function.operands, exported.in_avals))
        inputs = {entry.name: avals[INPUT, entry.name] for entry in function.info.inputs}
        results = zip(function.results, exported.out_avals)
        super().__init__(
            function.key,
            {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs.items()},
            [dtypes.shape_of(aval) for (kind, _), aval in results if kind == OUTPUT],
            examples,
            len(exported.mlir_module_serialized) <= _SMALL,
            function.program,
            function.info.sizes or None,
        )
        self._function = function

    def gradient_steps(self, case: Case) -> Iterator[CaseStep]:
        if self._function.order:
            make, what = partial(self._with_gradients, case), f"the gradients of {self.key}"
            yield CaseStep(what, make, _GRADIENT, is_gradient=True)

    def _flat_operands(self, inputs: Mapping[str, Any]) -> list[Any]:
        weights = self._function.weights
        return [
            weights[name] if kind == WEIGHT else inputs[name]
            for kind, name in self._function.operands
        ]

    def expected(self, inputs: Arrays) -> Arrays:
        function = self._function
        operands = self._flat_operands(inputs)
        self.check_end(function.reference, operands)
        found = function.reference(*operands)
        return {
            name if kind == OUTPUT else f"variable:{name}": np.asarray(value)
            for (kind, name), value in zip(function.results, found)
            if kind == OUTPUT or not np.array_equal(value, function.weights[name])
        }

    def _with_gradients(self, case: Case) -> Case | None:
        function = self._function
        operands = self._flat_operands(case.inputs)
        wrt = [i for i, value in enumerate(operands) if is_inexact(value.dtype)]
        of = [
            i
            for i, (kind, name) in enumerate(function.results)
            if kind == OUTPUT and is_inexact(case.expected[name].dtype)
        ]
        if not (wrt and of):
            return None
        case = with_cotangents(case, (function.results[index][1] for index in of))

        def outputs(*chosen: Array) -> list[Any]:
            filled = list(operands)
            for index, value in zip(wrt, chosen):
                filled[index] = value
            results = function.reference(*filled)
            return [results[index] for index in of]

        values, pull_back = jax.vjp(outputs, *(operands[index] for index in wrt))
        # On explicit axes of a mesh they are sharded as the outputs.
        pairs = zip(case.cotangents.values(), values)
        found = pull_back([jax.device_put(value, like.sharding) for value, like in pairs])
        for index, value in zip(wrt, found):
            case.expected[f"gradient:{function.operands[index][1]}"] = np.asarray(value)
        return case


def lower(
    model: Exportable,
    programs: Sequence[Program],
    *,
    update: bool,
    order: int,
    constant: bool,
    platforms: Sequence[str],
    disabled_checks: Sequence[Any],
) -> tuple[list[Function], Store]:
    """Exports every method of a model, over shared variables.

    With `update` functions return the new state of weights; `order` is the number of times they
    can be differentiated; with `constant` the weights become constants of the functions.
    """
    changed: set[int] = set()
    for program in programs:
        if update:
            check_updates(program, model.leaves)
            changed.update(program.changed)
    store = Store(model.leaves, changed, trainable=True)
    numbers = {  # of leaves, then of closed-over arrays: this adds all constants
        each.key: [*store.of_leaf, *map(store.of_constant, each.traced.constants)]
        for each in programs
    }
    values = {each.name: each.value for each in store.variables}
    functions = []
    for program in programs:
        assigned = tuple(store.of_leaf[index] for index in program.changed) if update else ()
        names = [store.variables[number].name for number in numbers[program.key]]
        new = tuple(store.variables[number].name for number in assigned)
        write = partial(_weights_function, program, names, new, values if constant else None)
        run = write()
        arrays = () if constant else ((name, values[name]) for name in names)
        weights = {
            name: _add_sharding(dtypes.struct_of(value), getattr(value, "sharding", None))
            for name, value in arrays
        }
        inputs = {
            entry.name: _add_sharding(dtypes.stored(entry.struct), entry.sharding)
            for entry in program.inputs.flat
        }
        with named_refusals():
            try:
                rewritten = lowerable(program.traced.program)
                rewritten = guaranteed(rewritten, () if disabled_checks else platforms)
                lowered, operands = write(rewritten), (weights, inputs)
                exported = _exported.make(lowered, operands, platforms, disabled_checks)
            except UnsupportedOperationError as error:
                if not operations(error):
                    names = (*_OUTSIDE, *_exported.named_operations(error.__cause__))
                    attach_operations(error, jaxpr_operations(program.traced.program, names))
                raise
            found = _exported.export_gradients(run, exported, order, disabled_checks)
            modules = _exported.neutral_modules(run, found)
            widened = _exported.make_portable_modules(found)
        functions.append(
            Function(
                key=program.key,
                exported=widened,
                modules=modules if exported.nr_devices == 1 else (),
                info=signature_info(
                    program,
                    assigns=new,
                    differentiable=order > 0,
                    stablehlo=_exported.oldest_stablehlo(modules),
                    module_bytes=len(exported.mlir_module_serialized),
                ),
                operands=(
                    *((WEIGHT, name) for name in sorted(weights)),
                    *((INPUT, name) for name in sorted(inputs)),
                ),
                results=(
                    *((OUTPUT, name) for name in sorted(program.output_names)),
                    *((WEIGHT, name) for name in sorted(new)),
                ),
                weights=values,
                reference=_reference_function(program, names, new, sorted(weights), values),
                order=order,
                program=program.traced.program,
            )
        )
    return functions, store


def _weights_function(
    program: Program,
    names: Sequence[str],
    new: Sequence[str],
    constant: Mapping[str, Any] | None,
    rewritten: TracedProgram | None = None,
) -> Any:
    """Returns the program, or a rewritten one, as a function of named weights and inputs."""
    count = len(program.output_names)
    first = len(program.traced.structs) - len(program.inputs.flat)

    def run(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        values = [(weights if constant is None else constant)[name] for name in names]
        arguments = [inputs[entry.name] for entry in program.inputs.flat]
        operands = [*values[:first], *arguments, *values[first:]]
        results = program.traced.with_constants(operands, None if new else count, program=rewritten)
        found = {OUTPUT: dict(zip(program.output_names, results))}
        return found | ({WEIGHT: dict(zip(new, results[count:]))} if new else {})

    run.__name__ = program.key
    return run


def _reference_function(
    program: Program,
    names: Sequence[str],
    new: Sequence[str],
    weights: Sequence[str],
    known: Mapping[str, Any],
) -> Any:
    """Returns the model as a function of flat operands, retraced for every size."""
    count = len(program.output_names)
    of_leaf = names[: len(program.traced.structs) - len(program.inputs.flat)]
    inputs = sorted(entry.name for entry in program.inputs.flat)

    @jax.jit
    def flat(values: Mapping[str, Any], named: Mapping[str, Any]) -> list[Any]:
        leaves = [values[name] for name in of_leaf]
        arguments = [named[entry.name] for entry in program.inputs.flat]
        results = program.traced.function([*leaves, *arguments])
        outputs = dict(zip(program.output_names, results))
        state = dict(zip(new, results[count:]))
        return [outputs[name] for name in sorted(outputs)] + [state[k] for k in sorted(state)]

    def run(*operands: Array) -> list[Any]:
        values = {**known, **dict(zip(weights, operands))}
        leaves = {name: values[name] for name in of_leaf}
        return flat(leaves, dict(zip(inputs, operands[len(weights) :])))

    return run


def _add_sharding(
    struct: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.num_devices == 1:
        return struct
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def of_exported(key: str, exported: Exported, order: int) -> Function:
    """A function that jax.export has made already."""
    args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, structs_of(exported.in_avals))
    tops = {f"arg{index}": value for index, value in enumerate(args)} | kwargs
    paths = [
        dotted_name(f"arg{which.idx}" if part.idx == 0 else which.key, rest)
        for (part, which, *rest), _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    ]
    names = signature_names(paths)
    left = iter(names)
    outputs = jax.tree_util.tree_unflatten(exported.out_tree, structs_of(exported.out_avals))
    out_names = tree_names(outputs, "output")
    portable = _exported.without_jax(exported)
    info = SignatureInfo(
        inputs=tuple(map(_array_info, names, exported.in_avals)),
        outputs=tuple(map(_array_info, out_names, exported.out_avals)),
        arguments={name: describe_structure(tree, left) for name, tree in tops.items()},
        positional=tuple(f"arg{index}" for index in range(len(args))),
        result=describe_structure(outputs, iter(out_names)),
        assigns=(),
        differentiable=order > 0,
        stablehlo=_exported.oldest_stablehlo(portable),
        module_bytes=len(exported.mlir_module_serialized),
        constraints=constraints(structs_of(exported.in_avals)),
    )

    def reference(*flat: Array) -> list[Any]:
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, flat)
        return jax.tree_util.tree_leaves(exported.call(*args, **kwargs))

    return Function(
        key=key,
        exported=exported,
        modules=portable,
        info=info,
        operands=tuple((INPUT, name) for name in names),
        results=tuple((OUTPUT, name) for name in out_names),
        weights={},
        reference=reference,
        order=order,
        remakable=False,
    )


def _array_info(name: str, aval: HasShape) -> ArrayInfo:
    shape = tuple(size if isinstance(size, int) else str(size) for size in aval.shape)
    return ArrayInfo(name, name, shape, str(aval.dtype))
