"""What is private in jax and in other packages: each name has its entry, and no file another."""

from __future__ import annotations

import ast
import dataclasses
import functools
import warnings
from pathlib import Path

import pytest

from pax_export._foundations.jax import PRIVATE, PRIVATE_ATTRIBUTES, private, say_less

PACKAGE = Path(__file__).parents[3] / "pax_export"
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: Parts of other packages that are public, and that they do not promise for ever, by the file.
UNPROMISED = {
    "_foundations/types.py": {"jax.extend.core"},
    "_foundations/jaxpr.py": {"jax.extend.source_info_util"},
    "precision/quantized/_activations.py": {
        "jax.extend.core.Primitive",
        "jax.interpreters.ad",
        "jax.interpreters.batching",
        "jax.interpreters.mlir",
    },
    "export/formats/stablehlo/exported.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/formats/torch/export.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/portable/any_size.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/portable/for_xla.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/tracing/traced.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/portable/program.py": {
        "jax.extend.core.primitives",
        "jax.extend.source_info_util",
    },
    "export/symbolic_numpy.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/validation/cases.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/validation/decompositions.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/validation/endless_loops.py": {"jax.extend.core.jaxpr_as_fun"},
    "export/formats/stablehlo/files.py": {
        "jax.extend.mlir.dialects.stablehlo",
        "jax.interpreters.mlir",
    },
    "export/formats/stablehlo/library_calls.py": {
        "jax.extend.mlir.dialects.stablehlo",
        "jax.extend.mlir.ir", "jax.extend.mlir.ir.Operation",
        "jax.interpreters.mlir",
    },
    "export/lowering/lower.py": {
        "jax.extend.mlir.dialects.stablehlo",
        "jax.extend.mlir.ir", "jax.extend.mlir.ir.Operation",
        "jax.extend.mlir.passmanager",
        "jax.interpreters.mlir",
    },
    "export/portable/passes.py": {"jax.extend.source_info_util"},
    "export/portable/decompositions/elementary.py": {
        "jax.extend.core.primitives.random_gamma_p",
    },
    "export/portable/real_numbers.py": {"jax.extend.random.threefry_prng_impl"},
    "export/lowering/rewrites.py": {
        "jax.extend.mlir.dialects.stablehlo", "jax.extend.mlir.ir",
        "jax.extend.mlir.ir.Operation",
    },
    "export/lowering/shardings.py": {
        "jax.extend.mlir.dialects.stablehlo", "jax.extend.mlir.ir",
        "jax.extend.mlir.ir.Operation",
    },
    "sharding/_shard.py": {"jax.experimental.multihost_utils"},
}  # fmt: skip
#: Attributes with an underscore that are no other package's: of namedtuples, and of `os`.
NOT_PRIVATE = {"_asdict", "_fields", "_make", "_replace", "_exit", "_assert_scalar"}


@dataclasses.dataclass(frozen=True)
class Names:
    """What a file of ours imports and reads, the names that it gives to something, its texts."""

    imported: frozenset[str]
    attributes: frozenset[str]
    given: frozenset[str]
    strings: frozenset[str]


@functools.cache
def names_of(source):
    imported, attributes, given, strings = set(), set(), set(), set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=0):
                imported |= {f"{module}.{alias.name}" for alias in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                given.add(name)
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                given.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                given.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                given.add(name)
            case ast.Attribute(value=value, attr=name):
                attributes.add(name)
                if isinstance(value, ast.Name) and value.id in ("jax", "jaxlib"):
                    imported.add(f"{value.id}.{name}")
            case ast.Constant(value=str(text)):
                strings.add(text)
    return Names(*map(frozenset, (imported, attributes, given, strings)))


def strings():
    """Every text in our own files, that of names which are imported as text among them."""
    return {text for source in SOURCES for text in names_of(source).strings}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_is_imported():
    for source in SOURCES:
        for name in names_of(source).imported:
            first, *rest = name.split(".")
            assert first == "pax_export" or not any(map(is_private, rest)), f"{source}: {name}"
            if source != PACKAGE / "_foundations" / "jax.py":
                assert not name.startswith(("jax.core", "jaxlib.")), f"{source}: {name}"


def test_no_private_attribute_of_another_package_is_read():
    own = NOT_PRIVATE.union(*(names_of(source).given for source in SOURCES))
    # Of __slots__, setattr and tables.
    own |= {text for source in SOURCES for text in names_of(source).strings if text.isidentifier()}
    for source in SOURCES:
        assert {name for name in names_of(source).attributes if is_private(name)} <= own, source


def test_private_names_are_asked_for_in_one_way():
    """Each entry has a use, and each private name in a string an entry."""
    text = "\n".join(source.read_text(encoding="utf-8") for source in SOURCES)
    for name in PRIVATE:
        assert text.count(f'"{name}"') > 1, name
    for name in PRIVATE_ATTRIBUTES:
        assert f'"{name.rpartition(".")[2]}"' in text, name
    kinds = ("jax._src", "jax.interpreters.", "jax.experimental.sparse.bc")
    found = {s for s in strings() if s.startswith(kinds) and " " not in s}
    # `artifact/screening.py` asks for a public module as text: it also works without jax.
    assert found - {"jax.interpreters.mlir"} == set(PRIVATE)


def test_of_tensorflow_these_private_names_are_used():
    """Two files say what is less without them, which tests of theirs try.

    `formats/saved_model/load.py` is slower then, and `artifact/screening.py` reads by jax.
    """
    found = {s for s in strings() if s.startswith(("tensorflow.python", "tensorflow.compiler"))}
    assert found == {
        "tensorflow.python.eager.record",
        "tensorflow.compiler.mlir.stablehlo.stablehlo",
        "tensorflow.python.pywrap_mlir",
    }


def test_of_torch_and_libtensorflow_these_private_names_are_used():
    """`torch.export.save` writes one program only; TensorFlow has no Python name for the other."""
    found = {s for s in strings() if s.startswith(("torch.export.pt2", "_ZN"))}
    assert found == {
        "torch.export.pt2_archive._package",
        "_ZN10tensorflow21DisableXlaCompilationEv",
    }


def test_public_names_without_promise_have_an_entry():
    found = {}
    for source in SOURCES:
        names = names_of(source).imported
        kinds = ("jax.interpreters", "jax.extend", "jax.experimental", "jax.lib")
        if names := {name for name in names if name.startswith(kinds)}:
            found[source.relative_to(PACKAGE).as_posix()] = names
    assert found == UNPROMISED


def test_this_jax_has_them_all():
    assert [name for name in PRIVATE if private(name) is None] == []


def test_a_name_without_an_entry_is_an_error():
    with pytest.raises(KeyError):
        private("jax._src.core.Tracer")


def test_stale_entries_are_named(monkeypatch):
    monkeypatch.setitem(PRIVATE, "jax._src.nowhere.name", "two and two are five")
    assert private("jax._src.nowhere.name") is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        say_less("jax._src.nowhere.name")
        say_less("jax._src.nowhere.name")
    (one,) = caught
    assert "no longer has jax._src.nowhere.name, so two and two are five" in str(one.message)
