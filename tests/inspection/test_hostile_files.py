"""Programs that somebody made to be read for ever: each is small, and told or counted at once."""

from __future__ import annotations

import itertools

import pytest

from pax_export.inspection._artifact_work import works_of
from pax_export.inspection._onnx_graph import program_of
from pax_export.inspection._saved_graph import modules_of
from tests.wire.test_protobuf import field


def node(name, functions=(), more=b""):
    called = (field(5, field(2, field(10, field(1, each)))) for each in functions)
    return field(1, name) + field(2, b"Call") + b"".join(called) + more


def saved(nodes, functions=()):
    """A SavedModel whose only signature needs the node `out`."""
    library = b"".join(
        field(1, field(1, field(1, name)) + field(3, each)) for name, each in functions
    )
    graph = b"".join(field(1, each) for each in nodes) + field(2, library)
    result = field(2, field(2, field(1, b"y") + field(2, field(1, b"out"))))
    return field(2, field(2, graph) + field(5, field(1, b"key") + result))


def test_functions_in_functions_without_end(tmp_path):
    names = [b"f%d" % number for number in range(3000)]
    chain = [(name, node(b"n", [after])) for name, after in itertools.pairwise(names)]
    (tmp_path / "saved_model.pb").write_bytes(saved([node(b"out", names[:1])], chain))
    (said,) = works_of(tmp_path, None, {"key": []})["key"].uncounted
    assert said.endswith("ValueError: its functions call each other too deeply to be counted")


def test_functions_that_are_called_too_often(monkeypatch):
    monkeypatch.setattr("pax_export.inspection._saved_graph._MOST_STEPS", 10_000)
    names = [b"f%d" % number for number in range(40)]
    twice = [(name, node(b"n", [after, after])) for name, after in itertools.pairwise(names)]
    with pytest.raises(ValueError, match="too often"):
        modules_of(saved([node(b"out", names[:1])], twice), ["key"])


def test_an_attribute_of_many_values_is_read_once():
    """Its name, which comes behind them, was looked for again with each."""
    many = field(5, field(2, b"") * 20_000 + field(1, b"module"))
    assert modules_of(saved([node(b"out", more=many)]), ["key"]) == {"key": []}


def test_whole_numbers_that_come_one_by_one():
    """The list was copied with each."""
    listed = field(1, b"perm") + field(8, 1) * 100_000
    graph = field(1, field(4, b"Transpose") + field(5, listed))
    (operation,) = program_of(memoryview(field(7, graph))).graph.operations
    assert operation.attributes["perm"] == [1] * 100_000
