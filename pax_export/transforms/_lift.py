"""The one rule of all transforms of functions that take modules.

A call is taken apart: its arguments become a flat list of leaves, of which a
transform gives some to jax and keeps the others.  Under jax's trace the leaves
are put together to fresh modules, open for change (`Call.inside`), and the
function runs.  What it returned, and the modules that were open where the call
stands, come out as leaves again, are put together, and the latter are written
back into the very objects that the caller holds (`Call.finish`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from pax_export.core import (
    Node,
    is_node,
    is_open,
    map_submodules,
    modules_and_leaves,
    open_copies,
    take_over,
)


@dataclass(frozen=True, eq=False)
class Part:
    """An outermost module of a tree, or a leaf outside of modules.

    Attributes:
        path: where it stands, as jax keys.
        value: the module or the leaf.
        start: the number of its first leaf in the tree.
        stop: the number after that of its last leaf.
    """

    path: tuple
    value: Any
    start: int
    stop: int

    @property
    def is_module(self) -> bool:
        return isinstance(self.value, Node)


def parts_of(tree: Any) -> list[Part]:
    """The outermost modules and the other leaves of a tree, in tree order."""
    parts, start = [], 0
    for path, value in tree_flatten_with_path(tree, is_leaf=is_node)[0]:
        count = jax.tree_util.tree_structure(value).num_leaves if is_node(value) else 1
        parts.append(Part(path, value, start, start + count))
        start += count
    return parts


def roots_of(tree: Any) -> list[Any]:
    """The outermost modules of a tree."""
    return [part.value for part in parts_of(tree) if part.is_module]


class WrittenBack:
    """Stands, in a result, for an argument module that was open where the call stands."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


jax.tree_util.register_pytree_node(
    WrittenBack,
    lambda node: ((), node.number),
    lambda number, children: WrittenBack(number),
)

Origins = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, eq=False)
class Result:
    """What a function left, while jax traces it.

    Attributes:
        head: what the transform took out of the returned value, if anything.
        copies: the argument modules, after the call.
        leaves: those of ``(rest of the value, final modules by their number)``.
        treedef: their structure.
        parts: their parts.
        roots: for each part, the number of the argument module that it is, or None.
        origins: for each final module, which of the call's modules its modules are.
    """

    head: Any
    copies: list[Any]
    leaves: list[Any]
    treedef: Any
    parts: list[Part]
    roots: list[int | None]
    origins: Origins

    def untouched(self, given: Sequence[Any]) -> list[int | None]:
        """For each leaf, the number of the given leaf that it still is, or None."""
        numbers = {id(leaf): number for number, leaf in enumerate(given)}
        return [numbers.get(id(leaf)) for leaf in self.leaves]


def _nothing_taken(value: Any) -> tuple[Any, Any]:
    return None, value


class Call:
    """One call of a lifted function.

    Args:
        function: the function; a module or a bound method is captured, like
            everything else that it closes over.
        args: the positional arguments.
        kwargs: the keyword arguments.
        strict: whether only those modules are open inside that are open here.
        roots: the caller's own modules, where `args` holds others in their place.
        written: which of them to write back; those that are open here by default.

    Attributes:
        leaves: the leaves of all arguments.
        treedef: their structure, that of ``(args, kwargs)``.
        parts: the parts of ``(args, kwargs)``.
    """

    def __init__(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict,
        *,
        strict: bool = False,
        roots: list[Any] | None = None,
        written: Sequence[bool] | None = None,
    ):
        self.function = function
        self.strict = strict
        self.leaves, self.treedef = tree_flatten((args, kwargs))
        self.parts = parts_of((args, kwargs))
        self.roots = roots_of((args, kwargs)) if roots is None else roots
        self.written = [is_open(root) for root in self.roots] if written is None else written

    def inside(
        self,
        leaves: Sequence[Any],
        take: Callable[[Any], tuple[Any, Any]] = _nothing_taken,
    ) -> Result:
        """Runs the function on fresh modules with these leaves; jax traces this.

        Args:
            leaves: what stands for the leaves of the arguments here.
            take: splits what the function returns into what the transform needs
                itself and the rest.
        """
        args, kwargs = tree_unflatten(self.treedef, leaves)
        copies = roots_of((args, kwargs))
        modules = _modules_of(copies)
        with open_copies([c for c, w in zip(copies, self.written) if w or not self.strict]):
            head, value = take(self.function(*args, **kwargs))
        return _result(head, value, copies, modules, self.written)

    def finish(self, result: Result, leaves: Sequence[Any]) -> Any:
        """Puts leaves together to the returned value, and writes modules back."""
        return finish(self.roots, result.treedef, result.origins, leaves)


def _result(
    head: Any, value: Any, copies: list[Any], modules: list[Any], written: Sequence[bool]
) -> Result:
    numbers = {id(copy): number for number, copy in enumerate(copies)}

    def stand_in(x: Any) -> Any:
        number = numbers.get(id(x)) if is_node(x) else None
        return x if number is None or not written[number] else WrittenBack(number)

    value = tree_map(stand_in, value, is_leaf=is_node)
    finals = {number: copy for number, copy in enumerate(copies) if written[number]}
    leaves, treedef = tree_flatten((value, finals))
    parts = parts_of((value, finals))
    roots = [numbers.get(id(part.value)) if part.is_module else None for part in parts]
    places = {id(module): place for place, module in enumerate(modules)}
    origins = tuple([tuple([places.get(id(m)) for m in _modules_of([x])]) for x in finals.values()])
    return Result(head, copies, leaves, treedef, parts, roots, origins)


def _modules_of(roots: list[Any]) -> list[Any]:
    return [module for root in roots for module in modules_and_leaves(root)[0]]


def finish(roots: list[Any], treedef: Any, origins: Origins, leaves: Sequence[Any]) -> Any:
    """The returned value of a call; the modules that it changed are written back.

    Args:
        roots: the caller's modules among the arguments.
        treedef: the structure of a `Result`.
        origins: those of the result.
        leaves: its leaves, outside of jax's trace.
    """
    value, finals = tree_unflatten(treedef, leaves)
    return write_back(roots, value, finals.values(), origins) if finals else value


def write_back(roots: list[Any], value: Any, finals: Iterable[Any], origins: Origins) -> Any:
    """Writes back what modules became; the value with the caller's modules in their places."""
    originals = _modules_of(roots)
    for final, places in zip(finals, origins):
        _write_back(final, iter(places), originals)
    return tree_map(
        lambda x: roots[x.number] if isinstance(x, WrittenBack) else x,
        value,
        is_leaf=lambda x: isinstance(x, (WrittenBack, Node)),
    )


def _write_back(final: Any, places: Iterator[int | None], originals: list[Any]) -> Any:
    """The object that the caller holds, with what became of it; a new module as it is."""
    place = next(places)
    final = map_submodules(final, lambda sub: _write_back(sub, places, originals))
    if place is None or not is_open(originals[place]):
        return final
    take_over(originals[place], final)
    return originals[place]


def wraps(function: Callable) -> Callable[[Callable], Any]:
    """`functools.wraps`, also for what has no name to copy."""
    if isinstance(function, Node):
        return lambda wrapper: wrapper
    return functools.wraps(function)
