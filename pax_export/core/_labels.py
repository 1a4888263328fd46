"""Modules that know where they stand: each call of one says its path to the trace and to a record.

A labelled net is a copy whose modules hold their paths as static data, and whose
classes are derived ones with another `__call__`.  The net itself, and nets that
nobody looks at, pay nothing.  A path survives jit, scan, vmap and grad, since it is
part of the treedef; a trace of one path is never taken for that of another.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import jax

from pax_export.core._edit import with_class
from pax_export.core._subclassing import derived, register_aspect
from pax_export.core._traversal import apply_bottom_up, named_modules, rebuilt
from pax_export.core._tree import STATIC, Node, attributes_of, current_kinds, update_moduledef

_PATH = "_path_in_net"
_SCOPE = re.compile(r"<([^<>]*)>")


class Recorder(Protocol):
    """Who hears of calls while a labelled net runs."""

    def called(self, path: str, module: Any, arguments: Any, output: Any) -> Any:
        """A module has been called; arguments are ``(args, kwargs)``.

        Returns:
            What the call shall return: the output, or something in its place.
        """


_recorder: ContextVar[Recorder | None] = ContextVar("pax_export_recorder", default=None)


def labelled(net: Any) -> Any:
    """A copy of a module in which each module knows its path from the root."""
    copy = rebuilt(net)
    for path, module in named_modules(copy):
        kinds = current_kinds(module)
        attributes_of(module)[_PATH] = path
        update_moduledef(module, kinds | {_PATH: STATIC})
    # A class that writes its own `apply` has no say here.
    return apply_bottom_up(copy, lambda m: with_class(m, derived(type(m), "labelled", True)))


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """While the block runs, the recorder hears of each call of a labelled module."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def _labelled(base: type, namespace: dict[str, Any], value: bool) -> dict[str, Any]:
    if not issubclass(base, Callable):  # what it is called for, it has no call
        return {}
    call = namespace.get("__call__") or base.__call__

    @functools.wraps(call)
    def __call__(self: Node, *args: Any, **kwargs: Any) -> Any:
        path = attributes_of(self).get(_PATH)
        if path is None:
            return call(self, *args, **kwargs)
        with jax.named_scope(f"<{path}>"):
            output = call(self, *args, **kwargs)
            recorder = _recorder.get()
            if recorder is not None:
                output = recorder.called(path, self, (args, kwargs), output)
        return output

    return {"__call__": __call__}


register_aspect("labelled", _labelled)


def path_in(equation: Any, around: str) -> str:
    """The path of the module in whose call an equation of a traced program stands.

    ``around`` is that of the equation whose inner program this is.  A program that jax
    keeps and uses again may name the module that came first: what is not below the
    module around is not believed.
    """
    found = _SCOPE.findall(str(equation.source_info.name_stack))
    if found and _is_below(found[-1], around):
        return found[-1]
    return around


def _is_below(path: str, other: str) -> bool:
    """True for a path itself, and for one that leads on from it."""
    return not other or path == other or path.startswith(other + ".")
