"""Adds a note with the path of the module to exceptions, by a wrapper of each `__call__`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_leaves

from pax_export._tracebacks import hide_frames
from pax_export._types import PyTree
from pax_export.core._labels import SAYS_PATH, call_labeled
from pax_export.core._moduledef import Label
from pax_export.core._sharding_notes import explain_sharding
from pax_export.core._subclassing import base_of
from pax_export.core._traversal import named_modules
from pax_export.core._tree import Node, flatten

_HAS_NOTE = "_pax_has_note"


def noting_path(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__call__` so that its errors name the path of the module."""

    @functools.wraps(call)
    def __call__(self: Any, /, *args: PyTree, **kwargs: PyTree) -> Any:
        try:
            if Label.in_use:
                return call_labeled(call, self, args, kwargs)
            return call(self, *args, **kwargs)
        except Exception as error:  # of the module; raised again
            if _is_asked_for_labels(self, args, kwargs):
                return self
            hide_frames(error)
            if isinstance(self, Node):  # else a view, whose own call encloses this one
                _add_note(error, self)
                explain_sharding(error, [self])
            raise

    setattr(__call__, SAYS_PATH, True)
    return __call__


def _is_asked_for_labels(self: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a tree of labels, which has the class of a layer, is called with parameters.

    `optax.multi_transform` and others take a function for label trees, and call what is callable.
    """
    return (
        isinstance(self, Node)
        and len(args) == 1
        and isinstance(args[0], Node)
        and base_of(type(self)) is base_of(type(args[0]))
        and not kwargs
        and not any(hasattr(leaf, "dtype") for leaf in tree_leaves(self))
    )


#: The code of all calls that are wrapped.
_CODE = noting_path(lambda self: None).__code__  # type: ignore[attr-defined]


def path_of_call() -> str:
    """Returns the path of the module whose call runs, from the outermost module."""
    return _path_and_root()[0]


def _path_and_root() -> tuple[str, Node | None]:
    path, inner, frame = "", None, inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CODE and isinstance(module := frame.f_locals["self"], Node):
            if inner is not None and module is not inner:
                path = ".".join(filter(None, (_step_between(module, inner), path)))
            inner = module
        frame = frame.f_back
    return path, inner


def _add_note(error: Exception, module: Node) -> None:
    if getattr(error, _HAS_NOTE, False):
        return  # from a call in this one
    path, root = _path_and_root()
    name = type(root).__name__
    text = f"{path} ({type(module).__name__}) in {name}" if path else name
    try:
        error.add_note(f"in the call of {text}")
        setattr(error, _HAS_NOTE, True)
    except (AttributeError, TypeError):
        pass  # the error does not allow attributes


def _step_between(outer: Node, inner: Node) -> str:
    """The path from a module to a called module; a star replaces unknown parts."""
    named = named_modules(outer)[1:]
    for path, module in named:
        if module is inner:
            return path
    # A transform has flattened and rebuilt it, so equal modules cannot be told apart.
    moduledef = flatten(inner)[1]
    alike = [path for path, module in named if flatten(module)[1] is moduledef]
    if alike:
        return _common_pattern(alike)
    # Under a policy a module calls a copy of itself with cast arrays.
    is_itself = base_of(type(inner)) is base_of(type(outer))
    return "" if is_itself else f"<{type(inner).__name__}>"


def _common_pattern(paths: list[str]) -> str:
    """Several paths as one pattern: ``layers.0.fc`` and ``layers.1.fc`` as ``layers.*.fc``."""
    columns = list(zip(*[path.split(".") for path in paths]))
    if any(path.count(".") + 1 != len(columns) for path in paths):
        return "*"
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in columns)
