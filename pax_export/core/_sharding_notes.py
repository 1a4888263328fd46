"""Notes on JAX's sharding errors: module, line and solution.

Where axes of a mesh are Explicit, jax asks a program how some results lie.  Our layers answer;
an operation of a user's own module ends in a message of jax that knows nothing of modules.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.sharding import AxisType

from pax_export._types import PyTree
from pax_export.core._frames import owner_of_frame
from pax_export.core._traversal import named_modules
from pax_export.core._tree import Node

_BEGIN = "pax_export: on a mesh with Explicit axes jax asks how this result lies, "
_ADVICE = (
    "  write: out_sharding=P(...) where the operation takes it (jnp.dot, jnp.einsum, "
    "x.at[i].get), or before it jax.sharding.reshard(x, P(...)) of an operand, so that both "
    "lie alike or are whole along the axis that is summed; pax.Linear, pax.Conv2D and the other "
    "layers answer by themselves; on a mesh of pax.sharding.make_mesh, whose axes are Auto, "
    "nothing is asked"
)
_OURS = str(Path(__file__).parent.parent) + os.sep
_JAX = str(Path(jax.__file__).parent) + os.sep


def explain_sharding(error: Exception, roots: list[Any]) -> None:
    """Adds a note to an error of jax about Explicit axes, if it is one; a longer one stays.

    On its way up an error comes to modules that know more of the path.

    Args:
        error: what is being raised.
        roots: the modules in which the path of the guilty one is looked for.
    """
    if not _is_about_sharding(error):
        return
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if any(_has_explicit_axes(leaf) for leaf in _arrays(frames, roots)):
        notes = getattr(error, "__notes__", [])
        new = f"{_BEGIN}and only the program knows.\n{_where(frames, roots)}{_ADVICE}"
        ours = max([new, *filter(_is_ours, notes)], key=len)
        error.__notes__ = [*(note for note in notes if not _is_ours(note)), ours]


def _is_ours(note: str) -> bool:
    return note.startswith(_BEGIN)


def _is_about_sharding(error: Exception) -> bool:
    if type(error).__name__ == "ShardingTypeError":
        return True
    return isinstance(error, (TypeError, ValueError)) and "sharding" in str(error).lower()


def _arrays(frames: list[tuple[FrameType, int]], roots: list[Any]) -> list[Any]:
    """The arrays of the modules, and those that functions of the program had at hand."""
    inner = [frame for frame, _ in frames if _is_the_programs(frame)][-1:]
    values = [value for frame in inner for value in frame.f_locals.values()]
    return [leaf for value in (*roots, *values) for leaf in _leaves(value)]


def _leaves(value: object) -> list[Any]:
    try:
        return jax.tree_util.tree_leaves(value)
    except (TypeError, ValueError):  # a dict whose keys have no order, among the locals
        return []


def _has_explicit_axes(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    return AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types


def _is_the_programs(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_OURS, _JAX, "<frozen"))


def _where(frames: list[tuple[FrameType, int]], roots: list[Any]) -> str:
    """The innermost module in which it happened, and the innermost line of the program."""
    lines = [(frame, line) for frame, line in frames if _is_the_programs(frame)]
    owners = [owner for frame, _ in frames if (owner := owner_of_frame(frame)) is not None]
    owner = next((each for each in reversed(owners) if isinstance(each, Node)), None)
    parts = [] if owner is None else [_name(owner, roots)]
    if lines:
        frame, line = lines[-1]
        parts.append(f"({Path(frame.f_code.co_filename).name}:{line})")
    return f"  where: {' '.join(parts)}\n" if parts else ""


def _name(module: PyTree, roots: list[Any]) -> str:
    """The path of a module and its class; of a root, or one of nowhere, the class alone."""
    kind = type(module).__qualname__
    for root in roots:
        for path, each in named_modules(root):
            if each is module and path:
                return f"{path}: {kind}"
    return kind
