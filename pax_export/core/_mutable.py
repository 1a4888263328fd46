"""Which modules may be changed now, and under which trace.

Modules are immutable, except in three places: a constructor may change the
object it makes, `pure` may change the copies it made, and so may the block of
``with mutable(module)``.  Each place opens a *session*; the innermost session
of the running thread or asyncio task is the only one that counts, so an inner
place suspends the outer ones until it returns.

A session also remembers the jax trace it began under.  Changing a module under
another trace would store a tracer where its trace cannot reach it any more;
that is refused here rather than found later as a leaked tracer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pax_export._errors import ImmutableModuleError
from pax_export._jax import trace_state
from pax_export.core._change import refresh
from pax_export.core._tree import (
    Node,
    attributes_of,
    current_kinds,
    set_owner,
    settle,
)


class Session:
    """A stretch of time in which some modules are open for change."""

    __slots__ = ("trace", "constructing", "closed", "adopted")

    def __init__(self, constructing: bool):
        self.trace = trace_state()
        self.constructing = constructing
        self.closed = False
        self.adopted: list[Node] = []


_current: ContextVar[Session | None] = ContextVar("pax_export_session", default=None)


@contextmanager
def opened(nodes: Iterable[Node], *, constructing: bool = False) -> Iterator[None]:
    """Opens modules for change while the block runs.

    Args:
        nodes: the modules, submodules included; only they become open.
        constructing: whether this is the constructor of a module that has no
            layout yet.
    """
    session = Session(constructing)
    for node in nodes:
        set_owner(node, session)
    token = _current.set(session)
    try:
        yield
    finally:
        # A task that was started inside has a copy of the context in which
        # this session is current for ever: hence the mark.
        session.closed = True
        _current.reset(token)
        for node in session.adopted:
            refresh(node)
        session.adopted.clear()


def adopt(parent: Node, children: Iterable[Node]) -> None:
    """Opens new modules for change as long as a module that is open now.

    Args:
        parent: an open module, which holds the new ones.  While it is still
            under construction nothing is opened: a constructor changes only its
            own object.
        children: modules that nobody else holds.
    """
    session = owner_of(parent)
    if session is None or session.constructing:
        return
    for node in children:
        set_owner(node, session)
        session.adopted.append(node)


def anything_is_open() -> bool:
    """False where no module at all may be changed."""
    return _current.get() is not None


def is_open(node: Node) -> bool:
    """True if this module may be changed here and now."""
    session = _current.get()
    return (
        session is not None
        and node._pax_owner is session
        and not session.closed
        and session.trace == trace_state()
    )


def is_constructing(node: Node) -> bool:
    """True while the constructor of this module runs."""
    owner = node._pax_owner
    return owner is not None and owner.constructing and not owner.closed


def require_open(node: Node, action: str, name: str) -> None:
    """Raises unless this module may be changed here and now.

    Args:
        node: the module.
        action: "set" or "delete", for the message.
        name: the attribute.

    Raises:
        ImmutableModuleError: the module is not open, or not under this trace.
    """
    if not is_open(node):
        raise _refusal(node, action, name)


def _refusal(node: Node, action: str, name: str) -> ImmutableModuleError:
    session = _current.get()
    where = f"{type(node).__qualname__}.{name}"
    if session is not None and node._pax_owner is session:
        return ImmutableModuleError(
            f"Cannot {action} an attribute of a module under a jax transformation "
            "that began after the module was opened for change.",
            where=where,
            got="a module opened outside of the jit, grad, vmap or scan that runs now",
            write="open it inside: jax.jit(pax.pure(f)), not pax.pure(jax.jit(f))",
        )
    return ImmutableModuleError(
        f"Cannot {action} an attribute of an immutable module.",
        where=where,
        got="a module that no pax.pure, constructor or mutable() has open",
        write=_way_out(node, action, name),
    )


def _way_out(node: Node, action: str, name: str) -> str:
    if action == "delete":
        return "a function decorated with pax.pure that deletes it and returns the module"
    call = "module, output = module % x" if callable(node) else "pax.module_and_value"
    return (
        f"module = module.replace({name}=...), or change it in a function decorated "
        f"with pax.pure; for a call that updates state: {call}"
    )


def owner_of(node: Any) -> Session | None:
    """The session that has this module open, if any has."""
    owner = node._pax_owner
    return None if owner is None or owner.closed else owner


def take_over(node: Node, other: Node) -> None:
    """Gives an open module the attributes of another one, and no more: it stays that object."""
    attributes = attributes_of(node)
    attributes.clear()
    attributes.update(attributes_of(other))
    if not is_constructing(node):
        settle(node, current_kinds(other))
