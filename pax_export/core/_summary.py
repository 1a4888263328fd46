"""How a module prints: its line, and the tree of lines of its submodules."""

from __future__ import annotations

import importlib
from typing import Any

import jmp
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export.core._subclassing import aspect_of
from pax_export.core._traversal import submodules
from pax_export.core._tree import Node, attributes_of


def line(module: Node, info: dict[str, Any] | None = None) -> str:
    """One line for a module, ``(name) Class(key=value, ...)``; None values are left out."""
    policy = aspect_of(type(module), "mp_policy")
    if policy is not None:
        info = {**(info or {}), "mp_policy": policy_letters(policy)}
    text = type(module).__qualname__
    if info is not None:
        pairs = [f"{key}={value}" for key, value in info.items() if value is not None]
        text += f"({', '.join(pairs)})"
    name = module.name  # type: ignore[attr-defined]
    return text if name is None else f"({name}) {text}"


#: Who draws a module for notebooks: a room above this one, loaded when a notebook asks.
_DRAWN_BY = "pax_export.inspection"


def html(module: Node) -> str:
    """The tree of a module as HTML that folds, with paths, shapes, roles and sizes."""
    return importlib.import_module(_DRAWN_BY).inspect(module)._repr_html_()


def treescope(module: Node, path: str | None, renderer: Any) -> Any:
    """A module as treescope draws it: its class, name, mode and public attributes.

    Treescope asks for this, so it is there; nothing of ours imports it before.
    """
    render = importlib.import_module("treescope.repr_lib").render_object_constructor
    shown = {key: value for key, value in attributes_of(module).items() if key[:1] != "_"}
    name, training = module.name, module.training  # type: ignore[attr-defined]
    mode = {"training": training} if name is None else {"name": name, "training": training}
    return render(
        object_type=type(module), attributes=mode | shown, path=path, subtree_renderer=renderer
    )


_LETTERS = {"float64": "F", "float32": "F", "float16": "H", "bfloat16": "H"}


def policy_letters(policy: jmp.Policy) -> str:
    """A policy as letters for param, compute and output: F full, H half, others written out."""
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    names = [np.dtype(dtype).name for dtype in dtypes]  # of a class, an instance or a string
    letters = [_LETTERS.get(name, name) for name in names]
    return "".join(letters) if all(len(x) == 1 for x in letters) else "-".join(letters)


def summary_lines(module: Node, children: list[Any] | None = None) -> list[str]:
    """The tree of a module, a line each: its direct submodules, or these, are below it."""
    text = type(module).__repr__(module)
    if not isinstance(text, str):
        raise InvalidArgumentError(
            "A __repr__ must return a string.",
            where=f"{type(module).__qualname__}.__repr__",
            got=repr(text),
            write="return super().__repr__()",
        )
    lines = [text]
    children = submodules(module) if children is None else children
    for child in children:
        last = child is children[-1]
        head, *tail = child.summary(return_list=True)
        lines.append(("└── " if last else "├── ") + head)
        lines += [("    " if last else "│   ") + text for text in tail]
    return lines
