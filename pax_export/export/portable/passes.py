"""The passes in order, and the first of them, which inlines calls.

It is the first, because the others match adjacent equations, also across outlined layers (see
`tracing/outline.py`) and named functions. The module path of an inlined equation is joined with
that of the call (see `path_in`). Constants of the program become operands.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from jax import lax
from jax.extend import source_info_util

from pax_export._foundations.jax import needed_part
from pax_export._foundations.jaxpr import (
    bind_equation,
    branch_for_cpu,
    called_program,
    interpret,
    jaxpr_of,
    needed_equations,
)
from pax_export._foundations.types import Array, Equation, PyTree, TracedProgram
from pax_export.core import path_in
from pax_export.export.portable.arithmetic import computed
from pax_export.export.portable.fold import folded, padded_inside
from pax_export.export.portable.layout import laid_out
from pax_export.export.portable.patterns import recognized
from pax_export.export.portable.program import PortableProgram, Weight, traced, with_bodies
from pax_export.export.portable.recurrent import whole_layers
from pax_export.export.portable.round_between import rounded_between, without_half
from pax_export.precision.quantized import FASTER_IN_JAX


def flattened(
    program: TracedProgram,
    leaves: Sequence[Weight],
    names: Mapping[int, str],
    count: int | None = None,
) -> PortableProgram:
    """Returns the portable program of a closed jaxpr; the arguments are those of `optimized`."""
    constants = {id(value): value for value in _arrays_in(program)}
    weights = [Weight(names.get(key, ""), value) for key, value in constants.items()]
    of_constant = {key: index for index, key in enumerate(constants)}
    of_leaf, by_name = [], {}
    for leaf in leaves:  # one array may be several leaves
        index = by_name.setdefault(leaf.name, len(weights))
        of_leaf.append(index)
        weights.extend([leaf] if index == len(weights) else [])
    inputs = jaxpr_of(program).invars[len(leaves) :]

    def run(*operands: Array) -> list[Any]:
        def constant(value: PyTree) -> Any:
            index = of_constant.get(id(value))
            return value if index is None else operands[index]

        arrays = [operands[index] for index in of_leaf]
        return _inlined(program, [*arrays, *operands[len(weights) :]], constant)[:count]

    like: dict[int, Any] = dict(zip(of_leaf, jaxpr_of(program).invars))
    for index, value in enumerate(constants.values()):  # as `traced` reads a variable
        like[index] = SimpleNamespace(aval=value if hasattr(value, "dtype") else np.asarray(value))
    operands = [like[index] for index in range(len(weights))]
    found = traced(run, (*operands, *inputs))
    return PortableProgram(found.replace(jaxpr=needed_part(found)), tuple(weights))


def _arrays_in(program: TracedProgram) -> Iterator[Any]:
    """Yields array constants of a program and the programs that it calls."""
    yield from (each for each in getattr(program, "consts", ()) if np.ndim(each))
    for equation in jaxpr_of(program).eqns:
        called = called_program(equation)
        if called is not None:
            yield from _arrays_in(called)


def _inlined(
    program: TracedProgram,
    arguments: Sequence[Any],
    constant: Callable[[Any], Any] = lambda value: value,
    callers: Sequence[Any] = (),
) -> list[Any]:
    chain = list(callers)

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        if called_program(equation) is not None:
            return None
        if (branch := _branch_of_platform(equation)) is not None:
            return _inlined(branch, operands[1:], constant, [*chain, equation])
        equation = with_bodies(equation, _flat_body)
        traceback, stack = _source([*chain, equation])
        with source_info_util.user_context(traceback, name_stack=stack):
            if equation.primitive.name == "mul":  # no target has jax's `out_dtype`
                dtype = equation.outvars[0].aval.dtype
                if equation.invars[0].aval.dtype != dtype:
                    operands = [lax.convert_element_type(each, dtype) for each in operands]
            of_jax = FASTER_IN_JAX.get(equation.primitive.name)
            if of_jax is not None:
                return [of_jax(*operands, **equation.params)]
            return bind_equation(equation, operands)

    options: Any = {"constant": constant, "equations": needed_equations, "callers": chain}
    return interpret(program, arguments, operate, **options)


def _branch_of_platform(equation: Equation) -> Any:
    """The branch of `jax.lax.platform_dependent` that runs on CPUs; None for other equations."""
    platforms = equation.params.get("branches_platforms")
    index = None if platforms is None else branch_for_cpu(platforms)
    return None if index is None else equation.params["branches"][index]


def _flat_body(body: PortableProgram) -> PortableProgram:
    def run(*operands: Array) -> list[Any]:
        return _inlined(body.program, operands)

    return replace(body, program=traced(run, body.jaxpr.invars))


def _source(chain: Sequence[Any]) -> tuple[Any, Any]:
    """The lines and the module path of the last equation of a chain of calls."""
    path, believed = "", chain[0].source_info.name_stack
    for equation in chain:
        inner = path_in(equation, path)
        if inner != path:
            path, believed = inner, equation.source_info.name_stack
    return chain[-1].source_info.traceback, believed


# --- The passes in order ---


T = TypeVar("T")


@dataclass(frozen=True)
class PassOptions:
    """The options of a target.

    Attributes:
        fold: fold scales into weights.
        compute: with `fold`, evaluate all arithmetic on weights; not needed by targets that fold
            constants.
        keep: keep functions for which runtimes have operators.
        recurrent: with `keep`, keep recurrent layers, too.
        move: move transposes to where they are not needed.
        features_first: with `move`, convolve ``[batch, features, ...]``, else ``[batch, ...,
            features]``.
        integers: pass integers from a quantized layer to the next, through float32 at most.
    """

    fold: bool = True
    compute: bool = True
    keep: bool = True
    recurrent: bool = True
    move: bool = True
    features_first: bool = True
    integers: bool = False


def optimized(
    program: TracedProgram,
    leaves: Sequence[Weight],
    names: Mapping[int, str],
    options: PassOptions,
    count: int | None = None,
) -> PortableProgram:
    """Optimizes a traced program for a runtime.

    Args:
        program: the closed jaxpr; its first operands are the leaves.
        leaves: their names and values.
        names: names of large constants, by `id`.
        options: the options of the target.
        count: the number of results; default: all.
    """
    # Calls hide adjacent equations from all other passes.
    portable = replace(flattened(program, leaves, names, count), fixed=options.fold)
    if options.integers:
        portable = without_half(portable)
    # Functions are found as they were written: folding and layouts take them apart.
    if options.keep:
        portable = recognized(whole_layers(portable) if options.recurrent else portable)
    portable = padded_inside(portable)
    # Scales are found by the axis of their features, which is simplest in the model's layout.
    if options.fold:
        portable = folded(portable)
    if options.integers:
        portable = rounded_between(portable)
    if options.move:
        portable = laid_out(portable, options.features_first)
    # The others leave arithmetic and transposes of weights behind.
    return computed(portable) if options.fold and options.compute else portable


def written_fast(
    program_of: Callable[[PassOptions | None], PortableProgram],
    options: PassOptions,
    write: Callable[[PortableProgram], T],
) -> tuple[T, PortableProgram]:
    """Writes the optimized program, or the traced one if a pass or a rule fails.

    Args:
        program_of: returns the program after the passes with these options, or for None the traced
            one.
        options: the options of the target.
        write: writes a program.

    Returns:
        The result of `write`, and the written program, whose notes are for the report.

    Raises:
        UnsupportedOperationError: about the traced program.
    """
    try:
        program = program_of(options)
        return write(program), program
    except Exception as error:  # also a mistake of a pass: then the program is as it was traced
        reason = error
    # If this is refused, too, its error names the user's operation.
    traced = program_of(None)
    result = write(traced)
    note = f"the program as it was traced, which may be slow: {reason!r}"
    warnings.warn(
        f"The file has {note}. This is a mistake of pax_export; please report it.",
        RuntimeWarning,
        stacklevel=2,
    )
    return result, traced.noted(note)
