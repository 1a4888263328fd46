"""TFLite's operators and their options, by their numbers in `schema.fbs`."""

from __future__ import annotations

#: The number of each operator.
CODES = {
    "ABS": 101, "ADD": 0, "ARG_MAX": 56, "ATAN2": 156, "AVERAGE_POOL_2D": 1, "BATCH_MATMUL": 126,
    "BITCAST": 159, "BITWISE_XOR": 160, "BROADCAST_TO": 130, "CAST": 53, "CEIL": 104,
    "CONCATENATION": 2, "CONV_2D": 3, "CONV_3D": 132, "COS": 108, "CUMSUM": 128,
    "DEPTHWISE_CONV_2D": 4, "DEQUANTIZE": 6, "DIV": 42, "DYNAMIC_UPDATE_SLICE": 151, "EQUAL": 71,
    "EXP": 47, "EXPAND_DIMS": 70, "FILL": 94, "FLOOR": 8, "FLOOR_DIV": 90, "FLOOR_MOD": 95,
    "FULLY_CONNECTED": 9, "GATHER": 36, "GELU": 150, "GREATER": 61, "GREATER_EQUAL": 62,
    "HARD_SWISH": 117, "IF": 118, "IMAG": 133, "LESS": 58, "LESS_EQUAL": 63, "LOG": 73,
    "LOGICAL_AND": 86, "LOGICAL_NOT": 87, "LOGICAL_OR": 84, "LOGISTIC": 14, "MAXIMUM": 55,
    "MAX_POOL_2D": 17, "MEAN": 40, "MINIMUM": 57, "MUL": 18, "NOT_EQUAL": 72, "PACK": 83,
    "PAD": 34, "PADV2": 60, "POW": 78, "RANGE": 96, "REAL": 134, "REDUCE_ALL": 140,
    "REDUCE_ANY": 91, "REDUCE_MAX": 82, "REDUCE_MIN": 89, "REDUCE_PROD": 81, "RELU": 19,
    "RELU6": 21, "RESHAPE": 22, "REVERSE_V2": 105, "RIGHT_SHIFT": 161, "ROUND": 116, "RSQRT": 76,
    "SCATTER_ND": 122, "SELECT_V2": 123, "SHAPE": 77, "SIN": 66, "SLICE": 65, "SOFTMAX": 25,
    "SQRT": 75, "STRIDED_SLICE": 45, "SUB": 41, "SUM": 74, "TANH": 28, "TILE": 69, "TOPK_V2": 48,
    "TRANSPOSE": 39, "TRANSPOSE_CONV": 67, "UNSORTED_SEGMENT_MAX": 154,
    "UNSORTED_SEGMENT_MIN": 157, "UNSORTED_SEGMENT_PROD": 153, "UNSORTED_SEGMENT_SUM": 155,
    "WHILE": 119,
}  # fmt: skip

_REDUCER = (27, {"keep_dims": (0, "Bool")})
_POOL = (
    5,
    {
        "padding": (0, "Int8"), "stride_w": (1, "Int32"), "stride_h": (2, "Int32"),
        "filter_w": (3, "Int32"), "filter_h": (4, "Int32"), "activation": (5, "Int8"),
    },
)  # fmt: skip

#: The number of the type of options of an operator, and its fields: their names here, numbers
#: and kinds.  Operators that are not here have no options, or none that matter.
OPTIONS: dict[str, tuple[int, dict[str, tuple[int, str]]]] = {
    "ADD": (11, {"activation": (0, "Int8")}),
    "ARG_MAX": (40, {"output_type": (0, "Int8")}),
    "AVERAGE_POOL_2D": _POOL,
    "BATCH_MATMUL": (101, {"adj_x": (0, "Bool"), "adj_y": (1, "Bool")}),
    "CAST": (37, {"in_type": (0, "Int8"), "out_type": (1, "Int8")}),
    "CONCATENATION": (10, {"axis": (0, "Int32"), "activation": (1, "Int8")}),
    "CONV_2D": (
        1,
        {
            "padding": (0, "Int8"), "stride_w": (1, "Int32"), "stride_h": (2, "Int32"),
            "activation": (3, "Int8"), "dilation_w": (4, "Int32"), "dilation_h": (5, "Int32"),
        },
    ),
    "CONV_3D": (
        106,
        {
            "padding": (0, "Int8"), "stride_d": (1, "Int32"), "stride_w": (2, "Int32"),
            "stride_h": (3, "Int32"), "activation": (4, "Int8"), "dilation_d": (5, "Int32"),
            "dilation_w": (6, "Int32"), "dilation_h": (7, "Int32"),
        },
    ),
    "CUMSUM": (102, {"exclusive": (0, "Bool"), "reverse": (1, "Bool")}),
    "DEPTHWISE_CONV_2D": (
        2,
        {
            "padding": (0, "Int8"), "stride_w": (1, "Int32"), "stride_h": (2, "Int32"),
            "depth_multiplier": (3, "Int32"), "activation": (4, "Int8"),
            "dilation_w": (5, "Int32"), "dilation_h": (6, "Int32"),
        },
    ),
    "DIV": (29, {"activation": (0, "Int8")}),
    "FULLY_CONNECTED": (
        8,
        {
            "activation": (0, "Int8"), "keep_num_dims": (2, "Bool"),
            "asymmetric_quantize_inputs": (3, "Bool"),
        },
    ),
    "GATHER": (23, {"axis": (0, "Int32"), "batch_dims": (1, "Int32")}),
    "GELU": (116, {"approximate": (0, "Bool")}),
    "IF": (92, {"then_graph": (0, "Int32"), "else_graph": (1, "Int32")}),
    "MAX_POOL_2D": _POOL,
    "MEAN": _REDUCER,
    "MUL": (21, {"activation": (0, "Int8")}),
    "PACK": (59, {"values_count": (0, "Int32"), "axis": (1, "Int32")}),
    "REDUCE_ALL": _REDUCER,
    "REDUCE_ANY": _REDUCER,
    "REDUCE_MAX": _REDUCER,
    "REDUCE_MIN": _REDUCER,
    "REDUCE_PROD": _REDUCER,
    "SHAPE": (55, {"out_type": (0, "Int8")}),
    "SOFTMAX": (9, {"beta": (0, "Float32")}),
    "STRIDED_SLICE": (
        32,
        {"begin_mask": (0, "Int32"), "end_mask": (1, "Int32"), "shrink_axis_mask": (4, "Int32")},
    ),
    "SUB": (28, {"activation": (0, "Int8")}),
    "SUM": _REDUCER,
    "TRANSPOSE_CONV": (
        49,
        {
            "padding": (0, "Int8"), "stride_w": (1, "Int32"), "stride_h": (2, "Int32"),
            "activation": (3, "Int8"),
        },
    ),
    "WHILE": (93, {"cond_graph": (0, "Int32"), "body_graph": (1, "Int32")}),
}  # fmt: skip

TYPES = {
    "float32": 0, "float16": 1, "int32": 2, "uint8": 3, "int64": 4, "bool": 6, "int16": 7,
    "complex64": 8, "int8": 9, "uint32": 15, "uint16": 16, "bfloat16": 18,
}  # fmt: skip
ACTIVATIONS = {"": 0, "RELU": 1, "RELU6": 3}
PADDINGS = {"SAME": 0, "VALID": 1}
#: The oldest form of an operator that LiteRT runs, where it is not the first.
VERSIONS = {"BROADCAST_TO": 2}
