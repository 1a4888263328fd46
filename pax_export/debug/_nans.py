"""`nans`: the first operation that gives NaN or infinity out of finite numbers.

The function runs as it always does, compiled whole, and its results are looked at on
the device.  Only when one is not finite is the program gone through operation by
operation, from that result back to where it became so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import NonFiniteError
from pax_export._jax import call_with_constants, scan_operands
from pax_export._jaxpr import bound, is_literal, line_of
from pax_export.core import is_array, is_node, labelled, named_leaves, path_in

_ADVICE = {
    "log": "jnp.log(jnp.maximum(x, 1e-12)), or jnp.log1p",
    "log1p": "an operand above -1",
    "div": "x / jnp.where(y == 0, 1, y), with jnp.where around it for the result",
    "rsqrt": "jax.lax.rsqrt(x + 1e-6)",
    "sqrt": "jnp.sqrt(jnp.maximum(x, 1e-12)): at zero its derivative is infinite",
    "exp": "jax.nn.softmax or jax.nn.logsumexp, which subtract the largest first",
    "pow": "a base above zero where the exponent is no integer",
    "dot_general": "smaller numbers, or a dtype with a larger range",
}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class _Found:
    """An operation of a program, with what went in."""

    equation: Any
    path: str
    operands: Sequence[Any]
    results: Sequence[Any]
    rounds: tuple[int, ...] = ()


def nans(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that raises where a result is NaN or infinite, and says why.

    The error names the first operation, in the forward or the backward pass, that gave
    such a number out of finite ones and that the result depends on: the path of the
    module, the line of the source, the operation and its operands.

    Args:
        function: a module, or a function of arrays and modules, such as a whole step of
            training; it is compiled by `jax.jit`.

    Returns:
        A function that is called like it and returns what it returns.  With the watch,
        a call costs what it costs under `jax.jit`, and a look at the results.

    Raises:
        NonFiniteError: (a FloatingPointError; when called) a result, or an argument, is
            not finite.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Identity(), jnp.log)
        >>> try:
        ...     pax.debug.nans(net)(jnp.array([1.0, 0.0]))
        ... except pax.errors.NonFiniteError as error:
        ...     print(error.what, error.got)
        log gives -inf out of finite numbers. float32[2] from 0 to 1
    """
    compiled: dict[Any, Any] = {}

    @functools.wraps(function, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if _is_data(leaf)]
        data = [leaves[place] for place in places]
        static = {n: leaf for n, leaf in enumerate(leaves) if not _is_data(leaf)}

        def call(data: list[Any], around: Callable[[Any], Any] = lambda tree: tree) -> list[Any]:
            given = [static.get(n) for n in range(len(leaves))]
            for place, value in zip(places, data):
                given[place] = value
            args, kwargs = around(jax.tree_util.tree_unflatten(tree, given))
            called = around(function) if is_node(function) else function
            flat, structure = jax.tree_util.tree_flatten(called(*args, **kwargs))
            trees.append(structure)
            return flat

        key = tree, tuple((n, id(leaf)) for n, leaf in static.items())
        if key not in compiled:
            trees: list[Any] = []
            run = jax.jit(lambda data: (flat := call(data), _all_finite(flat)))
            compiled[key] = run, trees, static  # which keeps the ids
        run, trees, _ = compiled[key]
        results, finite = run(data)
        if not finite:
            _explain(call, data, (args, kwargs))
        return jax.tree_util.tree_unflatten(trees[0], results)

    return wrapper


def _is_data(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _all_finite(values: Sequence[Any]) -> Any:
    checks = [jnp.isfinite(value).all() for value in values if _is_inexact(value)]
    return jnp.stack(checks).all() if checks else jnp.array(True)


def _is_inexact(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def _is_bad(value: Any) -> bool:
    return _is_inexact(value) and not bool(jnp.isfinite(value).all())


def _explain(call: Callable[..., Any], data: list[Any], given: Any) -> None:
    for path, leaf in named_leaves(given):
        if _is_bad(jnp.asarray(leaf)) if _is_data(leaf) else False:
            raise NonFiniteError(
                "An argument is not finite already.",
                where=path.partition(".")[2],
                got=_text(leaf),
                write="finite numbers",
            )
    program = jax.make_jaxpr(functools.partial(call, around=_labelled_all))(data)
    found = _first(program, data, "")
    name, source = found.equation.primitive.name, line_of(found.equation)
    bad = next(value for value in found.results if _is_bad(value))
    kind = _kind(bad)
    rounds = "".join(f", round {number} of a loop" for number in found.rounds)
    raise NonFiniteError(
        f"{name} gives {kind} out of finite numbers.",
        where=f"{found.path or '(the root)'}, {source or 'a line that jax does not know'}{rounds}",
        got=", ".join(map(_text, found.operands)),
        write=_ADVICE.get(name, "operands for which it is defined and does not overflow"),
    )


def _kind(value: Any) -> str:
    if bool(jnp.isnan(value).any()):
        return "NaN"
    return "inf" if bool((value == jnp.inf).any()) else "-inf"


def _labelled_all(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: labelled(x) if is_node(x) else x, tree, is_leaf=is_node)


def _text(value: Any) -> str:
    value = jnp.asarray(value)
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if not value.size or not jnp.issubdtype(value.dtype, jnp.number) or jnp.iscomplexobj(value):
        return text
    low, high = float(jnp.nanmin(value)), float(jnp.nanmax(value))
    share = float(jnp.isnan(value).mean()) if _is_inexact(value) else 0.0
    return f"{text} from {low:.4g} to {high:.4g}" + (f", {share:.1%} NaN" if share else "")


# --- from a result back to where it became so -------------------------------------------


def _first(program: Any, arguments: Sequence[Any], around: str) -> _Found:
    """The operation from which what is not finite in the results comes."""
    jaxpr = getattr(program, "jaxpr", program)
    given = (*getattr(program, "consts", ()), *arguments)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), given))
    maker: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        results = bound(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results))
        maker.update(dict.fromkeys(equation.outvars, equation))
    atom = next(atom for atom in jaxpr.outvars if _is_bad(read(atom)))
    while True:
        equation = maker[atom]
        operands = [read(each) for each in equation.invars]
        made = (each for each in equation.invars if not is_literal(each) and each in maker)
        before = next((each for each in made if _is_bad(values[each])), None)
        if before is None:
            break
        atom = before
    path = path_in(equation, around)
    results = [values[out] for out in equation.outvars if out in values]
    return _inside(equation, operands, path) or _Found(equation, path, operands, results)


def _inside(equation: Any, operands: list[Any], path: str) -> _Found | None:
    """Further into what an operation calls, if it calls anything."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _in_scan(params, operands, path)
    if name == "cond":
        index, *rest = operands
        branches = params["branches"]
        return _first(branches[min(max(int(index), 0), len(branches) - 1)], rest, path)
    if name == "while":
        return _in_while(params, operands, path)
    inner = next((params[key] for key in _CALLS if key in params), None)
    return None if inner is None else _first(inner, operands, path)


def _in_scan(params: Any, operands: list[Any], path: str) -> _Found | None:
    fixed, carry, inputs = scan_operands(params, operands)
    body = params["jaxpr"]
    run = jax.jit(lambda *values: call_with_constants(body, {}, values))
    order = range(params["length"])
    for number in reversed(order) if params["reverse"] else order:
        given = [*fixed, *carry, *(each[number] for each in inputs)]
        results = run(*given)
        if any(map(_is_bad, results)):
            found = _first(body, given, path)
            return replace(found, rounds=(number, *found.rounds))
        carry = results[: len(carry)]
    return None


def _in_while(params: Any, operands: list[Any], path: str) -> _Found | None:
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, fixed = operands[:of_test], operands[of_test : of_test + of_body]
    state, number = operands[of_test + of_body :], 0
    again, body = params["cond_jaxpr"], params["body_jaxpr"]
    goes_on = jax.jit(lambda *values: call_with_constants(again, {}, values)[0])
    run = jax.jit(lambda *values: call_with_constants(body, {}, values))
    while bool(goes_on(*test, *state)):
        results = run(*fixed, *state)
        if any(map(_is_bad, results)):
            found = _first(body, [*fixed, *state], path)
            return replace(found, rounds=(number, *found.rounds))
        state, number = results, number + 1
    return None
