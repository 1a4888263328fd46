"""Lifts a JAX transform to functions of modules.

Arguments become a flat list of leaves, some of which the transform passes to jax. Under its trace
they become new, mutable modules (`LiftedCall.inside`). Results and changed modules are returned as
leaves, and changes are written back to the caller's objects (`LiftedCall.finish`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import (
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
)

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    SharedNodeError,
)
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import (
    Module,
    Node,
    describe_array,
    is_node,
    is_open,
    join_path,
    lent_to_constructors,
    map_submodules,
    modules_and_leaves,
    named_leaves,
    open_copies,
    path_name,
    structure_differences,
    take_over,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """An outermost module of a tree, or a leaf outside of modules."""

    path: tuple  # the path, as jax keys
    value: Any
    start: int  # the number of its first leaf in the tree
    stop: int  # the number after that of its last leaf
    root: int  # the number of this module, or of the next one

    @property
    def is_module(self) -> bool:
        return isinstance(self.value, Node)


def parts_of(tree: PyTree) -> list[Part]:
    """The outermost modules and the other leaves of a tree, in tree order."""
    parts, start, root = [], 0, 0
    for path, value in tree_flatten_with_path(tree, is_leaf=is_node)[0]:
        stop = start + (tree_structure(value).num_leaves if is_node(value) else 1)
        parts.append(Part(path, value, start, stop, root))
        start, root = stop, root + is_node(value)
    return parts


def roots_of(tree: PyTree) -> list[Any]:
    """The outermost modules of a tree."""
    return [part.value for part in parts_of(tree) if part.is_module]


@jax.tree_util.register_static
@dataclass(frozen=True)
class WrittenBack:
    """Placeholder, in a result, for a module of the arguments that is open at the call."""

    place: int  # among the modules of all arguments


Origins = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, eq=False)
class Result:
    """The traced results of a function."""

    head: Any  # the part of the returned value that the transform took out, if any
    copies: list[Any]  # the argument modules, after the call
    leaves: list[Any]  # those of ``(rest of the value, final modules by their number)``
    treedef: Any  # their structure
    parts: list[Part]  # their parts
    roots: list[int | None]  # for each part, which argument module it is, if any
    origins: Origins  # for each final module, which of the call's modules its modules are
    untouched: list[int | None]  # for each leaf, which leaf of the arguments it still is, if any
    head_places: list[int | None]  # for each outermost module of the head, which open one it is


class Strict(Generic[P, R]):
    """Wraps a function so that only modules open at the call are open in it."""

    def __init__(self, function: Callable[P, R]):
        self.function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def as_pair(value: object, message: str, write: str) -> tuple[Any, Any]:
    """The result of a function as a pair; raises if it is not one."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgumentTypeError(message, got=describe_result(value), write=write)
    return value[0], value[1]


def describe_result(value: object) -> str:
    """Describes a result for messages, without mentioning tracers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{describe_array(value)} alone"
    count = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{count}"


def _open_owner(function: Callable) -> Any:
    """The open module that a function is, or is a method of, or None."""
    owner = function.__self__ if inspect.ismethod(function) else function
    return owner if isinstance(owner, Node) and is_open(owner) else None


def unbind(functions: Iterable[Callable]) -> tuple[list[Callable], list[Any]]:
    """Makes functions of ``(*args, modules)``, and lists the modules.

    The modules are those that are open here and that a function is, or is a method of.
    """
    functions = list(functions)
    owners = [_open_owner(function) for function in functions]
    modules: list[Any] = []  # without those in another one, which are changed as a part of it
    found = [owner for owner in owners if owner is not None]
    for owner in sorted(found, key=lambda each: -len(_modules_of([each]))):
        if id(owner) not in map(id, _modules_of(modules)):
            modules.append(owner)
    places = [id(module) for module in _modules_of(modules)]

    def with_modules(function: Callable[..., Any], owner: Module | None) -> Callable[..., Any]:
        if owner is None:
            return lambda *args: function(*args[:-1])
        number = places.index(id(owner))
        method = type(owner).__call__ if function is owner else function.__func__  # type: ignore
        return lambda *args: method(_modules_of(args[-1])[number], *args[:-1])

    return [with_modules(f, owner) for f, owner in zip(functions, owners)], modules


def _nothing_taken(value: T) -> tuple[None, T]:
    return None, value


class LiftedCall:
    """One call of a lifted function, split into leaves, structure and modules.

    Args:
        function: the function; modules in its closure are captured.
        args: the positional arguments; static ones are unwrapped for the function.
        kwargs: the keyword arguments.
        roots: the caller's modules, if ``args`` has replacements.
        written: the modules to write back; by default those that are mutable here.
        overlap: whether a module occurs in several of these.
    """

    def __init__(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict,
        *,
        roots: list[Any] | None = None,
        written: Sequence[bool] | None = None,
        overlap: bool | None = None,
    ):
        self.function = function
        self.leaves, self.treedef = tree_flatten((args, kwargs))
        self.parts = parts_of((args, kwargs))
        self.roots = roots_of((args, kwargs)) if roots is None else roots
        self.written = [is_open(root) for root in self.roots] if written is None else written
        self.overlap = have_overlap(self.roots, self.written) if overlap is None else overlap

    def parts_at(self, number: int) -> list[Part]:
        """The parts of a positional argument."""
        return [p for p in self.parts if p.path[0].idx == 0 and p.path[1].idx == number]

    def inside(
        self,
        changed: Mapping[int, Any] = MappingProxyType({}),
        take: Callable[[Any], tuple[Any, Any]] = _nothing_taken,
    ) -> Result:
        """Runs the function on new modules; jax traces this.

        `changed` replaces leaves of the arguments by number; `take` splits off the part of the
        result that the transform needs.
        """
        leaves = [changed.get(number, leaf) for number, leaf in enumerate(self.leaves)]
        args, kwargs = self.treedef.unflatten(leaves)
        copies = roots_of((args, kwargs))
        modules = _modules_of(copies)
        args, kwargs = unwrap_static(args, kwargs)
        strict = isinstance(self.function, Strict)
        constructs = isinstance(self.function, type)
        with (
            open_copies([c for c, w in zip(copies, self.written) if w or not strict]),
            lent_to_constructors() if constructs else nullcontext(),
        ):
            head, value = take(self.function(*args, **kwargs))
        return self._result(head, value, leaves, copies, modules)

    def _result(
        self, head: PyTree, value: PyTree, before: list[Any], copies: list[Any], modules: list[Any]
    ) -> Result:
        numbers = {id(copy): number for number, copy in enumerate(copies)}
        places = {id(module): index for index, module in enumerate(modules)}
        written = {number: copy for number, copy in enumerate(copies) if self.written[number]}
        in_written = {id(module) for module in _modules_of(list(written.values()))}

        def stand_in(x: T) -> T | WrittenBack:
            index = places.get(id(x)) if id(x) in in_written else None
            return x if index is None else WrittenBack(index)

        value = tree_map(stand_in, value, is_leaf=is_node)
        in_head = [stand_in(module) for module in roots_of(head)]
        head_places = [x.place if isinstance(x, WrittenBack) else None for x in in_head]
        finals = written
        if self.overlap:  # an unchanged copy must not undo the changes of another one
            finals = {n: copy for n, copy in written.items() if self.is_changed(n, copy, before)}
        leaves, treedef = tree_flatten((value, finals))
        parts = parts_of((value, finals))
        roots = [numbers.get(id(part.value)) if part.is_module else None for part in parts]
        origins = [tuple([places.get(id(m)) for m in _modules_of([x])]) for x in finals.values()]
        at = {id(leaf): number for number, leaf in enumerate(before)}
        untouched = [at.get(id(leaf)) for leaf in leaves]
        return Result(
            head, copies, leaves, treedef, parts, roots, tuple(origins), untouched, head_places
        )

    def is_changed(self, number: int, copy: Node, leaves: list[Any]) -> bool:
        """Whether the function changed its copy of a module."""
        part = [part for part in self.parts if part.is_module][number]
        before = leaves[part.start : part.stop]
        after, treedef = tree_flatten(copy)
        same = len(before) == len(after) and all(x is y for x, y in zip(before, after))
        return not same or treedef != tree_structure(part.value)

    def finish(self, result: Result, leaves: Iterable[Any]) -> Any:
        """Puts leaves together to the returned value, and writes modules back."""
        value, finals = result.treedef.unflatten(leaves)
        return write_back(self.roots, value, finals.values(), result.origins)


def _modules_of(roots: list[Any]) -> list[Any]:
    return [module for root in roots for module in modules_and_leaves(root)[0]]


def write_back(roots: list[Any], value: T, finals: Collection[Any], origins: Origins) -> T:
    """Writes changes back to the caller's modules; returns the value with these in place."""
    items, treedef = tree_flatten(value, is_leaf=lambda x: isinstance(x, (WrittenBack, Node)))
    if not finals and not any(isinstance(x, WrittenBack) for x in items):
        return value
    originals = _modules_of(roots)
    if len(finals) > 1:
        _require_one_copy(originals, origins)
    for final, places in zip(finals, origins):
        _write_back(final, iter(places), originals)
    return treedef.unflatten(
        [originals[x.place] if isinstance(x, WrittenBack) else x for x in items]
    )


def have_overlap(roots: list[Any], written: Sequence[bool]) -> bool:
    """Whether a module occurs in several of the roots that are written back."""
    if sum(written) < 2:
        return False
    modules = _modules_of([root for root, is_written in zip(roots, written) if is_written])
    return len({id(module) for module in modules}) < len(modules)


def _require_one_copy(originals: list[Any], origins: Origins) -> None:
    """Raises if two changed copies of a module would be written into it."""
    copies: dict[int, int] = {}
    for number in [number for places in origins for number in places if number is not None]:
        module = originals[number]
        if is_open(module) and copies.setdefault(id(module), number) != number:
            raise SharedNodeError(
                "A module occurs in several arguments, and changes of one copy would be lost.",
                got=repr(module)[:120],
                write="each module in one argument, or changes in one of them only",
            )


def _write_back(final: Node, places: Iterator[int | None], originals: list[Any]) -> Any:
    """Updates the caller's object and returns it; returns a new module unchanged."""
    number = next(places)
    final = map_submodules(final, lambda sub: _write_back(sub, places, originals))
    if number is None or not is_open(originals[number]):
        return final
    take_over(originals[number], final)
    return originals[number]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _TakenOut:
    """A placeholder for a part taken out of a tree."""


def take_out(tree: PyTree, is_taken: Callable[[Any], bool]) -> tuple[Any, tuple[Any, ...]]:
    """The tree without the outermost values that a test chooses, and these."""
    items, treedef = tree_flatten(tree, is_leaf=is_taken)
    selected = tuple([x for x in items if is_taken(x)])
    if not selected:
        return tree, selected
    return treedef.unflatten([_TakenOut() if is_taken(x) else x for x in items]), selected


def put_back(tree: T, selected: Iterable[Any]) -> T:
    """The reverse of `take_out`."""
    left = iter(selected)

    def is_slot(value: object) -> bool:
        return type(value) is _TakenOut

    return tree_map(lambda x: next(left) if is_slot(x) else x, tree, is_leaf=is_slot)


def wrap_like(function: Callable) -> Callable[[Callable], Any]:
    """`functools.wraps`, also for callables without a name."""
    if isinstance(function, Node):
        return lambda wrapper: wrapper
    return functools.wraps(function)


def require_array_arguments(parts: list[Part], transform: str, write: str) -> None:
    """Raises for an argument that is neither static nor a module, nor consists of arrays."""
    for part in parts:
        if not part.is_module and type(part.value) is not Held:
            what = f"{transform}: the arguments must be arrays, numbers or modules."
            check_arraylike(part.value, what, argument_name(part.path), write)


def require_array_results(parts: list[Part], transform: str) -> None:
    """Raises for a result that is neither a module nor an array."""
    for part in parts:
        if not part.is_module:
            what = f"{transform}: the function must return arrays, numbers or modules."
            where = join_path("output", path_name(part.path[1:])).rstrip(".")
            check_arraylike(part.value, what, where, RETURN_NONE)


RETURN_NONE = "None there, and the value outside of the function"


def argument_name(path: tuple) -> str:
    """``argument 2``, ``argument 'mask'``, or a path below one of these."""
    first = path[1]
    number = f"argument {first.idx if hasattr(first, 'idx') else repr(first.key)}"
    return f"{number}, {path_name(path[2:])}" if len(path) > 2 else number


def is_arraylike(value: object) -> bool:
    """Whether jax takes a value as an array: arrays, their shapes, and numbers."""
    return hasattr(value, "shape") or isinstance(value, (int, float, complex))


def check_arraylike(value: object, what: str, where: str, write: str) -> None:
    """Raises unless a value is an array or a number."""
    if not is_arraylike(value):
        raise InvalidArgumentTypeError(
            what, where=where, got=f"{type(value).__name__}: {value!r}"[:120], write=write
        )


def tree_differences(
    old: PyTree, new: PyTree, root: str, fits: Callable[[Any, Any], bool] | None = None
) -> list[str]:
    """The differences of two trees, as lines: of structure, else of leaves.

    `root` names the whole tree; `fits` says whether a leaf may replace another, which by default
    needs its shape and dtype.
    """
    if tree_structure(old) != tree_structure(new):
        return structure_differences(old, new) or ["the treedefs differ"]
    return [
        f"{name or root}: {_describe_leaf(x)} against {_describe_leaf(y)}"
        for (name, x), y in zip(named_leaves(old), tree_leaves(new))
        if not (fits or _are_alike)(x, y)
    ]


def _are_alike(old: ArrayLike, new: ArrayLike) -> bool:
    return jnp.shape(old) == jnp.shape(new) and jnp.result_type(old) == jnp.result_type(new)


def _describe_leaf(leaf: ArrayLike) -> str:
    return describe_array(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))


class Held:
    """A static argument, wrapped as a leaf."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value


def wrap_static(args: Sequence[Any], places: Iterable[int]) -> list[Any]:
    """Wraps the static arguments."""
    wrapped = list(args)
    for number in places:
        if -len(wrapped) <= number < len(wrapped):
            wrapped[number] = Held(wrapped[number])
    return wrapped


def unwrap_static(args: Sequence[Any], kwargs: dict) -> tuple[list[Any], dict[str, Any]]:
    """Unwraps the static arguments."""
    released = {k: x.value if type(x) is Held else x for k, x in kwargs.items()}
    return [x.value if type(x) is Held else x for x in args], released


def argument_places(option: str, numbers: Sequence[int], count: int) -> list[int]:
    """The positions of the arguments that an option names, none negative."""
    for number in numbers:
        if not -count <= number < count:
            raise InvalidArgumentError(
                f"The function was called without a positional argument that {option} names.",
                got=f"{option}={', '.join(map(str, numbers))} and {count} positional arguments",
                write="the argument by position, not by keyword",
            )
    return [number % count for number in numbers]
