"""Paths of another kind are refused by name, wherever there is one."""

import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.checkpoint import Checkpoints
from pax_export.errors import InvalidArgumentTypeError
from pax_export.export import load, renew, retarget, spec, to_onnx, to_saved_model, to_stablehlo
from tests.refusals import refused

NET = pax.Linear(2, 2)
CALLS = {
    "to_saved_model": lambda path: to_saved_model(jnp.sin, path, spec("n")),
    "to_stablehlo": lambda path: to_stablehlo(jnp.sin, path, spec("n")),
    "to_onnx": lambda path: to_onnx(jnp.sin, path, spec("n")),
    "load": load,
    "renew": renew,
    "retarget": retarget,
    "save_weights": lambda path: pax.save_weights(NET, path),
    "load_weights": lambda path: pax.load_weights(NET, path),
}


@pytest.mark.parametrize("path", [None, 3, b"bytes"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_path_is_refused(name, path):
    with refused(InvalidArgumentTypeError, where="path", got=f"{type(path).__name__}: {path!r}"):
        CALLS[name](path)


def test_the_directory_of_checkpoints():
    with refused(InvalidArgumentTypeError, where="directory", got="NoneType: None"):
        Checkpoints(None)
