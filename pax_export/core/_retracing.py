"""Detects static data that changes in every call of a jitted function.

A list that a call appends to, or a number that it counts up, is part of the
treedef: jax traces the function anew for each value, and a training loop takes
minutes instead of seconds without a word.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from typing import Any

from jax.tree_util import tree_leaves

from pax_export._errors import RetracingWarning
from pax_export._jax import is_tracer, trace_state
from pax_export.core._static import static_key
from pax_export.core._tree import Node, flatten

_ENOUGH = 3  # consecutive traces, each starting from the static data that the last one left
_REMEMBERED = 64

# Of each class: (attribute, what it was left as) -> how many traces led there, and the last.
_left: weakref.WeakKeyDictionary[type, OrderedDict] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


_outside = trace_state()


def static_before(modules: list[Node], trace: object) -> list[tuple[Node, Any]]:
    """The static data of modules that a trace begins with; nothing outside of traces."""
    if trace == _outside:
        return []
    return [(module, flatten(module)[1]) for module in modules]


def look_for_retracing(before: list[tuple[Node, Any]]) -> None:
    """Warns of an attribute that several traces in turn have changed."""
    for module, old in before:
        new = flatten(module)[1]
        if new is old or new.cls is not old.cls or not any(map(is_tracer, tree_leaves(module))):
            continue
        for name, value in new.static.items():
            if name in old.static:
                was, now = static_key(old.static[name]), static_key(value)
                if was != now:
                    _count(type(module), name, was, now, value)


def _count(cls: type, name: str, was: object, now: object, value: object) -> None:
    trace = trace_state()
    with _lock:
        left = _left.setdefault(cls, OrderedDict())
        count, last = left.get((name, was), (0, None))
        if (name, now) in left or last == trace:
            return
        left[name, now] = (count + 1, trace)
        if len(left) > _REMEMBERED:
            left.popitem(last=False)
    if count + 1 == _ENOUGH:
        warning = RetracingWarning(
            f"Static data changed in each of {_ENOUGH} traces of a jitted function, so jax "
            "traces and compiles it anew in every call.",
            where=f"{cls.__qualname__}.{name}",
            got=f"{type(value).__name__}: {value!r}"[:120],
            write="an array, which is data: self.count = jnp.array(0); or return the value, "
            "and collect values outside of the jitted function",
        )
        warnings.warn(warning, stacklevel=4)
