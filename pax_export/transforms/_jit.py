"""jit for functions of modules."""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeGuard, TypeVar

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
Wrapped: TypeAlias = tuple[list[Any], dict[str, Any]]  # arguments; static ones are hidden


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
        self.__wrapped__ = fun
        if not is_node(self.__wrapped__):
            for name in ("__name__", "__qualname__", "__doc__", "__module__"):
                if hasattr(fun, name):
                    setattr(self, name, getattr(fun, name))
        self._static = StaticArgs(fun, options["static_argnums"], options["static_argnames"])
        self._run = _Runner(fun, self._static, constraint)
        self._options, self._donate = options, donate
        # With `in_shardings` jax accepts no keywords, so whole arguments are donated.
        self._has_shardings = "in_shardings" in options
        # jax caches what it compiles, too, but `jax.jit` itself takes 0.2 ms.
        self._programs: dict[tuple, Any] = {}
        self._program(None, ())  # now, so that jax checks the options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        wrapped: Any = args
        if self._static:
            wrapped, kwargs = self._static.wrap_static(args, kwargs)  # type: ignore[assignment]
        arguments = [fold(x) for x in wrapped]
        keywords = fold(kwargs) if kwargs else kwargs
        roots, opened, donated = [], None, ()
        if anything_is_open():
            roots = roots_of((tuple(wrapped), kwargs))
            flags = tuple(map(is_open, roots))
            opened = _Opened(flags, have_overlap(roots, flags)) if any(flags) else None
        if self._donate and self._has_shardings:
            donated = _only_modules(arguments)
        elif self._donate:
            (arguments, keywords), state = take_out((arguments, keywords), _is_folded)
            keywords = {**keywords, STATE: state}
        if self._static:
            arguments, keywords = unwrap_static(arguments, keywords)
        value, changed = self._program(opened, donated)(*arguments, **keywords)
        if opened is None:
            return unfold(value)
        return write_back(roots, unfold(value), unfold(changed.modules), changed.origins)

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
        for program in self._programs.values():
            program.clear_cache()

    def _program(self, opened: _Opened | None, donated: tuple[int, ...]) -> Any:
        """The program of calls with these open modules and donated arguments."""
        if (opened, donated) not in self._programs:
            options = _with_donated(self._options, donated)
            if self._has_shardings:
                options["in_shardings"] = fold(options["in_shardings"])
            elif self._donate:
                names = options["donate_argnames"] or ()
                names = (names,) if isinstance(names, str) else tuple(names)
                options["donate_argnames"] = (*names, STATE)
            if "out_shardings" in options:  # None for updated modules
                options["out_shardings"] = (fold(options["out_shardings"]), None)
            program = _with_signature(_make_program(self._run, opened), self.__wrapped__, [STATE])
            self._programs[opened, donated] = jax.jit(program, **options)
        return self._programs[opened, donated]

    def _on_modules(self, args: tuple) -> Any:
        """Returns ``jax.jit(pax.pure(fun))``: whoever keeps its program passes modules to it."""
        numbers = range(len(args)) if self._donate else ()
        donated = tuple([n for n in numbers if _consists_of_modules(args[n])])
        if donated not in self._programs:
            program = _with_signature(self._run.on_modules, self.__wrapped__)
            self._programs[donated] = jax.jit(program, **_with_donated(self._options, donated))
        return self._programs[donated]


def _with_donated(options: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """A copy of the options with these arguments donated, too."""
    if not numbers:
        return dict(options)
    value = options["donate_argnums"]
    value = (value,) if isinstance(value, int) else value or ()
    return {**options, "donate_argnums": tuple(sorted({*value, *numbers}))}


def _consists_of_modules(argument: PyTree) -> bool:
    rest, modules = take_out(argument, is_node)
    return bool(modules) and not tree_leaves(rest)


def _only_modules(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Returns the arguments that consist of modules; jax donates others only as a whole."""
    numbers = []
    for number, argument in enumerate(arguments):
        rest, modules = take_out(argument, _is_folded)
        if modules and tree_leaves(rest):
            raise InvalidArgumentError(
                "With in_shardings, donate_state donates whole arguments.",
                where=f"argument {number}",
                got="modules and other arrays",
                write="the modules as an argument of their own, or donate_argnums",
            )
        if modules:
            numbers.append(number)
    return tuple(numbers)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Opened:
    """Marks the mutable modules of the arguments; static data for jax."""

    flags: tuple[bool, ...]
    overlap: bool  # whether a module occurs in several of them


def _with_signature(program: Callable, fun: Callable, added: Sequence[str] = ()) -> Callable:
    """Returns the program with a signature, so that jax resolves the names of arguments."""
    signature = _signature_of(fun)
    if signature is None:
        return program
    parameters = list(signature.parameters.values())
    at = len(parameters) - bool(parameters and parameters[-1].kind is parameters[-1].VAR_KEYWORD)
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added]
    parameters[at:at] = own
    program.__signature__ = signature.replace(parameters=parameters)  # type: ignore
    program.__name__ = getattr(fun, "__name__", type(fun).__name__)
    return program


class StaticArgs:
    """The static arguments of a function, by number and by name."""

    def __init__(
        self, fun: Callable, numbers: int | Sequence[int] | None, names: str | Iterable[str] | None
    ):
        numbers = [numbers] if isinstance(numbers, int) else list(numbers or ())
        names = [names] if isinstance(names, str) else list(names or ())
        signature = _signature_of(fun)
        positional = [
            p.name
            for p in (signature.parameters.values() if signature is not None else ())
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if not numbers:
            numbers = [positional.index(name) for name in names if name in positional]
        if not names:
            places = range(-len(positional), len(positional))
            names = [positional[number] for number in numbers if number in places]
        self.numbers, self.names = numbers, frozenset(names)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def wrap_static(self, args: Sequence[Any], kwargs: dict) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with those that are static hidden from jax's trees."""
        wrapped = {k: Held(x) if k in self.names else x for k, x in kwargs.items()}
        return wrap_static(args, self.numbers), wrapped


def _signature_of(fun: Callable) -> inspect.Signature | None:
    """The signature of a function, or None."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


class _Runner:
    """Runs the function under jax's trace, on modules or on folded ones."""

    def __init__(self, fun: Callable, static: StaticArgs, constraint: Constraint):
        self.fun, self.static, self.constraint = fun, static, constraint
        self.warn = _warning_once()

    def __call__(self, wrapped: Wrapped, opened: _Opened | None = None) -> tuple[Any, Any, Origins]:
        """Returns the value, the final state of the modules that are open, and its origins."""
        args, kwargs = _constrain_modules(wrapped, self.constraint)
        written = None if opened is None else opened.flags
        overlap = opened is not None and opened.overlap
        call = LiftedCall(self.fun, tuple(args), kwargs, written=written, overlap=overlap)
        with keys_changed_by(self.warn):
            result = call.inside()
        require_array_results(result.parts, "jit")
        value, finals = result.treedef.unflatten(result.leaves)
        value, finals = _constrain_modules((value, finals), self.constraint)
        return value, finals.values(), result.origins

    @property
    def on_modules(self) -> Callable:
        """The function on modules, as `pure` makes it."""

        def program(*args: PyTree, **kwargs: PyTree) -> Any:
            return self(self.static.wrap_static(args, kwargs))[0]

        return program


def _make_program(run: _Runner, opened: _Opened | None) -> Callable:
    """Returns the function that calls compile, which takes and returns folded modules."""

    def program(*args: PyTree, **kwargs: PyTree) -> tuple[Any, Changed]:
        state = kwargs.pop(STATE, ())
        wrapped: Any = run.static.wrap_static(args, kwargs)
        value, finals, origins = run(unfold(put_back(wrapped, state) if state else wrapped), opened)
        return fold(value), Changed(tuple(map(fold, finals)), origins)

    return program


class Changed:
    """The modules that a program changed and the caller has open."""

    __slots__ = ("modules", "origins")

    def __init__(self, modules: tuple[Any, ...], origins: Origins):
        self.modules = modules
        self.origins = origins


jax.tree_util.register_pytree_node(
    Changed,
    lambda changed: (changed.modules, changed.origins),
    lambda origins, modules: Changed(modules, origins),
)


def _constrain_modules(tree: T, constraint: Constraint) -> T:
    if constraint is False:
        return tree
    constrain_one = constrain_leaves if constraint is True else constraint
    return tree_map(lambda x: constrain_one(x) if is_node(x) else x, tree, is_leaf=is_node)


def _warning_once() -> Callable[[jax.Array], jax.Array]:
    """Warns, once for a function, that a key is drawn while it is compiled."""
    warned = False

    def warn(key: jax.Array) -> jax.Array:
        nonlocal warned
        if not warned:
            warned = True
            warnings.warn(
                "next_rng_key() was called while jit compiled a function: the key is a "
                "constant of the program, the same in every call. Pass a key as an argument, "
                "or a module that has one, such as pax.RngSeq.",
                stacklevel=4,
            )
        return key

    return warn


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
