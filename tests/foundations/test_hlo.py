"""Collectives are found in the compiler's text, with their groups and how often they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import pax_export as pax
from pax_export.sharding import Collective, Cost
from tests.refusals import refused

MESH = AbstractMesh((4, 2), ("data", "model"))


def program(*lines, devices=8, computations=""):
    """The text of a program with these instructions."""
    inside = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule jit_step, is_scheduled=true, num_partitions={devices}\n\n{computations}\n"
        f"ENTRY %main.1_spmd (param.4: f32[8]) -> f32[8] {{\n{inside}\n}}\n"
    )


def only(*lines, **options):
    """The only collective of a program."""
    (found,) = pax.sharding.collectives(program(*lines, **options))
    return found


@pytest.mark.parametrize(
    ("groups", "group", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", (0, 1), ("model",)),
        ("{{0,2,4,6},{1,3,5,7}}", (0, 2, 4, 6), ("data",)),
        ("{}", tuple(range(8)), ("data", "model")),
        ("[4,2]<=[8]", (0, 1), ("model",)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6), ("data",)),
        ("mesh['x'=4,'y'=2] {'x'}", (0, 2, 4, 6), ("data",)),
        ("mesh['x'=4,'y'=2] {'y'}", (0, 1), ("model",)),
        ("mesh['x'=4,'y'=2] {'x','y'}", tuple(range(8)), ("data", "model")),
        ("mesh['x'=4,'y'=2] {'x':(1)2}", (0, 4), ("data",)),
        ("mesh['x'=4,'y'=2] {'x':(2)2,'y'}", (0, 1, 2, 3), ("data", "model")),
    ],
)
def test_groups_of_devices(groups, group, axes):
    line = f"%r = f32[16]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    found = only(line)
    assert found.group == group
    assert found.axes(MESH) == axes


ALL = "replica_groups=[1,8]<=[8]"


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        ("f32[16,2]{1,0} all-reduce(%x)", "all-reduce", 128, 224),
        ("(f32[16]{0}, /*index=1*/bf16[8]{0}) all-reduce(%x, %y)", "all-reduce", 80, 140),
        ("bf16[16]{0:T(8,128)(2,1)S(1)} all-gather(%x)", "all-gather", 32, 28),
        ("f32[2]{0} reduce-scatter(%x)", "reduce-scatter", 64, 56),
        ("(s8[8]{0}, s8[8]{0}) all-to-all(%x, %y)", "all-to-all", 16, 14),
        ("(f32[2]{0}, f32[16]{0}) all-gather-start(%x)", "all-gather", 64, 56),
        ("f32[16]{0} all-reduce-start(%x)", "all-reduce", 64, 112),
        ("pred[16]{0} all-gather(%x)", "all-gather", 16, 14),
        ("f8e4m3fn[16]{0} all-gather(%x)", "all-gather", 16, 14),
        ("s4[16]{0} all-gather(%x)", "all-gather", 8, 7),
        ("f32[] all-reduce(%x)", "all-reduce", 4, 7),
    ],
)
def test_bytes_of_each_kind(line, kind, size, sent):
    found = only(f"ROOT %result.1 = {line}, channel_id=3, {ALL}, dimensions={{0}}")
    assert (found.kind, found.size, found.sent, found.times) == (kind, size, sent, 1)


def test_a_permutation_sends_the_whole_array():
    pairs = "channel_id=1, source_target_pairs={{0,0},{1,2},{2,1}}"
    assert only(f"%p = f32[4]{{0}} collective-permute(%x), {pairs}").sent == 16
    start = "(f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x)"
    assert only(f"%p = {start}, {pairs}").group == (1, 2)
    assert only(f"%p = {start}, {pairs}").sent == 16


def test_other_operations_are_not_found():
    text = program(
        "%alone = f32[4]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add",
        "%done = f32[4]{0} all-gather-done(%start)",
        "%fusion = f32[4]{0} fusion(%all-reduce.1), kind=kLoop, calls=%gone",
    )
    assert pax.sharding.collectives(text) == ()


LOOPS = """\
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %gathered = f32[32]{0} all-gather(%w), replica_groups={}, metadata={op_name="jit(step)/dot"}
}

%inner_test (p: (s32[], f32[4])) -> pred[] {
  %end = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}

%outer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %w = (s32[], f32[4]{0}) while(%t), condition=%inner_test, body=%inner
}

%branch (p: f32[4]) -> f32[4] {
  %f = f32[4]{0} fusion(%x), kind=kCustom, calls=%fused
}

%fused (p: f32[4]) -> f32[4] {
  %s = f32[4]{0} reduce-scatter(%x), replica_groups={}
}
"""


def test_loops_are_multiplied():
    """A known trip count, and one that is read off the condition of a loop inside of it."""
    text = program(
        "%w = (s32[], f32[4]{0}) while(%t), condition=%unseen, body=%outer, "
        'backend_config={"known_trip_count":{"n":"3"}}',
        "%c = f32[4]{0} conditional(%p, %x, %x), branch_computations={%branch, %add}",
        computations=LOOPS,
    )
    found = {each.kind: each for each in pax.sharding.collectives(text)}
    times = {kind: each.times for kind, each in found.items()}
    assert times == {"all-reduce": 3, "all-gather": 15, "reduce-scatter": 1}
    assert all(each.times_known for each in found.values())
    assert found["all-gather"].source == "jit(step)/dot"
    assert found["all-gather"].sent == 15 * 112


def test_asynchronous_collectives_are_counted_once():
    text = program(
        "%start = ((f32[4]), f32[4]) async-start(%x), calls=%fused",
        "%done = f32[4]{0} async-done(%start), calls=%fused",
        computations=LOOPS,
    )
    (found,) = pax.sharding.collectives(text)
    assert (found.kind, found.times) == ("reduce-scatter", 1)


def test_loops_of_unknown_length_are_reported():
    text = program(
        "%w = (s32[], f32[4]{0}) while(%t), condition=%unseen, body=%outer", computations=LOOPS
    )
    first, second = pax.sharding.collectives(text)
    assert not first.times_known and not second.times_known
    assert (first.times, second.times) == (1, 5)


def test_other_values_are_refused():
    lowered = jax.jit(jnp.sin).lower(1.0)
    for wrong in (lowered, "text", None):
        with refused(
            TypeError, "Expected a compiled program.", "jax.jit(step).lower(...).compile()"
        ):
            pax.sharding.collectives(wrong)
    with refused(TypeError, "collective", "all-gather"):
        pax.sharding.sent_bytes("gather", 8, 2)


def test_one_device_sends_nothing():
    assert pax.sharding.sent_bytes("all-reduce", 1000, 1) == 0
    assert pax.sharding.sent_bytes("collective-permute", 1000, 1) == 0
    assert pax.sharding.collectives(jax.jit(jnp.sin).lower(1.0).compile()) == ()


# --- the cost of a call -------------------------------------------------------------------


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
