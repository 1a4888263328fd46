"""--compat-jax: a program sees what jax has taken away; nobody else does."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pax_export.compat import _legacy_jax
from pax_export.compat import _old_functions as old
from pax_export.compat._old_jax import OLD_MODULES, OLD_NAMES
from tests.closeness import assert_close
from tests.compat.processes import pax_export_run
from tests.processes import ROOT

HERE = Path(__file__).parent / "jax_of_2021"
GUIDE = (ROOT / "docs" / "guide" / "migration.md").read_text(encoding="utf-8")
EACH = [(module, name) for module, names in OLD_NAMES.items() for name in names]


def test_a_program_of_2021_runs():
    done = pax_export_run("--compat-jax", HERE / "train.py", "--steps", "2")
    assert done.stdout.splitlines() == [
        "True True",
        "[[-1.0, 9.0, 9.0], [4.0, 5.0, 6.0]]",
        "True True",
        "True 0 1 cpu",
        "[0, 1, 2, 3]",
        "True 6 [False  True]",
        "[-1.0, 1.0]",
        "what: x   1.0",
        "2.0",
        "1.0",
        "True",
        "[3, 5] 2",
        "(2, 2) 1",
        "0.0",
    ]


def test_without_it_the_program_sees_the_jax_of_today():
    done = pax_export_run(HERE / "train.py", check=False)
    assert done.returncode == 1
    assert "ImportError: cannot import name" in done.stderr


LIBRARY = """
import jax

def sees():
    return hasattr(jax, "tree_multimap"), hasattr(jax.numpy, "DeviceArray")
"""
LOOK = """
import importlib, sys, jax, jax.numpy as jnp, library, jmp
import jax.experimental.optimizers
from jax.experimental import optimizers, ode
assert jax.experimental.optimizers is optimizers
assert ode is importlib.import_module("jax.experimental.ode")
print(hasattr(jax, "tree_multimap"), library.sees())
print(sys.modules["jax"] is jax, hasattr(sys.modules["jax"], "tree_multimap"))
print(sys.modules["jax.numpy"].clip is jnp.clip, jax.jit is sys.modules["jax"].jit)
print(hasattr(jax, "no_such_name"), hasattr(jax.numpy, "no_such_name"))
for statement in ("import jax.no_such_module", "from jax import no_such_name",
                  "from jax.experimental.maps import xmap"):
    try:
        exec(statement)
    except ImportError as error:
        print(type(error).__name__, error)
jax.config.update("jax_enable_x64", True)
print(jnp.ones(1).dtype, library.jax.numpy.ones(1).dtype)
jnp.of_mine = 1
print(sys.modules["jax.numpy"].of_mine)
"""
SEEN = """\
True (False, False)
False False
False True
False False
ModuleNotFoundError No module named 'jax.no_such_module'
ImportError cannot import name 'no_such_name' from 'jax' (unknown location)
ImportError cannot import name 'xmap' from 'jax.experimental.maps' (unknown location)
float64 float64
1
"""


@pytest.mark.parametrize("how", ["file", "module", "folder"])
def test_modules_outside_of_the_program_see_the_real_jax(how, tmp_path, monkeypatch):
    libraries, program = tmp_path / "site-packages", tmp_path / "program"
    libraries.mkdir()
    program.mkdir()
    (libraries / "library.py").write_text(LIBRARY)
    text = f"import sys; sys.path.append({str(libraries)!r})\n" + LOOK
    if how == "folder":
        (program / "__main__.py").write_text(text)
        done = pax_export_run("--compat-jax", program)
    elif how == "module":
        (program / "look.py").write_text(text)
        done = pax_export_run("--compat-jax", "-m", "look", cwd=program)
    else:
        (program / "look.py").write_text(text)
        done = pax_export_run("--compat-jax", program / "look.py")
    assert re.sub(r"from '([\w.]+)' \(.*\)", r"from '\1' (unknown location)", done.stdout) == SEEN


def test_an_export_is_no_program(tmp_path):
    done = pax_export_run("--compat-jax", tmp_path, check=False)
    assert done.returncode == 2
    assert "--compat-jax is for programs, and " in done.stderr


@pytest.mark.parametrize(("module", "name"), EACH, ids=[".".join(each) for each in EACH])
def test_every_old_name_is_there(module, name):
    value = getattr(_legacy_jax.view_module(module), name)
    assert value is not None
    if callable(value) and not inspect.isclass(value):
        assert getattr(value, "__doc__", "") is not None or module


@pytest.mark.parametrize("module", OLD_MODULES)
def test_every_old_module_is_there(module):
    assert _legacy_jax.view_module(module) is not None
    importlib.import_module(OLD_MODULES[module])


def test_the_guide_lists_them_all():
    listed = {
        (module, name)
        for module, names in re.findall(r"^\| `(jax[\w.]*)` \| (.+?) \|", GUIDE, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == set(EACH)
    modules = dict(re.findall(r"^\| `(jax[\w.]*)` \(module\) \| `(jax[\w.]*)` \|", GUIDE, re.M))
    assert modules == OLD_MODULES


def test_what_functions_of_today_are_called_with():
    x = jnp.array([3.0, 1.0, 2.0])
    seen = _legacy_jax.view_module("jax.numpy")
    assert seen.clip(x, 1.5, 2.5).tolist() == seen.clip(x, a_max=2.5, a_min=1.5).tolist()
    assert seen.clip(x, min=2).tolist() == [3, 2, 2]
    assert seen.sort(x, kind="quicksort").tolist() == [1, 2, 3]
    assert seen.where(condition=x > 1, x=x, y=0).tolist() == [3, 0, 2]
    assert seen.where(x > 1, y=0, x=x).tolist() == [3, 0, 2]
    assert seen.msort(x[:, None]).ravel().tolist() == [1, 2, 3]
    assert seen.issubsctype(x, jnp.floating)
    assert_close(seen.trapz(x), 3.5)
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    assert_close(seen.linalg.pinv(matrix, rcond=1e-6), jnp.linalg.inv(matrix), rtol=1e-4)
    linalg = _legacy_jax.view_module("jax.scipy.linalg")
    assert_close(linalg.solve(matrix, x[:2], sym_pos=True), jnp.linalg.solve(matrix, x[:2]))
    assert_close(
        linalg.polar_unitary(matrix) @ linalg.polar_unitary(matrix).T, jnp.eye(2), atol=1e-5
    )


def test_what_acts_on_indices():
    x, at = jnp.arange(4.0), old.INDEX
    ops = _legacy_jax.view_module("jax.ops")
    assert ops.index_mul(x, at[1:], 2).tolist() == [0, 2, 4, 6]
    assert ops.index_min(x, at[::2], 1, False, unique_indices=True).tolist() == [0, 1, 1, 3]
    assert ops.index_max([0, 1], 0, 5).tolist() == [5, 1]


def test_what_calls_python():
    host, seen = _legacy_jax.view_module("jax.experimental.host_callback"), []

    @jax.jit
    def call(x):
        x = host.id_tap(lambda value, transforms: seen.append((float(value), transforms)), x)
        return host.call(lambda value: value * 2, x, result_shape=x)

    assert float(call(jnp.float32(3))) == 6
    host.barrier_wait()
    assert seen == [(3.0, ())]
    assert float(host.id_tap(print, jnp.ones(1), result=jnp.float32(4))) == 4


def test_small_ones():
    util, random = _legacy_jax.view_module("jax.util"), _legacy_jax.view_module("jax.random")
    assert util.unzip2([(1, 2), (3, 4)]) == ((1, 3), (2, 4))
    assert util.safe_map(max, [1, 5], [2, 3]) == [2, 5]
    with pytest.raises(ValueError):
        util.safe_zip([1], [1, 2])
    assert random.threefry2x32_key(0).shape == random.PRNGKey(0).shape
    assert _legacy_jax.view_module("jax").curry(max)(1)(5) == 5
    assert _legacy_jax.view_module("jax").host_ids() == [0]
    with _legacy_jax.view_module("jax.experimental").enable_x64():
        assert jnp.ones(1).dtype == "float64"
