"""Functions that torch has whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pax_export.export.formats.torch.values import TorchValue, is_number, rule

if TYPE_CHECKING:
    from pax_export.export.formats.torch.graph import TorchGraph
    from pax_export.export.formats.torch.values import Node


@rule("gelu")
def write_gelu(builder: TorchGraph, x: TorchValue, *, approximate: bool) -> Any:
    kind = "tanh" if approximate else "none"
    return builder("nn.functional.gelu", builder.node_of(x), approximate=kind)


rule("softmax")(lambda builder, x, *, axis: builder("softmax", builder.node_of(x), axis))
rule("log_softmax")(lambda builder, x, *, axis: builder("log_softmax", builder.node_of(x), axis))


@rule("attention")
def write_attention(
    builder: TorchGraph,
    query: TorchValue,
    key: TorchValue,
    value: TorchValue,
    *bias: TorchValue,
    scale: float,
) -> Any:
    nodes = [builder.node_of(each) for each in (query, key, value)]
    mask = [builder.node_of(each) if each.thin is None or each.bare else each.thin for each in bias]
    output = builder("nn.functional.scaled_dot_product_attention", *nodes, *mask, scale=scale)
    output = builder.transpose_axes(output, [0, 2, 1, 3])
    if builder.live:
        return output
    # ExecuTorch puts other calls here, whose result has another order in memory, and views fail.
    return builder("clone", output, memory_format=builder.dtype_of("contiguous_format"))


@rule("mean")
def write_mean(builder: TorchGraph, x: TorchValue, *, axes: Sequence[int], keepdims: bool) -> Any:
    return builder("mean", builder.node_of(x), [int(each) for each in axes], keepdims)


@rule("layer_norm")
def layer_norm(
    builder: TorchGraph,
    x: TorchValue,
    *vectors: TorchValue,
    epsilon: float,
    scaled: bool,
    shifted: bool,
) -> Any:
    scale = builder.node_of(vectors[0]) if scaled else None
    shift = builder.node_of(vectors[-1]) if shifted else None
    if any(each.rank != 1 for each in vectors):
        return None
    size = [builder.sizes.of(x.shape[-1])]
    return builder("nn.functional.layer_norm", builder.node_of(x), size, scale, shift, epsilon)


@rule("rms_norm")
def rms_norm(builder: TorchGraph, x: TorchValue, *scale: TorchValue, epsilon: float) -> Any:
    if any(each.rank != 1 for each in scale):
        return None
    size = [builder.sizes.of(x.shape[-1])]
    weight = builder.node_of(scale[0]) if scale else None
    return builder("nn.functional.rms_norm", builder.node_of(x), size, weight, epsilon)


@rule("dft")
def write_dft(builder: TorchGraph, x: TorchValue) -> Any:
    pairs = builder("view_as_complex", builder.add_method_call("contiguous", builder.node_of(x)))
    return builder("view_as_real", builder("fft.fft", pairs, dim=-1))


def _gates(builder: TorchGraph, array: Node, order: Sequence[int]) -> Any:
    """The blocks of rows of a weight in another order."""
    parts = builder("chunk", array, len(order), 0)
    return builder("cat", [builder.take_item(parts, index) for index in order], 0)


def _recurrent(function: str, order: Sequence[int], relu: str = "") -> Callable:
    """A rule for torch's own loop: gates in its order, no batch axis first, one layer."""

    def write_loop(
        builder: TorchGraph,
        x: TorchValue,
        w: TorchValue,
        r: TorchValue,
        b: TorchValue,
        *states: TorchValue,
        reverse: bool,
        reset_after: bool = True,
        activation: str = "tanh",
    ) -> Any:
        # torch resets after the product, and its exporter fixes whether a batch is of one.
        if not reset_after or not (builder.live or is_number(states[0].shape[0])):
            return None
        name = {"rnn": f"rnn_{activation}"}.get(function, function)
        weights = [builder("select", builder.node_of(each), 0, 0) for each in (w, r, b)]
        biases = builder("chunk", weights[2], 2, 0)
        params = [*weights[:2], *(builder.take_item(biases, index) for index in (0, 1))]
        if len(order) > 1:
            params = [_gates(builder, each, order) for each in params]
        node = builder.node_of(x)
        node = builder("flip", node, [0]) if reverse else node
        starts = [builder("unsqueeze", builder.node_of(each), 0) for each in states]
        state = starts if function == "lstm" else starts[0]
        results = builder(name, node, state, params, True, 1, 0.0, False, False, False)
        outputs = builder.take_item(results, 0)
        outputs = builder("flip", outputs, [0]) if reverse else outputs
        last = [builder.take_item(results, index + 1) for index in range(len(states))]
        return [outputs, *(builder("select", each, 0, 0) for each in last)]

    return write_loop


# Ours are input, output, forget, cell; torch's input, forget, cell, output.
rule("lstm")(_recurrent("lstm", (0, 2, 3, 1)))
# Ours are update, reset, new; torch's reset, update, new.
rule("gru")(_recurrent("gru", (1, 0, 2)))
rule("rnn")(_recurrent("rnn", (0,)))
