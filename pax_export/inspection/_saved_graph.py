"""The StableHLO modules that a SavedModel calls, read without TensorFlow.

Of the protocol buffer the few fields are read that lead from the results of a signature to the
modules; their numbers are those of TensorFlow's `.proto` files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pax_export.inspection._protobuf import messages, text

_CALL = b"XlaCallModule"
#: Functions that call each other twice, one after the other, would never end.
_MOST_STEPS = 2_000_000


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
    graph = next(messages(memoryview(content), 2), memoryview(b""))  # its first meta graph
    nodes: dict[bytes, _Node] = {}
    library: dict[bytes, list[_Node]] = {}
    for definition in messages(graph, 2):
        nodes |= dict(map(_node, messages(definition, 1)))
        for functions in messages(definition, 2):
            for function in messages(functions, 1):
                name = text(next(messages(function, 1), memoryview(b"")), 1)
                library[name] = [_node(each)[1] for each in messages(function, 3)]
    results = {}
    for entry in messages(graph, 5):
        signature = next(messages(entry, 2), memoryview(b""))
        outputs = [next(messages(each, 2), memoryview(b"")) for each in messages(signature, 2)]
        results[text(entry, 1).decode("utf-8", "replace")] = [text(each, 1) for each in outputs]
    found = {}
    for key in keys:
        called = _called(_reached(results.get(key, []), nodes), library, frozenset(), [0])
        found[key] = list(called)
    return found


def _node(content: memoryview) -> tuple[bytes, _Node]:
    node = _Node(text(content, 2), [bytes(each) for each in messages(content, 3)])
    for entry in messages(content, 5):
        for value in messages(entry, 2):
            if text(entry, 1) == b"module":
                node.module = next(messages(value, 2), None)
            node.functions += [text(each, 1) for each in messages(value, 10)]
    return text(content, 1), node


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
