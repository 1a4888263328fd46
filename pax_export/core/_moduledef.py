"""ModuleDef: subtree names and static data of one module."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from jax.tree_util import GetAttrKey

from pax_export.core._containers import copy_containers, may_change, read_only
from pax_export.core._static import static_key

#: Under this name a module of a labeled net keeps its label, as a static attribute.
LABEL = "_path_in_net"


class Label:
    """The path of a module in a labeled net; ignored by comparisons."""

    __slots__ = ("path", "net")
    #: Whether any net was ever labeled: modules do not look for labels before.
    in_use = False

    def __init__(self, path: str, net: object):
        self.path, self.net = path, net
        Label.in_use = True

    def __repr__(self) -> str:
        return self.path

    def differs(self, other: Label | None) -> bool:
        """Whether this is another module of the same net."""
        return other is not None and self.net is other.net and self.path != other.path


class ModuleDef:
    """All of a module but its children; interned, so that treedefs compare by pointer.

    Attributes:
        cls: the class.
        names: the attributes that are subtrees, in child order: arrays, then mixed ones.
        array_count: the number of `names` that contain arrays only.
        template: all attributes in order of assignment, with None for children.
        static: the static attributes; lists, dicts and sets are read-only.
        changing: the static attributes that may be changed in place all the same, such as a
            dataclass that is not frozen: these are compared at each flatten.
        lazy: whether a rebuilt module may fill in its attributes later.
        keys: the jax key of each child.
        label: the path of the module in a labeled net, or None.
    """

    __slots__ = (
        "cls", "names", "array_count", "template", "static", "changing", "lazy",
        "keys", "label", "_key", "_hash", "__weakref__",
    )  # fmt: skip

    def __init__(self, key: tuple, cls, order, arrays, mixed, static):
        self._key = key
        self._hash = hash(key)
        self.cls = cls
        self.names = arrays + mixed
        self.array_count = len(arrays)
        # A snapshot: the list of an open module may be appended to later.
        self.static = {n: read_only(copy_containers(v)) for n, v in static.items()}
        self.changing = tuple([n for n, v in self.static.items() if may_change(v)])
        self.template = {name: self.static.get(name) for name in order}
        # An attribute that a class attribute hides would never be asked for.
        self.lazy = not self.changing and not any(hasattr(cls, n) for n in order)
        self.label: Label | None = static.get(LABEL)
        self.keys = tuple([GetAttrKey(name) for name in self.names])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ModuleDef):
            return NotImplemented
        # Two threads may have created one each, and one with a label is not interned.
        same = self._hash == other._hash and self._key == other._key
        return same and not (self.label and self.label.differs(other.label))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"ModuleDef({self.cls.__qualname__}, {self.names}, {self.static})"

    def derived(self, cls: type, static: Mapping[str, Any]) -> ModuleDef:
        """Returns the moduledef of another class, or with other static values."""
        arrays, mixed = self.names[: self.array_count], self.names[self.array_count :]
        left = {*self.names, *static}
        order = tuple([name for name in {**self.template, **static} if name in left])
        return intern_moduledef(cls, order, arrays, mixed, static)


_interned: weakref.WeakValueDictionary[tuple, ModuleDef] = weakref.WeakValueDictionary()


def intern_moduledef(
    cls: type,
    order: tuple[str, ...],
    arrays: tuple[str, ...],
    mixed: tuple[str, ...],
    static: Mapping[str, Any],
) -> ModuleDef:
    """Returns the one moduledef with this content; `order` has all names as assigned."""
    items = frozenset([(n, static_key(value)) for n, value in static.items() if n != LABEL])
    key = (cls, arrays, mixed, items)
    moduledef = _interned.get(key) if LABEL not in static else None
    if moduledef is None:
        moduledef = ModuleDef(key, cls, order, arrays, mixed, static)
        if LABEL not in static:
            moduledef = _interned.setdefault(key, moduledef)
    return moduledef
