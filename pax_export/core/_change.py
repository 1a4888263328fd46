"""What happens to the layout of a module that is open for change.

Setting an attribute only notes what it is now.  The layout is made when somebody
asks for it, or when the module is closed: a function that sets a hundred
attributes makes one layout, not a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pax_export.core._tree import (
    MIXED,
    PURE,
    Node,
    array_types,
    attributes_now,
    current_kinds,
    flatten,
    forget,
    kind_of,
    set_flat,
    set_kinds,
    settle,
    settled,
)


def begin(node: Node, attributes: Mapping[str, Any]) -> None:
    """Gives a newborn module its first attributes."""
    attributes_now(node).update(attributes)


def note(node: Node, name: str, value: Any) -> None:
    """Notes that an attribute of a settled module has been set to a value."""
    kind, kinds = kind_of(value), node._pax_kinds
    if kinds is None:
        if kind is PURE and node._pax_layout is None and _swap(node, name, value):
            return
        kinds = current_kinds(node)
        set_kinds(node, kinds)
        forget(node)
    kinds[name] = kind


def _swap(node: Node, name: str, value: Any) -> bool:
    """Exchanges one subtree for another of its kind; False if there was another kind."""
    children, layout = flatten(node)
    if name not in layout.names[: layout.pure_count]:
        return False
    index = layout.names.index(name)
    set_flat(node, ((*children[:index], value, *children[index + 1 :]), layout))
    return True


def is_untouched(node: Node) -> bool:
    """True if nobody has looked at an attribute of a module that jax rebuilt."""
    return not attributes_now(node)


def refresh(node: Node) -> None:
    """Looks again at the containers of a module that was open for change.

    A container that was all arrays may hold something else now.  One without
    any array stays a subtree: it belongs to a tree of masks or shapes.
    """
    layout, values = settled(node)
    pure = zip(layout.names[: layout.pure_count], values)
    changed = [name for name, value in pure if _is_mixed_now(value)]
    if changed:
        settle(node, current_kinds(node) | dict.fromkeys(changed, MIXED))


def _is_mixed_now(value: object) -> bool:
    if type(value) in array_types or isinstance(value, Node):
        return False
    return kind_of(value) is MIXED
