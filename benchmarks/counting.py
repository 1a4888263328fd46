"""Memory and traffic of a training step, counted from shapes and partition specs alone.

What each device holds and sends in one step of `benchmarks.decoder`, where every
device is given one sequence.  A ring is assumed for every exchange, as
`pax_export.sharding.sent_bytes` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pax_export as pax
from benchmarks.decoder import Size, abstract

#: Rules by name, and how many devices share the products of one layer.
SCHEMES = {
    "data parallel": (pax.sharding.data_parallel(), 1),
    "fully sharded": (pax.sharding.fully_sharded(), 1),
    "tensor parallel": (pax.sharding.tensor_parallel(), 8),
    "both": (pax.sharding.tensor_parallel() & pax.sharding.fully_sharded(), 8),
}


@dataclass(frozen=True)
class Counted:
    """Bytes on one device.

    Attributes:
        parameters: float32.
        optimizer: the two moments and the counter of Adam.
        gradients: float32.
        kept: what each layer leaves for its gradient: its input.
        working: the largest of what is needed in between: the attention weights
            of one layer, or the logits; each with its gradient, in float32.
        gathered: the weights of one layer, where they are gathered to be used.
        sent: by what is sent.
    """

    parameters: int
    optimizer: int
    gradients: int
    kept: int
    working: int
    gathered: int
    sent: dict[str, float]

    @property
    def state(self) -> int:
        """What a device holds between two steps."""
        return self.parameters + self.optimizer

    @property
    def temporary(self) -> int:
        """What a step needs on top of it."""
        return self.gradients + self.kept + self.working + self.gathered


def count(size: Size, scheme: str, devices: int, itemsize: int = 2) -> Counted:
    """Counts a step.

    Args:
        size: of the model.
        scheme: one of `SCHEMES`.
        devices: how many.
        itemsize: bytes of a number that is computed with: 2 for bfloat16.
    """
    rules, model = SCHEMES[scheme]
    net, adam = abstract(size)
    mesh = pax.sharding.abstract_mesh(data=devices // model, model=model)
    params = pax.sharding.table(net, mesh, rules)
    moments = pax.sharding.table(adam, mesh, pax.sharding.following(net, rules))
    tokens = model * size.length  # of the devices that share a layer
    attention = model * (size.heads // model) * size.length**2
    return Counted(
        parameters=params.bytes_per_device,
        optimizer=moments.bytes_per_device,
        gradients=params.bytes_per_device,
        kept=size.layers * tokens * size.dim * itemsize,
        working=2 * 4 * max(attention, tokens * size.vocab // model),
        gathered=sum(map(int, _gathered(params, size, itemsize))),
        sent={
            **_sent_for_weights(params, devices // model, itemsize),
            "activations": _sent_for_activations(size, tokens, model, itemsize),
        },
    )


def _gathered(params: Any, size: Size, itemsize: int) -> list[float]:
    rows = [row for row in params if row.path.startswith("layers.") and _is_split(row)]
    return [_whole(row, params.mesh) * itemsize / size.layers for row in rows]


def _sent_for_weights(params: Any, data: int, itemsize: int) -> dict[str, float]:
    """Gradients of replicated weights are summed; split weights are gathered.

    Those of layers twice, on the way forward and when the layer is computed again,
    the others once.  Their gradients are summed such that each device gets its part.
    """
    gradients = weights = 0.0
    for row in params:
        size = _whole(row, params.mesh) * itemsize
        kind = "reduce-scatter" if _is_split(row) else "all-reduce"
        gradients += pax.sharding.sent_bytes(kind, size, data)
        if _is_split(row):
            times = 2 if row.path.startswith("layers.") else 1
            weights += times * pax.sharding.sent_bytes("all-gather", size, data)
    return {"gradients": gradients, "weights": weights}


def _sent_for_activations(size: Size, tokens: int, model: int, itemsize: int) -> float:
    """Sums over the devices that share a layer, each of ``[tokens, dim]``.

    In a layer five: two forward (after attention and after the dense block), the
    first of them again when the layer is computed again, two backward.  Outside
    of the layers two: the embedding forward, the logits backward.
    """
    sums = 5 * size.layers + 2
    return sums * pax.sharding.sent_bytes("all-reduce", tokens * size.dim * itemsize, model)


def _is_split(row: Any) -> bool:
    """Whether a parameter is split over the devices that have different data."""
    return "data" in row.spec


def _whole(row: Any, mesh: dict[str, int]) -> int:
    """How many numbers of a parameter the devices with different data hold together."""
    return math.prod(row.shard_shape) * (mesh["data"] if _is_split(row) else 1)
