"""What a compiled program costs each device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import pax_export as pax
from pax_export.sharding import Collective, Cost
from tests.refusals import refused

ON_EIGHT_DEVICES = """
import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import pax_export as pax
from pax_export import transforms as T

mesh = pax.sharding.make_mesh(data=4, model=2)
spec = jax.ShapeDtypeStruct((8, 64), jnp.float32)
weights = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)


def step(weights, x):
    def layer(x, weight):
        y = jax.lax.with_sharding_constraint(x @ weight, NamedSharding(mesh, P("data")))
        return jnp.tanh(y), None

    return jax.lax.scan(layer, x, weights)[0]


shardings = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("data"))
step = jax.jit(step, in_shardings=shardings, out_shardings=shardings[1])
compiled = step.lower(weights, spec).compile()
cost = pax.sharding.cost(compiled)
print(json.dumps({
    "arguments": cost.arguments, "results": cost.results, "temporary": cost.temporary,
    "memory": cost.memory, "sent": cost.sent, "text": str(cost),
    "by": [[kind, axes, sent] for (kind, axes), sent in cost.sent_by(mesh).items()],
    "times": [each.times for each in cost.collectives],
}))
"""


def test_a_loop_over_split_weights_on_eight_devices():
    """Each of three layers sums over "model" what each part of "data" has."""
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        cwd=Path(__file__).parent.parent.parent,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
        },
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)
    assert cost["arguments"] == 4 * (3 * 64 * 64 // 2 + 8 // 4 * 64)
    activations = 4 * (8 // 4 * 64)
    assert cost["results"] == activations
    assert cost["memory"] == cost["arguments"] + activations + cost["temporary"]
    by = {(kind, *axes): sent for kind, axes, sent in cost["by"]}
    assert by["all-reduce", "model"] == 3 * pax.sharding.sent_bytes("all-reduce", activations, 2)
    # Nothing goes along "data"; what comes out of the loop may still lie in halves.
    assert set(by) <= {("all-reduce", "model"), ("all-gather", "model")}
    assert 3 in cost["times"] and cost["sent"] == sum(by.values())
    assert "sent by all-reduce" in cost["text"] and "arguments" in cost["text"]


def test_on_one_device():
    spec = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    cost = pax.sharding.cost(jax.jit(jnp.add, donate_argnums=0).lower(spec, spec).compile())
    assert (cost.arguments, cost.results, cost.reused, cost.sent) == (2048, 1024, 1024, 0)
    assert cost.memory == 2048 + cost.temporary
    assert str(cost).splitlines()[0].split() == ["arguments", "2.0", "KiB"]


def test_bytes_sent_are_summed():
    def each(kind, group, times=1, known=True):
        return Collective(kind, ("f32[256]",), 1024, group, times, known)

    found = (
        each("all-gather", (0, 2)), each("all-gather", (0, 1), 3), each("all-reduce", (0, 1), 2),
    )  # fmt: skip
    cost = Cost(0, 0, 0, 0, found)
    mesh = AbstractMesh((2, 2), ("data", "model"))
    assert cost.sent_by() == {("all-gather", ()): 2048, ("all-reduce", ()): 2048}
    assert list(cost.sent_by(mesh).items()) == [
        (("all-reduce", ("model",)), 2048),
        (("all-gather", ("model",)), 1536),
        (("all-gather", ("data",)), 512),
    ]
    assert cost.sent == 4096
    assert "not known" not in str(cost)
    unsure = Cost(0, 0, 0, 0, (each("all-reduce", (0, 1), known=False),))
    assert "(of a loop whose length is not known, one round is counted)" in str(unsure)


def test_programs_without_memory_analysis_are_refused():
    class Program:
        def as_text(self):
            return "HloModule m\n"

        def memory_analysis(self):
            return None

    with refused(TypeError, "reports", "pax.sharding.collectives(compiled)"):
        pax.sharding.cost(Program())
