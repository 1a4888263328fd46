"""``pax-export retarget``: what jax2tf wrote, mended from the command line."""

from __future__ import annotations

import json

import numpy as np

from tests.closeness import assert_close


def test_a_savedmodel_is_mended_and_runs(foreign, call, here):
    code, out, _ = call("retarget", "foreign", "--out", "mended", "--json")
    assert code == 0
    assert json.loads(out)["oldest_tensorflow"] == "2.15"
    found = json.loads(call("inspect", "mended", "--json")[1])
    assert (found["oldest_tensorflow"], found["problem"]) == ("2.15", "")
    np.save("x.npy", np.ones((2, 3), np.float32))
    code, out, _ = call("run", "mended", "--input", "x.npy", "--output", "y.npz")
    assert (code, out) == (0, "y: float32[2, 2]\n")
    with np.load("y.npz") as stored:
        assert_close(stored["y"], np.full((2, 2), 3.0))


def test_its_place_is_asked_for(foreign, call):
    code, out, error = call("retarget", "foreign", "--validate", "no")
    assert (code, out) == (1, "")
    assert "error: The path already exists. where: " in error
    code, out, _ = call("retarget", "foreign", "--validate", "no", "--overwrite")
    assert code == 0
    assert "2.15" in out
    code, _, error = call("retarget", "nowhere")
    assert code == 1
