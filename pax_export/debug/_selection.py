"""Selects modules by path, class or function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._types import PyTree
from pax_export.core import Chosen, better_path, matcher, named_modules


def selected_paths(net: PyTree, selection: PyTree) -> tuple[str, ...]:
    """The paths of the modules that are meant, in tree order.

    ``selection`` is a path as `Module.at` reads it, a class, a function of a module or of path
    and module, a selection of ``net.at(...)``, or several of these; ``...`` means all.

    Raises:
        InvalidArgumentError: one of them is for no module.
    """
    modules = named_modules(net)
    if selection is ...:
        return tuple(path for path, _ in modules)
    several = isinstance(selection, Iterable) and not isinstance(selection, (str, type, Chosen))
    meant = list(selection) if several else [selection]
    found: set[str] = set()
    for each in meant:
        matches = _matcher(each)
        paths = {path for path, module in modules if matches(path, module)}
        if not paths:
            raise _nothing(each, [path for path, _ in modules])
        found |= paths
    return tuple(path for path, _ in modules if path in found)


def _matcher(each: object) -> Callable[[str, Any], Any]:
    found = matcher(each, anywhere=False, with_path=True)
    if found is not None:
        return found
    raise InvalidArgumentTypeError(
        "Modules are chosen by a path, a class, or a function of path and module.",
        got=repr(each),
        write='"encoder.layers.*", pax.Linear, or lambda path, module: ...',
    )


def _nothing(each: object, paths: list[str]) -> InvalidArgumentError:
    near = better_path(each, paths) if isinstance(each, str) else ""
    shown = near or ", ".join(paths[1:6])
    return InvalidArgumentError(
        "There is no such module in the net.",
        got=repr(each),
        write=f"a path of the net, e.g. {shown}" if shown else "the empty path, of the net itself",
    )
