"""Traces each method of a model with its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pax_export._foundations.check import as_strings
from pax_export._foundations.errors import (
    InvalidArgumentError,
    StateChangeError,
    SymbolicDimensionError,
    UnsupportedOperationError,
    a_few,
    all_frames,
)
from pax_export._foundations.jaxpr import (
    called_program,
    inner_programs,
    interpret,
    jaxpr_of,
    jaxpr_operations,
    jaxpr_sizes,
)
from pax_export._foundations.types import Array, Equation, PyTree, TracedProgram
from pax_export.checkpoint import StoredArray
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.options import STATE_ELSEWHERE
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.dropped_state import (
    DRAWS,
    depend_on_inputs,
    dropped_state,
    passed_on,
)
from pax_export.export.tracing.exportable import Exportable, ExportLeaf, ModelMethod
from pax_export.export.tracing.inputs import Input, Inputs, resolve_inputs
from pax_export.export.tracing.libraries import train_mode_of, with_eval_mode
from pax_export.export.tracing.names import describe_structure, dotted_paths, signature_names
from pax_export.export.tracing.trace_errors import (
    EVAL_MODE,
    OF_VALUES,
    leaves_read,
    symbolic_errors,
)
from pax_export.export.tracing.traced import Traced, trace

#: The number of names in one error.
_FEW = 8


@dataclass(frozen=True)
class Program:
    """A traced method with its inputs.

    Operands of `traced` are all leaves, then all inputs; results are all outputs, then changed
    leaves.
    """

    key: str
    inputs: Inputs
    traced: Traced
    output_names: tuple[str, ...]
    output_structure: dict[str, Any]
    changed: tuple[int, ...]
    trains: bool = False  # a step of training: its changes are assigned, for any `state`
    output_paths: tuple[str, ...] = ()  # the names of the outputs in Python
    constants: tuple[str, ...] = ()  # the leaves whose values Python reads

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.traced.results[: len(self.output_names)]

    @functools.cached_property
    def sizes(self) -> list[dict[str, int]]:
        """Symbolic sizes for calls: the model can take them, and its arrays have elements."""
        inputs, outputs = (
            [dtypes.shape_of(dtypes.stored(struct)) for struct in structs]
            for structs in ([entry.struct for entry in self.inputs.flat], self.outputs)
        )
        inner = jaxpr_sizes(self.traced.program)
        return dimensions.choose(inputs, self.inputs.constraints, outputs, inner)

    @property
    def operand_names(self) -> dict[int, str]:
        """The operands that are inputs, by number, with the names of the inputs."""
        first = len(self.traced.structs) - len(self.inputs.flat)
        return {first + index: entry.name for index, entry in enumerate(self.inputs.flat)}

    @property
    def read(self) -> frozenset[int]:
        return self.traced.read(len(self.output_names))


def trace_all(
    model: Exportable,
    inputs: PyTree,
    kwargs: Mapping[str, Any] | None,
    constraints: Sequence[str],
    several: bool,
    train_inputs: PyTree = None,
) -> tuple[Program, ...]:
    """Traces every method; with several, inputs and kwargs are dicts over their keys."""
    if several:
        keys = [method.key for method in model.methods if not method.trains]
        _check_keys(keys, inputs, "inputs")
        if kwargs:
            _check_keys(keys, dict.fromkeys(keys) | dict(kwargs), "kwargs")
    described = []
    for method in model.methods:
        method_inputs, named = inputs, kwargs
        if method.trains:
            method_inputs, named = train_inputs, None
        elif several:
            method_inputs, named = inputs[method.key], (kwargs or {}).get(method.key)
        described.append(
            functools.partial(
                resolve_inputs, method.signature_of, method.skip, method_inputs, named
            )
        )
    resolved = _resolve_all(described, constraints)
    programs = []
    for method, found, resolve in zip(model.methods, resolved, described):
        try:
            programs.append(trace_one(model, method, found))
        except TypeError as error:
            if type(method_inputs := resolve.args[2]) is dict:
                error.add_note(_meaning_of_dict(method_inputs, found))
            raise
    return tuple(programs)


def _meaning_of_dict(inputs: dict, found: Inputs) -> str:
    if inputs.keys() <= found.arguments.keys():
        return f"The inputs are arguments by name, {sorted(inputs)}; a dict as one: ({{...}},)."
    (name,) = found.positional
    return f"The inputs are one argument, the dict {name!r}; arguments by name: {{{name!r}: ...}}."


def _resolve_all(
    described: Sequence[Callable[[Sequence[str]], Inputs]], constraints: Sequence[str]
) -> list[Inputs]:
    """The inputs of each method, with the constraints on its own dimensions."""
    found = [resolve(constraints) for resolve in described]
    texts = as_strings("constraints", constraints, "")
    about = {each: dimensions.constrained_names(each) for each in texts}
    for constraint, names in about.items():
        if not any(set(names) <= inputs.named for inputs in found):
            known = dict.fromkeys(name for inputs in found for name in inputs.dimensions)
            raise InvalidArgumentError(
                "No inputs have the dimensions of a constraint.",
                where="constraints",
                got=repr(constraint),
                write=f"a constraint on {', '.join(known)}" if known else "no constraints",
            )
    for index, inputs in enumerate(found):
        own = [each for each, names in about.items() if set(names) <= inputs.named]
        if len(own) < len(about):
            found[index] = described[index](own)
    return found


def _check_keys(keys: Sequence[str], by_key: object, argument: str) -> None:
    if not isinstance(by_key, Mapping) or sorted(by_key) != sorted(keys):
        raise InvalidArgumentError(
            "With methods=, inputs and kwargs must be dicts over methods.",
            where=argument,
            got=sorted(by_key) if isinstance(by_key, Mapping) else type(by_key).__name__,
            write=f"{argument}={{" + ", ".join(f"{key!r}: ..." for key in keys) + "}",
        )


def trace_one(model: Exportable, method: ModelMethod, inputs: Inputs) -> Program:
    """Traces one method with inputs that are named and abstract already."""
    seen: dict[str, Any] = {"same": frozenset()}
    constants: dict[int, Any] = {}  # the leaves that Python reads, as values
    structs = [leaf.struct for leaf in model.leaves] + [entry.struct for entry in inputs.flat]

    def run(operands: list[Any]) -> list[Any]:
        values = [dtypes.restore(value, struct) for value, struct in zip(operands, structs)]
        values = [constants.get(index, value) for index, value in enumerate(values)]
        leaves, flat = values[: len(model.leaves)], values[len(model.leaves) :]
        args, kwargs = inputs.call(flat)
        output, after = model.run(method, leaves, args, kwargs)
        found = enumerate(zip(leaves, after))
        changed = [i for i, (old, new) in found if new is not old and i not in seen["same"]]
        outputs, seen["tree"] = jax.tree_util.tree_flatten(output)
        seen["changed"] = tuple(changed)
        return [dtypes.store(value) for value in (*outputs, *(after[i] for i in changed))]

    _check_sizes(inputs)
    stored = [dtypes.stored(struct) for struct in structs]
    arrays = [*(each.value for each in model.leaves), *inputs.flat]
    with all_frames(), symbolic_errors(inputs):
        while True:
            try:  # jax keeps the trace of `run` itself
                traced = trace(lambda operands: run(operands), stored)
                break
            except OF_VALUES as error:
                read = leaves_read(error, len(model.leaves)) - constants.keys()
                if not read:
                    raise
                constants.update({index: _value_of(model.leaves[index]) for index in read})
            except Exception:  # of the model; raised again
                refuse_explicit(run, stored, arrays, None)
                raise
        if not constants.keys().isdisjoint(seen["changed"]):
            raise _changed_constant(model, constants.keys() & seen["changed"])
        if (changed := seen["changed"]) and not method.trains:
            origins = passed_on(traced.whole)[-len(changed) :]
            seen["same"] = frozenset(i for i, origin in zip(changed, origins) if i == origin)
            traced = trace(lambda operands: run(operands), stored) if seen["same"] else traced
    refuse_explicit(run, stored, arrays, traced.whole)
    count = len(traced.results) - len(seen["changed"])
    tree = jax.tree_util.tree_unflatten(seen["tree"], range(count))
    paths = dotted_paths(tree, "output")
    names = tuple(signature_names(paths))
    _check_outputs(names, traced.results)
    structure = describe_structure(tree, names)
    read = tuple(model.leaves[index].name for index in sorted(constants))
    return Program(
        method.key, inputs, traced, names, structure, seen["changed"], method.trains, paths, read
    )


def _value_of(leaf: ExportLeaf) -> Any:
    value = leaf.value.read() if isinstance(leaf.value, StoredArray) else leaf.value
    number = isinstance(value, (bool, int, float, complex))
    return value if number else jax.numpy.asarray(value)


def _changed_constant(model: Exportable, indices: Iterable[int]) -> StateChangeError:
    return StateChangeError(
        "The model changes arrays whose values Python reads, which are constants in an export.",
        where=_few_of(model.leaves[index].name for index in indices),
        write="jax.numpy instead of numpy, so that the values are read in each call",
    )


def _check_sizes(inputs: Inputs) -> None:
    """Refuses dimensions that shapes of inputs do not determine, as `b` in ``b*b``."""
    shapes = (dtypes.shape_of(dtypes.stored(entry.struct)) for entry in inputs.flat)
    sizes = [(size, lambda: 0) for shape in shapes for size in shape if isinstance(size, str)]
    try:
        dimensions.solve_each(sizes, lambda *_: "")
    except ValueError as error:
        raise SymbolicDimensionError(
            f"A symbolic dimension cannot be computed from {error}.",
            where=", ".join(entry.name for entry in inputs.flat),
            write="a size of one dimension alone, e.g. 'n' or '2*n'",
        ) from error


def _check_outputs(names: Sequence[str], results: Sequence[jax.ShapeDtypeStruct]) -> None:
    if not names:
        raise InvalidArgumentError(
            "The model returns no array.",
            write="a model that returns at least one array",
        )
    for name, struct in zip(names, results):
        dtypes.check(struct.dtype, f"output {name}")


def check_updates(program: Program, leaves: Sequence[ExportLeaf]) -> None:
    """Refuses new state that does not fit the variable of the old."""
    for index, new in zip(program.changed, program.traced.results[len(program.output_names) :]):
        old = dtypes.stored(leaves[index].struct)
        if (new.shape, new.dtype) == (old.shape, old.dtype):
            continue
        kind, write = "dtype", f"new state of dtype {old.dtype}, e.g. by .astype"
        if new.shape != old.shape:
            kind = "shape"
            write = (
                f"new state of shape {list(old.shape)}: a buffer of the maximum size, with a "
                "count of its valid entries; or the state as input and output of the model"
            )
        raise StateChangeError(
            f"A call changes the {kind} of a leaf, so no variable can hold it.",
            where=leaves[index].name,
            got=f"{new.dtype}{list(new.shape)} after {old.dtype}{list(old.shape)}",
            write=write,
        )


def refuse_changes(
    model: Exportable, programs: Sequence[Program], state: str, *, updates: bool
) -> None:
    """Raises for state that later calls would read, and for networks in train mode.

    A changed leaf that no output depends on, such as a step counter, is allowed. `updates` is
    whether the format has variables that a call can assign.
    """
    if state == "keep":
        return
    read = {index for each in programs for index in each.read}
    for program in programs:
        update = state == "update" or program.trains
        lost = set() if update else read.union(_changed_statistics(model, program))
        names = [model.leaves[index].name for index in program.changed if index in lost]
        if names:
            raise StateChangeError(
                "A call of the model in eval mode changes its state, and the export would not."
                if model.is_module
                else "A call changes the params, and the export would not.",
                where=", ".join(names),
                got='state="frozen"',
                write=f"{'' if model.is_module else EVAL_MODE}"
                f"{_UPDATE if updates else STATE_ELSEWHERE}; {_KEEP}; "
                "or a model that does not change it in eval mode",
            )
        if not model.is_module:
            _refuse_dropped(model, program, program.changed if update else (), f"; or {_KEEP}")
            _refuse_train_mode(model, program)


def refuse_dropped_state(model: Exportable, program: Program) -> None:
    """Raises for keys that a function closes over, and statistics that it changes and drops."""
    _refuse_dropped(model, program, range(len(model.leaves)), "")


def _changed_statistics(model: Exportable, program: Program) -> list[int]:
    """Returns leaves of a third-party net that a call recomputes from its inputs."""
    if model.is_module or not program.changed:
        return []
    depends = depend_on_inputs(program.traced.whole, len(model.leaves))[len(program.output_names) :]
    return [index for index, is_computed in zip(program.changed, depends) if is_computed]


_UPDATE = 'state="update", so that every call of the exported model assigns its state'
_KEEP = 'state="keep", so that every call begins with the state that is exported'


def _refuse_dropped(
    model: Exportable, program: Program, assigned: Sequence[int], otherwise: str
) -> None:
    """Refuses a function that draws from keys, or changes statistics, and does not return them."""
    names = [leaf.name for leaf in model.leaves]
    dropped = dropped_state(program.traced.whole, names, assigned)
    layers = {} if model.form is None else train_mode_of(model.form)
    known = [f"{path}: {kind} in train mode" for path, kind in layers.items()]
    if found := dropped.keys or dropped.values:
        what, instead = (
            (
                "draws random numbers from a key that it holds, the same in every call",
                "key as an input",
            )
            if dropped.keys
            else (
                "computes new values of arrays that it holds, and drops them",
                "new values as outputs",
            )
        )
        raise StateChangeError(
            f"The function {what}.",
            where=_few_of([*{**dropped.keys, **dropped.values}, *known]),
            got=_few_of(dict.fromkeys(filter(None, found.values()))),
            write=f"{EVAL_MODE}the {instead} of the function{otherwise}",
        )


def _refuse_train_mode(model: Exportable, program: Program) -> None:
    """Raises for Equinox layers in train mode, such as a batch norm with new averages."""
    form = model.form
    if form is None or program.trains:
        return
    layers = train_mode_of(form)
    method = next(each for each in model.methods if each.key == program.key)
    for kind in sorted(set(layers.values())):
        tree = jax.tree_util.tree_structure(with_eval_mode(form, kind))
        try:
            served = trace_one(replace(model, tree=tree), method, program.inputs)
        except Exception:  # of a train mode function; a mistake would let the model pass
            continue
        one, other = ((_program_effect(each, len(model.leaves))) for each in (program, served))
        if str(program.traced.whole) != str(served.traced.whole) and one == other:
            raise StateChangeError(
                "Layers in train mode change state that the function drops.",
                where=_few_of(f"{at}: {kind}" for at, name in layers.items() if name == kind),
                got="inference=False",
                write="equinox.nn.inference_mode(model); the new state as an output of the "
                f"function; or {_KEEP}",
            )


def _program_effect(program: Program, leaves: int) -> tuple[int, list[bool]]:
    """Returns the number of random numbers of a program, and its input-dependent results."""
    whole = program.traced.whole
    draws = sum(1 for _ in jaxpr_operations(whole, DRAWS))
    return draws, depend_on_inputs(whole, leaves)


def _few_of(names: Iterable[str]) -> str:
    return a_few(list(names), _FEW)


# --- Models that compute by the shardings of their arguments, on meshes with Explicit axes -------
# An export is traced without shardings. On such a mesh these are part of the types of arrays, and
# `jax.shard_map` and branches of Python may read them: a trace with shardings is another program.

#: Operations that only change a sharding.
_LAYOUT = frozenset({"mesh_cast", "pvary", "reshard", "sharding_constraint"})


def refuse_explicit(
    function: Callable[[list[Any]], list[Any]],
    structs: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Any],
    program: TracedProgram | None,
) -> None:
    """Raises if a function of sharded arrays is another program than one without shardings.

    There is no program, if jax refuses the function without them.
    """
    explicit = [_explicit_sharding(each) for each in arrays]
    if not any(explicit):
        return
    sharded = [
        jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
        if sharding is not None and struct.shape == getattr(array, "struct", array).shape
        else struct
        for struct, array, sharding in zip(structs, arrays, explicit)
    ]
    try:
        other = jax.make_jaxpr(lambda operands: function(operands))(sharded)
    except Exception:  # jax computes it of other arrays; a mistake would let the model pass
        return
    if program is None or _describe(program) != _describe(other):
        raise UnsupportedOperationError(
            "The model computes by the shardings of its arrays on a mesh with Explicit axes, "
            "without which an export is traced.",
            got=f"{next(filter(None, explicit))}",
            write="a mesh with Auto axes: jax.make_mesh(shape, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names)); or arrays without shardings",
        )


def _explicit_sharding(array: Array | StoredArray | Input) -> Any:
    """Returns the sharding of an array that is split along an Explicit axis, or None."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    axes = [name for part in sharding.spec for name in (part if type(part) is tuple else (part,))]
    explicit = jax.sharding.AxisType.Explicit
    return sharding if any(kinds.get(name) == explicit for name in axes) else None


def _describe(program: TracedProgram) -> list[Hashable]:
    """Describes operations, shapes and wiring of a program, without shardings."""
    found: list[Hashable] = []

    def operate(equation: Equation, operands: list[Hashable]) -> list[Hashable] | None:
        name = equation.primitive.name
        if called_program(equation) is not None:
            return None
        if name in _LAYOUT:
            return operands
        plain = (int, float, str, tuple, np.dtype)
        parameters = [
            (key, repr(value))
            for key, value in sorted(equation.params.items())
            if isinstance(value, plain) and "shard" not in key and "spec" not in key
        ]
        inner = [_describe(each) for each in inner_programs(equation)]
        shapes = [getattr(each.aval, "shape", ()) for each in equation.outvars]
        found.append(repr((name, operands, parameters if not inner else [], shapes, inner)))
        return [(len(found), index) for index in range(len(shapes))]

    def constant(value: Array) -> Hashable:
        return repr(value) if np.ndim(value) == 0 else ("array", np.shape(value))

    count = len(jaxpr_of(program).invars)
    results = interpret(program, list(range(count)), operate, constant=constant)
    return [*found, repr(results)]
