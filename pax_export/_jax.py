"""The only file that knows versions of jax, or anything jax does not promise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

# Not from jax.extend.core, which loads Pallas with it: a quarter of our own import.
from jax._src.core import get_opaque_trace_state
from jax.core import Tracer, eval_jaxpr
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr_consts

from pax_export._jaxpr import bound, evaluate, inner_programs, jaxpr_constants

trace_state = get_opaque_trace_state


def is_tracer(value: Any) -> bool:
    """True for the stand-ins that jax passes to a function while it traces it."""
    return isinstance(value, Tracer)


# What the exporter needs: symbolic dimensions, and programs as jaxprs.


def dimension_names(dimension: Any) -> tuple[str, ...]:
    """The variables of a symbolic dimension, sorted."""
    return tuple(sorted(dimension._get_vars()))


def scope_constraints(scope: Any) -> tuple[str, ...]:
    """What may be assumed of the symbolic dimensions of a scope, as it was written."""
    return tuple(each.debug_str for each in scope._explicit_constraints)


def dimension_value(dimension: Any, sizes: Mapping[str, int]) -> int:
    """The size of a (symbolic or plain) dimension where its variables have these sizes."""
    return dimension if isinstance(dimension, int) else int(dimension._evaluate(dict(sizes)))


def call_with_constants(
    program: Any,
    replaced: Mapping[int, Any],
    arguments: Sequence[Any],
    count: int | None = None,
    keep_derivatives: bool = False,
) -> list[Any]:
    """Evaluates a traced program, with other values for some arrays that it closes over.

    Args:
        program: what `trace(...).jaxpr` gives.
        replaced: the new value, by the `id` of the constant.
        arguments: the flat arguments.
        count: evaluate only what the first so many results need.
        keep_derivatives: leave functions that define their derivative as they
            are, with the constants inside of them, because it will be asked for.
    """
    jaxpr = getattr(program, "jaxpr", program)
    constants = [replaced.get(id(value), value) for value in getattr(program, "consts", ())]
    if count is not None:
        jaxpr, _ = _reduced(program, count, instantiate=True)
    if not replaced:
        return eval_jaxpr(jaxpr, constants, *arguments)

    def holds(equation: Any) -> bool:
        inside = (value for inner in inner_programs(equation) for value in jaxpr_constants(inner))
        return any(id(value) in replaced for value in inside)

    if not any(map(holds, jaxpr.eqns)):
        return eval_jaxpr(jaxpr, constants, *arguments)

    def run(inner: Any, given: Sequence[Any]) -> list[Any]:
        return call_with_constants(inner, replaced, given, keep_derivatives=keep_derivatives)

    def operate(equation: Any, given: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        is_kept = keep_derivatives and name.startswith("custom_")
        if name in _OPENED and not is_kept and holds(equation):
            return _OPENED[name](run, equation.params, given)
        return bound(equation, given)

    return evaluate(jaxpr, constants, arguments, operate)


def call_part(
    jaxpr: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Some equations of a traced program as a function, from these variables to those."""
    part = jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return lambda *values: eval_jaxpr(part, (), *values)


def _wrapper(run: Any, params: Any, given: list[Any]) -> list[Any]:
    inner = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
    return run(inner, given)


def _remat(run: Any, params: Any, given: list[Any]) -> list[Any]:
    options = {key: params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(lambda *values: run(params["jaxpr"], values), **options)(*given)


def _scan(run: Any, params: Any, given: list[Any]) -> list[Any]:
    if "ft_in" in params:  # since jax 0.12
        constants, start, inputs = map(list, params["ft_in"].update(given).unpack())
    else:
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        constants, start, inputs = given[:first], given[first:last], given[last:]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(params["jaxpr"], [*constants, *carry, *xs])
        return results[: len(carry)], results[len(carry) :]

    options = {key: params[key] for key in ("reverse", "unroll")}
    # A symbolic length is taken from the inputs only.
    length = None if inputs else params["length"]
    carry, ys = jax.lax.scan(body, start, inputs, length=length, **options)
    return [*carry, *ys]


def _while(run: Any, params: Any, given: list[Any]) -> list[Any]:
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def holds(state: list[Any]) -> Any:
        return run(params["cond_jaxpr"], [*given[:first], *state])[0]

    def body(state: list[Any]) -> list[Any]:
        return run(params["body_jaxpr"], [*given[first:last], *state])

    return jax.lax.while_loop(holds, body, given[last:])


def _cond(run: Any, params: Any, given: list[Any]) -> list[Any]:
    branches = [lambda *values, branch=branch: run(branch, values) for branch in params["branches"]]
    return jax.lax.switch(given[0], branches, *given[1:])


#: How an equation is made anew from functions that are given what its programs close over.
_OPENED = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), _wrapper),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _wrapper),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _reduced(program: Any, count: int, instantiate: bool) -> tuple[Any, list[bool]]:
    """The part of a program that its first results need, and which arguments that reads."""
    used = [index < count for index in range(len(program.jaxpr.outvars))]
    # Since jax 0.12 a program and its jaxpr are one class.
    whole = program if hasattr(program, "with_consts") else program.jaxpr
    reduced, _, read = dce_jaxpr_consts(whole, used, instantiate)
    return getattr(reduced, "jaxpr", reduced), read


def needed_part(program: Any) -> Any:
    """The jaxpr of a traced program without what none of its results needs."""
    return _reduced(program, len(program.jaxpr.outvars), instantiate=True)[0]


def read_arguments(program: Any, count: int) -> frozenset[int]:
    """The flat arguments on which the first so many results of a traced program depend."""
    _, read = _reduced(program, count, instantiate=False)
    return frozenset(index for index, is_read in enumerate(read) if is_read)


def call_here(exported: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs on this machine what was lowered for `neutral_platform`."""
    here = jax.default_backend()
    # jax knows a GPU by the names of its makers only.
    names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
    return list(dataclasses.replace(exported, platforms=names).call(list(operands)))


@contextmanager
def symbolic_convolutions() -> Iterator[None]:
    """Lets convolutions be differentiated in its block where their strides meet symbolic sizes.

    How far the gradient is padded depends on the remainder then; jax computes
    that, and its own convolution takes no such padding.  `lax.pad` does.
    """
    from jax._src.lax import convolution

    first = convolution.conv_general_dilated

    def convolve(
        lhs: Any, rhs: Any, window_strides: Any, padding: Any, *dilations: Any, **options: Any
    ) -> Any:
        sizes = [] if isinstance(padding, str) else [size for pair in padding for size in pair]
        if any(hasattr(size, "_get_vars") for size in sizes):
            spatial = options["dimension_numbers"].lhs_spec[2:]
            widths = [(0, 0, 0)] * lhs.ndim
            dilation = options.get("lhs_dilation") or (1,) * len(spatial)
            for axis, (low, high), step in zip(spatial, padding, dilation):
                widths[axis] = (low, high, step - 1)
            lhs = jax.lax.pad(lhs, jax.numpy.zeros((), lhs.dtype), widths)
            options["lhs_dilation"], padding = None, [(0, 0)] * len(spatial)
        return first(lhs, rhs, window_strides, padding, *dilations, **options)

    convolution.conv_general_dilated = convolve
    try:
        yield
    finally:
        convolution.conv_general_dilated = first


@functools.cache
def allow_symbolic_padding() -> None:
    """Lets the gradient of a max pool be lowered for TPUs where its padding is symbolic.

    jax's rules for CPU and GPU pad first, and take any padding; the one for TPU
    wants numbers, and is still asked first.
    """
    pool = jax.lax.select_and_scatter_add_p
    first = mlir._lowerings[pool].rule
    pads = mlir._platform_specific_lowerings["cpu"][pool].rule

    def rule(context: Any, *operands: Any, padding: Any, **parameters: Any) -> Any:
        symbolic = any(hasattr(size, "_get_vars") for pair in padding for size in pair)
        return (pads if symbolic else first)(context, *operands, padding=padding, **parameters)

    entry = dataclasses.replace(mlir._lowerings[pool], rule=rule)
    for platform in ("tpu", neutral_platform()):
        mlir._platform_specific_lowerings[platform][pool] = entry


@functools.cache
def neutral_platform() -> str:
    """A platform to lower for that no machine has, so that only general rules apply to it.

    jax asks its rules by the platform's name, and takes those without a platform
    where it finds none.  `eigh` has no such rule; the one for TPUs is general.
    `approx_max_k` and its sister are a call into XLA, and exact here.
    """
    name = "pax_export_any"
    rules = mlir._platform_specific_lowerings
    rules[name][jax.lax.linalg.eigh_p] = rules["tpu"][jax.lax.linalg.eigh_p]
    exact = mlir.lower_fun(_exact_top_k, multiple_results=True)
    top_k = jax.lax.approx_top_k_p
    rules[name][top_k] = dataclasses.replace(mlir._lowerings[top_k], rule=exact)
    return name


def _exact_top_k(operand: Any, **parameters: Any) -> tuple[Any, Any]:
    """What jax's approximation gives on CPUs: the best of all, in order."""
    axis = parameters["reduction_dimension"]
    like, _ = jax.eval_shape(lambda x: jax.lax.approx_top_k_p.bind(x, **parameters), operand)
    sign = 1 if parameters["is_max_k"] else -1
    values, places = jax.lax.top_k(sign * jax.numpy.moveaxis(operand, axis, -1), like.shape[axis])
    return jax.numpy.moveaxis(sign * values, -1, axis), jax.numpy.moveaxis(places, -1, axis)


# What many processes need.


def devices_are_known() -> bool:
    """True once jax has looked for the devices of this machine."""
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def join_processes(*who: Any, within: float, lost_after: float) -> tuple[Any, str, int, int]:
    """`jax.distributed.initialize`, so that jax does not abort all where one is lost.

    Returns:
        The client of jax's coordination service, through which processes tell each
        other what they please; its ``"host:port"``; their number; which one this is.
    """
    from jax._src.distributed import global_state as state

    jax.config.update("jax_enable_recoverability", True)
    seconds = {"initialization_timeout": within, "heartbeat_timeout_seconds": lost_after}
    jax.distributed.initialize(*who, **{name: int(value) for name, value in seconds.items()})
    return state.client, str(state.coordinator_address), state.num_processes, state.process_id
