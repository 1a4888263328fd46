"""Which modules of a net are meant: by path, by class, or by a function."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import named_modules, near_names


def selected_paths(net: Any, selection: Any) -> tuple[str, ...]:
    """The paths of the modules that are meant, in tree order.

    ``selection`` is a path, in which ``*`` stands for any names, a class, a function
    ``(path, module) -> bool``, or several of these; ``...`` means all.

    Raises:
        InvalidArgumentError: one of them is for no module.
    """
    modules = named_modules(net)
    if selection is ...:
        return tuple(path for path, _ in modules)
    several = isinstance(selection, Iterable) and not isinstance(selection, (str, type))
    meant = list(selection) if several else [selection]
    found: set[str] = set()
    for each in meant:
        paths = {path for path, module in modules if _matches(each, path, module)}
        if not paths:
            raise _nothing(each, [path for path, _ in modules])
        found |= paths
    return tuple(path for path, _ in modules if path in found)


def _matches(each: Any, path: str, module: Any) -> bool:
    if isinstance(each, str):
        return fnmatchcase(path, each)
    if isinstance(each, type):
        return isinstance(module, each)
    if callable(each):
        return bool(each(path, module))
    raise InvalidArgumentTypeError(
        "Modules are chosen by a path, a class, or a function of path and module.",
        got=repr(each),
        write='"encoder.layers.*", pax.Linear, or lambda path, module: ...',
    )


def _nothing(each: Any, paths: list[str]) -> InvalidArgumentError:
    near = near_names(each, paths, 3) if isinstance(each, str) else []
    shown = ", ".join(near or paths[1:6])
    return InvalidArgumentError(
        "There is no such module in the net.",
        got=repr(each),
        write=f"a path of the net, e.g. {shown}" if shown else "the empty path, of the net itself",
    )
