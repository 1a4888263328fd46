"""Nets with adapters, apart and merged, in the formats in which they are served."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pax_export as pax
from pax_export import adapters
from tests.adapters.layers import disturbed, names_of
from tests.closeness import assert_close


class Net(pax.Module):
    """A convolution, attention's dense layers by one of them, a head."""

    def __init__(self):
        super().__init__()
        self.conv = pax.Conv1D(3, 6, 3)
        self.head = pax.Linear(6, 2)

    def __call__(self, x):
        return self.head(jax.nn.relu(self.conv(x)).mean(1))


@pytest.fixture(scope="module")
def nets():
    apart = disturbed(adapters.add(Net(), (pax.Conv1D, pax.Linear), 2, alpha=3))
    return {"apart": apart, "merged": adapters.merge(apart)}


X = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)


@pytest.mark.parametrize("form", ["apart", "merged"])
def test_a_saved_model(form, nets, tmp_path):
    pax.export.to_saved_model(nets[form], tmp_path / "net", pax.export.spec("batch, 5, 3"))
    served = pax.export.load(tmp_path / "net")
    assert_close(served(X), nets["apart"](X), 1e-5)
    import tensorflow as tf

    variables = tf.saved_model.load(str(tmp_path / "net")).leaves
    assert sorted(variables) == sorted(names_of(nets[form]))


@pytest.mark.parametrize(
    "to", [pax.export.to_stablehlo, pax.export.to_onnx], ids=["stablehlo", "onnx"]
)
def test_other_formats(to, nets, tmp_path):
    path = tmp_path / ("net.onnx" if to is pax.export.to_onnx else "net")
    to(nets["apart"], path, pax.export.spec("batch, 5, 3"))
    assert_close(pax.export.load(path)(X), nets["merged"](X), 1e-5)
