"""Everything that depends on jax's versions or private APIs.

Private names are listed in `PRIVATE` only and looked up by `private`, never imported. Callers
handle None; `say_less` warns once where that does less.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr
from jax.typing import DTypeLike

from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    has_own_derivative,
    inner_programs,
    interpret,
    is_literal,
    jaxpr_constants,
    jaxpr_of,
    needed_equations,
)
from pax_export._foundations.types import ClosedJaxpr, Equation, Jaxpr, TracedProgram

#: Whether CPUs are fast at adding rows of a matrix one by one, and at blocks of bfloat16: with
#: jax 0.10 both take 1.1 to 3 times as long (docs/decisions/quantization.md).
ADDS_ROWS_FAST = jax.__version_info__ >= (0, 12)

#: What degrades without each name, where no public API does the same.
PRIVATE: dict[str, str] = {
    "jax._src.core.get_opaque_trace_state": "",
    "jax.interpreters.partial_eval.dce_jaxpr_consts": (
        "exports keep what loops, branches and nested functions compute and nobody reads"
    ),
    "jax._src.state.discharge.discharge_state": (
        "ONNX and TFLite exports refuse models that use jax.new_ref"
    ),
    "jax._src.core.eval_trace": "`with pax.debug.nans()` is jax.debug_nans, which names no module",
    "jax._src.core.set_current_trace": (
        "`with pax.debug.nans()` is jax.debug_nans, which names no module"
    ),
    "jax.experimental.sparse.bcoo._bcoo_dot_general_impl": "",
    "jax.experimental.sparse.bcsr._bcsr_dot_general_impl": "",
}

#: Attributes of jax's objects, in the same way.
PRIVATE_ATTRIBUTES: dict[str, str] = {"jax.export.SymbolicScope._explicit_constraints": ""}

#: APIs that older versions of jax lack, reported in the same way.
_LESS: dict[str, str] = {
    "jax.lax.add_p": (
        "a module that is changed under a jit, grad or vmap that began after it was opened is "
        "not refused: jax may speak of a leaked tracer then"
    ),
}


@functools.cache
def private(name: str) -> Any:
    """Returns jax's object for a name of `PRIVATE`, or None if jax does not have it."""
    if name not in PRIVATE:
        raise KeyError(name)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return None


@functools.cache
def say_less(name: str) -> None:
    """Warns once about what degrades because jax removed this name."""
    less = (PRIVATE | PRIVATE_ATTRIBUTES | _LESS)[name]
    text = f"jax {jax.__version__} no longer has {name}, so {less}. A newer pax-export may."
    warnings.warn(text, RuntimeWarning, stacklevel=3)


# --- what jax runs: values under transformations, the active trace ----------------------


#: The class of jax's operations.  jax.extend.core has it too, and loads Pallas with it,
#: which takes a quarter of our own import time.
Primitive: Any = type(jax.lax.add_p)


def is_tracer(value: object) -> bool:
    """Returns whether a value is a tracer of jax."""
    return isinstance(value, Tracer)


def is_key(dtype: DTypeLike) -> bool:
    """Whether this is the dtype of typed random keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def is_mapped(value: object) -> bool:
    """Returns whether `jax.vmap`, as the innermost transformation, maps over a value."""
    return type(value).__name__ == "BatchTracer"


@functools.cache
def find_trace() -> Any:
    """Finds the current trace by public API only: an operation that reports its trace."""

    class Asking(Primitive):
        def bind_with_trace(self, trace: object, *_: object) -> weakref.ref:
            return weakref.ref(trace)

    ask = Asking("pax_export_trace").bind
    try:
        return ask if isinstance(ask(), weakref.ref) else None
    except Exception:  # whatever jax raises for an unknown operation
        return None


def _return_nothing() -> None:
    """A fallback for which all traces are the same."""
    say_less("jax.lax.add_p")


def _trace_state() -> Any:
    found = private("jax._src.core.get_opaque_trace_state")
    return found or find_trace() or _return_nothing


#: Equal at two places if and only if they run under the same trace.
trace_state = _trace_state()


# --- hooks on every program and eager operation ----------------------------------------

_CURRENT, _SET = "jax._src.core.eval_trace", "jax._src.core.set_current_trace"

#: A function: its operation, parameters, operands and results.
Heard = Callable[[Any, dict[str, Any], Sequence[Any], Sequence[Any]], None]


def is_computing() -> bool:
    """False inside of a function that jax traces: under jit, grad, vmap."""
    plain, ask = private(_CURRENT), find_trace()
    return plain is None or ask is None or isinstance(ask()(), type(plain))


@contextmanager
def watch_operations(heard: Heard) -> Iterator[None]:
    """Context manager that reports this thread's computations to ``heard``.

    A jitted function is one operation. Tracing, and computations of ``heard``, are excluded.
    """
    plain, entered = private(_CURRENT), private(_SET)
    if plain is None or entered is None:
        say_less(_CURRENT if plain is None else _SET)
        with jax.debug_nans(True):
            yield
        return

    class Watching(type(plain)):  # type: ignore[misc]
        """Evaluates operations as jax does, and reports them."""

        def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
            params = _without_donation(params)
            found = plain.process_primitive(primitive, args, params)
            with entered(plain):
                heard(primitive, params, args, found if primitive.multiple_results else [found])
            return found

    with entered(Watching()):
        yield


def _without_donation(params: dict[str, Any]) -> dict[str, Any]:
    """Removes donation, because operands are inspected if results are wrong."""
    if not any(params.get("donated_invars", ())):
        return params
    return {**params, "donated_invars": (False,) * len(params["donated_invars"])}


def jitted_call() -> tuple[Any, tuple, dict[str, Any]] | None:
    """The function of the innermost running `jax.jit` call, from its frame, and the arguments.

    None for functions of jax, tracers as arguments, and other ways to call it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "cache_miss" and frame.f_globals["__name__"].startswith("jax."):
            there = frame.f_locals
            function, args, kwargs = (there.get(name) for name in ("fun", "args", "kwargs"))
            leaves = jax.tree_util.tree_leaves((args, kwargs))
            own = str(getattr(function, "__module__", "")).startswith("jax.")
            if own or not callable(function) or any(map(is_tracer, leaves)):
                return None
            return function, args or (), kwargs or {}
        frame = frame.f_back
    return None


# --- traced programs, evaluated in part or with other constants -------------------------


Run = Callable[[Any, Sequence[Any]], list[Any]]  # of a program and operands


def call_with_constants(
    program: TracedProgram,
    replaced: Mapping[int, Any],
    arguments: Sequence[Any],
    count: int | None = None,
    keep_derivatives: bool = False,
) -> list[Any]:
    """Evaluates a traced program with other values for some of its constants.

    Args:
        program: ``trace(...).jaxpr``.
        replaced: `id` of a constant -> new value.
        arguments: the flat arguments.
        count: evaluate only operations that the first `count` results need.
        keep_derivatives: keep functions with their own derivatives, and constants in them.
    """
    jaxpr: Any = jaxpr_of(program)
    constants = [replaced.get(id(value), value) for value in getattr(program, "consts", ())]
    if count is not None:
        jaxpr, _ = _prune_program(program, count, instantiate=True)

    def holds(equation: Equation) -> bool:
        inside = (value for inner in inner_programs(equation) for value in jaxpr_constants(inner))
        return any(id(value) in replaced for value in inside)

    if not (replaced and any(map(holds, jaxpr.eqns))):
        return eval_jaxpr(jaxpr, constants, *arguments)

    def run(inner: TracedProgram, operands: Sequence[Any]) -> list[Any]:
        return call_with_constants(inner, replaced, operands, keep_derivatives=keep_derivatives)

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        is_kept = keep_derivatives and has_own_derivative(equation)
        if is_kept or not holds(equation):
            return bind_equation(equation, operands)
        results = run_inside(equation, operands, run)
        is_call = called_program(equation) is not None
        return bind_equation(equation, operands) if results is None and not is_call else results

    # Since jax 0.12 a jaxpr may contain its constants.
    constants_of = () if getattr(jaxpr, "consts", ()) else constants
    return interpret(
        jaxpr, (*constants_of, *arguments), operate, constant=lambda x: replaced.get(id(x), x)
    )


def call_part(
    jaxpr: Jaxpr, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Returns some equations of a program as a function, from these variables to those."""
    part: Any = jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return lambda *values: eval_jaxpr(part, (), *values)


def find_expansion(equation: Equation) -> Callable[..., list[Any]] | None:
    """Returns the expansion of an operation of jax's newer kind as a function; None for others."""
    primitive: Any = equation.params.get("_prim")
    if not hasattr(primitive, "expand"):
        return None

    def function(*operands: Any) -> list[Any]:
        result = primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands))
        return jax.tree.leaves(result)

    return function


#: Primitives of `jax.experimental.sparse` with lowerings for some devices beside the function.
_SPARSE_PRODUCTS = {
    "bcoo_dot_general": "jax.experimental.sparse.bcoo._bcoo_dot_general_impl",
    "bcsr_dot_general": "jax.experimental.sparse.bcsr._bcsr_dot_general_impl",
}


def find_sparse(equation: Equation) -> Callable[..., Any] | None:
    """Returns the function behind an operation of `jax.experimental.sparse`; None for others."""
    if (name := _SPARSE_PRODUCTS.get(equation.primitive.name)) is not None:
        return private(name)
    function = equation.primitive.impl
    is_sparse = str(getattr(function, "__module__", "")).startswith("jax.experimental.sparse.")
    return function if is_sparse else None


def run_inside(
    equation: Equation, operands: Sequence[Any], run: Callable[[Any, Sequence[Any]], list[Any]]
) -> list[Any] | None:
    """Evaluates a loop, branches or a remat, with ``run`` for each inner program.

    Operands may be pytrees. Returns None for other equations.
    """
    opened = _OPENED.get(equation.primitive.name)
    return None if opened is None else opened(run, equation.params, list(operands))


def _expand_remat(run: Run, params: Mapping[str, Any], operands: list[Any]) -> list[Any]:
    options = {key: params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(lambda *values: run(params["jaxpr"], values), **options)(*operands)


def scan_operands(
    params: Mapping[str, Any], operands: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits the operands of a scan: constants of its body, the initial carry, the inputs."""
    if "ft_in" in params:  # since jax 0.12
        constants, start, inputs = map(list, params["ft_in"].update(operands).unpack())
        return constants, start, inputs
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(operands[:first]), list(operands[first:last]), list(operands[last:])


def _expand_scan(run: Run, params: Mapping[str, Any], operands: list[Any]) -> list[Any]:
    constants, start, inputs = scan_operands(params, operands)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(params["jaxpr"], [*constants, *carry, *xs])
        return results[: len(carry)], results[len(carry) :]

    options = {key: params[key] for key in ("reverse", "unroll")}
    # A symbolic length is taken from the inputs only.
    length = None if inputs else params["length"]
    carry, ys = jax.lax.scan(body, start, inputs, length=length, **options)
    return [*carry, *ys]


def _expand_while(run: Run, params: Mapping[str, Any], operands: list[Any]) -> list[Any]:
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def holds(state: list[Any]) -> Any:
        return run(params["cond_jaxpr"], [*operands[:first], *state])[0]

    def body(state: list[Any]) -> list[Any]:
        return run(params["body_jaxpr"], [*operands[first:last], *state])

    return jax.lax.while_loop(holds, body, operands[last:])


def _expand_cond(run: Run, params: Mapping[str, Any], operands: list[Any]) -> list[Any]:
    branches = [lambda *values, branch=branch: run(branch, values) for branch in params["branches"]]
    return jax.lax.switch(operands[0], branches, *operands[1:])


#: Rebuilds an equation from functions with their closed-over values as arguments; equations that
#: only call one are inlined.
_OPENED = {
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _expand_remat),
    "scan": _expand_scan,
    "while": _expand_while,
    "cond": _expand_cond,
}


_REDUCE = "jax.interpreters.partial_eval.dce_jaxpr_consts"


def _prune_program(program: Any, count: int, instantiate: bool) -> tuple[Any, list[bool]]:
    """The part of a program that its first results need, and which arguments that reads."""
    reduce = private(_REDUCE)
    if reduce is None:
        say_less(_REDUCE)
        return _sweep_program(program.jaxpr, count)
    used = [index < count for index in range(len(program.jaxpr.outvars))]
    # Since jax 0.12 a program and its jaxpr are one class.
    whole = program if hasattr(program, "with_consts") else program.jaxpr
    reduced, _, read = reduce(whole, used, instantiate)
    return jaxpr_of(reduced), read


def _sweep_program(jaxpr: Jaxpr, count: int) -> tuple[Any, list[bool]]:
    """The same without inner programs: a backward sweep."""
    reduced = jaxpr.replace(
        outvars=jaxpr.outvars[:count], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    reduced = reduced.replace(eqns=needed_equations(reduced))
    atoms = [atom for each in reduced.eqns for atom in each.invars] + list(reduced.outvars)
    read = {atom for atom in atoms if not is_literal(atom)}
    return reduced, [variable in read for variable in jaxpr.invars]


def needed_part(program: ClosedJaxpr, count: int | None = None) -> Any:
    """The jaxpr of a traced program, pruned to its first `count` results."""
    return _prune_program(program, count or len(program.jaxpr.outvars), instantiate=True)[0]


def read_arguments(program: ClosedJaxpr, count: int) -> frozenset[int]:
    """The flat arguments on which the first `count` results of a traced program depend."""
    _, read = _prune_program(program, count, instantiate=False)
    return frozenset(index for index, is_read in enumerate(read) if is_read)


_CONSTRAINT = re.compile(r".+(==|>=|<=).+")


def without_references(program: TracedProgram) -> Any:
    """Returns a program whose references are values that its operations return.

    What has references inside only keeps its operands and results.
    """
    discharge = private("jax._src.state.discharge.discharge_state")
    if discharge is None:
        say_less("jax._src.state.discharge.discharge_state")
        return program
    return discharge(program)


def scope_constraints(scope: jax.export.SymbolicScope) -> tuple[str, ...]:
    """Returns the constraints of a scope of symbolic dimensions, as written."""
    found = getattr(scope, "_explicit_constraints", None)
    if found is not None:
        return tuple(each.debug_str for each in found)
    # After a line with its source location, its text has one line per constraint.
    lines = [line.strip() for line in str(scope).splitlines()[1:]]
    return tuple(line for line in lines if _CONSTRAINT.fullmatch(line))


#: Local variable names for equations in jax's interpreters and ours; without them, nothing is
#: found.
_NAMES = ("eqn", "equation")


def equations_of(error: BaseException) -> list[Any]:
    """Returns the operations whose rules an error passed through, outermost first."""
    found: list[Any] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for equation in map(frame.f_locals.get, _NAMES):
            if hasattr(equation, "primitive") and not any(equation is old for old in found):
                found.append(equation)
    return found
