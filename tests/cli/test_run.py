"""``pax-export run``: an export is called."""

from __future__ import annotations

import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pax_export.export import load, spec, to_saved_model


@pytest.fixture
def saved(here):
    def run(params, function, *inputs, **options):
        to_saved_model((params, function), "out", inputs, validate=False, **options)

    np.save("x.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    return run


def test_outputs_are_described_and_written(saved, call, here):
    saved({"w": jnp.ones((3, 4))}, lambda p, x: {"y": x @ p["w"], "n": x.shape[0]}, spec("n, 3"))
    code, out, _ = call("run", "out", "--input", "x.npy", "--output", "y.out")
    assert (code, out) == (0, "n: int32[]\ny: float32[2, 4]\n")
    with np.load("y.out") as stored:
        expected = load("out")(np.load("x.npy"))
        np.testing.assert_array_equal(stored["y"], expected["y"])
        assert stored["n"] == 2
    code, out, _ = call("run", "out/", "--input", "x=x.npy", "--json")
    assert json.loads(out) == {
        "outputs": {
            "n": {"shape": [], "dtype": "int32"},
            "y": {"shape": [2, 4], "dtype": "float32"},
        },
        "file": None,
    }


def test_nested_inputs_have_dotted_names_and_small_floats_go_through(saved, call):
    saved(
        {}, lambda p, batch: {"sum": batch["a"] + batch["b"][0]},
        {"a": spec("n, 3", "bfloat16"), "b": [spec("n, 3", "bfloat16")]},
    )  # fmt: skip
    np.save("b.npy", np.ones((2, 3), ml_dtypes.bfloat16))
    files = ("--input", "batch.a=x.npy", "--input", "batch.b.0=b.npy")
    code, out, _ = call("run", "out", *files, "--output", "sum.npz")
    assert (code, out) == (0, "sum: bfloat16[2, 3]\n")
    with np.load("sum.npz") as stored:
        np.testing.assert_array_equal(stored["sum"], np.load("x.npy") + 1)


def test_a_signature_is_chosen(saved, call):
    methods = {"up": lambda p, x: x + 1, "down": lambda p, x: x - 1}
    to_saved_model(
        ({}, methods["up"]), "out", {"up": spec("n, 3"), "down": spec("n, 3")}, methods=methods,
        validate=False,
    )  # fmt: skip
    assert call("run", "out", "--input", "x.npy", "--signature", "down")[0] == 0
    code, _, error = call("run", "out", "--input", "x.npy")
    assert (code, "fix: --signature up or --signature down" in error) == (1, True)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "error: The export takes other inputs. got: none; fix: --input x=FILE.npy"),
        (("z=x.npy",), "error: The export takes other inputs. got: z=x.npy"),
        (("x.npy", "x=x.npy"), "error: The export takes other inputs."),
        (("x=missing.npy",), "error: The file contains no array. where: x; got: missing.npy"),
        (("x=cli_models.py",), "error: The file contains no array."),
        (("x=hostile.npy",), "error: The file contains no array."),
        (("x=whole.npy",), "error: An argument has a different dtype than the exported one."),
        (("x=flat.npy",), "error: An argument has a different shape than the exported one."),
    ],
)
def test_invalid_inputs_are_refused(saved, call, inputs, message):
    saved({"w": jnp.ones((3, 4))}, lambda p, x: x @ p["w"], spec("n, 3"))
    np.save("hostile.npy", np.array([print], object), allow_pickle=True)
    np.save("whole.npy", np.ones((2, 3), np.int32))
    np.save("flat.npy", np.ones(3, np.float32))
    arguments = [part for text in inputs for part in ("--input", text)]
    code, out, error = call("run", "out", *arguments)
    assert (code, out) == (1, "")
    assert message in error


def test_an_output_that_cannot_be_written(saved, call):
    saved({}, lambda p, x: x, spec("n, 3"))
    code, _, error = call("run", "out", "--input", "x.npy", "--output", "no/where.npz")
    assert (code, "error: The outputs cannot be written." in error) == (1, True)


def test_an_output_replaces_outputs_and_nothing_else(saved, call, here):
    saved({}, lambda p, x: x, spec("n, 3"))
    for _ in range(2):
        assert call("run", "out", "--input", "x.npy", "--output", "y.npz")[0] == 0
    before = (here / "x.npy").read_bytes()
    code, _, error = call("run", "out", "--input", "x.npy", "--output", "x.npy")
    assert code == 1
    message = "error: The path is not an archive of outputs by pax-export, so it is not replaced."
    assert f"{message} where: x.npy;" in error
    assert r'got: a file that begins with b"\x93NUMPY' in error
    assert (here / "x.npy").read_bytes() == before
    np.savez("data.npz", x_train=np.ones(2))  # a user's own, of the same kind
    assert message in call("run", "out", "--input", "x.npy", "--output", "data.npz")[2]
    assert np.load("data.npz").files == ["x_train"]
    assert not list(here.glob(".*"))
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert call("run", "out", "--input", "x.npy", "--output", "pipe")[0] == 0
    assert os.read(reader, 2) == b"PK"
    os.close(reader)


def test_a_directory_without_an_export(here, call):
    (here / "empty").mkdir()
    code, _, error = call("run", "empty")
    assert (code, "The path is not an export of pax_export." in error) == (1, True)
