"""The version of each operator: the first whose kernel takes these dtypes, ranks and options.

An older LiteRT refuses unknown versions when it reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pax_export.export.formats.tflite.builder.graph import Operator, Tensor

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
    if name == "DEQUANTIZE":
        return 5 if _by_channel(inputs[0]) else 1
    return 1


def _by_channel(weights: Tensor) -> bool:
    return weights.scale is not None and len(weights.scale) > 1
