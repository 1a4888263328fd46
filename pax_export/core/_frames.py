"""The modules whose methods are running, from the call stack, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from pax_export.core._tree import Node, attributes_of

_SETTING = frozenset({"__setattr__", "__delattr__"})


def owner_of_frame(frame: FrameType) -> Any:
    """The module whose method, or function of a module, a frame runs; None if there is none."""
    code = frame.f_code
    if code.co_argcount == 0:
        return None
    value = frame.f_locals.get(code.co_varnames[0])
    return value if isinstance(value, Node) else None


def running(frame: FrameType | None) -> Iterator[tuple[Any, str]]:
    """The modules whose methods run, the innermost first, each with the name of the method."""
    while frame is not None:
        module, name = owner_of_frame(frame), frame.f_code.co_name
        if module is not None and name not in _SETTING and hasattr(type(module), name):
            yield module, name
        frame = frame.f_back


def layer_in_training(frame: FrameType | None) -> Any:
    """The layer in train mode whose call changes a state, or None.

    It is the outermost of those that say so of themselves, one inside of the other: of a
    batch norm with two averages in it, the batch norm.
    """
    layer = None
    for module, _ in running(frame):
        if module._pax_changes == "":
            break
        if module._pax_changes == "in train mode" and attributes_of(module).get("_training"):
            layer = module
    return layer


def call_in_progress(frame: FrameType | None) -> Any:
    """The innermost module whose ``__call__`` runs, or None."""
    return next((module for module, name in running(frame) if name == "__call__"), None)
