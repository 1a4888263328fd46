"""A flat jax function, traced once, with its gradients.

It takes and returns lists of arrays. Closed-over arrays are `constants`: stored once, and passed
as further operands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.jax import call_with_constants, read_arguments
from pax_export._foundations.jaxpr import (
    jaxpr_constants,
    jaxpr_of,
    jaxpr_operations,
    jaxpr_primitives,
)
from pax_export._foundations.types import Array, ClosedJaxpr, TracedProgram
from pax_export.export import symbolic_numpy
from pax_export.export.portable.any_size import differentiable
from pax_export.export.portable.program import discharged, with_python_numbers
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.outline import outline
from pax_export.export.tracing.source_lines import attach_operations
from pax_export.transforms import prepared_gradients

#: A closed-over array of more bytes than this becomes a variable.
LARGEST_CONSTANT = 1024

Function = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Traced:
    """A function that has been traced once: its program, and how to run it again."""

    function: Function
    structs: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[Any, ...]
    jitted: Any  # the function, for arrays of any shapes
    program: Any  # the traced jaxpr, with repeated layers outlined
    whole: Any  # the complete jaxpr, including unused operations
    lowerable: Any  # the program as a jitted function, for arrays like `structs` only
    results: tuple[jax.ShapeDtypeStruct, ...]

    def run(self, operands: Sequence[Any]) -> Any:
        """Runs the function on arrays of any shapes.

        Constants are arguments: XLA would fold them, and returns NaN on the CPU for ``(x @
        w).sum(-1)`` where w is a constant of 16 MiB (jax 0.10.2 and 0.12.0.1).
        """
        if not self.constants:
            return self.jitted(operands)
        structs = [dtypes.struct_of(value) for value in operands]
        here = trace(self.function, structs, outlined=False)
        return jax.jit(here.with_constants)([*operands, *here.constants])

    def with_program(self, program: ClosedJaxpr) -> Traced:
        """The same results by another program, perhaps of other operands."""
        return replace(
            self,
            structs=tuple(dtypes.struct_of(each.aval) for each in jaxpr_of(program).invars),
            constants=_large_constants(program),
            program=program,
            lowerable=jax.jit(functools.partial(_call_program, program)),
        )

    def with_function(self, function: Function) -> Traced:
        """The same program, run by another function on arrays."""
        return replace(self, function=function, jitted=jax.jit(function))

    def read(self, count: int) -> frozenset[int]:
        return read_arguments(self.program, count)

    def with_constants(
        self,
        operands: Sequence[Any],
        count: int | None = None,
        keep_derivatives: bool = True,
        program: TracedProgram | None = None,
    ) -> list[Any]:
        """Runs the program on `structs` and `constants`; `count` limits it to the first results.

        Without `keep_derivatives`, constants are also replaced in functions with own derivatives.
        """
        values = operands[len(self.structs) :]
        replaced = {id(old): new for old, new in zip(self.constants, values)}
        arguments = operands[: len(self.structs)]
        run = self.program if program is None else program
        return call_with_constants(run, replaced, arguments, count, keep_derivatives)


def trace(
    function: Function, structs: Sequence[jax.ShapeDtypeStruct], outlined: bool = True
) -> Traced:
    """Traces a flat function, `outlined` if layers repeat; refuses callbacks to Python."""
    jitted = lowerable = jax.jit(function)
    traced = trace_with_sizes(lambda: jitted.trace(list(structs)), structs)
    _refuse_callbacks(traced.jaxpr)
    results = tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in traced.out_info)
    whole = discharged(traced.jaxpr)
    shorter = outline(whole) if outlined else None
    if shorter is None and whole is not traced.jaxpr:
        shorter = functools.partial(_call_program, whole)
    if shorter is not None:
        lowerable = jax.jit(shorter)
        traced = lowerable.trace(list(structs))
    constants = _large_constants(traced.jaxpr)
    result = Traced(
        function, tuple(structs), constants, jitted, traced.jaxpr, whole, lowerable, results
    )
    program = with_python_numbers(result.program)
    return result if program is result.program else result.with_program(program)


def _call_program(program: TracedProgram, operands: list[Any]) -> list[Any]:
    return jaxpr_as_fun(program)(*operands)


def trace_with_sizes(trace: Callable[[], Any], structs: Sequence[Any]) -> Any:
    """Traces a function of arrays like `structs`; again for libraries, if sizes are not enough."""
    with for_symbolic_sizes(structs):
        try:
            return trace()
        except Exception as error:  # of the model: raised again if the second trace fails, too
            if not is_of_size(error):
                raise
            # Names in jax change for this trace only; other threads get jax's functions by them.
            with symbolic_numpy.for_libraries():
                try:
                    return trace()
                except Exception as other:  # further on, unless the first trace broke the model
                    if is_of_size(other):
                        raise
            raise


def is_of_size(error: Exception) -> bool:
    """Returns whether jax raised an error because it does not know a symbolic size."""
    return bool(re.search("symbolic dimension|shape polymorphism", str(error), re.IGNORECASE))


def _has_symbolic_sizes(structs: Sequence[Any]) -> bool:
    return not all(isinstance(size, int) for each in structs for size in each.shape)


def for_symbolic_sizes(structs: Sequence[Any]) -> AbstractContextManager[None]:
    """A block in which `pax.grad` differentiates along the symbolic sizes of these arrays."""
    if not _has_symbolic_sizes(structs):
        return nullcontext()
    return prepared_gradients(symbolic_numpy.for_any_size)


def _large_constants(program: TracedProgram) -> tuple[Any, ...]:
    found = {id(value): value for value in jaxpr_constants(program) if _is_large(value)}
    return tuple(found.values())


def _is_large(value: Array) -> bool:
    size = getattr(value, "size", 1) * getattr(value.dtype, "itemsize", 1)
    # A key is small, but TensorFlow has no constant of its dtype.
    return size > LARGEST_CONSTANT and not dtypes.is_key(value.dtype)


def _refuse_callbacks(program: TracedProgram) -> None:
    outside = ("debug_print", "infeed", "outfeed")
    found = sorted(p for p in jaxpr_primitives(program) if "callback" in p or p in outside)
    if not found:
        return
    error = UnsupportedOperationError(
        "The model calls back into Python, which an export cannot.",
        got=", ".join(found),
        write="the same in operations of jax; no jax.debug.print, jax.pure_callback and the like "
        "in eval mode; EQX_ON_ERROR=off in the environment of Python for equinox.error_if, which "
        "diffrax, lineax and optimistix call",
    )
    raise attach_operations(error, jaxpr_operations(program, found))


def vjp(traced: Traced, wrt: Sequence[int], of: Sequence[int]) -> Traced:
    """Returns the gradient of a traced function, as a function.

    It takes all operands of the function, including constants, then one cotangent per result in
    `of`, and returns one cotangent per operand in `wrt`.
    """
    operands = [*traced.structs, *map(dtypes.struct_of, traced.constants)]
    cotangents = [traced.results[index] for index in of]

    program = differentiable(traced.program)

    def function(values: list[Any]) -> list[Any]:
        return traced.with_constants(values, program=program)

    def run(values: list[Any]) -> list[Any]:
        arguments, incoming = values[: len(operands)], values[len(operands) :]
        return pull_back(function, wrt, of)(arguments, incoming)

    # The gradients of a function that is called often are called as often.
    return trace(run, [*operands, *cotangents], outlined=False)


def pull_back(
    function: Function, wrt: Sequence[int], of: Sequence[int]
) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Cotangents of operands `wrt` from those of results `of`, conjugated as in TensorFlow."""

    def run(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def outputs(chosen: list[Any]) -> list[Any]:
            filled = list(operands)
            for index, value in zip(wrt, chosen):
                filled[index] = value
            results = function(filled)
            return [results[index] for index in of]

        back = jax.vjp(outputs, [operands[index] for index in wrt])[1]
        return [_conjugate(value) for value in back([_conjugate(each) for each in cotangents])[0]]

    return run


def _conjugate(value: Array) -> Array:
    return jax.numpy.conj(value) if jax.numpy.iscomplexobj(value) else value
