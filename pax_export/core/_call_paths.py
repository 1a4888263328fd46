"""Adds a note with the path of the module to exceptions, by a wrapper of each `__call__`."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pax_export._tracebacks import hide_frames
from pax_export._types import PyTree
from pax_export.core._labels import SAYS_PATH, called
from pax_export.core._moduledef import Label
from pax_export.core._sharding_notes import explain_sharding
from pax_export.core._subclassing import base_of
from pax_export.core._traversal import named_modules
from pax_export.core._tree import Node, flatten

_KEPT = "_pax_raised_in"


@dataclass(frozen=True)
class _RaisedAt:
    """Where an error was raised, as far as it has propagated."""

    top: weakref.ref  # the outermost module so far
    path: str  # from `top` to the module that raised
    raised_in: str
    note: str  # the text attached to the error


def noting_path(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__call__` so that its errors name the path of the module."""

    @functools.wraps(call)
    def __call__(self: Any, /, *args: PyTree, **kwargs: PyTree) -> Any:
        try:
            if Label.in_use:
                return called(call, self, args, kwargs)
            return call(self, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            if isinstance(self, Node):  # else a view of one, whose own call is around this
                _note(error, self)
                explain_sharding(error, [self])
            raise

    setattr(__call__, SAYS_PATH, True)
    return __call__


#: The code of all calls that are wrapped.
_CODE = noting_path(lambda self: None).__code__  # type: ignore[attr-defined]


def path_of_call() -> str:
    """The path of the module in whose call this function is called, from the outermost module."""
    path, inner, frame = "", None, inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CODE and isinstance(module := frame.f_locals["self"], Node):
            if inner is not None and module is not inner:
                path = ".".join(filter(None, (_step(module, inner), path)))
            inner = module
        frame = frame.f_back
    return path


def _note(error: Exception, module: Node) -> None:
    place: _RaisedAt | None = getattr(error, _KEPT, None)
    below = place and place.top()
    if below is module:
        return  # a method of a base class, or of a policy, around the same call
    name = type(module).__name__
    steps = [] if place is None else [_step(module, below), place.path]
    path = ".".join(filter(None, steps))
    raised_in = name if place is None else place.raised_in
    text = f"in the call of {path} ({raised_in}) in {name}" if path else f"in the call of {name}"
    try:
        old = place and place.note
        error.__notes__ = [*[n for n in getattr(error, "__notes__", ()) if n != old], text]
        setattr(error, _KEPT, _RaisedAt(weakref.ref(module), path, raised_in, text))
    except (AttributeError, TypeError):
        pass  # the error does not allow attributes


def _step(outer: Node, inner: Node | None) -> str:
    """The path from a module to a called module; a star replaces unknown parts."""
    if inner is None:
        return "*"
    named = named_modules(outer)[1:]
    for path, module in named:
        if module is inner:
            return path
    # A transform has taken it apart and built it again: equal ones are told apart no more.
    moduledef = flatten(inner)[1]
    alike = [path for path, module in named if flatten(module)[1] is moduledef]
    if alike:
        return _common(alike)
    # Under a policy a module calls a copy of itself with cast arrays.
    is_itself = base_of(type(inner)) is base_of(type(outer))
    return "" if is_itself else f"<{type(inner).__name__}>"


def _common(paths: list[str]) -> str:
    """Several paths as one pattern: ``layers.0.fc`` and ``layers.1.fc`` as ``layers.*.fc``."""
    columns = list(zip(*[path.split(".") for path in paths]))
    if any(path.count(".") + 1 != len(columns) for path in paths):
        return "*"
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in columns)
