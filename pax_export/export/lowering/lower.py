"""Lowers a traced function to portable StableHLO for old readers.

jax writes the newest StableHLO, with composites, unused functions and locations that last year's
readers cannot parse. Four steps make it portable. Composites are replaced by their definitions, and
everything is inlined; new operations are expressed by old ones; locations (which also name local
files) are dropped; and the bytes are written for the oldest version that has all of the operations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax import export as jax_export
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.jax import equations_of
from pax_export._foundations.jaxpr import jaxpr_operations
from pax_export._foundations.types import TracedProgram
from pax_export.export.artifact import saved_models
from pax_export.export.artifact.report import ArrayInfo
from pax_export.export.lowering.rewrites import (
    drop_dot_algorithm,
    keep_nan,
    let_be_empty,
    may_be_empty,
    says_extremes,
    tensor_shape,
)
from pax_export.export.lowering.shardings import drop_shardings, says_shardings
from pax_export.export.portable.any_size import lowerable
from pax_export.export.portable.for_xla import (
    ANY_PLATFORM,
    XLA_EXPANDS,
    fast_on_cpus,
    without_libraries,
)
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.inputs import Inputs
from pax_export.export.tracing.source_lines import BY_LAPACK, attach_operations, other_target
from pax_export.export.tracing.trace_errors import named_refusals
from pax_export.export.tracing.traced import Traced

if TYPE_CHECKING:
    from jax.extend.mlir.ir import Operation

_PIPELINE = (
    "builtin.module(func.func(stablehlo-legalize-composite-to-call),inline,symbol-dce,"
    "stablehlo-compatibility-expander{target=0.9.0},strip-debuginfo)"
)
#: Version 9 adds tokens for ordered effects, 10 shardings of another dialect;
#: modules with either are refused, so version 8 is sufficient.
CALLING_CONVENTION = 8


@dataclass(frozen=True)
class Lowered:
    """A function as portable StableHLO.

    Its operands are those of the function, then the `constants`; only the ones
    that `used` counts are used, in that order.
    """

    portable: Portable
    used: tuple[int, ...]
    constants: tuple[Any, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]  # as stored outside of jax
    platforms: tuple[str, ...]
    neutral: bool = False  # lowered with rules for all platforms
    #: The program for a writer of TensorFlow's operations, instead of StableHLO.
    graph: Any = None
    #: Whether the runtime differentiates the program as jax does, so that no gradient is written.
    differentiates: bool = False

    @property
    def oldest_tensorflow(self) -> saved_models.Version:
        return saved_models.oldest_tensorflow(self.portable.stablehlo, CALLING_CONVENTION)


def lower_traced(
    traced: Traced,
    platforms: Sequence[str],
    count: int | None = None,
    names: Mapping[int, str] | None = None,
) -> Lowered:
    """Lowers a traced function, or its first `count` results, to portable StableHLO.

    Messages at run time call operands by their `names`.
    """
    with named_refusals():
        program = lowerable(traced.program)
        try:
            fast = fast_on_cpus(program) if "cpu" in platforms else program
            exported, allowed = _export(traced, fast, count, platforms), frozenset[str]()
            module = _make_single_device(exported, allowed, names, traced.program)
        except (NotImplementedError, UnsupportedOperationError) as error:
            # Rules for real machines call their libraries (LAPACK, cuSOLVER), which
            # no consumer has.
            exported = _export_neutral(traced, without_libraries(program), count, error)
            allowed = XLA_EXPANDS
            module = _make_single_device(exported, allowed, names, traced.program)
    used, results = tuple(exported.module_kept_var_idx), traced.results[:count]
    return Lowered(module, used, traced.constants, results, tuple(platforms), bool(allowed))


def _make_single_device(
    exported: jax_export.Exported,
    allowed: frozenset[str],
    names: Mapping[int, str] | None,
    program: TracedProgram,
) -> Portable:
    """Converts a jax export to a single-device module that accepts empty batches where possible."""
    empty = may_be_empty(result.shape for result in exported.out_avals)
    serialized = exported.mlir_module_serialized
    return portable(serialized, allowed, names, empty=empty, single=True, program=program)


def _export(
    traced: Traced, program: TracedProgram, count: int | None, platforms: Sequence[str]
) -> Any:
    """Exports the first results of a traced function, or of a replacement program."""
    operands: tuple[Any, ...] = traced.structs
    function = traced.lowerable
    fewer = count is not None and count < len(traced.results)
    if traced.constants or fewer or program is not traced.program:
        operands += tuple(map(dtypes.struct_of, traced.constants))
        function = jax.jit(lambda values: traced.with_constants(values, count, False, program))
    return export_unchecked(function, platforms, list(operands))


def export_unchecked(
    function: jax.stages.Wrapped, platforms: Sequence[str], *structs: Any
) -> jax_export.Exported:
    """Exports a jitted function by jax, with any custom calls: our own errors are about these."""
    unchecked = jax_export.DisabledSafetyCheck.custom_call("ALL")
    options: Any = {"platforms": tuple(platforms), "disabled_checks": (unchecked,)}
    return jax_export.export(function, **options)(*structs)


def _export_neutral(
    traced: Traced, program: TracedProgram, count: int | None, cause: Exception
) -> Any:
    try:
        return _export(traced, program, count, (ANY_PLATFORM,))
    except NotImplementedError as error:
        if isinstance(cause, UnsupportedOperationError):
            raise cause from None
        name = re.search(r"primitive '(\w+)'", str(error))
        if name is None:
            raise
        write = "the same in other operations of jax.numpy and jax.lax"
        if name[1] in BY_LAPACK:
            write += f", or {other_target(name[1])}"
        refusal = UnsupportedOperationError(
            f"The operation {name[1]} exists in jax only.",
            write=write,
        )
        chain = equations_of(error)
        found = [chain] if chain else jaxpr_operations(traced.program, [name[1]])
        raise attach_operations(refusal, found) from error


@dataclass(frozen=True)
class Signature:
    key: str
    input_names: tuple[str, ...]
    input_structs: tuple[jax.ShapeDtypeStruct, ...]
    output_names: tuple[str, ...]
    forward: Call
    assigned: tuple[int, ...]  # the variables that take the results after the outputs
    gradient: Gradient | None
    processing: Processing | None = None  # functions around it
    no_gradient: str = ""  # why it has no gradient, or its gradient has none

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Its gradient, and the gradient of that."""
        first = self.gradient
        return tuple(each for each in (first, first and first.next) if each is not None)

    @property
    def differentiated_by(self) -> str:
        """Whose rules make its gradients, "jax" or "TensorFlow"; empty without gradients."""
        by = "TensorFlow" if self.forward.lowered.differentiates else "jax"
        return by if self.gradient else ""

    @property
    def modules(self) -> list[Lowered]:
        """The function and its gradients."""
        return [call.lowered for call in (self.forward, *(each.call for each in self.gradients))]


@dataclass(frozen=True)
class Call:
    """A module, and where its operands are: variables by place, then the inputs, then constants."""

    lowered: Lowered
    variables: tuple[int, ...]
    constants: tuple[int, ...]  # the variables of its constants


@dataclass(frozen=True)
class Gradient:
    """A module that takes all operands of the forward module and cotangents of `of`.

    It returns the cotangents of the operands `wrt`. `next` is its own gradient.
    """

    call: Call
    wrt: tuple[int, ...]
    of: tuple[int, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]  # of its operands
    next: Gradient | None = None


@dataclass(frozen=True)
class Processing:
    """TensorFlow functions around a signature, and the resulting outer signature."""

    inputs: Inputs
    outputs: tuple[ArrayInfo, ...]
    structure: dict[str, Any]  # of the outputs, nested
    preprocess: Any  # a tf.function from outer inputs to those of the model, in order
    postprocess: Any  # a tf.function from the model's outputs, in order, to the outer ones
    trackables: tuple[Any, ...]  # their resources


@dataclass(frozen=True)
class Portable:
    """A StableHLO module as portable bytes, and the version they are written for."""

    module: bytes
    stablehlo: saved_models.Version


def portable(
    serialized: bytes,
    allowed: frozenset[str] | None = frozenset(),
    names: Mapping[int, str] | None = None,
    changes: Counter[str] | None = None,
    empty: Collection[str] = (),
    single: bool = False,
    program: TracedProgram | None = None,
) -> Portable:
    """Makes the serialized module of a `jax.export.Exported` portable.

    It may contain custom calls that every consumer supports, and those `allowed` (None: any).
    `changes` counts the rewritten operations. Sizes in `empty` may be 0; `single` converts to a
    single device. A refusal has the source in the `program` of the module.
    """
    stablehlo.register_stablehlo_passes()
    with mlir.make_ir_context() as context:
        module = _parse(context, serialized)

        def operations() -> list[Any]:
            return list(_operations(module.operation))

        if single and says_shardings(serialized):
            drop_shardings(module, operations())
        if empty:
            let_be_empty(operations(), empty)
        if single and says_extremes(serialized):
            keep_nan(operations())
        if allowed is not None:
            _refuse_custom_calls(module, allowed | saved_models.CUSTOM_CALLS, program)
        _name_operands(module, names or {})
        counts = {
            "composites": sum(x.operation.name == "stablehlo.composite" for x in operations()),
            "accuracy hints": sum(map(_drop_accuracy, operations())),
            "named algorithms": sum(drop_dot_algorithm(each.operation) for each in operations()),
        }
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        counts["batched indexing"] = sum(_rewrite_batched(x.operation) for x in operations())
        if changes is not None:
            changes.update(counts)
        return _write_oldest(module, context)


def _parse(context: ir.Context, serialized: bytes) -> ir.Module:
    try:
        return stablehlo.deserialize_portable_artifact(context, serialized)
    except Exception as error:  # of a class that the bindings keep to themselves
        name = serialized[:64].split(b"\0")[0].decode(errors="replace")
        raise UnsupportedOperationError(
            "The StableHLO of the installed jax cannot read this module.",
            got=f"{name!r} for StableHLO {stablehlo.get_current_version()}",
            write="a newer jax, or export the model again",
        ) from error


def _write_oldest(module: ir.Module, context: Any) -> Portable:
    current = tuple(map(int, stablehlo.get_current_version().split(".")))
    oldest = saved_models.FOUR_BITS if _has_four_bits(module) else ()
    targets = [v for v in saved_models.TARGETS if oldest <= v < current] + [current]
    # A target that lacks an operation is no news to the user.
    handler = context.attach_diagnostic_handler(lambda diagnostic: True)
    try:
        for version in targets:
            try:
                written = stablehlo.serialize_portable_artifact(
                    module, saved_models.format_version(version)
                )
            except ValueError:
                continue
            return Portable(written, version)
    finally:
        handler.detach()
    raise UnsupportedOperationError(
        "This model cannot be written as portable StableHLO.",
        got=f"StableHLO {saved_models.format_version(current)}",
    )


def _drop_accuracy(operation: Operation) -> bool:
    """Drops the hint of StableHLO 1.9 how exactly to compute a function.

    The derivative of `erf` has had one since jax 0.12.  Only TPUs read it; an
    accuracy in numbers is more than a hint, and stays.
    """
    hint = "result_accuracy"
    if hint not in operation.attributes or "TOLERANCE" in str(operation.attributes[hint]):
        return False
    stands_there = "HIGHEST" in str(operation.attributes[hint])
    del operation.attributes[hint]
    return stands_there


def _has_four_bits(module: ir.Module) -> bool:
    kinds = (str(value.type) for each in _operations(module.operation) for value in each.results)
    return any(re.search(r"[x<]u?i4>", kind) for kind in kinds)


def _operations(operation: Operation) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner
                yield from _operations(inner.operation)


def _refuse_custom_calls(
    module: ir.Module, allowed: frozenset[str], program: TracedProgram | None
) -> None:
    """Refuses custom calls that consumers do not support, with their sources in the model."""
    found: dict[str, tuple[str, str]] = {}
    for operation in _operations(module.operation):
        if operation.operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target not in allowed:
                found.setdefault(target, _source_text(str(operation.location)))
    if found:
        error = UnsupportedOperationError(
            "The model calls functions that exist in jax only: " + ", ".join(sorted(found)) + ".",
            where="; ".join(sorted({" ".join(filter(None, each)) for each in found.values()})),
            write="the same in operations of jax.numpy and jax.lax, not in kernels of your own",
        )
        lines = {name.rsplit("/", 1)[-1] for name, _ in found.values()}
        raise attach_operations(
            error, jaxpr_operations(program, lines) if program is not None else ()
        )


def _name_operands(module: ir.Module, names: Mapping[int, str]) -> None:
    """Lets the checks of shapes speak of ``x`` where jax counts ``args[0][7]``."""

    def named(match: re.Match) -> str:
        return names.get(int(match[1]), match[0])

    for operation in _operations(module.operation):
        if "error_message" in operation.attributes:
            message = ir.StringAttr(operation.attributes["error_message"]).value
            message = re.sub(r"args\[0\]\[(\d+)\]", named, message)
            operation.attributes["error_message"] = ir.StringAttr.get(message)


def _source_text(location: str) -> tuple[str, str]:
    """``jit(f)/cholesky`` and ``(model.py:12)`` out of the text of an MLIR location."""
    name = re.search(r'loc\("([^"]*)"', location)
    line = re.search(r'"([^"]+\.py)":(\d+)', location)
    text = f"({line[1].rsplit('/', 1)[-1]}:{line[2]})" if line else ""
    return name[1] if name else "" if text else "unknown", text


_GATHER = (
    "dimension_numbers",
    stablehlo.GatherDimensionNumbers,
    *("operand_batching_dims", "start_indices_batching_dims"),
    *("collapsed_slice_dims", "start_index_map", "offset_dims"),
)
_SCATTER = (
    "scatter_dimension_numbers",
    stablehlo.ScatterDimensionNumbers,
    *("input_batching_dims", "scatter_indices_batching_dims"),
    *("inserted_window_dims", "scattered_dims_to_operand_dims", "update_window_dims"),
)
#: By operation: its attribute with the numbers of dimensions, the class of that, and the names in
#: it of the batch dimensions of operand and indices, of the indexed dimensions that slices lack,
#: of those that indices count, and of the dimensions of slices.
_BATCHED: dict[str, tuple[Any, ...]] = {
    "stablehlo.gather": _GATHER,
    "stablehlo.dynamic_gather": _GATHER,
    "stablehlo.scatter": _SCATTER,
}


def _rewrite_batched(operation: Operation) -> bool:
    """Rewrites a batched gather or scatter as a plain one, which every reader supports.

    `jax.vmap` of an indexing operation results in a gather (or scatter) with batch dimensions of
    operand and indices: entry ``i`` of one indexes entry ``i`` of the other. StableHLO has these
    since 1.1. Without them, the batch number becomes one more component of each index, and its
    dimension an indexed one.

    StableHLO has a pass for this, which skips symbolic shapes.
    """
    if operation.name not in _BATCHED:
        return False
    attribute, kind, *names = _BATCHED[operation.name]
    old = kind(operation.attributes[attribute])
    batches, axes_of_indices, lacking, counted, slices = (getattr(old, name) for name in names)
    indices = len(operation.operands) // 2  # after the inputs, before updates or sizes
    if not _prepend_batch_numbers(operation, indices, axes_of_indices, old.index_vector_dim):
        return False
    new = [], [], sorted([*lacking, *batches]), [*batches, *counted], slices
    operation.attributes[attribute] = kind.get(
        **dict(zip(names, new)), index_vector_dim=old.index_vector_dim, context=operation.context
    )
    return True


def _prepend_batch_numbers(
    operation: Operation, operand: int, dimensions: Sequence[int], axis: int
) -> bool:
    """Puts the numbers of their batches in front of the indices, if they have batches."""
    indices = operation.operands[operand]
    # The components of an index have a dimension of their own where jax wrote them.
    if not dimensions or axis >= ir.RankedTensorType(indices.type).rank:
        return False
    with operation.context, ir.Location.unknown(), ir.InsertionPoint(operation):
        indices = _widen_indices(indices)
        numbers = [_iota(indices, dimension, axis) for dimension in dimensions]
        kind = ir.RankedTensorType(indices.type)
        shape = tensor_shape(kind)
        shape[axis] += len(numbers)
        joined = ir.RankedTensorType.get(shape, kind.element_type)
        # Named by its keyword only where that has one name in all versions.
        whole = stablehlo.ConcatenateOp([*numbers, indices], axis, results=[joined]).result
    operation.operands[operand] = whole
    # Sorted within each batch is not sorted as a whole, unless batches come first.
    operation.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, operation.context)
    return True


def _widen_indices(indices: ir.Value) -> ir.Value:
    """Indices of at least 32 bits: an int8 cannot count the batches."""
    kind = ir.RankedTensorType(indices.type)
    if ir.IntegerType(kind.element_type).width >= 32:
        return indices
    wide = ir.RankedTensorType.get(tensor_shape(kind), ir.IntegerType.get_signless(32))
    return stablehlo.ConvertOp(wide, indices).result


def _iota(indices: ir.Value, iota_dimension: int, axis: int) -> ir.Value:
    """The index along one dimension, shaped like the indices with one component."""
    kind = ir.RankedTensorType(indices.type)
    shape = tensor_shape(kind)
    shape[axis] = 1
    result = ir.RankedTensorType.get(shape, kind.element_type)
    sizes = [
        _dimension_size(indices, dimension)
        if size == ir.ShapedType.get_dynamic_size()
        else _constant(size)
        for dimension, size in enumerate(shape)
    ]
    whole = stablehlo.ConcatenateOp(sizes, 0, results=[_vector(len(sizes))]).result
    return stablehlo.DynamicIotaOp(result, whole, iota_dimension).result


def _dimension_size(value: ir.Value, dimension: int) -> ir.Value:
    """Returns the size of a dynamic dimension, as a vector of one number."""
    size = stablehlo.GetDimensionSizeOp(value, dimension).result
    return stablehlo.ReshapeOp(_vector(1), size).result


def _constant(value: int) -> Any:
    element = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
    return stablehlo.ConstantOp(ir.DenseElementsAttr.get([element], _vector(1))).result


def _vector(length: int) -> Any:
    return ir.RankedTensorType.get([length], ir.IntegerType.get_signless(32))
