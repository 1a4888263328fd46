"""`nans`: finds the first operation that produces NaN or infinity.

The function runs compiled; only if a result is not finite, the program is evaluated operation by
operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeGuard, TypeVar, overload

import jax
import jax.numpy as jnp

from pax_export._foundations.errors import InvalidArgumentError, NonFiniteError
from pax_export._foundations.jax import (
    call_with_constants,
    is_computing,
    jitted_call,
    scan_operands,
    watch_operations,
)
from pax_export._foundations.jaxpr import (
    bind_equation,
    called_program,
    interpret,
    is_literal,
    jaxpr_of,
    line_now,
    line_of,
)
from pax_export._foundations.types import (
    Array,
    ArrayLike,
    Equation,
    Primitive,
    PyTree,
    TracedProgram,
)
from pax_export.core import (
    Labeling,
    is_array,
    is_node,
    named_leaves,
    path_in,
    path_of_call,
    with_labels,
)
from pax_export.transforms import Folded, fold, unfold

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def nans(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def nans() -> AbstractContextManager[None]: ...
def nans(function: Callable[P, R] | None = None) -> Any:
    """Wraps a function so that NaN or infinity in its results raises a detailed error.

    The error names the first operation, in the forward or the backward pass, that produced the
    number from finite ones, and on which the result depends: the path of the module, the line of
    source, the operation and its operands.

    Values that the function drops are not checked, such as the loss of a step that returns only
    the net: return the loss as well.

    Without a function it is a context manager, ``with pax.debug.nans():``, for unchanged code: it
    checks what jax computes in the block, in this thread: each call of a jitted function as a
    whole, and other code operation by operation.  An infinity that results from infinities, such
    as those of a mask, is ignored there; NaN never is.

    Args:
        function: a module, or a function of arrays and modules, such as a training step; it is
            compiled by `jax.jit`.

    Returns:
        A function with the same arguments and results.  It costs a call under `jax.jit` and a
        check of the results.  The context manager waits for each call, and keeps donated
        arguments (it recompiles their functions for that); it does not see functions compiled
        ahead of time by ``lower().compile()``.

    Raises:
        NonFiniteError: (a FloatingPointError; when called) a result, or an argument, is not
            finite.
        InvalidArgumentError: (of the context manager) it is entered while jax traces a function.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Identity(), jnp.log)
        >>> try:
        ...     pax.debug.nans(net)(jnp.array([1.0, 0.0]))
        ... except pax.errors.NonFiniteError as error:
        ...     print(error.what, error.got)
        log produced -inf from finite numbers. float32[2] from 0 to 1
        >>> step, x = jax.jit(lambda net, x: net(x)), jnp.zeros(2)
        >>> with pax.debug.nans():
        ...     try:
        ...         step(net, x)
        ...     except pax.errors.NonFiniteError as error:
        ...         print(error.what, error.where.split(",")[0])
        log produced -inf from finite numbers. modules.1

    """
    if function is None:
        return _watch_results()
    compiled: dict[Any, Any] = {}

    @functools.wraps(function, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        call = FunctionCall(function, args, kwargs)
        if call.key not in compiled:
            trees: list[Any] = []

            def run(data: list[Any]) -> Any:
                flat, tree = jax.tree_util.tree_flatten(call(data))
                trees.append(tree)
                return flat, all_finite(flat)

            compiled[call.key] = jax.jit(run), trees, call.static  # which keeps the ids
        run, trees, _ = compiled[call.key]
        results, finite = run(call.data)
        if not finite:
            raise _error_of(call)
        return jax.tree_util.tree_unflatten(trees[0], results)

    return wrapper


class FunctionCall:
    """A call of a function: its data and its static arguments."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ):
        self.function = function
        leaves, self.tree = jax.tree_util.tree_flatten((args, kwargs))
        self.count = len(leaves)
        self.places = [n for n, leaf in enumerate(leaves) if is_data(leaf)]
        self.data = [leaves[index] for index in self.places]
        self.static = {n: leaf for n, leaf in enumerate(leaves) if not is_data(leaf)}
        self.key = self.tree, tuple((n, id(leaf)) for n, leaf in self.static.items())

    def arguments(self, data: list[Any]) -> tuple[tuple, dict[str, Any]]:
        leaves = [self.static.get(n) for n in range(self.count)]
        for index, value in zip(self.places, data):
            leaves[index] = value
        return jax.tree_util.tree_unflatten(self.tree, leaves)

    def __call__(self, data: list[Any]) -> Any:
        args, kwargs = self.arguments(data)
        return self.function(*args, **kwargs)

    def traced(self, label: Labeling) -> Any:
        """The traced call, with labeled modules."""

        def run(data: list[Any]) -> list[Any]:
            args, kwargs = _labeled_all(self.arguments(data), label)
            function = _labeled_all(self.function, label)
            return jax.tree_util.tree_leaves(function(*args, **kwargs))

        return jax.make_jaxpr(run)(self.data)


def _error_of(call: FunctionCall) -> Exception:
    """The error for a call with a non-finite result."""
    for path, leaf in named_leaves(call.arguments(call.data)):
        if is_data(leaf) and is_bad(jnp.asarray(leaf)):
            return argument_error(leaf, path.partition(".")[2])
    return operation_error(with_labels(call.traced), call.data, line_now())


def is_data(leaf: object) -> TypeGuard[ArrayLike]:
    """Whether jax takes a leaf of the arguments as data."""
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _labeled_all(tree: PyTree, label: Labeling) -> Any:
    def labeled(value: Any) -> Any:
        if isinstance(value, Folded):  # a module, as `transforms.jit` hands it on
            return fold(label(unfold(value)))
        return label(value) if is_node(value) else value

    is_leaf = lambda value: is_node(value) or isinstance(value, Folded)  # noqa: E731
    return jax.tree_util.tree_map(labeled, tree, is_leaf=is_leaf)


@contextmanager
def _watch_results() -> Iterator[None]:
    """Raises an error if finite numbers result in NaN or infinity."""
    if not is_computing():
        raise InvalidArgumentError(
            "The block of pax.debug.nans() is entered while jax traces a function.",
            write="with pax.debug.nans(): around the calls of the jitted function",
        )
    finite = jax.jit(all_finite)

    def heard(
        operation: Primitive,
        params: Mapping[str, Any],
        operands: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        looked_at = [value for value in results if is_inexact(value)]
        if looked_at and not finite(looked_at):
            _judge_operation(operation, params, operands, looked_at)

    with watch_operations(heard):
        yield


def _judge_operation(
    operation: Primitive,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    results: Sequence[Any],
) -> None:
    non_finite = [value for value in operands if is_bad(value)]
    if non_finite and not any(bool(jnp.isnan(value).any()) for value in (*non_finite, *results)):
        return  # unchanged infinities, such as those of a mask
    error = _error_of_jitted() if operation.name in ("jit", "pjit") else None
    if error is None and non_finite:
        error = argument_error(non_finite[0], line_now())
    if error is None:
        program = jax.make_jaxpr(lambda *values: operation.bind(*values, **params))(*operands)
        error = operation_error(program, operands, line_now(), path_of_call())
    raise error


def _error_of_jitted() -> Exception | None:
    """Traces the call again with labeled modules; None if that is impossible."""
    call = jitted_call()
    if call is None:
        return None
    try:
        return _error_of(FunctionCall(*call))
    except Exception:  # such as static arguments, or a function with side effects
        return None


# --- Traces a non-finite result back to the operation that produced it ---------------------------

_ADVICE = {
    "log": "jnp.log(jnp.maximum(x, 1e-12)), or jnp.log1p",
    "log1p": "an operand above -1",
    "div": "x / jnp.where(y == 0, 1, y), with jnp.where around it for the result",
    "rsqrt": "jax.lax.rsqrt(x + 1e-6)",
    "sqrt": "jnp.sqrt(jnp.maximum(x, 1e-12)): at zero its derivative is infinite",
    "exp": "jax.nn.softmax or jax.nn.logsumexp, which subtract the largest first",
    "pow": "a base above zero where the exponent is no integer",
    "dot_general": "smaller numbers, or a dtype with a larger range",
    "convert_element_type": "smaller numbers, or bfloat16, which has the range of float32",
}


@dataclass(frozen=True)
class _Producer:
    """An operation of a program with its operands; None for a constant."""

    equation: Any
    path: str
    operands: Sequence[Any]
    results: Sequence[Any]
    rounds: tuple[int, ...] = ()
    line: str = ""  # of the call around it, where jax keeps none for the operation


def operation_error(
    program: TracedProgram, arguments: Sequence[Any], line: str = "", path: str = ""
) -> NonFiniteError:
    """Names the first operation with a non-finite result; `line` and `path` are the call's."""
    found = _first_producer(program, arguments, path)
    if found.equation is None:
        return NonFiniteError(
            "A constant that is returned is not finite.",
            where=found.path or "(the root)",
            got=_text(found.results[0]),
            write="finite numbers",
        )
    name, source = found.equation.primitive.name, line_of(found.equation) or found.line or line
    bad = next(value for value in found.results if is_bad(value))
    rounds = "".join(f", round {number} of a loop" for number in found.rounds)
    return NonFiniteError(
        f"{name} produced {_kind_of(bad)} from finite numbers.",
        where=f"{found.path or '(the root)'}, {source or 'an unknown line'}{rounds}",
        got=", ".join(map(_text, found.operands)),
        write=_ADVICE.get(name, "operands for which it is defined and does not overflow"),
    )


def argument_error(value: ArrayLike, where: str) -> NonFiniteError:
    """The message for inputs that are not finite."""
    return NonFiniteError(
        "An argument is not finite already.", where=where, got=_text(value), write="finite numbers"
    )


def all_finite(values: Sequence[Any]) -> Any:
    """Whether each of some arrays is finite, as a value on the device."""
    # Zeros add up to zero: XLA sums numbers faster than it joins truth values, and its largest
    # number of some is no NaN on every machine.
    sums = [jnp.abs(jnp.sum(jnp.asarray(value) * 0)) for value in values if is_inexact(value)]
    return jnp.isfinite(sum(each.astype(jnp.float32) for each in sums))


def is_inexact(value: ArrayLike) -> bool:
    """Whether a value can have NaN or infinities in it."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)  # type: ignore


def is_bad(value: ArrayLike) -> bool:
    """Whether NaN or an infinity is in a value."""
    return is_inexact(value) and not bool(jnp.isfinite(value).all())


def _kind_of(value: Array) -> str:
    if bool(jnp.isnan(value).any()):
        return "NaN"
    return "inf" if bool((value == jnp.inf).any()) else "-inf"


def _text(value: ArrayLike) -> str:
    value = jnp.asarray(value)
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if not value.size or not jnp.issubdtype(value.dtype, jnp.number) or jnp.iscomplexobj(value):
        return text
    low, high = float(jnp.nanmin(value)), float(jnp.nanmax(value))
    share = float(jnp.isnan(value).mean()) if is_inexact(value) else 0.0
    return f"{text} from {low:.4g} to {high:.4g}" + (f", {share:.1%} NaN" if share else "")


def _first_producer(program: TracedProgram, arguments: Sequence[Any], around: str) -> _Producer:
    """The operation that produced the non-finite values of the results."""
    producers: dict[Any, _Producer] = {}  # by variable

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        results = bind_equation(equation, operands)
        path = path_in(equation, around)
        producers.update(
            dict.fromkeys(equation.outvars, _Producer(equation, path, operands, results))
        )
        return results

    outputs = zip(jaxpr_of(program).outvars, interpret(program, arguments, operate))
    atom, value = next((atom, value) for atom, value in outputs if is_bad(value))
    found = None if is_literal(atom) else producers.get(atom)
    if found is None:
        return _Producer(None, around, (), (value,))
    while before := _bad_operand(found, producers):
        found = before
    inside = _find_inside(found)
    if inside is None:
        return found
    return replace(inside, line=inside.line or line_of(found.equation))


def _bad_operand(found: _Producer, producers: dict[Any, _Producer]) -> _Producer | None:
    """Returns the operation that produced a non-finite operand; None if all are finite."""
    operands = zip(found.equation.invars, found.operands)
    bad = (atom for atom, value in operands if not is_literal(atom) and is_bad(value))
    return next((producers[atom] for atom in bad if atom in producers), None)


def _find_inside(found: _Producer) -> _Producer | None:
    """The operation in the program that this one calls, if it calls any."""
    path, operands = found.path, list(found.operands)
    name, params = found.equation.primitive.name, found.equation.params
    if name == "scan":
        return _in_scan(params, operands, path)
    if name == "cond":
        index, *rest = operands
        branches = params["branches"]
        return _first_producer(branches[min(max(int(index), 0), len(branches) - 1)], rest, path)
    if name == "while":
        return _in_while(params, operands, path)
    inner = called_program(found.equation)
    return None if inner is None else _first_producer(inner, operands, path)


def _in_scan(params: Mapping[str, Any], operands: list[Any], path: str) -> _Producer | None:
    fixed, carry, inputs = scan_operands(params, operands)
    body = params["jaxpr"]
    run = jax.jit(lambda *values: call_with_constants(body, {}, values))
    order = range(params["length"])
    for number in reversed(order) if params["reverse"] else order:
        arguments = [*fixed, *carry, *(each[number] for each in inputs)]
        results = run(*arguments)
        if any(map(is_bad, results)):
            found = _first_producer(body, arguments, path)
            return replace(found, rounds=(number, *found.rounds))
        carry = results[: len(carry)]
    return None


def _in_while(params: Mapping[str, Any], operands: list[Any], path: str) -> _Producer | None:
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, fixed = operands[:of_test], operands[of_test : of_test + of_body]
    state, number = operands[of_test + of_body :], 0
    again, body = params["cond_jaxpr"], params["body_jaxpr"]
    goes_on = jax.jit(lambda *values: call_with_constants(again, {}, values)[0])
    run = jax.jit(lambda *values: call_with_constants(body, {}, values))
    while bool(goes_on(*test, *state)):
        results = run(*fixed, *state)
        if any(map(is_bad, results)):
            found = _first_producer(body, [*fixed, *state], path)
            return replace(found, rounds=(number, *found.rounds))
        state, number = results, number + 1
    return None
