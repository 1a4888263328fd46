"""Sorting and `top_k` in ONNX, where runtimes differ in the order of equal numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import spec, to_onnx


@pytest.mark.parametrize("kind", ["float32", "int32", "bool", "float32 with nan"])
def test_orders_do_not_depend_on_what_top_k_does_with_equal_numbers(tmp_path, kind):
    """A runtime may keep their order, as ONNX says, or not: each key is another number."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.ops.op_topk import TopK_11

    class Turned(TopK_11):
        """Of equal numbers the last one first."""

        op_domain = ""

        def _run(self, x, k, axis=None, largest=None, sorted=None):
            sign = -1 if largest else 1
            keys = np.flip(sign * x.astype(np.float64), axis)
            order = x.shape[axis] - 1 - np.argsort(keys, axis, kind="stable")
            index = np.take(order, np.arange(int(k[0])), axis)
            return np.take_along_axis(x, index, axis), index

    Turned.__name__ = "TopK"
    x = np.array([[2, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 0], [1, 1, 2, 2, 0, 0]])
    x = x > 0 if kind == "bool" else x.astype(kind.split()[0])
    if "nan" in kind:
        x[:, 1::3] = np.nan

    def model(x):
        key = x.astype(jnp.int32) if kind == "bool" else x
        return jax.lax.top_k(key, 4)[1], jnp.argsort(x, axis=1), jnp.sort(x, axis=0)

    to_onnx(model, tmp_path / "m.onnx", spec("n, 6", str(x.dtype)))
    run = ReferenceEvaluator(str(tmp_path / "m.onnx"), new_ops=[Turned]).run
    for got, expected in zip(run(None, {"x": x}), model(x)):
        np.testing.assert_array_equal(got, expected)
