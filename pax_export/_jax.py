"""The only file that knows versions of jax, or anything jax does not promise."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import get_opaque_trace_state as trace_state
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr_consts

__all__ = [
    "call_with_constants",
    "dimension_names",
    "dimension_value",
    "is_tracer",
    "jaxpr_constants",
    "jaxpr_equations",
    "neutral_platform",
    "read_arguments",
    "trace_state",
]


def is_tracer(value: Any) -> bool:
    """True for the stand-ins that jax passes to a function while it traces it."""
    return isinstance(value, Tracer)


# What the exporter needs: symbolic dimensions, and programs as jaxprs.


def dimension_names(dimension: Any) -> tuple[str, ...]:
    """The variables of a symbolic dimension, sorted."""
    return tuple(sorted(dimension._get_vars()))


def dimension_value(dimension: Any, sizes: Mapping[str, int]) -> int:
    """The size of a (symbolic or plain) dimension where its variables have these sizes."""
    return dimension if isinstance(dimension, int) else int(dimension._evaluate(dict(sizes)))


def _jitted(equation: Any) -> Any:
    """The program that an equation calls if it is a call of a jitted function."""
    return equation.params["jaxpr"] if equation.primitive.name in ("jit", "pjit") else None


def jaxpr_constants(program: Any) -> Iterator[Any]:
    """The arrays that a traced program closes over, those of jitted functions inside too."""
    yield from program.consts
    for equation in program.jaxpr.eqns:
        inner = _jitted(equation)
        if inner is not None:
            yield from jaxpr_constants(inner)


def call_with_constants(
    program: Any,
    replaced: Mapping[int, Any],
    arguments: Sequence[Any],
    count: int | None = None,
) -> list[Any]:
    """Evaluates a traced program, with other values for some arrays that it closes over.

    Args:
        program: what `trace(...).jaxpr` gives.
        replaced: the new value, by the `id` of the constant.
        arguments: the flat arguments.
        count: evaluate only what the first so many results need.
    """
    jaxpr = program.jaxpr
    constants = [replaced.get(id(value), value) for value in program.consts]
    if count is not None:
        jaxpr, _ = _reduced(program, count, instantiate=True)
    inner = [equation for equation in jaxpr.eqns if _jitted(equation) is not None]
    if not any(id(value) in replaced for each in inner for value in jaxpr_constants(_jitted(each))):
        return eval_jaxpr(jaxpr, constants, *arguments)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments)))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        called = _jitted(equation)
        if called is not None:
            results = call_with_constants(called, replaced, given)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                results = equation.primitive.bind(*given, **parameters)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results))
    return [read(atom) for atom in jaxpr.outvars]


def _reduced(program: Any, count: int, instantiate: bool) -> tuple[Any, list[bool]]:
    """The part of a program that its first results need, and which arguments that reads."""
    used = [index < count for index in range(len(program.jaxpr.outvars))]
    # Since jax 0.12 a program and its jaxpr are one class.
    whole = program if hasattr(program, "with_consts") else program.jaxpr
    reduced, _, read = dce_jaxpr_consts(whole, used, instantiate)
    return getattr(reduced, "jaxpr", reduced), read


def read_arguments(program: Any, count: int) -> frozenset[int]:
    """The flat arguments on which the first so many results of a traced program depend."""
    _, read = _reduced(program, count, instantiate=False)
    return frozenset(index for index, is_read in enumerate(read) if is_read)


def jaxpr_equations(program: Any) -> Iterator[tuple[str, str]]:
    """Every operation of a traced program, nested ones too: its name and ``file.py:line``."""
    from jax.extend import source_info_util

    for equation in getattr(program, "jaxpr", program).eqns:
        source = source_info_util.summarize(equation.source_info)
        yield equation.primitive.name, source.split(" ")[0].rsplit("/", 1)[-1]
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from jaxpr_equations(inner)


@functools.cache
def neutral_platform() -> str:
    """A platform to lower for that no machine has, so that only general rules apply to it.

    jax asks its rules by the platform's name, and takes those without a platform
    where it finds none.  `eigh` has no such rule; the one for TPUs is general.
    """
    name = "pax_export_any"
    rules = mlir._platform_specific_lowerings
    rules[name][jax.lax.linalg.eigh_p] = rules["tpu"][jax.lax.linalg.eigh_p]
    return name
