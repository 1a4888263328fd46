"""Exports to PyTorch in a process that has loaded TensorFlow."""

from __future__ import annotations

import pytest

from tests.processes import printed

pytest.importorskip("torch")
CODE = """
import sys
import jax.numpy as jnp
from pax_export import export
export.to_saved_model(jnp.sin, sys.argv[1] + "/saved", export.spec("3"))
print(export.to_torch(jnp.sin, sys.argv[1] + "/sine.pt2", export.spec("3")).validated)
"""


def test_torch_is_loaded_after_tensorflow(tmp_path):
    assert printed(CODE, tmp_path) == "here\n"
