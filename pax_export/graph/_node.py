"""Nodes: values with their computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotPicklableError,
)
from pax_export._foundations.types import ArrayLike, DTypeLike, PyTree
from pax_export.core import Module, describe_array, is_array, pure
from pax_export.graph._adapters import Spread, as_module, identity


class Node:
    """A value, with its parent nodes and the module that computed it.

    Operators join nodes to a graph, and a graph becomes a `GraphModule`. Each operator computes the
    value of the new node immediately, on a copy of the module, so a layer with state does not
    change.

    Nodes are compared by identity. They can be neither copied nor pickled; a graph module can.

    Args:
        parents: the nodes of the inputs of `fx`.
        fx: a module or a function of one value: that of the parent, or a tuple with several
            parents.
        value: the value; any pytree.

    Attributes:
        parents: a tuple.
        fx: a module; functions become a `Lambda`.
        value: as passed.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> from pax_export.experimental.graph import Node
        >>> x = Node((), jax.nn.relu, jnp.zeros((3, 8)))
        >>> y = x >> pax.Linear(8, 2)
        >>> y.shape, y.fx
        ((3, 2), Linear(in_dim=8, out_dim=2, with_bias=True))
    """

    name: str | None = None

    def __init__(self, parents: Iterable[Node], fx: Callable, value: PyTree):
        self.parents = tuple(parents)
        for parent in self.parents:
            _require_node(parent, "A parent of a node")
        self.fx = as_module(fx)
        self.value = value

    def __rshift__(self, fn: Callable) -> Node:
        """``node >> fn``: the node of ``fn(node.value)``.

        Args:
            fn: a module or a function.

        Raises:
            InvalidArgumentTypeError: (a ValueError) it is neither.
        """
        return _apply_node((self,), as_module(fn), self.value)

    def __and__(self, other: Node) -> Node:
        """``a & b``: the node of a tuple; ``(a & b) >> fn`` calls fn with one tuple.

        ``a & b & c`` is one tuple of three, however it is bracketed.
        """
        _require_node(other, "The second operand of &")
        return CatNode(_side_by_side(CatNode, self, other))

    def __or__(self, other: Node) -> Node:
        """``a | b``: the node of arguments; ``(a | b) >> fn`` calls fn with two.

        ``a | b | c`` is three arguments, however it is bracketed.
        """
        _require_node(other, "The second operand of |")
        return ArgsNode(_side_by_side(ArgsNode, self, other))

    def binary_ops(self, fn: Callable, other: Node) -> Node:
        """Returns the node of ``fn(self.value, other.value)``.

        Args:
            fn: a module or a function of two arguments.
            other: the node of the second argument.

        Returns:
            A node whose ``fx`` takes one pair.

        Raises:
            InvalidArgumentTypeError: (a ValueError) ``other`` is not a node, or ``fn`` is not
                callable.
        """
        _require_node(other, "The second argument of binary_ops")
        values = (self.value, other.value)
        return _apply_node((self, other), Spread(as_module(fn)), values)

    @property  # not a method, of which jax says that it is no longer supported
    def __jax_array__(self) -> NoReturn:
        raise _not_a_value(self, _AS_ARRAY)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NoReturn:
        raise _not_a_value(self, _AS_ARRAY)

    def _refuse_operator(self, other: Node | ArrayLike) -> NoReturn:
        raise _not_a_value(
            self, "(x | y) >> jax.numpy.add for x + y, (x | y) >> jax.numpy.multiply"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_operator
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse_operator

    @property
    def shape(self) -> Any:
        """The shape of the value; None if the value is None."""
        return None if self.value is None else self.value.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value; None if the value is None."""
        return None if self.value is None else self.value.dtype

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_value(self.value)})"

    def __reduce__(self) -> NoReturn:
        raise NotPicklableError(
            "A node is part of its graph, so it can be neither copied nor pickled.",
            got=repr(self),
            write="copy or pickle the GraphModule of the nodes",
        )


class InputNode(Node):
    """An argument of a `GraphModule`, with an example of its value.

    Args:
        value: the example; any pytree.
        fx: stored only; a graph module does not apply it.
        name: shown in drawings and error messages.

    Example:
        >>> import jax, pax_export as pax
        >>> from pax_export.experimental.graph import InputNode
        >>> x, y = InputNode(1), InputNode(2)
        >>> (x & y).value
        (1, 2)
        >>> int(((x | y) >> jax.lax.add).value), int(x.binary_ops(jax.lax.sub, y).value)
        (3, -1)
    """

    def __init__(self, value: PyTree, fx: Callable = identity, *, name: str | None = None):
        super().__init__((), fx, value)
        self.name = name


class CatNode(Node):
    """The result of ``a & b``: a tuple of values."""

    def __init__(self, parents: tuple[Node, ...]):
        super().__init__(parents, identity, _node_values(parents))

    def __rshift__(self, fn: Callable) -> Node:
        """``(a & b) >> fn``: the node of ``fn((a.value, b.value))``."""
        return _apply_node(self.parents, as_module(fn), self.value)


class ArgsNode(Node):
    """The result of ``a | b``: several arguments."""

    def __init__(self, parents: tuple[Node, ...]):
        super().__init__(parents, identity, _node_values(parents))

    def __rshift__(self, fn: Callable) -> Node:
        """``(a | b) >> fn``: the node of ``fn(a.value, b.value)``."""
        return _apply_node((self,), Spread(as_module(fn)), self.value)


def _apply_node(parents: tuple[Node, ...], module: Module, value: PyTree) -> Node:
    try:
        return Node(parents, module, pure(module)(value))
    except Exception as error:  # of the function; raised again
        error.add_note(f"  while building a graph: {describe_value(value)} >> {module!r}")
        raise


def _side_by_side(kind: type, *nodes: Node) -> tuple[Node, ...]:
    """Returns the nodes, with those of one kind replaced by their parents."""
    parents: list[Node] = []
    for node in nodes:
        parents += node.parents if isinstance(node, kind) else (node,)
    return tuple(parents)


_AS_ARRAY = "x >> layer for layer(x), x >> jax.numpy.tanh for jax.numpy.tanh(x)"


def _not_a_value(node: Node, write: str) -> InvalidArgumentError:
    return InvalidArgumentError(  # jax drops a TypeError of `__jax_array__`
        "A node of a graph is not an array; functions are applied to it by >>.",
        got=repr(node),
        write=write,
    )


def _require_node(value: Node, what: str) -> None:
    if not isinstance(value, Node):
        raise InvalidArgumentTypeError(
            f"{what} must be a node.",
            got=f"{type(value).__name__}: {value!r}"[:120],
            write="node >> function; bind constants in the function, e.g. "
            "node >> functools.partial(jax.lax.add, 1.0)",
        )


def _node_values(nodes: tuple[Node, ...]) -> tuple:
    return tuple([node.value for node in nodes])


def describe_value(value: PyTree) -> str:
    """Describes the type of a node's value, e.g. ``float32[3,8]``, without the value itself."""
    if is_array(value):
        return describe_array(value)
    if type(value) in (tuple, list):
        return f"({', '.join(map(describe_value, value))})"
    return "None" if value is None else type(value).__name__


def _refuse_flattening(node: Node, *children: Node) -> NoReturn:
    raise _not_a_value(node, _AS_ARRAY)


# Functions with jit or a rule of their own, such as `jax.nn.relu`, flatten their arguments before
# they ask for anything else.
for _kind in (Node, InputNode, CatNode, ArgsNode):
    jax.tree_util.register_pytree_node(_kind, _refuse_flattening, _refuse_flattening)
