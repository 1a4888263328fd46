"""`repr` and `summary` of modules."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jmp  # type: ignore  # has no types
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export.core._parameters import FROZEN, ROLES, STATE, TRAINABLE, named_roles
from pax_export.core._static import aspect_of, verb
from pax_export.core._traversal import modules_and_leaves, named_submodules
from pax_export.core._tree import Node, attributes_of


def module_line(module: Node, info: dict[str, Any] | None = None) -> str:
    """Formats one line for a module: `info`, or counts of its elements, and its mode.

    Without counts, the mode is omitted while it is ``train``.
    """
    if _within_a_summary.get():
        return pax_line(module, info)
    contents = module._pax_contents() if info is None else info  # type: ignore[attr-defined]
    counts = info is None or "parameters" in info
    training = getattr(module, "training", None)  # a module that is being made has none yet
    if training is False or (training and counts):
        contents = {**contents, "mode": "train" if training else "eval"}
    return pax_line(module, contents or info)


def pax_line(module: Node, info: dict[str, Any] | None = None) -> str:
    """Returns PAX's line for a module, ``(name) Class(key=value, ...)``, without None values."""
    policy = aspect_of(type(module), "mp_policy")
    if policy is not None:
        info = {**(info or {}), "mp_policy": policy_letters(policy)}
    text = type(module).__qualname__
    if info is not None:
        pairs = [f"{key}={value}" for key, value in info.items() if value is not None]
        text += f"({', '.join(pairs)})"
    name = module.name  # type: ignore[attr-defined]
    return text if name is None else f"({name}) {text}"


#: Set while a tree of lines is printed: children are printed below their parent.
_within_a_summary: ContextVar[bool] = ContextVar("within_a_summary", default=False)


@contextmanager
def _pax_lines() -> Generator[None, None, None]:
    before = _within_a_summary.set(True)
    try:
        yield
    finally:
        _within_a_summary.reset(before)


def count_elements(module: Node) -> dict[str, Any]:
    """Counts of elements: parameters, frozen, states; {} in summaries and for broken modules."""
    if _within_a_summary.get():
        return {}
    count: dict[str, int] = dict.fromkeys(ROLES, 0)
    try:
        with _pax_lines():  # an error while printing prints the module: that line counts nothing
            if not _is_tree(module):
                return {}
            for _, leaf, role in named_roles(module):
                count[role] += count_array_elements(leaf)
    except Exception:  # a broken `parameters()`: errors print the modules that they are about
        return {}
    parameters, state = count[TRAINABLE] + count[FROZEN], count[STATE]
    return {
        "parameters": None if state and not parameters else parameters,
        "frozen": count[FROZEN] or None,
        "state": state or None,
    }


def count_array_elements(leaf: object) -> int:
    """Returns the number of elements of an array; 0 for other values."""
    return math.prod(getattr(leaf, "shape", (0,)))


def _is_tree(module: Node) -> bool:
    """Returns whether every submodule occurs once, so that jax can flatten the module."""
    modules, _ = modules_and_leaves(module, once=True)
    return len(set(map(id, modules))) == len(modules)


def module_html(module: Node) -> str | None:
    """The tree of a module as collapsible HTML; None if it cannot be inspected."""
    try:
        return verb("inspect")(module)._repr_html_()
    except Exception:  # hides any fault of `inspect`: the notebook prints the text instead
        return None


def render_treescope(module: Node, path: str | None, renderer: Callable[..., Any]) -> Any:
    """A module as treescope renders it: its class, name, mode and public attributes."""
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


def summary_lines(module: Node, below: bool = True) -> list[str]:
    """Returns the tree of a module as lines, each child with its dotted name."""
    with _pax_lines():
        text = type(module).__repr__(module)
    if not isinstance(text, str):  # type: ignore  # a user's, perhaps
        raise InvalidArgumentError(
            "A __repr__ must return a string.",
            where=f"{type(module).__qualname__}.__repr__",
            got=repr(text),
            write="return super().__repr__()",
        )
    return tree_lines(text, named_submodules(module) if below else [])


def tree_lines(text: str, children: Sequence[tuple[str, Any]]) -> list[str]:
    """Returns a line and the summaries of named modules below it."""
    lines = [text]
    for number, (name, child) in enumerate(children):
        last = number == len(children) - 1
        head, *tail = child.summary(return_list=True)
        head = f"{name}: {head.removeprefix(f'({name}) ')}"
        lines.append(("└── " if last else "├── ") + head)
        lines += [("    " if last else "│   ") + text for text in tail]
    return lines
