"""References (`jax.new_ref`) and hijax types, which become plain values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import hijax

from pax_export.export import spec, to_onnx, to_saved_model, to_stablehlo, to_tflite, to_torch
from tests.processes import printed

xla = functools.partial(to_saved_model, operations="xla")
FORMATS = [to_onnx, to_tflite, to_saved_model, xla, to_stablehlo]
if find_spec("torch"):
    FORMATS.append(to_torch)
every_format = pytest.mark.parametrize("to", FORMATS)


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


# --- a type of a user's own: an int8 array with its scale ---

HiPrimitive: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009


@dataclass
class Scaled:
    integers: jax.Array
    scale: jax.Array


@dataclass(frozen=True)
class ScaledType(hijax.HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        return [hijax.ShapedArray(self.shape, jnp.dtype("int8")), jax.typeof(jnp.zeros(()))]

    def lower_val(self, value):
        return [value.integers, value.scale]

    def raise_val(self, *lo_vals):
        return Scaled(*lo_vals)

    def to_tangent_aval(self):
        return jax.typeof(jnp.zeros(self.shape))


hijax.register_hitype(Scaled, lambda value: ScaledType(value.integers.shape))


class Scale(HiPrimitive):
    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), ScaledType(x.shape), {}
        super().__init__()

    def expand(self, x):
        scale = jnp.max(jnp.abs(x)) / 127
        return Scaled(jnp.round(x / scale).astype("int8"), scale)


class Unscale(HiPrimitive):
    def __init__(self, x):
        self.in_avals, self.params = (x,), {}
        self.out_aval = jax.typeof(jnp.zeros(x.shape))
        super().__init__()

    def expand(self, x):
        return x.integers.astype("float32") * x.scale


def unscaled(value):
    return Unscale(jax.typeof(value))(value)


def rounded(x):
    return unscaled(Scale(jax.typeof(x))(x)) * 2


def with_a_weight(params, x):
    return x @ unscaled(params["kernel"])


@every_format
def test_types_of_users_are_values(tmp_path, to):
    assert to(rounded, tmp_path / "rounded", spec("2, 3")).validated
    kernel = Scaled(jnp.arange(6, dtype="int8").reshape(3, 2), jnp.float32(0.5))
    net = ({"kernel": kernel}, with_a_weight)
    assert to(net, tmp_path / "net", spec("batch, 3")).validated


def test_nets_of_nnx_with_hijax_variables(tmp_path):
    pytest.importorskip("flax")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from flax import nnx; from pax_export import export\n"
        "rngs = nnx.Rngs(0)\n"
        "net = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))\n"
        "net.eval(); assert type(net.layers[0].kernel).__name__ == 'HijaxVariable'\n"
        "for name in sys.argv[2:]:\n"
        "    to, _, operations = name.partition(':')\n"
        "    given = {'operations': operations} if operations else {}\n"
        "    path = f'{sys.argv[1]}/{to}{operations}'\n"
        "    report = getattr(export, to)(net, path, export.spec('batch, 3'), **given)\n"
        "    print(report.validated, len(report.variables))\n"
    )
    names = ["to_onnx", "to_tflite", "to_saved_model", "to_saved_model:xla", "to_stablehlo"]
    if find_spec("torch"):
        names.append("to_torch")
    out = printed(code, tmp_path, *names, env={"FLAX_HIJAX_VARIABLE": "1"})
    assert out.splitlines() == ["here 6"] * len(names)
