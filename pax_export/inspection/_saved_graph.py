"""The StableHLO modules that a SavedModel calls, read without TensorFlow.

Of the protocol buffer the few fields are read that lead from the results of a signature to the
modules; their numbers are those of TensorFlow's `.proto` files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pax_export._wire import Memory, Message

_CALL = b"XlaCallModule"
#: Functions that call each other twice, one after the other, would never end.
_MOST_STEPS = 2_000_000
#: No program has functions in functions as deep as this, and Python's own limit is not far.
_DEEPEST = 300


@dataclass
class _Node:
    operation: bytes = b""
    inputs: list[bytes] = field(default_factory=list)
    module: Message | None = None
    functions: list[bytes] = field(default_factory=list)


def modules_of(content: bytes, keys: Sequence[str]) -> dict[str, list[bytes]]:
    """The modules in the order of their calls, by signature.

    Args:
        content: ``saved_model.pb``.
        keys: of the signatures.

    Raises:
        ValueError: it is no such file.
    """
    graph = Message(Memory(content)).first(2)  # its first meta graph
    nodes: dict[bytes, _Node] = {}
    library: dict[bytes, list[_Node]] = {}
    for definition in graph.messages(2):
        nodes |= dict(map(_node, definition.messages(1)))
        for functions in definition.messages(2):
            for function in functions.messages(1):
                name = _text(function.first(1), 1)
                library[name] = [_node(each)[1] for each in function.messages(3)]
    results = {}
    for entry in graph.messages(5):
        signature = entry.first(2)
        outputs = [each.first(2) for each in signature.messages(2)]
        results[_text(entry, 1).decode("utf-8", "replace")] = [_text(each, 1) for each in outputs]
    found = {}
    for key in keys:
        called = _called(_reached(results.get(key, []), nodes), library, frozenset(), [0])
        found[key] = list(called)
    return found


def _node(content: Message) -> tuple[bytes, _Node]:
    node = _Node(_text(content, 2), [each.content() for each in content.messages(3)])
    for entry in content.messages(5):
        name = _text(entry, 1)
        for value in entry.messages(2):
            if name == b"module":
                node.module = next(value.messages(2), None)
            node.functions += [_text(each, 1) for each in value.messages(10)]
    return _text(content, 1), node


def _text(content: Message, number: int) -> bytes:
    """The first field with this number; empty if there is none."""
    return content.first(number).content()


def _reached(names: Sequence[bytes], nodes: Mapping[bytes, _Node]) -> list[_Node]:
    """The nodes of a graph that some results need."""
    left, seen = list(names), {}
    while left:
        name = left.pop().lstrip(b"^").partition(b":")[0]
        if name in nodes and name not in seen:
            seen[name] = nodes[name]
            left += nodes[name].inputs
    return list(seen.values())


def _called(
    nodes: Sequence[_Node],
    library: Mapping[bytes, list[_Node]],
    around: frozenset[bytes],
    steps: list[int],
) -> Iterator[bytes]:
    """The modules in some nodes, and in the functions that they call."""
    if len(around) > _DEEPEST:
        raise ValueError("its functions call each other too deeply to be counted")
    for node in nodes:
        steps[0] += 1 + len(node.functions)
        if steps[0] > _MOST_STEPS:
            raise ValueError("its functions call each other too often to be counted")
        if node.operation == _CALL and node.module is not None:
            yield node.module.content()
            continue
        for name in node.functions:
            if name in library and name not in around:
                yield from _called(library[name], library, around | {name}, steps)
