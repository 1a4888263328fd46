"""`nans`: finds the first operation that produces NaN or infinity.

The function runs compiled; only if a result is not finite, the program is evaluated operation by
operation.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp

from pax_export._errors import InvalidArgumentError
from pax_export._jax import is_computing, jitted_call, watch_operations
from pax_export._types import PyTree
from pax_export.core import Labeling, is_array, is_node, named_leaves, path_of_call, with_labels
from pax_export.debug._origin import all_finite, argument_error, is_bad, is_inexact, operation_error
from pax_export.transforms import Folded, fold, unfold


@overload
def nans(function: Callable[..., Any]) -> Callable[..., Any]: ...
@overload
def nans() -> AbstractContextManager[None]: ...
def nans(function: Callable[..., Any] | None = None) -> Any:
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
        return watch_results(explained)
    compiled: dict[Any, Any] = {}

    @functools.wraps(function, updated=())
    def wrapper(*args: object, **kwargs: object) -> Any:
        call = _FunctionCall(function, args, kwargs)
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


def explained(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Exception:
    """The error for a call with a non-finite result."""
    return _error_of(_FunctionCall(function, args, kwargs))


class _FunctionCall:
    """A call of a function: its data and its static arguments."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ):
        self.function = function
        leaves, self.tree = jax.tree_util.tree_flatten((args, kwargs))
        self.count = len(leaves)
        self.places = [n for n, leaf in enumerate(leaves) if _is_data(leaf)]
        self.data = [leaves[place] for place in self.places]
        self.static = {n: leaf for n, leaf in enumerate(leaves) if not _is_data(leaf)}
        self.key = self.tree, tuple((n, id(leaf)) for n, leaf in self.static.items())

    def arguments(self, data: list[Any]) -> tuple[tuple, dict[str, Any]]:
        given = [self.static.get(n) for n in range(self.count)]
        for place, value in zip(self.places, data):
            given[place] = value
        return jax.tree_util.tree_unflatten(self.tree, given)

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


def _error_of(call: _FunctionCall) -> Exception:
    for path, leaf in named_leaves(call.arguments(call.data)):
        if _is_data(leaf) and is_bad(jnp.asarray(leaf)):
            return argument_error(leaf, path.partition(".")[2])
    return operation_error(with_labels(call.traced), call.data)


def _is_data(leaf: object) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _labeled_all(tree: PyTree, label: Labeling) -> Any:
    def labeled(value: object) -> Any:
        if _is_folded(value):  # a module, as `transforms.jit` hands it on
            return fold(label(unfold(value)))
        return label(value) if is_node(value) else value

    return jax.tree_util.tree_map(labeled, tree, is_leaf=lambda x: is_node(x) or _is_folded(x))


def _is_folded(value: object) -> bool:
    return isinstance(value, Folded)


Explain = Callable[[Callable[..., Any], Any, Any], Exception]
_JITS = ("jit", "pjit")


@contextmanager
def watch_results(explain: Explain) -> Iterator[None]:
    """Raises ``explain(function, args, kwargs)`` if finite numbers result in NaN or infinity."""
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
            _judge_operation(operation, params, operands, looked_at, explain)

    with watch_operations(heard):
        yield


def _judge_operation(
    operation: PyTree,
    params: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    explain: Explain,
) -> None:
    given = [value for value in operands if is_inexact(value) and not jnp.isfinite(value).all()]
    if given and not any(map(_has_nan, (*given, *results))):
        return  # unchanged infinities, such as those of a mask
    error = _of_the_function(explain) if operation.name in _JITS else None
    if error is None and given:
        error = argument_error(given[0], _users_line())
    if error is None:
        program = jax.make_jaxpr(lambda *values: operation.bind(*values, **params))(*operands)
        error = operation_error(program, operands, _users_line(), path_of_call())
    raise error


def _of_the_function(explain: Explain) -> Exception | None:
    """Traces the call again with labeled modules; None if that is impossible."""
    call = jitted_call()
    if call is None:
        return None
    try:
        return explain(*call)
    except Exception:  # such as static arguments, or a function with side effects
        return None


def _users_line() -> str:
    """The line of the user's code that runs now, as jax writes it."""
    above = (str(Path(jax.__file__).parent), __file__, inspect.getfile(jitted_call))
    frames = reversed(traceback.extract_stack())
    frame = next((each for each in frames if not each.filename.startswith(above)), None)
    return f"{frame.filename}:{frame.lineno} ({frame.name})" if frame else ""


def _has_nan(value: PyTree) -> bool:
    return bool(jnp.isnan(value).any())
