from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

from pax_export.cli import main
from pax_export.export.artifact.formats import import_function
from pax_export.export.validation import recheck, serve

FACTORIES = """
import jax.numpy as jnp
import pax_export as pax

PARAMS = {"w": jnp.arange(12.0).reshape(3, 4) / 7, "b": jnp.ones(4)}

def affine():
    return PARAMS, lambda params, x: {"y": x @ params["w"] + params["b"]}

def other():
    return {**PARAMS, "b": jnp.zeros(4)}, affine()[1]

def stranger():
    return {}, lambda params, a, b: a + b
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory to work in, with a module of factories."""
    (tmp_path / "cli_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    return tmp_path


@pytest.fixture
def call(capsys):
    """Runs the command line; gives the exit code, what it printed, and its one line of error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("pax-export: ")]
        assert len(lines) == (code != 0)
        return code, out, "".join(lines)

    return run


@pytest.fixture
def foreign(here):
    """What somebody else's jax2tf wrote."""
    import tensorflow as tf
    from jax.experimental import jax2tf

    module = tf.Module()
    module.w = tf.Variable(np.ones((3, 4), np.float32), name="w")
    converted = jax2tf.convert(
        lambda w, x: jax.lax.top_k(x @ w, 2)[0], polymorphic_shapes=[None, "(b, 3)"]
    )
    module.f = tf.function(
        lambda x: {"y": converted(module.w, x)},
        autograph=False,
        input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")],
    )
    tf.saved_model.save(module, "foreign", signatures=module.f)
    return here / "foreign"


@pytest.fixture
def quick(monkeypatch):
    """Makes the calls in this process: a fresh one spends seconds on its imports."""

    def here(format, place, calls, mode):
        assert mode == "each"
        return serve.run_each(import_function(format.run), str(place), calls)

    monkeypatch.setattr(recheck, "in_process", here)
