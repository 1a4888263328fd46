"""Orbax's checkpoints as a source, and our own, which orbax writes."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused

ocp = pytest.importorskip("orbax.checkpoint")
KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)
TREE = {
    "params": {"Dense_0": {"kernel": KERNEL, "bias": jnp.ones(3, jnp.bfloat16)}},
    "list": [np.zeros(2)],
    "step": 3,
}
NAMES = {"params.Dense_0.kernel", "params.Dense_0.bias", "list.0", "step"}


@pytest.fixture(scope="module", params=[True, False])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "net"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=request.param)) as saver:
        saver.save(path, TREE)
    return path


def test_a_tree(checkpoint):
    with open_source(checkpoint) as source:
        assert source.kind == "orbax"
        assert source.entries.keys() == NAMES
        assert_close(source.entries["params.Dense_0.kernel"].read(), KERNEL)
        part = (slice(1, 2), slice(0, 2))
        assert_close(source.entries["params.Dense_0.kernel"].read_part(part), KERNEL[part])
        assert source.entries["params.Dense_0.bias"].dtype.name == "bfloat16"


def test_our_own_checkpoints(tmp_path):
    net = pax.Linear(2, 3)
    with pax.checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(100, model=net, other={"a": np.ones(2)})
    with open_source(tmp_path) as source:
        assert source.entries.keys() == {"model.weight", "model.bias", "other.a"}
        assert_close(source.entries["model.weight"].read(), net.weight)


def test_which_step_is_not_guessed(tmp_path):
    for step in ("3", "7"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "_METADATA").write_text("{}")
    with refused(WeightsFileError, got="3, 7"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc", "..", "a/b", ""])
def test_arrays_outside_of_the_folder_are_refused(tmp_path, name):
    leaf = {"key_metadata": [{"key": name}], "value_metadata": {"value_type": "jax.Array"}}
    tree = {"use_ocdbt": False, "tree_metadata": {"a": leaf}}
    (tmp_path / "_METADATA").write_text(json.dumps(tree))
    with pytest.raises(WeightsFileError):
        open_source(tmp_path)


@pytest.mark.parametrize("shape", [[1 << 50], [1 << 30, 1 << 30], [-1]])
@pytest.mark.parametrize("chunks", [[1], None])
def test_inconsistent_headers_are_refused(tmp_path, shape, chunks):
    leaf = {"key_metadata": [{"key": "a"}], "value_metadata": {"value_type": "jax.Array"}}
    tree = {"use_ocdbt": False, "tree_metadata": {"a": leaf}}
    (tmp_path / "_METADATA").write_text(json.dumps(tree))
    (tmp_path / "a").mkdir()
    header = {"zarr_format": 2, "shape": shape, "chunks": chunks or shape, "dtype": "<f4",
              "compressor": None, "fill_value": None, "order": "C", "filters": None}  # fmt: skip
    (tmp_path / "a" / ".zarray").write_text(json.dumps(header))
    with pytest.raises(WeightsFileError):
        open_source(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tree_metadata": 3}', "[" * 100_000])
def test_a_damaged_tree(tmp_path, text):
    (tmp_path / "_METADATA").write_text(text)
    with pytest.raises(WeightsFileError):
        open_source(tmp_path)
