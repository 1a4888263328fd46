"""The bytes of a TFLite file: a flat buffer of graphs, their signatures and constants.

It uses LiteRT's schema classes: one object per table of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._foundations.errors import UnsupportedOperationError
from pax_export._foundations.optional import require
from pax_export._foundations.wire import TFLITE_MARK
from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor

#: The maximum size of a flat buffer, in bytes.
LARGEST = (1 << 31) - (1 << 16)
#: Where the bytes of a constant may begin.
_ALIGNMENT = 16
_SCHEMA_VERSION = 3
_OLD_CODES = 127
#: The schema's name for the options of an operator; operators that are not here need none.
_OPTIONS = {
    "ADD": "Add", "ARG_MAX": "ArgMax", "ARG_MIN": "ArgMin", "AVERAGE_POOL_2D": "Pool2D",
    "BATCH_MATMUL": "BatchMatMul",
    "CAST": "Cast", "CONCATENATION": "Concatenation", "CONV_2D": "Conv2D", "CONV_3D": "Conv3D",
    "CUMSUM": "Cumsum", "DEPTHWISE_CONV_2D": "DepthwiseConv2D",
    "DEPTH_TO_SPACE": "DepthToSpace", "DIV": "Div",
    "FULLY_CONNECTED": "FullyConnected", "GATHER": "Gather", "GELU": "Gelu", "IF": "If",
    "MAX_POOL_2D": "Pool2D", "MEAN": "Reducer", "MUL": "Mul", "PACK": "Pack",
    "REDUCE_ALL": "Reducer", "REDUCE_ANY": "Reducer", "REDUCE_MAX": "Reducer",
    "REDUCE_MIN": "Reducer", "REDUCE_PROD": "Reducer", "SHAPE": "Shape", "SOFTMAX": "Softmax",
    "STRIDED_SLICE": "StridedSlice", "SUB": "Sub", "SUM": "Reducer",
    "TRANSPOSE_CONV": "TransposeConv", "WHILE": "While",
}  # fmt: skip
#: The enumeration of an option that is given as a text; others are dtypes.
_ENUMERATIONS = {"padding": "Padding", "fused_activation_function": "ActivationFunctionType"}


@dataclass(frozen=True)
class TfliteSignature:
    """A graph by its name, with the names of its inputs and outputs."""

    key: str
    graph: Graph
    inputs: Sequence[str]
    outputs: Sequence[str]


def encode(signatures: Sequence[TfliteSignature]) -> memoryview:
    return _File(signatures).encode(signatures)


def graphs_of(graphs: Iterable[Graph]) -> list[Graph]:
    """Graphs, and behind them those of their loops and branches."""
    found = list(graphs)
    for graph in found:
        for operator in graph.operators:
            found.extend(operator.graphs.values())
    return found


class _File:
    def __init__(self, signatures: Sequence[TfliteSignature]):
        self._schema = require("ai_edge_litert.schema_py_generated", "tflite", "to_tflite")
        self._graphs = graphs_of(each.graph for each in signatures)
        self._numbers = {id(graph): number for number, graph in enumerate(self._graphs)}
        self._operators = [each for graph in self._graphs for each in graph.operators]
        codes = sorted({(each.name, version(each)) for each in self._operators})
        self._codes = {code: number for number, code in enumerate(codes)}
        self._arrays: dict[int, tuple[int, np.ndarray]] = {}
        self._tensors = [self._numbered(graph) for graph in self._graphs]

    def _numbered(self, graph: Graph) -> dict[int, tuple[int, Tensor]]:
        """The tensors of a graph by their ids, numbered; constants are noted."""
        found: dict[int, tuple[int, Tensor]] = {}
        operators = graph.operators
        tensors = (each for o in operators for each in (*o.inputs, *o.outputs))
        for each in (*graph.inputs, *tensors, *graph.outputs):
            if each is None or id(each) in found:
                continue
            for one in (each, *([] if each.blocks is None else [each.blocks])):
                found[id(one)] = len(found), one
                if one.value is not None and id(one.value) not in self._arrays:
                    self._arrays[id(one.value)] = len(self._arrays) + 1, one.value
        return found

    def encode(self, signatures: Sequence[TfliteSignature]) -> memoryview:
        size = sum(array.nbytes + 64 for _, array in self._arrays.values())
        if size > LARGEST:
            raise UnsupportedOperationError(
                "A TFLite file has no more than 2 GiB.",
                got=f"{size / 2**30:.1f} GiB of constants",
                write='quantize="float16" or "dynamic", or another target, e.g. to_saved_model',
            )
        flatbuffers = require("flatbuffers", "tflite", "to_tflite")
        builder = flatbuffers.Builder(min(size + 512 * len(self._operators) + 65536, LARGEST))
        model = self._table(
            "Model",
            version=_SCHEMA_VERSION,
            operator_codes=[self._code(*each) for each in self._codes],
            subgraphs=list(map(self._graph, self._graphs, self._tensors)),
            buffers=[_Buffer(None), *(_Buffer(array) for _, array in self._arrays.values())],
            signature_defs=list(map(self._signature, signatures)),
        )
        builder.Finish(model.Pack(builder), TFLITE_MARK)
        return memoryview(builder.Bytes)[builder.Head() :]

    def _table(self, kind: str, **fields: object) -> Any:
        """Returns a table of the schema, with fields named as in `schema.fbs`."""
        table = getattr(self._schema, f"{kind}T")()
        for name, value in fields.items():
            first, *rest = name.split("_")
            setattr(table, first + "".join(map(str.capitalize, rest)), value)
        return table

    def _dtype(self, name: str) -> int:
        return getattr(self._schema.TensorType, name.upper())

    def _code(self, name: str, version: int) -> Any:
        code = getattr(self._schema.BuiltinOperator, name)
        return self._table(
            "OperatorCode",
            deprecated_builtin_code=min(code, _OLD_CODES),
            version=version,
            builtin_code=code,
        )

    def _graph(self, graph: Graph, tensors: Mapping[int, tuple[int, Tensor]]) -> Any:
        def indices(values: Iterable[Any]) -> np.ndarray:
            return np.array([-1 if t is None else tensors[id(t)][0] for t in values], np.int32)

        operators = [
            self._table(
                "Operator",
                opcode_index=self._codes[each.name, version(each)],
                inputs=indices(each.inputs),
                outputs=indices(each.outputs),
                **self._options(each),
            )
            for each in graph.operators
        ]
        return self._table(
            "SubGraph",
            tensors=[self._tensor(*each, tensors) for each in tensors.values()],
            inputs=indices(graph.inputs),
            outputs=indices(graph.outputs),
            operators=operators,
            name=graph.name,
        )

    def _tensor(
        self, number: int, tensor: Tensor, tensors: Mapping[int, tuple[int, Tensor]]
    ) -> Any:
        sizes = np.array([-1 if size is None else size for size in tensor.shape], np.int32)
        return self._table(
            "Tensor",
            shape=np.where(sizes < 0, np.int32(1), sizes),
            shape_signature=None if tensor.shape.known else sizes,
            type=self._dtype(tensor.dtype.name),
            buffer=0 if tensor.value is None else self._arrays[id(tensor.value)][0],
            name=tensor.name or f"{tensor.made_by.lower() or 'array'}_{number}",
            quantization=self._quantization(tensor, tensors),
            has_rank=True,
        )

    def _quantization(self, tensor: Tensor, tensors: Mapping[int, tuple[int, Tensor]]) -> Any:
        if tensor.blocks is not None:
            (index, scales), size = tensors[id(tensor.blocks)], tensor.shape[-1]
            fields = {"scales": index, "zero_points": -1, "block_size": size // scales.shape[-1]}
            return self._table(
                "QuantizationParameters",
                details_type=self._schema.QuantizationDetails.BlockwiseQuantization,
                details=self._table("BlockwiseQuantization", **fields),
            )
        if tensor.scale is None:
            return None
        return self._table(
            "QuantizationParameters",
            scale=np.asarray(tensor.scale, np.float32),
            zero_point=np.full(len(tensor.scale), tensor.zero or 0, np.int64),
            quantized_dimension=tensor.axis,
        )

    def _options(self, operator: Operator) -> dict[str, Any]:
        if operator.name not in _OPTIONS:
            return {}
        options: dict[str, Any] = dict(operator.options)
        for name, value in options.items():
            if name in _ENUMERATIONS:
                options[name] = getattr(getattr(self._schema, _ENUMERATIONS[name]), value)
            elif isinstance(value, str):
                options[name] = self._dtype(value)
        options |= {name: self._numbers[id(graph)] for name, graph in operator.graphs.items()}
        kind = f"{_OPTIONS[operator.name]}Options"
        return {
            "builtin_options_type": getattr(self._schema.BuiltinOptions, kind),
            "builtin_options": self._table(kind, **options),
        }

    def _signature(self, signature: TfliteSignature) -> Any:
        graph = signature.graph
        number = self._numbers[id(graph)]

        def named(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Any]:
            indices = (self._tensors[number][id(each)][0] for each in tensors)
            pairs = zip(names, indices)
            return [self._table("TensorMap", name=name, tensor_index=i) for name, i in pairs]

        return self._table(
            "SignatureDef",
            inputs=named(signature.inputs, graph.inputs),
            outputs=named(signature.outputs, graph.outputs),
            signature_key=signature.key,
            subgraph_index=number,
        )


class _Buffer:
    """The bytes of a constant.  The schema's own class copies them, and aligns no beginning."""

    def __init__(self, array: np.ndarray | None):
        self._array = array

    def Pack(self, builder: Any) -> int:
        vector = None
        if self._array is not None:
            data = np.ascontiguousarray(self._array).reshape(-1).view(np.uint8)
            builder.StartVector(1, data.size, _ALIGNMENT)
            builder.head = builder.Head() - data.size
            np.frombuffer(builder.Bytes, np.uint8)[builder.head : builder.head + data.size] = data
            vector = builder.EndVector()
        builder.StartObject(1)
        if vector is not None:
            builder.PrependUOffsetTRelativeSlot(0, vector, 0)
        return builder.EndObject()


# --- The version of each operator: the first whose kernel takes these dtypes, ranks and options ---
# An older LiteRT refuses unknown versions when it reads the file.

_COMPARISON = {"int16": 3, "int8": 2}
_SMALL = {"int16": 2, "int8": 2}
_ARITHMETIC = {"int64": 4, "int16": 5, "int8": 2}
_EXTREME = {"int16": 4, "int8": 2}
_PAD = {"bool": 5, "int16": 3, "int8": 2}
#: By the dtype of the input at `_PLACE`, if it is not version 1.
_DTYPES: Mapping[str, Mapping[str, int]] = {
    "ABS": {"int32": 5, "int16": 4, "int8": 2, "uint8": 2}, "ADD": _ARITHMETIC,
    "ARG_MAX": {"bool": 3, "int8": 2}, "ARG_MIN": {"bool": 3, "int8": 2},
    "BATCH_MATMUL": _COMPARISON,
    "BROADCAST_TO": {"int8": 3, "int16": 3}, "AVERAGE_POOL_2D": _COMPARISON,
    "CONCATENATION": {"uint32": 4, **_COMPARISON},
    "DEQUANTIZE": {"float16": 3, **_COMPARISON},
    "DYNAMIC_UPDATE_SLICE": {"int16": 4, "float16": 3}, "EQUAL": {"int16": 5, "int8": 2},
    "EXP": _SMALL,
    "FILL": {"float16": 4, "int8": 3, "int16": 3, "bool": 2},
    "FLOOR_DIV": {"int16": 3, "int8": 3, "float32": 2}, "FLOOR_MOD": _SMALL,
    "GATHER": {"int16": 4, "bool": 3, "int8": 2}, "GATHER_ND": {"bool": 5, "int16": 3},
    "GELU": {"int8": 2, "uint8": 2}, "GREATER": {"int8": 2}, "GREATER_EQUAL": _COMPARISON,
    "LESS": _COMPARISON, "LESS_EQUAL": {"int8": 2}, "LOG": _SMALL, "LOGISTIC": _COMPARISON,
    "MAXIMUM": _EXTREME, "MAX_POOL_2D": _COMPARISON, "MEAN": _COMPARISON, "MINIMUM": _EXTREME,
    "MUL": {"int16": 7, "uint32": 7, "complex64": 6, "int64": 5, "int8": 2},
    "NOT_EQUAL": {"int8": 2}, "PACK": {"uint32": 4, **_COMPARISON}, "PAD": _PAD, "PADV2": _PAD,
    "QUANTIZE": {"int8": 2}, "RANGE": {"int64": 2},
    "REDUCE_MAX": _COMPARISON, "REDUCE_MIN": _COMPARISON,
    "REDUCE_PROD": _SMALL, "RELU": {"int16": 3, "int8": 2, "uint8": 2}, "RELU6": _COMPARISON,
    "REVERSE_V2": {"int8": 3, "bool": 2}, "RSQRT": _COMPARISON, "SELECT_V2": {"uint32": 2},
    "SLICE": {"uint32": 6, "int16": 4, "int8": 2}, "SOFTMAX": _COMPARISON,
    "STRIDED_SLICE": {"uint32": 7, "bool": 3, "int8": 2}, "SUB": _ARITHMETIC, "SUM": {"int8": 2},
    "TANH": _COMPARISON, "TILE": {"int8": 3}, "TOPK_V2": _COMPARISON,
    "TRANSPOSE": {"int16": 5, "bool": 3, "int8": 2}, "TRANSPOSE_CONV": {"int8": 2},
}  # fmt: skip
_PLACE = {"FILL": 1, "TRANSPOSE_CONV": 1}
#: By the largest dtype of input and result.
_CAST = {
    "bfloat16": 7, "float64": 5, "float16": 5, "uint16": 4, "int8": 3, "uint32": 2,
}  # fmt: skip
#: For more dimensions than a number, and for those where one input is broadcast.
_RANKS = {"PAD": [(4, 4)], "PADV2": [(4, 4)], "SLICE": [(4, 5)], "STRIDED_SLICE": [(4, 4)]}
_RANKS |= {"TRANSPOSE": [(4, 4), (5, 6)]}
_BROADCAST = {"MAXIMUM": 3, "MINIMUM": 3, "SUB": 3, "DIV": 2}
#: Weights of int8 for an input of float: one scale, and one for each channel.
_HYBRID = {"CONV_2D": (2, 5), "DEPTHWISE_CONV_2D": (4, 6), "FULLY_CONNECTED": (3, 12)}
#: Weights and inputs of int8.
_INTEGERS = {"CONV_2D": (3, 3), "DEPTHWISE_CONV_2D": (3, 3), "FULLY_CONNECTED": (4, 12)}


def version(operator: Operator) -> int:
    name, inputs = operator.name, operator.inputs
    first = inputs[0]
    found = [2 if name == "BROADCAST_TO" else 1]
    if name in _DTYPES:
        found.append(_DTYPES[name].get(inputs[_PLACE.get(name, 0)].dtype.name, 1))
    if name == "CAST":
        found += [_CAST.get(each.dtype.name, 1) for each in (first, *operator.outputs)]
    found += [number for rank, number in _RANKS.get(name, ()) if len(first.shape) > rank]
    if name in _BROADCAST and max(len(each.shape) for each in inputs) > 4:
        found.append(_BROADCAST[name] if first.shape != inputs[1].shape else 1)
    if name in _HYBRID and first.dtype == np.float32 and inputs[1].dtype == np.int8:
        found.append(_HYBRID[name][_by_channel(inputs[1])])
    if name in _INTEGERS and first.dtype == np.int8:
        found.append(_INTEGERS[name][_by_channel(inputs[1])])
    found.append(_of_options(operator))
    return max(found)


def _of_options(operator: Operator) -> int:
    name, inputs, options = operator.name, operator.inputs, operator.options
    if name == "CONV_2D":
        return 6 if inputs[0].shape[3] != inputs[1].shape[3] else 1
    if name == "DEPTHWISE_CONV_2D":
        dilated = {options.get(f"dilation_{side}_factor", 1) for side in "hw"} != {1}
        return 2 if dilated else 1
    if name == "FULLY_CONNECTED":
        return 6 if len(inputs) == 2 else 5 if options.get("keep_num_dims") else 1
    if name == "TRANSPOSE_CONV":
        fused = options.get("fused_activation_function", "NONE") != "NONE"
        return 4 if fused else 3 if len(inputs) == 4 and inputs[3] is not None else 1
    if name == "GATHER":
        return 6 if inputs[1].dtype == np.int16 else 5 if options.get("batch_dims") else 1
    return 5 if name == "DEQUANTIZE" and _by_channel(inputs[0]) else 1


def _by_channel(weights: Tensor) -> bool:
    return weights.scale is not None and len(weights.scale) > 1
