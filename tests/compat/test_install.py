"""install_as_pax: which names are served, by what, and which are refused."""

from pathlib import Path

import pytest

from tests.compat.processes import code

INSTALL = "import pax_export; pax_export.install_as_pax()\n"


def test_every_way_to_import_gives_the_one_module():
    assert code(
        INSTALL
        + """
import pax, opax, sys
import pax.experimental, pax.experimental.graph as graph, pax.nets, pax.utils
from pax import experimental, nets
from pax.experimental.graph import Node, build_graph_module
from pax.utils import build_update_fn
import opax.schedule
from opax.transform import scale_by_adam
assert pax is pax_export and pax.experimental is pax_export.experimental is experimental
assert pax.nets is pax_export.nets is nets and sys.modules["pax.utils"] is pax_export.utils
assert graph is pax_export.experimental.graph and graph.Node is Node
assert opax is pax_export.opax and opax.transform is pax_export.opax.transform
print(pax.__spec__.name, pax.nets.__spec__.name, opax.__spec__.name)
""",
        fresh=True,
    ) == ["pax_export pax_export.nets pax_export.opax"]


@pytest.mark.parametrize(
    "first", ["import pax.nets", "from pax.experimental.graph import Node", "import opax.schedule"]
)
def test_a_submodule_may_be_imported_first(first):
    assert code(f"{INSTALL}{first}\nimport pax; print(pax is pax_export)") == ["True"]


def test_opax_is_loaded_when_first_imported_and_by_either_name():
    assert code(
        "import sys; before = len(sys.meta_path)\n"
        + INSTALL * 2
        + """
import importlib.util
print(len(sys.meta_path) - before)
print("pax_export.opax" in sys.modules, importlib.util.find_spec("opax").name)
from pax_export import opax as ours
import opax, jax.numpy as jnp
print(opax is ours, len(opax.clip(1.0)(jnp.ones(3)).pytree_attributes))
"""
    ) == ["1", "False opax", "True 0"]


def test_nothing_is_served_without_it():
    assert code(
        """
import sys, pax_export
from pax_export import opax
print([name for name in sys.modules if name.split(".")[0] in ("pax", "opax")])
"""
    ) == ["[]"]


def test_another_pax_is_refused(tmp_path):
    (tmp_path / "pax.py").write_text("version = 1")
    lines = code(
        f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import pax, pax_export
try:
    pax_export.install_as_pax()
except ImportError as error:
    print(error)
print(pax.version, sys.modules["pax"] is pax)
"""
    )
    assert lines == [
        "install_as_pax was called too late: another package is already imported as 'pax'.",
        f"  got: {tmp_path / 'pax.py'}",
        "  fix: pax_export.install_as_pax() before the first import of pax and opax",
        "1 True",
    ]


def test_another_pax_that_failed_to_import_is_forgotten(tmp_path):
    """As PAX itself does on the jax of today."""
    (tmp_path / "pax").mkdir()
    (tmp_path / "pax" / "__init__.py").write_text("import pax.part; raise RuntimeError")
    (tmp_path / "pax" / "part.py").write_text("")
    assert code(
        f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
try:
    import pax
except RuntimeError:
    assert "pax.part" in sys.modules
    import pax_export; pax_export.install_as_pax()
import pax
print(pax is pax_export, "pax.part" in sys.modules)
"""
    ) == ["True False"]


def test_another_pax_that_is_only_installed_is_not_looked_at(tmp_path):
    (tmp_path / "pax").mkdir()
    (tmp_path / "pax" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "pax" / "nets.py").write_text("raise RuntimeError")
    text = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{INSTALL}import pax.nets; print(1)"
    assert code(text) == ["1"]


def errors(*statements):
    """What imports that fail say: the class, its `name`, and the first line."""
    tries = [
        f"try:\n    {statement}\nexcept ImportError as error:\n"
        "    print(type(error).__name__, error.name, str(error).splitlines()[0], sep='|')"
        for statement in statements
    ]
    return code(INSTALL + "\n".join(tries))


def test_what_pax_does_not_have_is_named():
    assert errors(
        "import pax.core",
        "from pax.nets.resnet import ResNet18",
        "from pax._src.core.base import no_such_thing",
        "import opax.no_such_thing",
    ) == [
        "NotInPaxError|pax.core|No module named 'pax.core': it is not part of PAX's interface.",
        "NotInPaxError|pax.nets.resnet|No module named 'pax.nets.resnet': it is not part of "
        "PAX's interface.",
        "NotInPaxError|no_such_thing|PAX's internal pax._src.core.base.no_such_thing does not "
        "exist here.",
        "ModuleNotFoundError|opax.no_such_thing|No module named 'opax.no_such_thing'",
    ]


def test_internal_names_of_pax():
    """`pax_export` has a folder `core`; as `pax.core` its classes would be others."""
    assert code(
        INSTALL
        + """
import pickle, sys
for name in ("pax.core", "pax.core._tree"):
    try:
        __import__(name)
    except ImportError as error:
        again = pickle.loads(pickle.dumps(error))
        print(str(again) == str(error), again.name)
print([name for name in sys.modules if name.startswith("pax.core")])
import pax._src.core as core, pax
from pax._src.core.pure import pure
print(core.Module is pax.Module, pure is pax.pure, hasattr(core, "_private"))
"""
    ) == ["True pax.core", "True pax.core", "[]", "True True False"]


def test_missing_opax_is_named():
    assert code(
        """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):  # modules, but not what is installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None
sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
""".replace("sys.meta_path[", "import pax_export; pax_export.install_as_pax()\nsys.meta_path[")
        + """
try:
    import opax
except ImportError as error:
    print(error)
"""
    ) == [
        "import opax needs the package 'opax', which is not installed.",
        '  fix: python -m pip install "opax>=0.2.11" (the extra [opax] of pax-export)',
    ]


def test_pickles_that_name_classes_of_pax_are_loaded():
    assert code(
        INSTALL
        + r"""
import pickle
for text in (b"cpax\nLinear\n.", b"cpax._src.nn.linear\nLinear\n.",
             b"cpax._src.nn.recurrent\nLSTMState\n(I1\nI2\ntR.",
             b"cpax._src.core.graph_module\nGraphModule\n.",
             b"cpax._src.nets.resnet\nResNet18\n.", b"cpax.utils\nscan\n."):
    print(pickle.loads(text))
"""
    )[:3] == [
        "<class 'pax_export.nn._linear.Linear'>",
        "<class 'pax_export.nn._linear.Linear'>",
        "LSTMState(hidden=1, cell=2)",
    ]


def test_parts_of_nets_in_pickles_of_pax_are_loaded():
    """PAX pickles a module by the file of its class, and gives it back its attributes."""
    assert code(
        INSTALL
        + r"""
import pickle
def text(file, name):
    return f"\x80\x02cpax._src.nets.{file}\n{name}\n)\x81}}(U\x04spamK\x01ub.".encode("latin1")
for file, names in {"resnet": ("ResNet", "BlockGroup", "ResnetBlock"),
                    "transformer": ("Transformer", "CausalSelfAttention", "DenseBlock")}.items():
    for name in names:
        loaded = pickle.loads(text(file, name))
        print(type(loaded).__name__, loaded.spam, loaded.eval().spam)
"""
    ) == [
        f"{name} 1 1"
        for name in (
            "ResNet", "BlockGroup", "ResnetBlock", "Transformer", "CausalSelfAttention",
            "DenseBlock",
        )
    ]  # fmt: skip


# --- PAX's documentation of its experimental part -----------------------------------------


EXAMPLES = Path(__file__).with_name("pax_examples.txt")


def test_the_examples_run_as_written():
    """In a process of its own, as what is imported as `pax` stays imported."""
    *failures, result = code(
        "import doctest, pax_export; pax_export.install_as_pax();"
        "flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE;"
        f"print(doctest.testfile({str(EXAMPLES)!r}, module_relative=False,"
        " optionflags=flags, encoding='utf-8'))"
    )
    assert result.startswith("TestResults(failed=0, attempted="), "\n".join([*failures, result])
    assert int(result.split("attempted=")[1].strip(")")) == EXAMPLES.read_text().count(">>> ")
