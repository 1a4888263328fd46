"""Gradients with respect to the parameters of modules.

jax sees the leaves that ``wrt`` selects, and all leaves outside of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import tree_map, tree_structure

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotDifferentiableError,
    a_few,
)
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import (
    EmptyNode,
    Node,
    Param,
    Selector,
    as_filter,
    describe_array,
    differentiating,
    has_names,
    is_node,
    join_path,
    leaves_of,
    path_name,
    require_names,
    warn_of_untrained,
)
from pax_export.transforms._lift import (
    LiftedCall,
    Result,
    argument_places,
    as_pair,
    describe_result,
    is_arraylike,
    wrap_like,
)

P = ParamSpec("P")
T = TypeVar("T")

#: Applied to each function before this thread differentiates it.
_prepare: ContextVar[Callable[[Callable], Callable] | None] = ContextVar(
    "pax_export_prepare", default=None
)


@contextmanager
def prepared_gradients(prepare: Callable[[Callable], Callable]) -> Iterator[None]:
    """Context manager for gradients of ``prepare(function)`` in this thread, for symbolic sizes."""
    token = _prepare.set(prepare)
    try:
        yield
    finally:
        _prepare.reset(token)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Selector = Param,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns a loss and its gradients.

    Args:
        fun: takes modules and returns a scalar loss, or ``(loss, aux)``.  Inside,
            modules are mutable copies, as in `pure`: return one in ``aux`` to keep its changes.
        argnums: the positional arguments to differentiate: an integer or several; negative ones
            count from the end.  They may be modules, arrays, or pytrees of both.  (True or False
            means ``has_aux``, PAX's second argument.)
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        holomorphic: as in `jax.grad`.
        allow_int: whether integer leaves may be differentiated; their gradients
            have the dtype float0.
        wrt: a filter that selects the leaves of modules to differentiate; the
            trainable ones by default.

    Returns:
        A function of the same arguments that returns ``(value, grads)`` or
        ``((value, aux), grads)``.  The gradient of a module has the structure of
        its ``parameters()``, or of the module with an EmptyNode at each leaf
        that ``wrt`` does not select; for several argnums there is a tuple of
        gradients.

    Raises:
        InvalidArgumentTypeError: (a TypeError) ``wrt`` is not a filter; (a ValueError,
            when called) no argument holds a module.
        NotDifferentiableError: (a TypeError, when called) an integer leaf.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> def loss_fn(layer, x):
        ...     return jnp.sum(layer(x))
        >>> layer, x = pax.Linear(2, 3), jnp.ones((4, 2))
        >>> loss, grads = pax.value_and_grad(loss_fn)(layer, x)
        >>> loss.shape, grads.weight.shape
        ((), (2, 3))
    """
    if isinstance(argnums, bool):
        argnums, has_aux = 0, argnums
    numbers = argnums if isinstance(argnums, Sequence) else [argnums]
    select = as_filter(wrt)
    take = _loss_and_aux if has_aux else _loss_alone

    @wrap_like(fun)
    def value_and_grad_fun(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        call = LiftedCall(fun, args, kwargs)
        places = argument_places("argnums", numbers, len(args))
        _require_module(argnums, args, call)
        targets = [_DiffArgument(args[argnum], call, argnum, wrt, select) for argnum in places]
        _require_match(wrt, targets)
        if not allow_int:
            for target in targets:
                target.require_inexact()
        results: list[Result] = []

        def loss(selected: dict[int, Any]) -> tuple[Any, list[Any]]:
            token = differentiating.set(True)
            try:
                results.append(call.inside(selected, take))
            finally:
                differentiating.reset(token)
            return results[-1].head, results[-1].leaves

        prepare = _prepare.get()
        differentiated = prepare(loss) if prepare else loss
        (value, rest), grads = jax.value_and_grad(
            differentiated, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )({number: call.leaves[number] for target in targets for number in target.numbers})
        aux = call.finish(results[-1], rest)
        trees = tuple([target.tree(grads) for target in targets])
        return (value, aux) if has_aux else value, trees[0] if _is_one(argnums) else trees

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Selector = Param,
) -> Callable[..., Any]:
    """Makes a function that returns the gradients of a loss.

    Args:
        fun: takes a module first and returns a scalar loss, or ``(loss, aux)``.
        argnums: as in `value_and_grad`, like all following arguments.
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        holomorphic: as in `jax.grad`.
        allow_int: whether integer leaves may be differentiated.
        wrt: a filter that selects the leaves of modules to differentiate.

    Returns:
        A function of the same arguments that returns ``grads`` or
        ``(grads, aux)``.

    Raises:
        InvalidArgumentTypeError: (a TypeError) ``wrt`` is not a filter; (a ValueError,
            when called) no argument contains a module.
        NotDifferentiableError: (a TypeError, when called) an integer leaf.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer, x = pax.Linear(2, 3), jnp.ones((4, 2))
        >>> grads = pax.grad(lambda layer, x: jnp.sum(layer(x)))(layer, x)
        >>> pax.assert_structure_equal(grads, layer.parameters())
        True
    """
    if isinstance(argnums, bool):
        argnums, has_aux = 0, argnums
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, wrt=wrt)

    @wrap_like(fun)
    def grad_fun(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def _loss_alone(value: T) -> tuple[T, None]:
    _require_number(value, "return loss; or has_aux=True to return loss, aux")
    return value, None


def _loss_and_aux(value: object) -> tuple[Any, Any]:
    loss, aux = as_pair(
        value,
        "With has_aux=True the function must return a pair: the loss, and what else to return.",
        write="return loss, aux",
    )
    _require_number(loss, "return loss, aux")
    return loss, aux


def _require_number(loss: Any, write: str) -> None:
    """Raises if the loss is not a scalar, with a message that covers modules and aux."""
    is_array = hasattr(loss, "dtype") and hasattr(loss, "shape")
    if isinstance(loss, (int, float, complex)) or (is_array and loss.shape == ()):
        return
    raise InvalidArgumentTypeError(
        "A gradient needs one number: the function must return a scalar loss.",
        got=describe_array(loss) if is_array else describe_result(loss),
        write=f"return {'loss.mean()' if is_array else write.removeprefix('return ')}",
    )


def _is_one(argnums: int | Sequence[int]) -> bool:
    return not isinstance(argnums, Sequence)


def _require_module(argnums: int | Sequence[int], args: tuple, call: LiftedCall) -> None:
    """Refuses, as PAX does, a gradient without any module."""
    if not call.roots and _is_one(argnums) and not argnums:
        raise InvalidArgumentTypeError(
            "Gradients are taken with respect to a module: the first argument must be one.",
            got=f"{type(args[0]).__name__}: {args[0]!r}"[:200],
            write="loss_fn(model, ...), or jax.grad for a function of arrays",
        )


def _require_match(wrt: Selector, targets: Sequence[_DiffArgument]) -> None:
    """Raises if ``wrt`` names what no module to differentiate has, or names and selects nothing."""
    modules = [part.value for target in targets for part in target.parts if part.is_module]
    is_class = isinstance(wrt, type) and issubclass(wrt, Node)
    if not modules or not (is_class or has_names(wrt)):
        return
    require_names(wrt, modules, "grad(wrt=...)")
    if not any(target.selects_in_modules for target in targets):
        paths = [leaf.name for module in modules for leaf in leaves_of(module)]
        raise InvalidArgumentError(
            "wrt selects no leaf of the modules, so there are no gradients.",
            where="grad(wrt=...)",
            got=repr(wrt),
            write=f"a filter that selects some: {a_few(paths, 5)}"
            if paths
            else "modules with leaves",
        )


class _DiffArgument:
    """An argument to differentiate, and the numbers of the leaves that are."""

    def __init__(
        self, argument: PyTree, call: LiftedCall, argnum: int, wrt: Selector, select: Callable
    ):
        self.argument, self.call, self.place = argument, call, argnum
        self.by_parameters = wrt is Param
        self.parts = call.parts_at(argnum)
        for part in self.parts:
            if part.is_module and self.by_parameters:
                warn_of_untrained(part.value)
        # Now, because the function may change modules that are open.
        self.treedefs = [
            tree_structure(p.value.parameters() if self.by_parameters else p.value)
            if p.is_module
            else None
            for p in self.parts
        ]
        masks = [select(p.value) if p.is_module else [True] for p in self.parts]
        self.masks = [
            [n if chosen else None for n, chosen in zip(range(p.start, p.stop), mask)]
            for p, mask in zip(self.parts, masks)
        ]
        self.numbers = [n for mask in self.masks for n in mask if n is not None]
        self.selects_in_modules = any(
            True in mask for part, mask in zip(self.parts, masks) if part.is_module
        )

    def require_inexact(self) -> None:
        """Raises if a leaf to differentiate is neither real nor complex."""
        for part, mask in zip(self.parts, self.masks):
            for at, number in enumerate(mask):
                if number is None or _is_inexact(self.call.leaves[number]):
                    continue
                inside = path_name(part.path[2:])
                name = leaves_of(part.value)[at].name if part.is_module else ""
                raise NotDifferentiableError(
                    "A gradient needs real or complex numbers.",
                    where=join_path(inside, name) if name else inside or f"argument {self.place}",
                    got=describe_array(self.call.leaves[number]),
                    write="parameters = pax.parameters_method(...) without it, or allow_int=True",
                )

    def tree(self, grads: dict[int, Any]) -> Any:
        """The gradients in the structure of the argument."""
        parts = iter(zip(self.parts, self.masks, self.treedefs))

        def fill(_: Node | ArrayLike) -> Any:
            part, mask, treedef = next(parts)
            if treedef is None:
                return grads[part.start]
            found = [EmptyNode() if n is None else grads[n] for n in mask]
            if self.by_parameters:  # whose method may omit whole submodules
                found = [x for x in found if not isinstance(x, EmptyNode)]
            return treedef.unflatten(found)

        return tree_map(fill, self.argument, is_leaf=is_node)


def _is_inexact(leaf: object) -> bool:
    return is_arraylike(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
