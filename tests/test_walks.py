"""The walks of CONTRIBUTING, step by step: who forgets one is told which."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import pax_export as pax
from pax_export.core import adaptable_arrays, flatten, is_array, is_node
from pax_export.export.artifact import formats
from pax_export.export.portable.decompositions import DECOMPOSITIONS
from pax_export.nets.decoder._hf import FAMILIES
from pax_export.precision import policy_of
from pax_export.weights.adoption._layers import find_layers
from pax_export.weights.sources import _open

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pax_export"

#: For each step of a walk, whether it is done for a name.
Steps = dict[str, Callable[[str], Any]]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def words(path: str) -> set[str]:
    return set(re.findall(r"\w+", read(path)))


def keys(path: str, table: str) -> set[str]:
    """The keys of a dict that is written in a file."""
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            return {key.value for key in node.value.keys}
    raise LookupError(f"{path} has no {table}")


def elements(path: str, table: str) -> list[str]:
    """The names in a list that is written in a file."""
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            return [ast.unparse(each) for each in node.value.elts]
    raise LookupError(f"{path} has no {table}")


def listed(path: str) -> set[str]:
    """The names in the tables of a page of the API reference, with their module."""
    found, module = set(), ""
    for line in read(path).splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
        elif name := re.fullmatch(r"   (\w+)", line):
            found.add(f"{module}.{name[1]}")
    return found


def public(room: str) -> set[str]:
    return set(importlib.import_module(f"pax_export.{room}").__all__)


def check(steps: dict[str, Callable[[Any], Any]], subject: Any) -> None:
    missing = [step for step, is_done in steps.items() if not is_done(subject)]
    assert not missing, "\n".join(["missing:", *missing])


# --- a layer ----------------------------------------------------------------------------------

#: Classes of `nn` that are for other rooms: bases, and parts of nets.
NOT_PUBLIC = {"Convolution", "DenseBlock", "PlainDense"}
#: CHANGELOG begins where PAX ended.
FROM_PAX = set(
    "BatchNorm2D Conv1D Conv1DTranspose Conv2D Conv2DTranspose Dropout EMA GroupNorm Identity "
    "VanillaRNN scan".split()
)


def layers() -> dict[str, type]:
    """The modules of `nn` by name, whether somebody has listed them or not."""
    found = {}
    for info in pkgutil.iter_modules([str(PACKAGE / "nn")]):
        file = importlib.import_module(f"pax_export.nn.{info.name}")
        for name, value in vars(file).items():
            is_layer = isinstance(value, type) and issubclass(value, pax.Module)
            if is_layer and value.__module__ == file.__name__ and name[0] != "_":
                found[name] = value
    return {name: found[name] for name in sorted(found.keys() - NOT_PUBLIC)}


LAYERS = layers()
ROW_NAMES = set(re.findall(r'^ +Row\(\s*"(\w+)', read("tests/contract/table.py"), re.M))
TESTED = {word for path in (ROOT / "tests" / "nn").glob("test_*.py") for word in words(str(path))}
LAYER_STEPS: Steps = {
    "2. pax_export/nn/__init__.py: its import, and its name in __all__": public("nn").__contains__,
    "3. tests/contract/table.py: a row that begins with its name": ROW_NAMES.__contains__,
    "4. tests/nn: a test of its numbers": TESTED.__contains__,
    "5. docs/api/layers.md: its name": lambda name: (
        f"pax_export.{name}" in listed("docs/api/layers.md")
    ),
    "6. CHANGELOG.md: a line with its name": (words("CHANGELOG.md") | FROM_PAX).__contains__,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    check(LAYER_STEPS, name)


def own_weights(layer: Any) -> dict[str, Any]:
    """The trained arrays of a layer itself, without those of layers in it."""
    children, moduledef = flatten(layer.parameters())
    own = zip(moduledef.names, children)
    return {name: x for name, x in own if is_array(x) and not is_node(x)}


def is_split(layer: Any) -> bool:
    """Whether tensor parallel rules know each weight, be it as one that is not split."""
    net = pax.Sequential(pax.Linear(2, 2), layer)  # a rule must be for some leaf
    mesh = pax.sharding.abstract_mesh(model=2)
    table = pax.sharding.table(net, mesh, pax.sharding.tensor_parallel())
    return not {f"modules.1.{name}" for name in own_weights(layer)} & set(table.unmatched)


def can_begin_anew(layer: Any) -> bool:
    try:
        return bool(layer.at(list(own_weights(layer))).init(jax.random.key(0)))
    except pax.errors.InvalidArgumentError:
        return False


#: As LAYER_STEPS, for a layer instead of its name.
WEIGHT_STEPS: dict[str, Callable[[Any], Any]] = {
    'arrays = {"weight": a role that files have}': lambda layer: (
        not any(each.kind == "free" for each in find_layers(layer).layers)
    ),
    'arrays = {"weight": init}': can_begin_anew,
    'arrays = {"weight": axes}': is_split,
    'arrays = {"weight": a kernel or table, for a matrix}': lambda layer: (
        adaptable_arrays(layer) or not any(map(is_matrix, own_weights(layer).values()))
    ),
    'arrays = {"weight": a role, or WITHOUT_POLICY here}': (
        lambda layer: policy_of(pax.experimental.default_mp_policy(layer)) or is_without(layer)
    ),
}

WITHOUT_POLICY = (pax.Embed,)  # one row is read of it, in the dtype that it has


def is_without(layer: Any) -> bool:
    return isinstance(layer, WITHOUT_POLICY)


def is_matrix(x: Any) -> bool:
    return sum(size > 1 for size in x.shape) > 1


@pytest.mark.parametrize("name", sorted(LAYERS.keys() & ROW_NAMES))
def test_layer_with_weights(name):
    from tests.contract.table import ROWS  # needs all layers, `test_layer` none

    layer = next(row for row in ROWS if row.name == name).build()
    if own_weights(layer):
        check(WEIGHT_STEPS, layer)


# --- a transform ------------------------------------------------------------------------------


def transforms() -> list[str]:
    """The public functions that take functions."""
    room = importlib.import_module("pax_export.transforms")
    public_ones = [getattr(room, name) for name in room.__all__]
    return sorted(
        each.__name__
        for each in public_ones
        if inspect.isfunction(each) and "Callable" in str(inspect.signature(each).parameters)
    )


#: What is made of another transform, whose row stands for it.
MADE_OF_OTHERS = {"map", "value_and_grad"}
TRANSFORM_TESTS = [path.read_text() for path in (ROOT / "tests/transforms").glob("test_*.py")]
TRANSFORM_STEPS: Steps = {
    "2. pax_export/transforms/__init__.py: its import, and its name in __all__": (
        public("transforms").__contains__
    ),
    "3. tests/transforms/each.py: a row in ROWS": (
        (keys("tests/transforms/each.py", "ROWS") | MADE_OF_OTHERS).__contains__
    ),
    "4. tests/transforms/test_NAME.py: its values and mistakes": lambda name: any(
        f"T.{name}(" in text for text in TRANSFORM_TESTS
    ),
    "5. docs/api/transforms.md: its name": lambda name: (
        {f"pax_export.transforms.{name}", f"pax_export.{name}"} & listed("docs/api/transforms.md")
    ),
    "6. CHANGELOG.md: a line with its name": (words("CHANGELOG.md") | FROM_PAX).__contains__,
}


@pytest.mark.parametrize("name", transforms())
def test_transform(name):
    check(TRANSFORM_STEPS, name)


# --- a format ---------------------------------------------------------------------------------

#: Formats whose package or page is called otherwise.
EXTRAS = {"saved_model": "tensorflow", "web": "onnx"}
PAGES = {"saved_model": "exporting"}
#: Formats whose files are in the folder of another, of which they are made.
FOLDERS = {"web": "onnx"}


def written_formats() -> list[str]:
    """The formats that a file of the exporter can write, whether a table has them or not."""
    texts = [path.read_text() for path in (PACKAGE / "export" / "formats").rglob("*.py")]
    return sorted(
        name for text in texts for name in re.findall(r"^def to_(\w+)\(\s*model:", text, re.M)
    )


SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
EXPORT = "pax_export/export/__init__.py"
FORMAT_STEPS: Steps = {
    "1. pax_export/export/formats/: its row in an __init__.py": lambda name: (
        name in formats.own_formats()
    ),
    f"2. {EXPORT}: to_NAME in the imports for type checkers": lambda name: re.search(
        rf"import .*\bto_{name}\b", read(EXPORT)
    ),
    f"2. {EXPORT}: to_NAME in __all__": lambda name: f"to_{name}" in public("export"),
    "3. setup.cfg: an extra": lambda name: (
        EXTRAS.get(name, name) in SETTINGS["options.extras_require"]
    ),
    "3. setup.cfg: the contract `formats`": lambda name: (
        f"pax_export.export.formats.{FOLDERS.get(name, name)}"
        in SETTINGS["importlinter:contract:formats"]["modules"].split()
    ),
    "4. tests/export/formats/NAME/test_to_NAME.py": lambda name: (
        ROOT / "tests/export/formats" / FOLDERS.get(name, name) / f"test_to_{name}.py"
    ).exists(),
    "5. docs/api/export.md: to_NAME": lambda name: (
        f"pax_export.export.to_{name}" in listed("docs/api/export.md")
    ),
    "6. docs/guide/targets.md: to_NAME": lambda name: (
        f"`to_{name}`" in read(f"docs/guide/{PAGES.get(name, 'targets')}.md")
    ),
    "7. CHANGELOG.md: a line with to_NAME": lambda name: f"to_{name}" in words("CHANGELOG.md"),
}


@pytest.mark.parametrize("name", written_formats())
def test_format(name):
    check(FORMAT_STEPS, name)


# --- a reader of weights ----------------------------------------------------------------------

SOURCES = PACKAGE / "weights" / "sources"
HARD = "tests/hard/test_sources.py"
#: What messages and the hard tests call a format, where that is not its name.
TITLES = {"torch": "PyTorch"}
#: Without damaged files: libhdf5 may hang on them.
UNDAMAGED = {"keras"}


def readers() -> list[str]:
    """The readers that have a file, whether the table has them or not."""
    files = {path.stem[1:]: path.read_text(encoding="utf-8") for path in SOURCES.glob("_*.py")}
    return sorted(name for name, text in files.items() if re.search("^def matches", text, re.M))


READER_STEPS: Steps = {
    "pax_export/weights/sources/: KIND, matches and read": lambda name: (
        f"pax_export.weights.sources._{name}" in [vars(each)["__name__"] for each in _open.READERS]
    ),
    "tests/weights/sources/test_NAME.py": lambda name: (
        ROOT / "tests" / "weights" / "sources" / f"test_{name}.py"
    ).exists(),
    "tests/hard/test_sources.py: in_NAME in FILES": lambda name: (
        name in UNDAMAGED or f"in_{name}" in elements(HARD, "FILES")
    ),
    "docs/guide/bring_your_weights.md: a row of its table": lambda name: (
        f"\n| `{name}` |" in read("docs/guide/bring_your_weights.md")
    ),
    "CHANGELOG.md: a line": lambda name: (
        TITLES.get(name, name).lower() in read("CHANGELOG.md").lower()
    ),
}


@pytest.mark.parametrize("name", readers())
def test_reader(name):
    check(READER_STEPS, name)


# --- an operation -----------------------------------------------------------------------------

OPERATION_STEPS: Steps = {
    "1. pax_export/export/portable/decompositions/: @decomposes": lambda name: (
        any(re.search(rf'["\s]{name}["\s]', path.read_text()) for path in DECOMPOSED.glob("*.py"))
        or name.startswith(("reduce_window_", "scatter"))  # made of a table
    ),
    "2. tests/export/portable/test_decompositions.py: a test": lambda name: (
        f'"{name}"' in read("tests/export/portable/test_decompositions.py")
    ),
}
DECOMPOSED = PACKAGE / "export" / "portable" / "decompositions"


@pytest.mark.parametrize("name", sorted(DECOMPOSITIONS))
def test_operation(name):
    check(OPERATION_STEPS, name)


# --- a family of language models --------------------------------------------------------------

FAMILY_STEPS: Steps = {
    "3. tests/oracles/test_families.py: its classes": lambda name: (
        f'"{name}": (transformers.' in read("tests/oracles/test_families.py")
    ),
    "4. docs/guide/language_models.md: the list of families": lambda name: bool(
        re.search(rf"\b{name}\b", read("docs/guide/language_models.md"))
    ),
}


@pytest.mark.parametrize("name", [each.model_type or name for name, each in FAMILIES.items()])
def test_family(name):
    check(FAMILY_STEPS, name)


# --- the walks themselves ---------------------------------------------------------------------


def test_the_walks_name_every_place():
    """What is looked for here stands in CONTRIBUTING."""
    text = read("CONTRIBUTING.md")
    steps = [*LAYER_STEPS, *WEIGHT_STEPS, *TRANSFORM_STEPS, *FORMAT_STEPS, *READER_STEPS,
             *OPERATION_STEPS, *FAMILY_STEPS]  # fmt: skip
    places = {re.sub(r"^\d\. ", "", step).partition(":")[0] for step in steps}
    assert [place for place in sorted(places) if f"`{place}" not in text] == []
    for first, steps in (("layer", LAYER_STEPS), ("transform", TRANSFORM_STEPS)):
        walk = text.partition(f"## Add a {first}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^(\d)\. ", walk, re.M)[-1] == list(steps)[-1][0]
