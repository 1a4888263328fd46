"""Versions of operators, beside those that TensorFlow's converter writes for the same."""

import contextlib
import types
from collections import defaultdict

import jax
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema

import pax_export as pax
from pax_export.export.formats.tflite.builder.encode import version
from pax_export.export.formats.tflite.builder.graph import Operator, Tensor

NAMES = {number: name for name, number in vars(schema.BuiltinOperator).items() if name.isupper()}
DTYPES = {number: name.lower() for name, number in vars(schema.TensorType).items()}


def spec(shape, dtype="float32"):
    return tf.TensorSpec(shape, dtype)


def of_function(function, *specs, select=False):
    concrete = tf.function(function).get_concrete_function(*specs)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete])
    if select:
        own, others = tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS
        converter.target_spec.supported_ops = [own, others]
    return converter.convert()


def operators(content):
    """The name and version of each operator of a file, and the operator as this library has it."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    for graph in model.subgraphs:
        tensors = []
        for each in graph.tensors:
            made = Tensor(list(each.shape), np.dtype(DTYPES[each.type]), None)
            quantization = each.quantization
            if quantization is not None and quantization.scale is not None:
                made.scale = quantization.scale
            tensors.append(made)
        for each in graph.operators:
            code = model.operatorCodes[each.opcodeIndex]
            given = [None if i < 0 else tensors[i] for i in each.inputs]
            options = {snake(k): v for k, v in vars(each.builtinOptions or EMPTY).items()}
            if "fused_activation_function" in options:
                relu = options["fused_activation_function"]
                options["fused_activation_function"] = "RELU" if relu else "NONE"
            outputs = [tensors[i] for i in each.outputs]
            name = NAMES[max(code.builtinCode, code.deprecatedBuiltinCode)]
            if name == "CUSTOM":
                continue
            yield each.opcodeIndex, name, code.version, Operator(name, given, outputs, options)


EMPTY = types.SimpleNamespace()


def snake(name):
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name)


def check(content, *expected):
    """One entry serves several operators: its version is the largest that they need."""
    codes, needed = {}, defaultdict(list)
    for number, name, stated, operator in operators(content):
        codes[number] = name, stated
        needed[number].append(version(operator))
    for number, (name, stated) in codes.items():
        assert max(needed[number]) == stated, f"{name}: {needed[number]}, the file has {stated}"
    names = {name for name, _ in codes.values()}
    assert names.issuperset(expected), names


BINARY = {
    "ADD": tf.add, "SUB": tf.subtract, "MUL": tf.multiply, "MAXIMUM": tf.maximum,
    "MINIMUM": tf.minimum, "FLOOR_DIV": tf.math.floordiv, "FLOOR_MOD": tf.math.floormod,
    "EQUAL": tf.equal, "NOT_EQUAL": tf.not_equal, "LESS": tf.less, "LESS_EQUAL": tf.less_equal,
    "GREATER": tf.greater, "GREATER_EQUAL": tf.greater_equal,
}  # fmt: skip


UNARY = {
    "ABS": tf.abs,
    "TRANSPOSE": lambda x: tf.transpose(x, [1, 0]),
    "SLICE": lambda x: tf.slice(x, [0, 1], [1, 2]),
    "STRIDED_SLICE": lambda x: x[:, ::2],
    "PAD": lambda x: tf.pad(x, [[0, 1], [1, 0]]),
    "TILE": lambda x: tf.tile(x, [2, 1]),
    "REVERSE_V2": lambda x: tf.reverse(x, [1]),
    "CONCATENATION": lambda x: tf.concat([x, x], 0),
    "PACK": lambda x: tf.stack([x, x]),
    "GATHER": lambda x: tf.gather(x, [1, 0], axis=1),
    "GATHER_ND": lambda x: tf.gather_nd(x, [[1, 0]]),
    "ARG_MAX": lambda x: tf.argmax(x, 1, tf.int32),
    "TOPK_V2": lambda x: tf.math.top_k(x, 2)[0],
    "SUM": lambda x: tf.reduce_sum(x, 1),
    "REDUCE_MAX": lambda x: tf.reduce_max(x, 1),
    "REDUCE_PROD": lambda x: tf.reduce_prod(x, 1),
    "SELECT_V2": lambda x: tf.where(tf.constant([[True], [False]]), x, x[:, ::-1]),
    "BROADCAST_TO": lambda x: tf.broadcast_to(x, [4, 2, 3]),
}


#: How many operators of `BINARY` and `UNARY` TFLite has for a dtype, at least.
DTYPES_OF_ARRAYS = {
    "float32": 28, "int32": 28, "int64": 20, "int8": 12, "uint32": 8, "bool": 8, "int16": 8,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES_OF_ARRAYS)
def test_operators_of_each_dtype(dtype):
    """All in one file; what TFLite does not have are TensorFlow's operators there."""

    def function(x, y):
        found = []
        for name, each in (BINARY | UNARY).items():
            # Its files have quantization without scales, which these versions are older for.
            if dtype != "int16" or name not in ("ABS", "ADD", "MUL"):
                with contextlib.suppress(TypeError, ValueError, tf.errors.InvalidArgumentError):
                    found.append(each(x, y) if name in BINARY else each(x))
        return found

    content = of_function(function, spec([2, 3], dtype), spec([2, 3], dtype), select=True)
    check(content)
    names = {each[1] for each in operators(content)} & {*BINARY, *UNARY}
    assert len(names) >= DTYPES_OF_ARRAYS[dtype], sorted(names)


def test_casts():
    for dtype in ("int32", "uint32", "int8", "uint16"):
        check(of_function(lambda x: tf.cast(x, "float32"), spec([3], dtype)), "CAST")


def test_many_dimensions_and_batches():
    def moved(x):
        return tf.transpose(x, [4, 2, 3, 0, 1]), tf.pad(x, [[0, 1]] * 5), x[:, :, 1:, ::2]

    def computed(x, y):
        return [each(x, y) for each in (tf.subtract, tf.maximum, tf.minimum, tf.divide)]

    five, same = spec([1, 2, 3, 4, 5]), spec([1, 2, 1, 4, 5])
    check(of_function(moved, five), "TRANSPOSE", "PAD", "STRIDED_SLICE")
    check(of_function(computed, five, same), "SUB", "MAXIMUM", "MINIMUM", "DIV")
    check(of_function(computed, five, five), "SUB", "MAXIMUM", "MINIMUM", "DIV")
    both = spec([2, 3, 4]), spec([2, 2], "int32")
    check(of_function(lambda x, i: tf.gather(x, i, axis=1, batch_dims=1), *both), "GATHER")


def test_layers():
    keras = tf.keras.layers
    stacks = [
        [keras.Conv2D(4, 3), keras.ReLU(), keras.MaxPool2D(2), keras.DepthwiseConv2D(3)],
        [keras.Conv2D(4, 3, groups=2), keras.DepthwiseConv2D(3, dilation_rate=2)],
        [keras.Conv2DTranspose(4, 2, 2), keras.Dense(4), keras.Activation("gelu")],
        [keras.Conv2DTranspose(4, 2, 2, activation="relu"), keras.Flatten(), keras.Dense(4)],
        [keras.GlobalAveragePooling2D(), keras.Activation("tanh"), keras.Softmax()],
    ]
    for stack in stacks:
        model = tf.keras.Sequential([tf.keras.Input((8, 8, 4)), *stack])
        check(of_function(model, spec([1, 8, 8, 4])))


@pytest.mark.parametrize("halves", [False, True])
def test_small_weights(halves):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 32)),
            tf.keras.layers.Conv2D(32, 3),
            tf.keras.layers.DepthwiseConv2D(3),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64),
        ]
    )
    concrete = tf.function(model).get_concrete_function(spec([1, 8, 8, 32]))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_types = [tf.float16] if halves else []
    check(converter.convert(), "FULLY_CONNECTED", "CONV_2D")


def test_files_of_this_library_have_them(tmp_path):
    def model(x, y):
        return jax.numpy.transpose(x, (4, 2, 3, 0, 1)), y.T

    path = tmp_path / "net.tflite"
    inputs = pax.export.spec("1, 2, 3, 4, 5"), pax.export.spec("2, 3")
    pax.export.to_tflite(model, path, inputs)
    found = {(name, stated) for _, name, stated, _ in operators(path.read_bytes())}
    assert {("TRANSPOSE", 4), ("TRANSPOSE", 1)} <= found
    check(path.read_bytes())
