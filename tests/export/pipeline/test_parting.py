"""Where an export goes wrong: the error names the operation, the module, the line."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

import pax_export as pax
from pax_export.errors import ValidationError
from pax_export.export import spec, to_onnx, to_saved_model, to_tflite
from pax_export.export.formats.onnx.graph import RULES
from pax_export.export.formats.tflite.tensors import RULES as TFLITE_RULES
from pax_export.export.lowering import lower
from pax_export.export.pipeline.bisect import _Operations
from pax_export.export.portable import Rule
from tests.closeness import assert_close


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.first = pax.Linear(3, 4)
        self.second = pax.Linear(4, 4)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)) * 0.5)


def twice_in_onnx(monkeypatch):
    right = RULES["tanh"].function

    def wrong(builder, *rest, **more):
        return builder("Mul", right(builder, *rest, **more), builder.literal(np.float32(2)).name)

    monkeypatch.setitem(RULES, "tanh", Rule(wrong))


def twice_in_tflite(monkeypatch):
    right = TFLITE_RULES["tanh"].function
    monkeypatch.setitem(TFLITE_RULES, "tanh", Rule(lambda op, x: right(op, x) * 2.0))


def another_in_stablehlo(monkeypatch):
    right = lower._write_oldest

    def wrong(module, context):
        with context:
            text = str(module).replace("stablehlo.tanh", "stablehlo.logistic")
            return right(ir.Module.parse(text), context)

    monkeypatch.setattr(lower, "_write_oldest", wrong)


@pytest.fixture
def wrong_tanh(monkeypatch):
    pytest.importorskip("onnxruntime")
    twice_in_onnx(monkeypatch)


@pytest.mark.parametrize(
    ("write", "plant"),
    [
        (
            partial(to_saved_model, operations="xla", platforms=("cpu",), vjp_order=0),
            another_in_stablehlo,
        ),
        (to_onnx, twice_in_onnx),
        (to_tflite, twice_in_tflite),
    ],
    ids=["saved_model", "onnx", "tflite"],
)
def test_a_wrong_operation_is_named(write, plant, tmp_path, monkeypatch):
    pytest.importorskip({to_onnx: "onnxruntime"}.get(write, "tensorflow"))
    plant(monkeypatch)
    with pytest.raises(ValidationError) as caught:
        net = pax.Sequential(pax.Identity(), Net())
        write(net, tmp_path / "model.onnx", spec("batch, 3"))
    parting = caught.value.parting
    assert (parting.operation, parting.path, parting.kind) == ("tanh", "modules.1", "Net")
    assert parting.source.startswith("test_parting.py:29:")
    assert parting.apart in str(caught.value) and parting.candidates == 1
    assert "; first at " in str(caught.value)
    assert "; there 8 of 8 elements differ" in str(caught.value)
    assert not list(tmp_path.iterdir())


class Scale(pax.Module):
    def __init__(self):
        super().__init__()
        self.inner = pax.Linear(3, 3)

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


def test_of_layers_alike_the_right_one_is_named(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    net, path = pax.Sequential(Scale(), Scale(), Scale()), tmp_path / "model.onnx"
    right = RULES["dot_general"].function

    def wrong(builder, x, y, **more):
        made = right(builder, x, y, **more)
        two = builder.literal(np.float32(2)).name
        return builder("Mul", made, two) if y.name.startswith("modules.1") else made

    monkeypatch.setitem(RULES, "dot_general", Rule(wrong))
    with pytest.raises(ValidationError) as caught:
        to_onnx(net, path, spec("2, 3"))
    parting = caught.value.parting
    assert (parting.operation, parting.path) == ("dot_general", "modules.1.inner")


def test_functions_without_modules_name_their_line(wrong_tanh, tmp_path):
    def function(params, x):
        return jnp.tanh(x + params["b"]).sum(-1)

    with pytest.raises(ValidationError) as caught:
        to_onnx(({"b": jnp.ones(3)}, function), tmp_path / "model.onnx", spec("2, 3"))

    parting = caught.value.parting
    assert (parting.operation, parting.path) == ("tanh", "")
    assert "test_parting.py" in parting.source
    assert "(test_functions_without_modules_name_their_line.<locals>.function)" in parting.source


def test_models_that_are_not_callable_are_named(monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")

    def broken(writer, operand, **_):
        wrong = writer.literal(np.zeros((7, 7, 7), np.float32))
        return writer("Add", operand.name, wrong.name)

    monkeypatch.setitem(RULES, "tanh", Rule(broken))
    with pytest.raises(ValidationError) as caught:
        to_onnx(Net(), tmp_path / "model.onnx", spec("2, 3"))

    assert caught.value.parting.operation == "tanh"


def test_nothing_is_searched_where_the_test_passes(monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")
    name = "pax_export.export.pipeline.bisect._BisectSearch"
    monkeypatch.setattr(name, lambda *_: pytest.fail("a search was made"))

    to_onnx(Net(), tmp_path / "model.onnx", spec("2, 3"))


def test_a_program_cut_anywhere_gives_what_the_rest_reads():
    def function(x, y):
        z = jax.jit(lambda a: jnp.sin(a) + 1.0)(x)
        unused = jnp.exp(y)
        del unused
        return jax.nn.relu(z * y) + z

    x, y = jnp.arange(3.0), jnp.ones(3)
    operations = _Operations(jax.make_jaxpr(function)(x, y), [0])
    names = [step.equation.primitive.name for step in operations.steps]

    assert names == ["sin", "add", "mul", "max", "add"]
    assert len(operations.run(1, [x, y])) == 1  # z
    assert len(operations.run(2, [x, y])) == 2  # z is read once more
    (result,) = operations.run(4, [x, y])
    assert_close(result, function(x, y))
