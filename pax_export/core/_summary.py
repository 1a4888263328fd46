"""How a module prints: its line, and the tree of lines of its submodules."""

from __future__ import annotations

from typing import Any

import jmp
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export.core._subclassing import aspect_of
from pax_export.core._traversal import submodules
from pax_export.core._tree import Node


def line(module: Node, info: dict[str, Any] | None = None) -> str:
    """One line for a module: ``(name) Class(key=value, ...)``.

    Args:
        module: the module.
        info: what stands in the brackets; None values are left out.  Without
            it there are no brackets.
    """
    policy = aspect_of(type(module), "mp_policy")
    if policy is not None:
        info = {**(info or {}), "mp_policy": policy_letters(policy)}
    text = type(module).__qualname__
    if info is not None:
        pairs = [f"{key}={value}" for key, value in info.items() if value is not None]
        text += f"({', '.join(pairs)})"
    name = module.name  # type: ignore[attr-defined]
    return text if name is None else f"({name}) {text}"


_LETTERS = {
    "float64": "F",
    "float32": "F",
    "float16": "H",
    "bfloat16": "H",
}


def policy_letters(policy: jmp.Policy) -> str:
    """A policy as letters for param, compute and output: F full, H half.

    Another dtype is written out.
    """
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    names = [_dtype_name(dtype) for dtype in dtypes]
    letters = [_LETTERS.get(name, name) for name in names]
    return "".join(letters) if all(len(x) == 1 for x in letters) else "-".join(letters)


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype however it is given: class, instance or string."""
    return np.dtype(dtype).name


def summary_lines(module: Node, children: list[Any] | None = None) -> list[str]:
    """The tree of a module and its submodules, a line each.

    Args:
        module: the root.
        children: what to show below it, if not its direct submodules.
    """
    first = _require_text(module, type(module).__repr__(module))
    if children is None:
        children = submodules(module)
    lines = [first]
    for child in children:
        last = child is children[-1]
        head, *tail = child.summary(return_list=True)
        lines.append(("└── " if last else "├── ") + head)
        lines += [("    " if last else "│   ") + text for text in tail]
    return lines


def _require_text(module: Node, text: Any) -> str:
    """Raises where a user's ``__repr__`` gave something that is no text."""
    if isinstance(text, str):
        return text
    raise InvalidArgumentError(
        "A __repr__ must return a string.",
        where=f"{type(module).__qualname__}.__repr__",
        got=repr(text),
        write="return super().__repr__()",
    )
