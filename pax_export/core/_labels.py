"""Modules labeled with their paths, which they add to the trace.

Labels are in moduledefs, so they survive jit, scan, vmap and grad. Treedefs with and without
labels are equal; only modules of one net with different labels differ, so that jax traces
equal layers separately. See `with_labels` for nets that stack such layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import jax

from pax_export._types import Equation, PyTree
from pax_export.core._edit import with_class
from pax_export.core._moduledef import LABEL, Label
from pax_export.core._subclassing import base_of, derive_class, register_aspect
from pax_export.core._traversal import apply_bottom_up, is_at, named_modules, rebuild_tree
from pax_export.core._tree import STATIC, Node, attributes_of, current_kinds, update_moduledef

R = TypeVar("R")
Labeling = Callable[[Any], Any]
#: Attributes that `call_labeled` adds to a `__call__`.
SAYS_PATH = "_pax_says_path"
_SCOPE = re.compile(r"<([^<>]*)>")


class Recorder(Protocol):
    """Receives the calls of a labeled net."""

    def called(self, path: str, module: PyTree, arguments: Sequence[Any], output: PyTree) -> Any:
        """Records a call; returns its output or a replacement."""


_recorder: ContextVar[Recorder | None] = ContextVar("pax_export_recorder", default=None)
#: The path and the class of the labeled module whose call runs.
_around: ContextVar[tuple[str, type] | None] = ContextVar("pax_export_around", default=None)
_trace = jax.make_user_context()


def label_modules(net: PyTree, apart: bool = True) -> Any:
    """Returns a copy whose modules have their paths; ``apart=False`` keeps equal treedefs equal."""
    copy, whole = rebuild_tree(net), object()
    for path, module in named_modules(copy):
        kinds = current_kinds(module)
        attributes_of(module)[LABEL] = Label(path, whole if apart else object())
        update_moduledef(module, kinds | {LABEL: STATIC})
    # An overridden `apply` is not used here.
    return apply_bottom_up(copy, _that_says_its_path)


def with_labels(trace: Callable[[Labeling], R]) -> R:
    """Traces a function of ``label(net)``; without distinct labels if these prevent stacking."""
    try:
        with traced_anew():
            return trace(label_modules)
    except (TypeError, ValueError):
        with traced_anew():
            return trace(functools.partial(label_modules, apart=False))


def traced_anew() -> Any:
    """Context manager in which jax reuses no program traced outside of it."""
    return _trace(object())


@contextmanager
def record_calls(recorder: Recorder) -> Iterator[None]:
    """While the block runs, the recorder hears of each call of a labeled module."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def call_labeled(
    call: Callable[..., Any], module: PyTree, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a module; a labeled one adds its path to the trace and notifies the recorder."""
    label = attributes_of(module).get(LABEL) if isinstance(module, Node) else None
    if label is None:
        return call(module, *args, **kwargs)
    around = label.path, base_of(type(module))
    if _around.get() == around:  # the call of a base class, or of a view of the module
        return call(module, *args, **kwargs)
    token = _around.set(around)
    try:
        with jax.named_scope(f"<{label.path}>"):
            output = call(module, *args, **kwargs)
    finally:
        _around.reset(token)
    recorder = _recorder.get()
    if recorder is None:
        return output
    return recorder.called(label.path, module, (args, kwargs), output)


def _that_says_its_path(module: Node) -> Node:
    """Returns the module, of a derived class unless `call_labeled` wraps its `__call__`."""
    cls = type(module)
    if not issubclass(cls, Callable) or getattr(cls.__call__, SAYS_PATH, False):
        return module
    return with_class(module, derive_class(cls, "labeled", True))


def _labeled(base: type, namespace: dict[str, Any], value: bool) -> dict[str, Any]:
    call = namespace.get("__call__") or base.__call__
    return {"__call__": lambda self, *args, **kwargs: call(self, *args, **kwargs)}


register_aspect("labeled", _labeled)


def path_in(equation: Equation, around: str) -> str:
    """Returns the path of the module whose call contains an equation.

    A program that jax caches may name another module: a path outside `around` is ignored.
    """
    found = _SCOPE.findall(str(equation.source_info.name_stack))
    if found and is_at(found[-1], around):
        return found[-1]
    return around
