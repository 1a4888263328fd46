"""Where an operation stands in a model: the layer, the line that makes it, the user's line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pax_export._jax import Primitive
from pax_export.export.tracing import exportable
from pax_export.export.tracing.exportable import layer_of
from pax_export.export.tracing.programs import Program

_OURS = str(Path(__file__).parents[3])
#: How deep a layer is looked for in the attributes of a model.
_DEPTH = 8


def place_of(program: Program, equation: Any, callers: Sequence[Any]) -> str:
    """``encoder.pool: Pool, _pool.py:30 (max_pool), from model.py:12 (forward)``."""
    # What jax jits by itself has no line of the user's; the call of it has.
    lines = (_line(each) for each in (equation, *reversed(callers)))
    line = next(filter(None, lines), "")
    users = (_users_frame(each) for each in (equation, *reversed(callers)))
    user = next(filter(None, users), None)
    parts = [_layer(program, (*callers, equation)[0], user), line]
    if user is not None and not line.startswith(f"{Path(user[0]).name}:{user[1]}:"):
        parts.append(f"from {_text(*user)}")
    return ", ".join(filter(None, parts))


def _line(equation: Any) -> str:
    from jax.extend import source_info_util

    return source_info_util.summarize(equation.source_info).rsplit("/", 1)[-1]


def _text(file: str, line: int, function: str) -> str:
    return f"{Path(file).name}:{line} ({function})"


def _users_frame(equation: Any) -> tuple[str, int, str] | None:
    """The innermost line that is neither of a library nor ours."""
    trace = getattr(equation.source_info, "traceback", None)
    for frame in getattr(trace, "frames", ()):
        file = frame.file_name
        if not file.startswith((_OURS, "<")) and "site-packages" not in Path(file).parts:
            return file, frame.line_num, frame.function_name.rsplit(".", 1)[-1]
    return None


def _layer(program: Program, outermost: Any, user: tuple[str, int, str] | None) -> str:
    """The path of the layer: as its library says it, or found by tracing once more."""
    stack = str(outermost.source_info.name_stack)
    if stack:
        return stack
    try:
        return _found(program, outermost.primitive.name, user)
    except Exception:  # it only makes a message better
        return ""


def _found(program: Program, name: str, user: tuple[str, int, str] | None) -> str:
    """Traces the model again, and looks at what runs when the operation is made."""
    seen: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event != "call" or seen or frame.f_code.co_name != "bind":
            return
        made = frame.f_locals.get("self")
        if not isinstance(made, Primitive) or made.name != name:
            return
        frames = list(_outwards(frame))
        lines = {(each.f_code.co_filename, each.f_lineno) for each in frames}
        if user is None or user[:2] in lines:
            seen.append(_owner([each.f_locals.get("self") for each in _of_model(frames)]))

    traced = program.traced
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        jax.make_jaxpr(lambda operands: traced.function(operands))(list(traced.structs))
    finally:
        sys.setprofile(before)
    return seen[0] if seen else ""


def _of_model(frames: Sequence[Any]) -> list[Any]:
    """From the model inwards, without what called the export."""
    files = [each.f_code.co_filename for each in frames]
    ours = [index for index, file in enumerate(files) if file == exportable.__file__]
    return list(reversed(frames[: ours[-1] if ours else len(frames)]))


def _outwards(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner(owners: Sequence[Any]) -> str:
    """The innermost of our modules, or of the objects of another library with arrays in them."""
    layer = layer_of(owners)
    if layer:
        return layer
    models = [each for each in owners if each is not None and _is_model(each)]
    if not models:
        return ""
    root, last = models[0], models[-1]
    path = _path(root, last, _DEPTH, set())
    name = type(last).__name__
    return f"{path}: {name}" if path else name


def _is_model(value: Any) -> bool:
    room = type(value).__module__.split(".")[0]
    return room not in ("jax", "jaxlib", "builtins", "functools", "contextlib", "pax_export") and (
        hasattr(value, "__dict__")
    )


def _path(value: Any, wanted: Any, depth: int, seen: set[int]) -> str:
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
            rest = _path(each, wanted, depth - 1, seen)
            if rest:
                return f"{name}.{rest}"
    return ""
