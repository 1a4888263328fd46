"""Finds the module, of any library, that creates an operation, by reading frames of a new trace."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from pax_export._jax import Primitive
from pax_export._types import PyTree
from pax_export.export.tracing import exportable
from pax_export.export.tracing.exportable import layer_of
from pax_export.export.tracing.source_lines import Chain, users_line
from pax_export.export.tracing.traced import Traced

#: How deep a layer is looked for in the attributes of a model.
_DEPTH = 8


def owner_of(traced: Traced, chain: Chain) -> str:
    """Returns ``encoder.pool: Pool``, the module running when the operation is created, or ""."""
    name, user = chain[0].primitive.name, users_line(chain)
    seen: list[str] = []

    def look(frame: PyTree, event: str, _: object) -> None:
        if event != "call" or seen or frame.f_code.co_name != "bind":
            return
        made = frame.f_locals.get("self")
        if not isinstance(made, Primitive) or made.name != name:
            return
        frames = [each for each, _ in traceback.walk_stack(frame)]
        lines = {(each.f_code.co_filename, each.f_lineno) for each in frames}
        if user is None or user[:2] in lines:
            seen.append(owner_name([each.f_locals.get("self") for each in _of_model(frames)]))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        jax.make_jaxpr(lambda operands: traced.function(operands))(list(traced.structs))
    finally:
        sys.setprofile(before)
    return seen[0] if seen else ""


def _of_model(frames: Sequence[Any]) -> list[Any]:
    """Returns the frames from the model inwards, without the callers of the export."""
    files = [each.f_code.co_filename for each in frames]
    ours = [index for index, file in enumerate(files) if file == exportable.__file__]
    return list(reversed(frames[: ours[-1] if ours else len(frames)]))


def owner_name(owners: Sequence[Any]) -> str:
    """The innermost of our modules, or of the objects of another library with arrays in them."""
    layer = layer_of(owners)
    if layer:
        return layer
    models = [each for each in owners if each is not None and _is_model(each)]
    if not models:
        return ""
    root, last = models[0], models[-1]
    path = _attribute_path(root, last, _DEPTH, set())
    name = type(last).__name__
    return f"{path}: {name}" if path else name


def _is_model(value: object) -> bool:
    room = type(value).__module__.split(".")[0]
    return room not in ("jax", "jaxlib", "builtins", "functools", "contextlib", "pax_export") and (
        hasattr(value, "__dict__")
    )


def _attribute_path(value: object, wanted: object, depth: int, seen: set[int]) -> str:
    if depth == 0 or id(value) in seen:
        return ""
    seen.add(id(value))
    if isinstance(value, dict):
        entries = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        entries = [(str(index), each) for index, each in enumerate(value)]
    else:
        entries = list(getattr(value, "__dict__", {}).items())
    for name, each in entries:
        if each is wanted:
            return name
        if isinstance(each, (dict, list, tuple)) or hasattr(each, "__dict__"):
            rest = _attribute_path(each, wanted, depth - 1, seen)
            if rest:
                return f"{name}.{rest}"
    return ""
