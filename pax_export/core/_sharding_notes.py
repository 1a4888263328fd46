"""Notes on JAX's sharding errors: module, line and solution."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.sharding import AxisType

from pax_export.core._traversal import named_modules
from pax_export.core._tree import Node, attributes_of

_BEGIN = "pax_export: on a mesh with Explicit axes jax asks how this result lies, "
_ADVICE = (
    "  fix: out_sharding=P(...) where the operation takes it (jnp.dot, jnp.einsum, "
    "x.at[i].get), or before it jax.sharding.reshard(x, P(...)) of an operand, so that both "
    "lie alike or are whole along the axis that is summed; pax.Linear, pax.Conv2D and the other "
    "layers answer by themselves; on a mesh of pax.sharding.make_mesh, whose axes are Auto, "
    "nothing is asked"
)
_OURS = str(Path(__file__).parent.parent) + os.sep
_JAX = str(Path(jax.__file__).parent) + os.sep


def explain_sharding(error: Exception, roots: list[Any]) -> None:
    """Adds a note with the module's path to an error of jax about explicit axes."""
    if not _is_about_sharding(error):
        return
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if any(_has_explicit_axes(leaf) for leaf in _arrays_at_hand(frames, roots)):
        notes = getattr(error, "__notes__", [])
        new = f"{_BEGIN}and only the program knows.\n{_error_place(frames, roots)}{_ADVICE}"
        ours = max([new, *filter(_is_ours, notes)], key=len)
        error.__notes__ = [*(note for note in notes if not _is_ours(note)), ours]


def _is_ours(note: str) -> bool:
    return note.startswith(_BEGIN)


def _is_about_sharding(error: Exception) -> bool:
    if type(error).__name__ == "ShardingTypeError":
        return True
    return isinstance(error, (TypeError, ValueError)) and "sharding" in str(error).lower()


def _arrays_at_hand(frames: list[tuple[FrameType, int]], roots: list[Any]) -> list[Any]:
    """The arrays of the modules, and those that functions of the program had at hand."""
    inner = [frame for frame, _ in frames if _is_the_programs(frame)][-1:]
    values = [value for frame in inner for value in frame.f_locals.values()]
    return [leaf for value in (*roots, *values) for leaf in _leaves_if_sortable(value)]


def _leaves_if_sortable(value: object) -> list[Any]:
    try:
        return jax.tree_util.tree_leaves(value)
    except (TypeError, ValueError):  # a dict with unordered keys among the locals
        return []


def _has_explicit_axes(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    return AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types


def _is_the_programs(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_OURS, _JAX, "<frozen"))


def _error_place(frames: list[tuple[FrameType, int]], roots: list[Any]) -> str:
    """The innermost module in which it happened, and the innermost line of the program."""
    lines = [(frame, line) for frame, line in frames if _is_the_programs(frame)]
    owners = [owner for frame, _ in frames if (owner := owner_of_frame(frame)) is not None]
    owner = next((each for each in reversed(owners) if isinstance(each, Node)), None)
    parts = [] if owner is None else [_name_in_roots(owner, roots)]
    if lines:
        frame, line = lines[-1]
        parts.append(f"({Path(frame.f_code.co_filename).name}:{line})")
    return f"  where: {' '.join(parts)}\n" if parts else ""


def _name_in_roots(module: Node, roots: list[Any]) -> str:
    """The path of a module and its class; of a root, or one of nowhere, the class alone."""
    kind = type(module).__qualname__
    for root in roots:
        for path, each in named_modules(root):
            if each is module and path:
                return f"{path}: {kind}"
    return kind


_SETTING = frozenset({"__setattr__", "__delattr__"})


def owner_of_frame(frame: FrameType) -> Any:
    """Returns the module whose method, or function of a module, a frame runs, or None."""
    code = frame.f_code
    if code.co_argcount == 0:
        return None
    value = frame.f_locals.get(code.co_varnames[0])
    return value if isinstance(value, Node) else None


def running_modules(frame: FrameType | None) -> Iterator[tuple[Any, str]]:
    """Yields the modules whose methods run, innermost first, each with the name of the method."""
    while frame is not None:
        module, name = owner_of_frame(frame), frame.f_code.co_name
        if module is not None and name not in _SETTING and hasattr(type(module), name):
            yield module, name
        frame = frame.f_back


def layer_in_training(frame: FrameType | None) -> Any:
    """Returns the outermost layer in train mode whose call changes a state, or None."""
    layer = None
    for module, _ in running_modules(frame):
        if module._pax_changes == "":
            break
        if module._pax_changes == "in train mode" and attributes_of(module).get("_training"):
            layer = module
    return layer


def call_in_progress(frame: FrameType | None) -> Any:
    """Returns the innermost module whose ``__call__`` runs, or None."""
    return next((module for module, name in running_modules(frame) if name == "__call__"), None)
