"""Detects in-place changes of lists and dicts in immutable modules.

When a container may first be referenced from outside, its contents are recorded, and the next
flatten compares. Modules whose attributes nobody has read are not compared.
"""

from __future__ import annotations

import operator
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from pax_export._errors import ChangedOutsideWarning
from pax_export._types import PyTree

Seen = tuple[Any, ...]  # a container, its content, the next container, its content

DICTS = frozenset({dict, OrderedDict, defaultdict})

MAX_DEPTH = 100  # containers, one in another


class Watched(NamedTuple):
    """The flattened pair of a module whose containers may be referenced elsewhere."""

    pair: tuple  # ``(children, moduledef)``
    seen: Seen  # containers among the children, and their contents


def with_watch(pair: tuple) -> tuple:
    """Returns the pair, with a record of the containers among its children if there are any."""
    seen = seen_in(pair[0])
    return Watched(pair, seen) if seen else pair


def seen_in(values: Iterable[Any]) -> Seen:
    """The lists and dicts in the values, each with its current contents."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is list or kind in DICTS:
            parts = _items_of(value)
            found += (value, parts, *seen_in(parts))
        elif isinstance(value, tuple):
            found += seen_in(value)
    return tuple(found)


def _items_of(container: PyTree) -> tuple:
    if isinstance(container, list):
        return tuple(container)
    return tuple([x for item in container.items() for x in item])


def is_unchanged(seen: Seen) -> bool:
    """True if every container has the same objects as before."""
    return find_changed(seen) is None


def find_changed(seen: Seen) -> tuple[Any, tuple] | None:
    """Returns the first changed container and its old contents, or None."""
    for container, before in zip(seen[::2], seen[1::2]):
        now = _items_of(container)
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            return container, before
    return None


def ends(value: object, depth: int = MAX_DEPTH) -> bool:
    """False if a container contains itself or nests too deeply, which jax does not survive."""
    if type(value) is list or isinstance(value, tuple):
        parts: Iterable[Any] = value
    elif type(value) in DICTS:
        parts = value.values()  # type: ignore[attr-defined]
    else:
        return True
    if not depth:
        return False
    for part in parts:  # noqa: SIM110 - all() would take another frame for each container
        if not ends(part, depth - 1):
            return False
    return True


def holds_container(value: object, container: object) -> bool:
    """True if a container is this value or is inside it."""
    return not ends(value) or any(each is container for each in seen_in([value])[::2])


def warn_of_change(cls: type, name: str, value: object) -> None:
    """Warns that an attribute of an immutable module was changed in place."""
    where = f"{cls.__qualname__}.{name}"
    kind = type(value).__name__
    write = f"module = module.replace({name}=...)"
    if isinstance(value, list):
        write += f", as module.replace({name}=[*module.{name}, new])"
    warning = ChangedOutsideWarning(
        f"A {kind} of an immutable module was changed in place, outside of pax.pure; "
        "the module is used with the change, and jax retraces.",
        where=where,
        write=write + "; or change it in a function decorated with pax.pure",
    )
    warnings.warn(warning, stacklevel=5)
