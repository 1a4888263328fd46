"""What benchmarks/ counts for a model on a mesh is what the compiler makes of it.

The page docs/scaling.md says where the two differ, and by how much; here a small
model differs by exactly that.
"""

from __future__ import annotations

import json
import os

import jax
import pytest

pytest.importorskip("optax")

import pax_export as pax
from benchmarks.counting import SCHEMES, count
from benchmarks.decoder import SIZES, Size, abstract
from benchmarks.scaling import QUICKLY
from tests.processes import python

DEVICES = 8
#: More tokens than weights, as in the large ones: weights are cheaper to move.
SMALL = Size(dim=64, layers=3, heads=8, length=128, vocab=128)
KINDS = [
    ("data parallel", "f32"), ("data parallel", "bf16"),
    ("fully sharded", "f32"), ("tensor parallel", "f32"),
]  # fmt: skip

COMPILE = """
import json, sys, jax
from benchmarks.decoder import Size
from benchmarks.scaling import compiled

size, kinds = json.loads(sys.argv[1])
print(json.dumps([compiled(Size(**size), scheme, jax.devices(), dtype) for scheme, dtype in kinds]))
"""


@pytest.fixture(scope="module")
def compiled():
    """What the compiler says of each kind of step, on virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "XLA_FLAGS": flags}
    done = python("-c", COMPILE, json.dumps([vars(SMALL), KINDS]), env=variables)
    return dict(zip(KINDS, json.loads(done.stdout)))


def counted(scheme):
    return count(SMALL, scheme, DEVICES, itemsize=4)


@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
def test_arguments_are_the_state_and_the_tokens(compiled, scheme, dtype):
    sequences = SCHEMES[scheme][1]
    tokens = 4 * sequences * (SMALL.length + 1)
    assert compiled[scheme, dtype]["arguments"] == counted(scheme).state + tokens


def test_data_parallel_sends_the_gradients_and_the_loss(compiled):
    loss = pax.sharding.sent_bytes("all-reduce", 4, DEVICES)
    sent = {"all-reduce data": counted("data parallel").sent["gradients"] + loss}
    assert compiled["data parallel", "f32"]["sent by"] == sent


# What a compiler adds to what is needed is its choice; a better one may add less.


def test_cpus_exchange_float32_also_in_half_precision(compiled):
    full, half = compiled["data parallel", "f32"]["sent"], compiled["data parallel", "bf16"]["sent"]
    assert full / 2 <= half <= full


def test_fully_sharded_gathers_the_weights_and_sums_whole_gradients(compiled):
    """Where a reduce-scatter would do, the compiler for CPUs has an all-reduce."""
    sums = compiled["data parallel", "f32"]["sent"]
    needed = counted("fully sharded").sent
    found = compiled["fully sharded", "f32"]["sent by"]
    assert found["all-gather data"] == needed["weights"]
    assert needed["gradients"] <= sum(found.values()) - needed["weights"] <= sums


def test_tensor_parallel_sums_the_gradients_of_query_key_and_value_one_by_one(compiled):
    """Two sums more in each layer than needed; and three numbers a token for the loss."""
    tokens = DEVICES * SMALL.length
    activations = pax.sharding.sent_bytes("all-reduce", 4 * tokens * SMALL.dim, DEVICES)
    losses = 3 * pax.sharding.sent_bytes("all-reduce", 4 * tokens, DEVICES)
    needed = counted("tensor parallel").sent["activations"] + losses
    found = compiled["tensor parallel", "f32"]["sent by"]
    assert set(found) == {"all-reduce model"}
    assert needed <= sum(found.values()) <= needed + 2 * SMALL.layers * activations


def test_temporary_memory_is_at_least_the_counted(compiled):
    for (scheme, dtype), row in compiled.items():
        kept = count(SMALL, scheme, DEVICES, itemsize=4 if dtype == "f32" else 2)
        assert kept.temporary < row["temporary"] < 4 * kept.temporary


def test_seventy_billion_parameters_need_no_memory():
    before = sum(array.nbytes for array in jax.live_arrays())
    net, adam = abstract(SIZES["70B"])
    leaves = jax.tree.leaves((net, adam))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in jax.tree.leaves(net)) == 69_802_393_600
    split, whole = [count(SIZES["70B"], scheme, 512) for scheme in ("both", "data parallel")]
    assert whole.state == 4 + 12 * 69_802_393_600
    assert whole.state / 512 < split.state < 1.01 * whole.state / 512
    assert sum(array.nbytes for array in jax.live_arrays()) <= before
