"""Rules of the house that import-linter cannot see.

The directions between rooms are contracts in setup.cfg; here are the rules
about sizes, private files and interfaces, and optional packages.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import room_of

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "pax_export").rglob("*.py"))
ROOMS = {path.stem for path in (ROOT / "pax_export").iterdir()}

OPTIONAL = {
    "ai_edge_litert", "fast_sugiyama", "flax", "gguf", "h5py", "jax2onnx", "matplotlib",
    "msgpack", "onnx", "onnxruntime", "opax", "optax", "orbax", "pax", "rich",
    "safetensors", "sklearn", "tensorflow", "tensorstore", "treescope",
}  # fmt: skip


def sources_that(breaks: Callable[[Path], object]) -> list[str]:
    """The files of the package that break a rule."""
    return [str(source.relative_to(ROOT)) for source in SOURCES if breaks(source)]


def for_type_checkers_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: `if TYPE_CHECKING` is left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if for_type_checkers_only(child):
            yield from (inner for other in child.orelse for inner in walk(other))
        else:
            yield from walk(child)


@functools.cache
def imports(source: Path, *, when_loaded: bool = False) -> frozenset[str]:
    """The modules that a file imports; `from pax_export import nn` imports nn."""
    found: set[str] = set()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body if when_loaded else walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "pax_export":
            rooms = {alias.name for alias in node.names} & ROOMS
            found |= rooms if len(rooms) == len(node.names) else {"pax_export"}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
    return frozenset(found)


def test_optional_packages_come_through_require():
    assert not sources_that(lambda source: {n.split(".")[0] for n in imports(source)} & OPTIONAL)


def test_no_room_imports_the_public_face():
    """`pax_export/__init__.py` gathers the rooms: a room that needs it closes a circle."""
    assert not sources_that(lambda source: "pax_export" in imports(source, when_loaded=True))


def test_a_room_is_entered_by_its_face():
    """What another room may use stands in its `__init__.py`, or in a file without underscore."""

    def enters_elsewhere(source: Path) -> bool:
        own = ".".join(source.relative_to(ROOT).parent.parts)
        split = [name.rpartition(".") for name in imports(source)]
        return any(
            file.startswith("_") and rooms.startswith("pax_export.")
            and not f"{own}.".startswith(f"{rooms}.")
            for rooms, _, file in split
        )  # fmt: skip

    assert not sources_that(enters_elsewhere)


def test_a_file_stays_short():
    assert not sources_that(lambda source: len(source.read_text().splitlines()) > 600)


def test_the_exporter_shows_its_rooms_at_one_glance():
    entries = {
        path for path in (ROOT / "pax_export/export").iterdir() if path.name != "__pycache__"
    }
    assert len(entries) <= 12  # README.md and `__init__.py` are two of them
    for room in filter(Path.is_dir, entries):
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))


def test_tests_mirror_the_rooms():
    rooms = {path.parent.name.strip("_") for path in ROOT.glob("pax_export/*/__init__.py")}
    assert rooms <= {
        path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))
    }


def test_tests_mirror_the_rooms_of_the_exporter():
    export = ROOT / "pax_export" / "export"
    for path in (*export.glob("*/__init__.py"), *export.glob("formats/*/__init__.py")):
        tests = ROOT / "tests" / "export" / path.parent.relative_to(export)
        assert any(tests.glob("test_*.py")), tests
    assert not any((ROOT / "tests" / "export").glob("test_*.py"))


@pytest.mark.parametrize(
    ("test", "room"),
    [
        ("tests/core/test_tree.py::test_round_trip[Linear]", "core"),
        ("tests/export/formats/onnx/test_to_onnx.py::test_one", "export/formats/onnx"),
        ("pax_export/core/_tree.py::pax_export.core._tree.folded", "core"),
        ("tests/test_names.py::test_one", "names"),
    ],
)
def test_a_failure_names_its_room(test, room):
    assert room_of(test) == room


def test_what_the_older_jax_skips_is_there():
    lines = (ROOT / "tests" / "older_jax.txt").read_text().splitlines()
    for line in lines:
        path, _, name = line.removeprefix("--deselect=").partition("::")
        assert (ROOT / path).exists(), line
        assert not name or f"def {name}" in (ROOT / path).read_text(), line


def test_the_quick_set_has_every_room():
    """`consumers`, `released` test files that others wrote; `hard` takes what time it is given,
    `oracles` needs what is in no other environment."""
    quick = [Path(line) for line in (ROOT / "tests" / "quick.txt").read_text().splitlines()]
    assert [path for path in quick if not (ROOT / path).is_file()] == []
    rooms = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert rooms - {path.parts[1] for path in quick} <= {"consumers", "hard", "oracles", "released"}


def test_what_a_broad_except_may_hide_is_said():
    def silent(path: Path) -> bool:
        lines = path.read_text(encoding="utf-8").splitlines()
        return any("except Exception" in line and "  # " not in line for line in lines)

    assert sources_that(silent) == []
