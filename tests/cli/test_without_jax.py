"""The command line where TensorFlow is, and no jax: exports are inspected, tested and run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes import python

#: Importing jax fails; so does everything that needs it.
NO_JAX = """
import sys
sys.modules["jax"] = sys.modules["jaxlib"] = None
"""

COMMANDS = """
import json, sys
from pax_export.cli import main

results = [main(arguments) for arguments in json.loads(sys.argv[1])]
print(results)
assert "pax_export.nn" not in sys.modules
"""


@pytest.fixture
def without_jax(here):
    def run(program, *arguments):
        return python("-W", "error", "-c", NO_JAX + program, *arguments, cwd=here)

    return run


def test_a_savedmodel_is_inspected_tested_run_and_loaded(here, call, without_jax):
    inputs = ("cli_models:affine", "out", "--input", "n, 3", "--validate", "no")
    assert call("export", *inputs)[0] == 0
    np.save("x.npy", np.ones((2, 3), np.float32))
    commands = (
        '[["inspect", "out"], ["validate", "out"], ["run", "out", "--input", "x.npy"],'
        ' ["export", "cli_models:affine", "new", "--input", "n, 3"]]'
    )
    load = """
import numpy as np
from pax_export.export import load
model = load("out")
print(model(np.ones((1, 3)))["y"].shape, model)
"""
    done = without_jax(COMMANDS + load, commands)
    assert "    in   x: float32[n, 3]\n" in done.stdout
    assert "serving_default (n=5): ok, y [5, 4]\n" in done.stdout
    assert "y: float32[2, 4]\n[0, 0, 0, 1]\n(1, 4) LoadedModel(" in done.stdout
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("pax-export: error"))
    assert "needs the package 'jax', which is not installed. fix: python -m pip" in error
    assert not (here / "new").exists()


def test_missing_packages_are_named(without_jax):
    program = """
import pax_export
try:
    pax_export.Linear
except ImportError as error:
    print(error)
"""
    done = without_jax(program)
    assert done.stdout.startswith(
        "pax_export.Linear needs the package 'jax', which is not installed."
    )
