"""jit for functions of modules."""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeGuard, TypeVar

import jax
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import PyTree, TreeDef
from pax_export.core import (
    Node,
    anything_is_open,
    from_folded,
    is_labeled,
    is_node,
    is_open,
    keys_changed_by,
)
from pax_export.transforms._lift import (
    Held,
    LiftedCall,
    Origins,
    have_overlap,
    put_back,
    require_array_results,
    roots_of,
    take_out,
    unwrap_static,
    wrap_static,
    write_back,
)
from pax_export.transforms._sharding import constrain_leaves

_UNSPECIFIED: Any = inspect.signature(jax.jit).parameters["in_shardings"].default

#: Whether arrays of modules are constrained to their specs, or a function of a module that does.
Constraint = bool | Callable[[Any], Any]

#: The keyword of the modules that are donated.
STATE = "_pax_state"

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def jit(
    fun: Callable[P, R],
    *,
    in_shardings: object = _UNSPECIFIED,
    out_shardings: object = _UNSPECIFIED,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: object = None,
    backend: str | None = None,
    inline: bool = False,
    donate_state: bool = False,
    constrain_state: Constraint = False,
) -> Jitted[P, R]:
    """Compiles a function that takes and returns modules.

    It equals ``jax.jit(pax.pure(fun))``. A module argument that is mutable at the call is updated
    in place.

    Args:
        fun: the function.  A module or a bound method is captured: its arrays are constants of the
            program, and it is immutable.
        in_shardings: as in `jax.jit`: prefixes, or trees of the classes of the
            arguments, as `get_named_sharding` makes them.
        out_shardings: the same for results.
        static_argnums: as in `jax.jit`.
        static_argnames: as in `jax.jit`.
        donate_argnums: as in `jax.jit`.
        donate_argnames: as in `jax.jit`.
        keep_unused: as in `jax.jit`.
        device: as in `jax.jit`.
        backend: as in `jax.jit`.
        inline: as in `jax.jit`.
        donate_state: whether the arrays of all modules among the arguments are
            donated, and no others; with ``in_shardings``, an argument with modules must contain
            nothing else.
        constrain_state: True constrains the arrays of modules, at entry and at
            exit, to the partition specs that the modules declare; a function
            takes a module and returns it with constraints of its own.

    Returns:
        A function of the same arguments, with the methods ``lower``, ``trace``,
        ``eval_shape`` and ``clear_cache`` that ``jax.jit`` gives.

    Raises:
        ValueError: the function has no such argument.
        InvalidArgumentError: (a ValueError, when called) an argument with modules and other arrays
            beside ``donate_state`` and ``in_shardings``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> @T.jit
        ... def step(net, x):
        ...     return net, net(x)
        >>> net, y = step(pax.Dropout(0.5), jnp.ones((2, 3)))
        >>> y.shape
        (2, 3)
    """
    options: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    # Passed only if given: jax warns about them, or will.
    options |= {k: v for k, v in {"device": device, "backend": backend}.items() if v is not None}
    if in_shardings is not _UNSPECIFIED:
        options["in_shardings"] = in_shardings
    if out_shardings is not _UNSPECIFIED:
        options["out_shardings"] = out_shardings
    return Jitted(fun, options, donate_state, constrain_state)


class Jitted(Generic[P, R]):
    """A function that `jit` compiled."""

    def __init__(
        self, fun: Callable[P, R], options: dict[str, Any], donate: bool, constraint: Constraint
    ):
        functools.update_wrapper(self, fun, updated=())
        self._traced = _TracedFunction(fun, options, constraint)
        self._options, self._donate = options, donate
        # With `in_shardings` jax accepts no keywords, so whole arguments are donated.
        self._has_shardings = "in_shardings" in options
        # jax caches what it compiles, too, but `jax.jit` itself takes 0.2 ms.
        self._programs: dict[tuple, Any] = {}
        self._program((), False, ())  # now, so that jax checks the options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        wrapped: Any = args
        if self._traced.has_static:
            wrapped, kwargs = self._traced.wrap_static(args, kwargs)  # type: ignore[assignment]
        arguments = [fold(x) for x in wrapped]
        keywords = fold(kwargs) if kwargs else kwargs
        roots = roots_of((tuple(wrapped), kwargs)) if anything_is_open() else []
        written, donated = tuple(map(is_open, roots)), ()
        if not any(written):
            written = ()
        if self._donate and self._has_shardings:
            donated = self._only_modules(arguments, _is_folded)
        elif self._donate:
            (arguments, keywords), state = take_out((arguments, keywords), _is_folded)
            keywords = {**keywords, STATE: state}
        if self._traced.has_static:
            arguments, keywords = unwrap_static(arguments, keywords)
        program = self._program(written, have_overlap(roots, written), donated)
        value, (finals, origins) = program(*arguments, **keywords)
        if not written:
            return unfold(value)
        return write_back(roots, unfold(value), unfold(finals), origins.value)

    def __get__(self, instance: Node | None, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def lower(self, *args: object, **kwargs: object) -> Any:
        """Lowers as `jax.jit` does; the compiled program takes and returns modules."""
        return self._on_modules(args).lower(*args, **kwargs)

    def trace(self, *args: object, **kwargs: object) -> Any:
        """Traces as `jax.jit` does, also for `jax.export.export`."""
        return self._on_modules(args).trace(*args, **kwargs)

    def eval_shape(self, *args: object, **kwargs: object) -> Any:
        """The result of a call with shapes and dtypes in place of arrays."""
        return self._on_modules(args).eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets the compiled programs."""
        self._programs.clear()

    def _program(self, written: tuple[bool, ...], overlap: bool, donated: tuple[int, ...]) -> Any:
        """The program of calls with these open modules and donated arguments."""
        key = written, overlap, donated
        if key not in self._programs:
            options = _with_donated(self._options, donated)
            if self._has_shardings:
                options["in_shardings"] = fold(options["in_shardings"])
            elif self._donate:
                options["donate_argnames"] = (*_as_tuple(options["donate_argnames"]), STATE)
            if "out_shardings" in options:  # None for updated modules
                options["out_shardings"] = (fold(options["out_shardings"]), None)
            self._programs[key] = jax.jit(self._traced.on_folded(written, overlap), **options)
        return self._programs[key]

    def _on_modules(self, args: tuple) -> Any:
        """Returns ``jax.jit(pax.pure(fun))``: whoever keeps its program passes modules to it."""
        donated = self._only_modules(args, is_node) if self._donate else ()
        if donated not in self._programs:
            options = _with_donated(self._options, donated)
            self._programs[donated] = jax.jit(self._traced.on_modules(), **options)
        return self._programs[donated]

    def _only_modules(
        self, arguments: Sequence[Any], is_module: Callable[[Any], bool]
    ) -> tuple[int, ...]:
        """Returns the arguments that consist of modules; jax donates others only as a whole."""
        numbers = []
        for number, argument in enumerate(arguments):
            rest, modules = take_out(argument, is_module)
            if modules and not tree_leaves(rest):
                numbers.append(number)
            elif modules and self._has_shardings:
                raise InvalidArgumentError(
                    "With in_shardings, donate_state donates whole arguments.",
                    where=f"argument {number}",
                    got="modules and other arrays",
                    write="the modules as an argument of their own, or donate_argnums",
                )
        return tuple(numbers)


def _with_donated(options: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """A copy of the options with these arguments donated, too."""
    if not numbers:
        return dict(options)
    donated = {*_as_tuple(options["donate_argnums"]), *numbers}
    return {**options, "donate_argnums": tuple(sorted(donated))}


def _as_tuple(option: int | str | Iterable[Any] | None) -> tuple[Any, ...]:
    """The numbers or names of an option of `jax.jit`."""
    return (option,) if isinstance(option, (int, str)) else tuple(option or ())


class _TracedFunction:
    """The function as jax traces it: of modules, or of folded ones."""

    def __init__(self, fun: Callable, options: dict[str, Any], constraint: Constraint):
        self.fun, self.constraint, self.has_warned = fun, constraint, False
        try:
            self.signature = inspect.signature(fun)
        except (TypeError, ValueError):
            self.signature = inspect.signature(lambda *args, **kwargs: None)
        positional = [
            p.name
            for p in self.signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        numbers = _as_tuple(options["static_argnums"])
        names = _as_tuple(options["static_argnames"])
        inside = range(-len(positional), len(positional))
        # As jax infers the numbers from the names, and the names from the numbers.
        self.numbers = numbers or [positional.index(name) for name in names if name in positional]
        self.names = names or [positional[number] for number in numbers if number in inside]
        self.has_static = bool(self.numbers or self.names)

    def wrap_static(self, args: Sequence[Any], kwargs: dict) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with those that are static hidden from jax's trees."""
        wrapped = {k: Held(x) if k in self.names else x for k, x in kwargs.items()}
        return wrap_static(args, self.numbers), wrapped

    def on_modules(self) -> Callable:
        """The function on modules, as `pure` makes it."""

        def program(*args: PyTree, **kwargs: PyTree) -> Any:
            return self._run(*self.wrap_static(args, kwargs), (), False)[0]

        return self._with_signature(program)

    def on_folded(self, written: tuple[bool, ...], overlap: bool) -> Callable:
        """The function that calls compile: of folded modules, of which some are written back."""

        def program(*args: PyTree, **kwargs: PyTree) -> tuple[Any, tuple[Any, _StaticOrigins]]:
            state = kwargs.pop(STATE, ())
            wrapped = self.wrap_static(args, kwargs)
            arguments, keywords = unfold(put_back(wrapped, state) if state else wrapped)
            value, finals, origins = self._run(arguments, keywords, written, overlap)
            return fold(value), (tuple(map(fold, finals)), _StaticOrigins(origins))

        return self._with_signature(program)

    def _with_signature(self, program: Callable) -> Callable:
        """Returns the program with a signature, so that jax resolves the names of arguments."""
        parameters = list(self.signature.parameters.values())
        at = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
        parameters.insert(at, inspect.Parameter(STATE, inspect.Parameter.KEYWORD_ONLY, default=()))
        program.__signature__ = self.signature.replace(parameters=parameters)  # type: ignore
        program.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__)
        return program

    def _run(
        self, args: Sequence[Any], kwargs: dict, written: tuple[bool, ...], overlap: bool
    ) -> tuple[Any, Collection[Any], Origins]:
        """Returns the value, the final state of the modules that are open, and its origins."""
        args, kwargs = _constrain_modules((tuple(args), kwargs), self.constraint)
        call = LiftedCall(self.fun, args, kwargs, written=written or None, overlap=overlap)
        with keys_changed_by(self._warn):
            result = call.inside()
        require_array_results(result.parts, "jit")
        value, finals = result.treedef.unflatten(result.leaves)
        value, finals = _constrain_modules((value, finals), self.constraint)
        return value, finals.values(), result.origins

    def _warn(self, key: jax.Array) -> jax.Array:
        """Warns, once for a function, that a key is drawn while it is compiled."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "next_rng_key() was called while jit compiled a function: the key is a "
                "constant of the program, the same in every call. Pass a key as an argument, "
                "or a module that has one, such as pax.RngSeq.",
                stacklevel=4,
            )
        return key


@jax.tree_util.register_static
@dataclass(frozen=True)
class _StaticOrigins:
    """Origins, in the structure of a result."""

    value: Origins


def _constrain_modules(tree: T, constraint: Constraint) -> T:
    if constraint is False:
        return tree
    constrain_one = constrain_leaves if constraint is True else constraint
    return tree_map(lambda x: constrain_one(x) if is_node(x) else x, tree, is_leaf=is_node)


class Folded:
    """A module as the pair ``((leaves,), treedef)``: jax flattens a list fastest."""

    __slots__ = ("pair",)

    def __init__(self, pair: tuple[Any, Any]):
        self.pair = pair


jax.tree_util.register_pytree_node(
    Folded, operator.attrgetter("pair"), lambda treedef, children: Folded((children, treedef))
)


@functools.lru_cache(maxsize=1024)
def _intern_treedef(treedef: TreeDef) -> Any:
    """The first of all equal treedefs: jax then compares pointers."""
    return treedef


def _fold_module(module: Node) -> Folded:
    pair = module._pax_folded
    if pair is None:
        leaves, treedef = tree_flatten(module)
        pair = (leaves,), treedef if is_labeled(module) else _intern_treedef(treedef)
    return Folded(pair)


def fold(tree: PyTree) -> Any:
    """A tree with every outermost module folded."""
    if isinstance(tree, Node):
        return _fold_module(tree)
    if isinstance(tree, jax.Array):
        return tree
    return tree_map(lambda x: _fold_module(x) if isinstance(x, Node) else x, tree, is_leaf=is_node)


def unfold(tree: PyTree) -> Any:
    """Unfolds every module of a tree, lazily."""
    if type(tree) is Folded:
        return from_folded(tree.pair)
    if type(tree) is tuple:
        return tuple([unfold(x) for x in tree])
    if isinstance(tree, jax.Array):
        return tree
    return tree_map(lambda x: unfold(x) if _is_folded(x) else x, tree, is_leaf=_is_folded)


def _is_folded(value: object) -> TypeGuard[Folded]:
    return type(value) is Folded
