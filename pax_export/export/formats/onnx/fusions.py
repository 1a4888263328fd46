"""Fusions of convolutions: with biases, and with rounded inputs and quantized kernels.

If the result of rounded inputs is rounded again, directly or after a ReLU, onnxruntime fuses the
operators into one convolution of integers (`QLinearConv`). Other convolutions compute with the
rounded numbers in float32: `ConvInteger` takes three to eight times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from pax_export.export.formats.onnx.graph import GraphBuilder, all_nodes, needed, read_in
from pax_export.export.formats.onnx.rules.quantized import QuantizedWeight
from pax_export.export.formats.onnx.values import RoundedInputs
from pax_export.export.validation.integers import Arithmetic

if TYPE_CHECKING:
    from onnx import NodeProto

#: A quantized kernel, and the order of its axes.
_Kernel = tuple[QuantizedWeight, tuple[int, ...]]
#: Operators that onnxruntime fuses into a preceding convolution of integers.
_ACTIVATIONS = ("Relu",)
#: Operators that it computes on integers.
_MOVES = ("MaxPool", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten")


def with_integer_convolutions(
    builder: GraphBuilder, nodes: list[Any], wanted: Collection[str]
) -> list[Any]:
    """Returns the operators for these results, with convolutions of integers."""
    if all(each.by_row for each in builder.rounded.values()):
        return nodes
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for name in read_in(node):
            readers.setdefault(name, []).append(node)
    rewritten: list[Any] = []
    replaced: dict[str, str] = {}
    for node in nodes:
        node.input[:] = [replaced.get(name, name) for name in node.input]
        if _is_left_out(builder, node, readers):
            replaced[node.output[0]] = node.input[0]
            continue
        operands = _operands(builder, node)
        ends = readers.get(node.output[0], [])
        if operands is None or not _is_rounded(builder, ends, readers):
            rewritten.append(node)
            continue
        with builder.body() as new:
            name = _fused(builder, node, *operands)
        replaced[node.output[0]] = name
        rewritten += new
    return needed(rewritten, wanted)


def _operands(builder: GraphBuilder, node: NodeProto) -> tuple[RoundedInputs, _Kernel] | None:
    """The inputs and the kernel of a convolution that can compute with integers."""
    if node.op_type != "Conv" or any(name not in builder.initializers for name in node.input[2:]):
        return None
    x, kernel = builder.rounded.get(node.input[0]), builder.weights.get(node.input[1])
    if x is None or x.by_row or kernel is None:
        return None
    weight, order = kernel
    return (x, kernel) if weight.is_by_channel(order[0]) else None


def _is_rounded(builder: GraphBuilder, ends: Sequence[Any], readers: Any) -> bool:
    """Whether a result is only read to be rounded."""
    if len(ends) != 1:
        return bool(ends) and all(each.op_type == "QuantizeLinear" for each in ends)
    (end,) = ends
    if end.op_type in (*_ACTIVATIONS, *_MOVES) or _is_left_out(builder, end, readers):
        return _is_rounded(builder, readers.get(end.output[0], []), readers)
    return end.op_type == "QuantizeLinear"


def _is_left_out(builder: GraphBuilder, node: NodeProto, readers: Any) -> bool:
    """Whether a `Clip` has no effect: integers behind it do not reach beyond its bounds."""
    if node.op_type != "Clip" or len(node.input) != 3:
        return False
    ends = readers.get(node.output[0], [])
    bounds = [builder.initializers.get(name) for name in node.input[1:]]
    if not ends or any(each is None or each.size != 1 for each in bounds):
        return False
    low, high = (float(np.asarray(each)) for each in bounds)
    for end in ends:
        known = [builder.initializers.get(name) for name in end.input[1:]]
        if (
            end.op_type != "QuantizeLinear"
            or len(known) != 2
            or any(each is None for each in known)
        ):
            return False
        scale, zero = (float(np.asarray(each)) for each in known)
        slack = 1e-3 * scale  # of rounding 255 times the scale
        if -zero * scale < low - slack or (255 - zero) * scale > high + slack:
            return False
    return True


def _fused(builder: GraphBuilder, node: NodeProto, x: RoundedInputs, kernel: _Kernel) -> str:
    weight, order = kernel
    operands = [node.input[0], weight.as_kernel(order)]
    for bias in (builder.initializers[name] for name in node.input[2:]):
        scale = weight.scale_with(x)
        scales = builder.initializers[scale]
        limits = np.iinfo(np.int32)
        whole = np.clip(np.rint(bias / scales.astype(np.float64)), limits.min, limits.max)
        stored = builder.store(whole.astype(np.int32), builder.new_name("bias"))
        operands.append(builder("DequantizeLinear", stored, scale, axis=0))
    result = builder("Conv", *operands)
    builder.nodes[-1].attribute.extend(node.attribute)
    return result


# --- what is computed in integers ---------------------------------------------


#: Products, and the operators between stored integers and a product of their numbers.
_PRODUCTS = frozenset("Conv ConvInteger ConvTranspose Einsum Gemm MatMul MatMulInteger".split())
_OF_WEIGHTS = frozenset("Cast DequantizeLinear Mul Reshape Squeeze Sub Transpose Unsqueeze".split())


def arithmetic(builder: GraphBuilder, nodes: Sequence[Any], wanted: Collection[str]) -> Arithmetic:
    """Finds what the products of a graph compute with, and its casts to half precision."""
    producers = {name: node for node in all_nodes(nodes) for name in node.output}

    def leaf(name: str) -> str:
        while name in producers and producers[name].op_type in _OF_WEIGHTS:
            name = producers[name].input[0]
        weight = builder.quantized.get(name)
        return weight.leaf if weight else name if name.endswith(".integers") else ""

    def is_integer(node: NodeProto, name: str) -> bool:
        """Whether onnxruntime has a kernel for it; with rounded inputs it has none for `MatMul`."""
        before = [
            producers[each].op_type if each in producers else "" for each in (node.input[0], name)
        ]
        parted = node.op_type == "MatMul" and before[0] == "DequantizeLinear"
        return node.op_type.endswith("Integer") or (
            before[1] in ("DequantizeLinear", "If") and not parted
        )

    multiplied: dict[bool, set[str]] = {True: set(), False: set()}
    looked_up: set[str] = set()
    for node in all_nodes(nodes):
        for name in node.input if node.op_type in _PRODUCTS else ():
            if leaf(name):
                multiplied[is_integer(node, name)].add(leaf(name))
        table = builder.initializers.get(leaf(node.input[0])) if node.op_type == "Gather" else None
        if table is not None and table.ndim == 2:
            looked_up.add(leaf(node.input[0]))
    halves = {builder.type(dtype): name for dtype, name in _HALVES}
    results, casts = set(wanted), []
    for node in reversed([*all_nodes(nodes)]):
        if node.op_type in ("Cast", *_MOVES) and not results.isdisjoint(node.output):
            results.add(node.input[0])  # which has the dtype of the model
        elif node.op_type == "Cast":
            casts += [halves[each.i] for each in node.attribute if each.i in halves]
    return Arithmetic(multiplied[True], multiplied[False], looked_up, casts)


_HALVES = ((np.float16, "float16"), (ml_dtypes.bfloat16, "bfloat16"))


# --- biases -----------------------------------------------------------------


def with_biases(builder: GraphBuilder, nodes: Sequence[Any]) -> list[Any]:
    """The operators of a graph, with stored vectors added by the convolutions before them."""
    counts = Counter(name for node in nodes for name in read_in(node))
    producers = {name: node for node in nodes for name in node.output}
    rewritten: list[Any] = []
    gone: set[str] = set()
    for node in nodes:
        found = _with_bias(builder, node, producers, counts) if node.op_type == "Add" else None
        if found is None:
            rewritten.append(node)
            continue
        conv, bias = found
        inputs, outputs = [*conv.input, bias], list(node.output)
        fused = builder.onnx.helper.make_node("Conv", inputs, outputs, name=node.output[0])
        fused.attribute.extend(conv.attribute)
        producers[node.output[0]] = fused
        rewritten.append(fused)
        gone.add(conv.output[0])
    return [node for node in rewritten if not (len(node.output) == 1 and node.output[0] in gone)]


def _with_bias(
    builder: GraphBuilder, node: NodeProto, producers: Mapping[str, Any], counts: Mapping[str, int]
) -> tuple[Any, str] | None:
    """Returns the convolution and the vector that a node adds, or None."""
    for one, other in (node.input, node.input[::-1]):
        conv, spread = producers.get(one), producers.get(other)
        if conv is None or conv.op_type != "Conv" or len(conv.input) != 2 or counts[one] != 1:
            continue
        if spread is None or spread.op_type != "Unsqueeze":
            continue
        vector, axes = map(builder.initializers.get, spread.input)
        kernel = _kernel_shape(builder, conv.input[1])
        if vector is None or axes is None or vector.ndim != 1:
            continue
        around = [0, *range(2, len(kernel))]
        if kernel and axes.tolist() == around and len(vector) == kernel[0]:
            return conv, spread.input[0]
    return None


def _kernel_shape(builder: GraphBuilder, name: str) -> Sequence[int]:
    """The shape of a stored kernel, also of one with integers; empty for others."""
    if name in builder.initializers:
        return builder.initializers[name].shape
    if name not in builder.weights:
        return ()
    weight, order = builder.weights[name]
    return [weight.shape[axis] for axis in order]
