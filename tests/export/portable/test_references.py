"""References (`jax.new_ref`) and hijax types, which become plain values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pax_export.export import spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.processes import printed

every_format = pytest.mark.parametrize("to", [to_onnx, to_tflite, to_saved_model, to_stablehlo])


def straight(x):
    total = jax.new_ref(jnp.zeros(3))
    total[...] = x.sum(0)
    total[0] += 1.0
    return x + total[...]


def in_loops(x):
    total = jax.new_ref(jnp.zeros(3))

    def step(count, row):
        total[...] = total[...] * 0.5 + row
        return count, total[1]

    jax.lax.fori_loop(0, 2, lambda i, c: step(c, x[i])[0], 0)
    _, seen = jax.lax.scan(step, 0, x)
    return seen, jax.freeze(total)


def in_branches_and_calls(x):
    found = jax.new_ref(jnp.zeros(3))

    @jax.jit
    def inner(row):
        own = jax.new_ref(row)
        own[jnp.argmax(row)] = 5.0
        return own[...]

    jax.lax.cond(x[0, 0] > 0, lambda: found.__setitem__(0, 1.0), lambda: found.__setitem__(1, 2.0))
    return found[...] + jax.vmap(inner)(x)


def in_gradients(x):
    def loss(row):
        own = jax.new_ref(row)
        own[0] = own[1] * own[1]
        return (own[...] ** 2).sum()

    return jax.grad(loss)(x[0])


@every_format
@pytest.mark.parametrize("function", [straight, in_loops, in_branches_and_calls, in_gradients])
def test_references_are_values(tmp_path, to, function):
    assert to(function, tmp_path / "file", spec("2, 3")).validated


def test_nets_of_nnx_with_hijax_variables(tmp_path):
    pytest.importorskip("flax")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from flax import nnx; from pax_export import export\n"
        "rngs = nnx.Rngs(0)\n"
        "net = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))\n"
        "net.eval(); assert type(net.layers[0].kernel).__name__ == 'HijaxVariable'\n"
        "for name in ('to_onnx', 'to_tflite', 'to_saved_model', 'to_stablehlo'):\n"
        "    path = f'{sys.argv[1]}/{name}'\n"
        "    report = getattr(export, name)(net, path, export.spec('batch, 3'))\n"
        "    print(report.validated, len(report.variables))\n"
    )
    out = printed(code, tmp_path, env={"FLAX_HIJAX_VARIABLE": "1"})
    assert out.splitlines() == ["here 6"] * 4
