"""The context manager of `nans`: checks every computation in a block."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError
from pax_export._jax import is_computing, jitted_call, watched
from pax_export._types import PyTree
from pax_export.core import path_of_call
from pax_export.debug._origin import all_finite, argument_error, is_inexact, operation_error

Explain = Callable[[Callable[..., Any], Any, Any], Exception]
_JITS = ("jit", "pjit")


@contextmanager
def watching(explain: Explain) -> Iterator[None]:
    """While the block runs, what gives NaN or infinity out of finite numbers raises.

    ``explain(function, args, kwargs)`` gives the error of a call of a jitted function.
    """
    if not is_computing():
        raise InvalidArgumentError(
            "The block of pax.debug.nans() is entered while jax traces a function.",
            write="with pax.debug.nans(): around the calls of the jitted function",
        )
    finite = jax.jit(all_finite)

    def heard(
        operation: object, params: PyTree, operands: Sequence[Any], results: Sequence[Any]
    ) -> None:
        looked_at = [value for value in results if is_inexact(value)]
        if looked_at and not finite(looked_at):
            _judge(operation, params, operands, looked_at, explain)

    with watched(heard):
        yield


def _judge(
    operation: PyTree,
    params: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    explain: Explain,
) -> None:
    given = [value for value in operands if is_inexact(value) and not jnp.isfinite(value).all()]
    if given and not any(map(_has_nan, (*given, *results))):
        return  # infinities, as of a mask, that stay what they are
    error = _of_the_function(explain) if operation.name in _JITS else None
    if error is None and given:
        error = argument_error(given[0], _line())
    if error is None:
        program = jax.make_jaxpr(lambda *values: operation.bind(*values, **params))(*operands)
        error = operation_error(program, operands, _line(), path_of_call())
    raise error


def _of_the_function(explain: Explain) -> Exception | None:
    """Traces the call again with labelled modules; None if that is impossible."""
    call = jitted_call()
    if call is None:
        return None
    try:
        return explain(*call)
    except Exception:  # such as static arguments, or a function that does another thing now
        return None


def _line() -> str:
    """The line of the user's code that runs now, as jax writes it."""
    above = (str(Path(jax.__file__).parent), __file__, inspect.getfile(jitted_call))
    frames = reversed(traceback.extract_stack())
    frame = next((each for each in frames if not each.filename.startswith(above)), None)
    return f"{frame.filename}:{frame.lineno} ({frame.name})" if frame else ""


def _has_nan(value: PyTree) -> bool:
    return bool(jnp.isnan(value).any())
