"""The module and source lines of a traced operation."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pax_export._foundations.errors import PaxError, UnsupportedOperationError
from pax_export._foundations.jaxpr import line_of
from pax_export._foundations.types import Equation
from pax_export.core import path_in
from pax_export.export.portable import NotWrittenError
from pax_export.export.tracing import exportable

_OURS = str(Path(__file__).parents[2])
_LIBRARY = Path(traceback.__file__).parent
Error = TypeVar("Error", bound=PaxError)
Line = tuple[str, int, str]  # file, number, function
#: An operation as a chain of equations; each calls the next.
Chain = Sequence[Any]

#: The number of operations named in one error.
_FEW = 5
#: The operations of errors, stored separately, because errors can be pickled and operations not.
_operations: WeakKeyDictionary[PaxError, tuple[Chain, ...]] = WeakKeyDictionary()


def attach_operations(error: Error, chains: Iterable[Chain]) -> Error:
    """Stores the operations in an error, for `operations`, and their lines in its text."""
    _operations[error] = tuple(tuple(chain) for chain in chains if chain)
    error.where = join_texts(map(source_text, operations(error))) or error.where
    return error


_OTHER = "another target, e.g. to_saved_model"


def refuse_operation(
    target: str, error: NotWrittenError, key: str, write: str, other: str = _OTHER
) -> UnsupportedOperationError:
    """Returns the error for an operation of the signature `key` that a target cannot express.

    It says what to `write`, or which `other` target has operations that are not LAPACK's.
    """
    what = f"{target} cannot express the operation {error.equation.primitive.name}"
    what += f": {error.reason[:300].rstrip('.')}." if error.reason else "."
    write = f"{write}, or {other_target(error.equation.primitive.name, other)}"
    refusal = UnsupportedOperationError(what, where=key, write=write)
    return attach_operations(refusal, [(*error.callers, error.equation)])


#: What jax computes by LAPACK alone, on CPUs, and nothing here decomposes.
BY_LAPACK = frozenset({"eig", "hessenberg", "schur"})


def other_target(name: str, other: str = _OTHER) -> str:
    """The exporter to suggest for an operation that the others refuse."""
    if name in BY_LAPACK:
        return 'to_stablehlo(..., platforms=("cpu",))'
    return other


def operations(error: PaxError) -> tuple[Chain, ...]:
    """The operations that an error is about."""
    return _operations.get(error, ())


def join_texts(texts: Iterable[str]) -> str:
    """A few different texts as one."""
    return "; ".join(list(dict.fromkeys(filter(None, texts)))[:_FEW])


def module_path(equations: Chain) -> str:
    """Returns the path of the module that contains the last of nested equations; see `labeled`."""
    path = ""
    for equation in equations:
        path = path_in(equation, path)
    if path:
        return path
    stacks = (str(each.source_info.name_stack) for each in equations)
    return "/".join(stack for stack in stacks if stack and "<" not in stack)


def source_text(equations: Chain) -> str:
    """``nnx/linear.py:80 (Linear.__call__), from model.py:12 (forward)``: operation, and user."""
    lines = (line_of(each) for each in reversed(equations))
    operation = next((x.rsplit("/", 1)[-1] for x in lines if x), "")
    user = users_line(equations) or (None if operation else _callers_line())
    text = f"{Path(user[0]).name}:{user[1]}" if user else ""
    if not text or operation.startswith(f"{text}:") or operation.split(" ")[0] == text:
        return operation or text
    return f"{operation}, from {text} ({user[2]})" if operation and user else text


def users_line(equations: Chain) -> Line | None:
    """The innermost line outside of libraries; lines in cached programs must match the caller."""
    found: list[Line] = []
    for equation in equations:
        inner = _users_lines(equation)
        if found and inner[len(inner) - len(found) :] != found:
            break
        found = inner or found
    return found[0] if found else None


def _users_lines(equation: Equation) -> list[Line]:
    """Returns source lines of the model itself, innermost first, without callers of the export."""
    trace = getattr(equation.source_info, "traceback", None)
    users = []
    for frame in getattr(trace, "frames", ()):
        file = frame.file_name
        if file == exportable.__file__:
            break
        if is_users(file):
            users.append((file, frame.line_num, frame.function_name.rsplit(".", 1)[-1]))
    return users


def _callers_line() -> Line | None:
    """The line that called the exporter, for a model without a line: a function of jax."""
    frames = (each for each in traceback.walk_stack(None) if is_users(each[0].f_code.co_filename))
    for frame, line in frames:
        return frame.f_code.co_filename, line, frame.f_code.co_name
    return None


def is_users(file: str) -> bool:
    """Whether a file is of the user: not of a library, of Python or of this package."""
    path = Path(file)
    return (
        not file.startswith((_OURS, "<"))
        and path.parent != _LIBRARY
        and "site-packages" not in path.parts
    )
