"""The public names: where they come from, what type checkers see of them, when they load."""

from __future__ import annotations

import ast
import functools
import importlib
import pickle
from collections import Counter
from pathlib import Path
from types import ModuleType

import jmp
import pytest

import pax_export as pax
from tests.processes import ROOT, printed
from tests.refusals import refused

SOURCE = (ROOT / "pax_export" / "__init__.py").read_text(encoding="utf-8")
ROOMS = {path.stem for path in (ROOT / "pax_export").iterdir() if path.stem.isalpha()} - {"py"}


def imported_if(condition):
    """What a block under this condition imports: name -> room, '' for a room itself."""
    imports = (
        node for block in ast.parse(SOURCE).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == condition
        for node in block.body if isinstance(node, ast.ImportFrom)
    )  # fmt: skip
    return {
        name: node.module.removeprefix("pax_export").removeprefix(".")
        for node in imports
        for alias in node.names
        for name in (
            importlib.import_module(node.module).__all__
            if alias.name == "*"
            else [alias.asname or alias.name]
        )
    }


AT_ONCE = imported_if("TYPE_CHECKING or is_installed('jax')")
ON_FIRST_USE = imported_if("TYPE_CHECKING")


def process(program, *arguments):
    """What a new process prints, as words."""
    return printed(program, *arguments).split()


def test_every_import_for_type_checkers_is_a_name():
    assert {name for name, room in ON_FIRST_USE.items() if not room} == pax._ROOMS
    assert AT_ONCE | {name: room for name, room in ON_FIRST_USE.items() if room} == pax._HOMES
    assert set(AT_ONCE.values()) == {"core"}


def test_every_name_is_public_and_every_public_name_has_a_home():
    rooms = set(pax.__all__) & pax._ROOMS
    assert set(pax.__all__) == rooms | set(pax._HOMES) | set(AT_ONCE)
    assert len(pax.__all__) == len(set(pax.__all__))


def test_every_room_is_an_attribute():
    assert ROOMS - {"cli", "core"} == pax._ROOMS
    assert all(getattr(pax, room).__name__ == f"pax_export.{room}" for room in ROOMS - {"cli"})


def test_no_name_is_that_of_a_room():
    """Python sets a submodule on its package, over a function of that name."""
    assert not (set(pax._HOMES) | set(AT_ONCE)) & ROOMS
    for room in (getattr(pax, name) for name in pax._ROOMS - {"opax"}):
        files = {
            path.stem for place in getattr(room, "__path__", ()) for path in Path(place).iterdir()
        }
        same = files & set(getattr(room, "__all__", ()))
        assert all(isinstance(vars(room).get(name, pax), ModuleType) for name in same)


@pytest.mark.parametrize("name", pax._HOMES)
def test_a_name_is_looked_up_once(name, monkeypatch):
    monkeypatch.delitem(vars(pax), name, raising=False)
    value = getattr(importlib.import_module(f"pax_export.{pax._HOMES[name]}"), name)
    assert getattr(pax, name) is value
    assert vars(pax)[name] is value


def test_a_name_that_is_misspelt():
    with refused(AttributeError, "'pax_export'", "'Linaer'") as raised:
        pax.Linaer
    # What Python makes "Did you mean: 'Linear'?" of.
    assert (raised.value.name, raised.value.obj) == ("Linaer", pax)
    with refused(ImportError, "'Linaer'"):
        exec("from pax_export import Linaer")


@pytest.mark.parametrize(("name", "home"), [
    ("Scan", "transforms"), ("vmap", "transforms"), ("jit", "transforms"), ("adopt", "weights"),
    ("apply_gradients", "optim"), ("to_onnx", "export"),
])  # fmt: skip
def test_names_of_rooms_are_named_with_their_room(name, home):
    with refused(AttributeError, f"pax_export.{home}.{name}"):
        getattr(pax, name)
    with refused(AttributeError, "'_no_such_name'"):
        pax._no_such_name  # asks no room


def test_a_room_loads_when_it_is_used():
    loaded = process(
        """
import jax, sys
before = set(sys.modules)
import pax_export as pax
new = set(sys.modules) - before
print(*sorted({name for name in new if name.split(".")[0] != "pax_export"}), "|")
own = {name.split(".")[1] for name in new if name.startswith("pax_export.")}
print(*sorted(own), "|")
rooms = lambda: {name for name in pax._ROOMS if f"pax_export.{name}" in sys.modules}
print(*sorted(rooms()), "|")
pax.Linear
print(*sorted(rooms()), "|")
pax.optim.from_optax, pax.build_update_fn
print(*sorted(rooms()), "|")
assert "optax" not in sys.modules
"""
    )
    others, own, at_once, layers, training = " ".join(loaded).split("|")[:5]
    assert {name.split(".")[0] for name in others.split()} == {"jmp"}
    assert own.split() == [
        "_foundations",
        "core",
    ]
    assert at_once.split() == []
    assert layers.split() == ["nn", "precision"]
    assert training.split() == ["nn", "optim", "precision", "transforms"]


def test_all_of_them_and_again_after_a_reload():
    assert process(
        """
import pax_export.nn, importlib
from pax_export import *
from pax_export import Linear as one
assert {*pax_export.__all__} <= {*globals()}
layer = one(2, 3)
again = importlib.reload(pax_export)
assert again is pax_export and again.Linear is Linear is one is pax_export.nn.Linear
assert again.Module is Module and isinstance(layer, again.Module)
print(set(dir(again)) == {*again.__all__, "__version__"})
"""
    ) == ["True"]


def test_threads_may_use_a_name_at_once():
    assert process(
        """
import threading
import pax_export as pax
names = [*sorted(pax._HOMES), *sorted({*pax._ROOMS} - {"opax"})]
found, start = [], threading.Barrier(len(names))
def look_up(name):
    start.wait()
    found.append(getattr(pax, name) is getattr(pax, name))
threads = [threading.Thread(target=look_up, args=[name]) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found) - len(names), all(found))
"""
    ) == ["0", "True"]


def test_a_pickle_loads_the_rooms_that_it_needs(tmp_path):
    """A class under a policy is made by `precision`, which nothing else there uses."""
    layer = pax.freeze_parameters(pax.apply_mp_policy(pax.Linear(2, 3), jmp.get_policy("half")))
    (tmp_path / "layer").write_bytes(pickle.dumps(layer))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).eval())"
    assert process(program, str(tmp_path / "layer")) == str(layer.eval()).split()


#: Class names with two meanings: public ones, and those in pickles.
SHARED = {"Entry", "Input", "Node", "Program", "Row", "Table"}


@functools.cache
def definitions():
    """The kinds and names of all definitions in the package, and the folders that they are in."""
    return [
        (type(node), node.name, path.parts)
        for path in (ROOT / "pax_export").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_a_class_name_has_one_meaning():
    names = Counter(name.lstrip("_") for kind, name, _ in definitions() if kind is ast.ClassDef)
    assert {name for name, count in names.items() if count > 1} <= SHARED


def test_share_of_one_word_function_names():
    """Names of functions and methods are a verb and its object, or a noun of the field.

    A rule has the name of its operation, which others chose.
    """
    found = [
        name
        for kind, name, folders in definitions()
        if kind is not ast.ClassDef and "rules" not in folders
    ]
    names = [name.strip("_") for name in found if not name.startswith("__")]
    assert sum("_" not in name for name in names) / len(names) < 0.41
