"""Modules that are called: their paths, for errors, traces and recordings."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
from jax.tree_util import tree_leaves

from pax_export._foundations.errors import hide_frames
from pax_export._foundations.types import Equation
from pax_export.core._edit import with_class
from pax_export.core._static import LABEL, Label, base_of, derive_class, register_aspect
from pax_export.core._traversal import apply_bottom_up, is_at, named_modules, rebuild_tree
from pax_export.core._tree import (
    STATIC,
    Node,
    attributes_of,
    current_kinds,
    flatten,
    update_moduledef,
)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound=Node)
Labeling = Callable[[Any], Any]
#: Attributes that `call_labeled` adds to a `__call__`.
SAYS_PATH = "_pax_says_path"
_SCOPE = re.compile(r"<([^<>]*)>")


class Recorder(Protocol):
    """Receives the calls of a labeled net."""

    def called(self, path: str, module: Node, arguments: Sequence[Any], output: R) -> R:
        """Records a call; returns its output or a replacement."""
        ...


_recorder: ContextVar[Recorder | None] = ContextVar("pax_export_recorder", default=None)
#: The path and the class of the labeled module whose call runs.
_around: ContextVar[tuple[str, type] | None] = ContextVar("pax_export_around", default=None)
_trace = jax.make_user_context()  # type: ignore  # of any value


def label_modules(net: M, apart: bool = True) -> M:
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
def record_calls(recorder: Recorder) -> Generator[None, None, None]:
    """While the block runs, the recorder hears of each call of a labeled module."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def call_labeled(
    call: Callable[..., R], module: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> R:
    """Calls a module; a labeled one adds its path to the trace and notifies the recorder."""
    label = attributes_of(module).get(LABEL) if isinstance(module, Node) else None
    if not isinstance(module, Node) or label is None:
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
    cls: Any = type(module)
    if not callable(module) or getattr(cls.__call__, SAYS_PATH, False):
        return module
    return with_class(module, derive_class(cls, "labeled", True))


def _labeled(base: type, namespace: dict[str, Any], value: bool) -> dict[str, Any]:
    call: Callable[..., Any] = namespace.get("__call__") or base.__call__

    def __call__(self: Node, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    return {"__call__": __call__}


register_aspect("labeled", _labeled)


def path_in(equation: Equation, around: str) -> str:
    """Returns the path of the module whose call contains an equation.

    A program that jax caches may name another module: a path outside `around` is ignored.
    """
    found = _SCOPE.findall(str(equation.source_info.name_stack))
    if found and is_at(found[-1], around):
        return found[-1]
    return around


# --- notes on exceptions with the path of the module, by a wrapper of each __call__ ---


_HAS_NOTE = "_pax_has_note"


def noting_path(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wraps `__call__` so that its errors name the path of the module."""

    @functools.wraps(call)
    def __call__(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if Label.in_use:
                return call_labeled(call, self, args, kwargs)
            return call(self, *args, **kwargs)
        except Exception as error:  # of the module; raised again
            if _is_asked_for_labels(self, args, kwargs):
                return self  # type: ignore[return-value]
            hide_frames(error)
            if isinstance(self, Node):  # else a view, whose own call encloses this one
                _add_note(error, self)
            raise

    setattr(__call__, SAYS_PATH, True)
    return __call__


def _is_asked_for_labels(self: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a tree of labels, which has the class of a layer, is called with parameters.

    `optax.multi_transform` and others take a function for label trees, and call what is callable.
    """
    return (
        isinstance(self, Node)
        and len(args) == 1
        and isinstance(args[0], Node)
        and base_of(type(self)) is base_of(type(args[0]))
        and not kwargs
        and not any(hasattr(leaf, "dtype") for leaf in tree_leaves(self))
    )


#: The code of all calls that are wrapped.
_CODE = noting_path(repr).__code__  # type: ignore[attr-defined]


def path_of_call() -> str:
    """Returns the path of the module whose call runs, from the outermost module."""
    return _path_and_root()[0]


def _path_and_root() -> tuple[str, Node | None]:
    path, inner, frame = "", None, inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CODE and isinstance(module := frame.f_locals["self"], Node):
            if inner is not None and module is not inner:
                path = ".".join(filter(None, (_step_between(module, inner), path)))
            inner = module
        frame = frame.f_back
    return path, inner


def _add_note(error: Exception, module: Node) -> None:
    if getattr(error, _HAS_NOTE, False):
        return  # from a call in this one
    path, root = _path_and_root()
    name = type(root).__name__
    text = f"{path} ({type(module).__name__}) in {name}" if path else name
    try:
        error.add_note(f"in the call of {text}")
        setattr(error, _HAS_NOTE, True)
    except (AttributeError, TypeError):
        pass  # the error does not allow attributes


def _step_between(outer: Node, inner: Node) -> str:
    """The path from a module to a called module; a star replaces unknown parts."""
    named = named_modules(outer)[1:]
    for path, module in named:
        if module is inner:
            return path
    # A transform has flattened and rebuilt it, so equal modules cannot be told apart.
    moduledef = flatten(inner)[1]
    alike = [path for path, module in named if flatten(module)[1] is moduledef]
    if alike:
        return _common_pattern(alike)
    # Under a policy a module calls a copy of itself with cast arrays.
    is_itself = base_of(type(inner)) is base_of(type(outer))
    return "" if is_itself else f"<{type(inner).__name__}>"


def _common_pattern(paths: list[str]) -> str:
    """Several paths as one pattern: ``layers.0.fc`` and ``layers.1.fc`` as ``layers.*.fc``."""
    columns = list(zip(*[path.split(".") for path in paths]))
    if any(path.count(".") + 1 != len(columns) for path in paths):
        return "*"
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in columns)
