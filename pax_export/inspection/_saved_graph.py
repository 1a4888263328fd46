"""The StableHLO modules that a SavedModel calls, read without TensorFlow.

Of the protocol buffer the few fields are read that lead from the results of a signature to the
modules; their numbers are those of TensorFlow's `.proto` files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_CALL = b"XlaCallModule"
#: Functions that call each other twice, one after the other, would never end.
_MOST_STEPS = 2_000_000
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass
class _Node:
    operation: bytes = b""
    inputs: list[bytes] = field(default_factory=list)
    module: memoryview | None = None
    functions: list[bytes] = field(default_factory=list)


def modules_of(content: bytes, keys: Sequence[str]) -> dict[str, list[bytes]]:
    """The modules in the order of their calls, by signature.

    Args:
        content: ``saved_model.pb``.
        keys: of the signatures.

    Raises:
        ValueError: it is no such file.
    """
    graph = next(_messages(memoryview(content), 2), memoryview(b""))  # its first meta graph
    nodes: dict[bytes, _Node] = {}
    library: dict[bytes, list[_Node]] = {}
    for definition in _messages(graph, 2):
        nodes |= dict(map(_node, _messages(definition, 1)))
        for functions in _messages(definition, 2):
            for function in _messages(functions, 1):
                name = _text(next(_messages(function, 1), memoryview(b"")), 1)
                library[name] = [_node(each)[1] for each in _messages(function, 3)]
    results = {}
    for entry in _messages(graph, 5):
        signature = next(_messages(entry, 2), memoryview(b""))
        outputs = [next(_messages(each, 2), memoryview(b"")) for each in _messages(signature, 2)]
        results[_text(entry, 1).decode("utf-8", "replace")] = [_text(each, 1) for each in outputs]
    found = {}
    for key in keys:
        called = _called(_reached(results.get(key, []), nodes), library, frozenset(), [0])
        found[key] = list(called)
    return found


def _node(content: memoryview) -> tuple[bytes, _Node]:
    node = _Node(_text(content, 2), [bytes(each) for each in _messages(content, 3)])
    for entry in _messages(content, 5):
        for value in _messages(entry, 2):
            if _text(entry, 1) == b"module":
                node.module = next(_messages(value, 2), None)
            node.functions += [_text(each, 1) for each in _messages(value, 10)]
    return _text(content, 1), node


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
    for node in nodes:
        steps[0] += 1
        if steps[0] > _MOST_STEPS:
            raise ValueError("its functions call each other too often to be counted")
        if node.operation == _CALL and node.module is not None:
            yield bytes(node.module)
            continue
        for name in node.functions:
            if name in library and name not in around:
                yield from _called(library[name], library, around | {name}, steps)


# --- protocol buffers -------------------------------------------------------------------


def _messages(content: memoryview, number: int) -> Iterator[memoryview]:
    """The fields with this number that have a length."""
    place, end = 0, len(content)
    while place < end:
        tag, place = _varint(content, place)
        kind = tag & 7
        if kind == _VARINT:
            _, place = _varint(content, place)
            continue
        if kind not in (_EIGHT, _BYTES, _FOUR):
            raise ValueError("this is no protocol buffer")
        size = {_EIGHT: 8, _FOUR: 4}.get(kind, 0)
        if kind == _BYTES:
            size, place = _varint(content, place)
        if place + size > end:
            raise ValueError("this protocol buffer is cut short")
        if kind == _BYTES and tag >> 3 == number:
            yield content[place : place + size]
        place += size


def _text(content: memoryview, number: int) -> bytes:
    return bytes(next(_messages(content, number), b""))


def _varint(content: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(content) and shift < 64:
        byte = content[place]
        value, place, shift = value | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("this protocol buffer is cut short")
