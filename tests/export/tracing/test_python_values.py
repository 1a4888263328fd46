"""Python values among params and arguments stay what they are."""

import enum
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export import transforms as T
from pax_export.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    StateChangeError,
    TracedValueError,
    UnsupportedDtypeError,
    UnsupportedOperationError,
)
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo
from pax_export.export.artifact import structure
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.training import mark_trainable
from tests.closeness import assert_close
from tests.export.models import random
from tests.refusals import refused

# --- params -------------------------------------------------------------------------------


class Layer(eqx.Module):
    """Its activation and its flags are leaves."""

    weight: Any
    activation: Any
    mode: str = "plain"
    frozen: bool = False

    def __call__(self, x):
        y = x @ self.weight
        if self.frozen:
            y = jax.lax.stop_gradient(y)
        return y if self.mode == "linear" else self.activation(y)


def layers():
    return [
        Layer(jnp.asarray(random(3, 4)), jax.nn.relu),
        Layer(jnp.asarray(random(4, 2)), jnp.tanh, mode="linear", frozen=True),
    ]


def apply(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def test_static_leaves_stay_in_the_function(export):
    loaded, report = export((layers(), apply), spec("n, 3"), trainable=True, validate=True)
    assert [each.name for each in report.variables] == ["0.weight", "1.weight"]
    x = random(5, 3)
    assert_close(loaded(x), apply(layers(), x), atol=1e-5)


def test_they_are_chosen_by_prefix_and_by_name():
    model = make_exportable((layers(), apply), None)
    for chosen in ("0", [True, False]):
        trainable = [leaf.name for leaf in mark_trainable(model, chosen).leaves if leaf.trainable]
        assert trainable == ["0.weight"]
    each = jax.tree.map(lambda leaf: hasattr(leaf, "ndim") and leaf.shape == (4, 2), layers())
    assert [x.name for x in mark_trainable(model, each).leaves if x.trainable] == ["1.weight"]


def test_a_step_of_training_is_given_them_too(tmp_path):
    rule = optax.sgd(0.1)
    params = [Layer(jnp.asarray(random(3, 2)), jnp.tanh)]

    def step(params, state, x):
        assert params[0].activation is jnp.tanh
        assert state["name"] == "sgd"
        weights = [layer.weight for layer in params]

        def loss(weights):
            return (apply([Layer(w, jnp.tanh) for w in weights], x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, _ = rule.update(gradients, rule.init(weights))
        new = optax.apply_updates(weights, updates)
        count = {"count": state["count"] + 1, "name": "sgd"}
        return [Layer(w, jnp.tanh) for w in new], count, value

    to_saved_model(
        (params, apply), tmp_path / "m", spec("n, 3"), train_step=step,
        optimizer={"count": jnp.zeros((), jnp.int32), "name": "sgd"},
        train_inputs=spec("n, 3"),
    )  # fmt: skip
    loaded = load(tmp_path / "m")
    losses = [float(loaded.signatures["train_step"](random(4, 3))) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_what_only_looks_like_an_array_is_refused(tmp_path):
    for value in (jax.ShapeDtypeStruct((3,), np.float32), np.array([None, 1])):
        with refused(UnsupportedDtypeError, where="w"):
            to_saved_model(({"w": value}, lambda p, x: x), tmp_path / "m", spec("n"))


# --- arguments ----------------------------------------------------------------------------


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


def reduce(params, x, mode="sum", *, axis=0, batched=False, how=None, function=None):
    x = x * params["w"]
    if batched:
        x = x[None]
    if function is not None:
        x = function(x)
    how = how or (Mode.SUM if mode == "sum" else Mode.MEAN)
    return x.sum(axis) if how is Mode.SUM else x.mean(axis)


PARAMS = {"w": jnp.arange(1.0, 4.0)}


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        ((spec("n, 3"),), {"batched": True}),
        ((spec("n, 3"), "mean"), {"axis": 1}),
        ((spec("n, 3"),), {"axis": -1, "batched": True, "mode": "mean"}),
        ((spec("n, 3"),), {"how": Mode.MEAN, "function": jnp.tanh}),
    ],
)
def test_python_arguments_are_static(export, inputs, kwargs):
    loaded, report = export((PARAMS, reduce), inputs, kwargs=kwargs, validate=True)
    info = report.signatures["serving_default"]
    assert [entry.name for entry in info.inputs] == ["x"]
    x = random(4, 3)
    expected = reduce(PARAMS, x, *inputs[1:], **kwargs)
    assert_close(loaded(x), expected, atol=1e-5)  # they need not be said again
    assert_close(loaded(x, *inputs[1:], **kwargs), expected, atol=1e-5)
    for name in kwargs:
        assert f"    with {name} = " in str(report)


STATIC_ARGUMENTS = {
    "a number": (jax.jit(lambda p, x, n: p["w"] * x if n > 2 else x, static_argnums=2), 3),
    "axes": (jax.jit(lambda p, x, axis: (p["w"] * x).sum(axis), static_argnames="axis"), (0, 1)),
    "one of nnx": (T.jit(lambda p, x, n: p["w"] * x if n > 2 else x, static_argnums=2), 3),
}


@pytest.mark.parametrize("name", STATIC_ARGUMENTS)
def test_static_arguments_of_a_jitted_function_are_static(export, name):
    function, value = STATIC_ARGUMENTS[name]
    loaded, report = export((PARAMS, function), (spec("n, 3"), value), validate=True)
    assert [entry.name for entry in report.signatures["serving_default"].inputs] == ["x"]
    x = random(4, 3)
    assert_close(loaded(x), function(PARAMS, x, value), atol=1e-5)
    assert_close(loaded(x, value), function(PARAMS, x, value), atol=1e-5)


def test_other_numbers_of_a_jitted_function_are_inputs(export):
    function = jax.jit(lambda p, x, n, flag: p["w"] * x * n if flag else x, static_argnums=3)
    loaded, report = export((PARAMS, function), (spec("n, 3"), 3.0, True))
    assert [entry.name for entry in report.signatures["serving_default"].inputs] == ["x", "n"]
    x = random(4, 3)
    assert_close(loaded(x, 2.0), PARAMS["w"] * x * 2, atol=1e-5)


def test_an_argument_that_was_none_may_be_omitted(export):
    function = lambda p, x, mask=None: p["w"] * x if mask is None else x * mask  # noqa: E731
    loaded, _ = export((PARAMS, function), (spec("n, 3"), None), examples=[(random(2, 3),)])
    x = random(4, 3)
    assert_close(loaded(x), loaded(x, None), atol=0)


def test_another_value_than_the_exported_one_is_refused(export):
    loaded, _ = export((PARAMS, reduce), spec("n, 3"), kwargs={"batched": True})
    with refused(InvalidArgumentError, where="batched", got="False"):
        loaded(random(4, 3), batched=False)


def test_values_within_arguments_and_examples(export, tmp_path):
    def model(params, batch, *, scale):
        x = batch["x"] if batch["norm"] else batch["x"] / 2
        return x * scale

    inputs = {"x": spec("n, 3"), "norm": False}
    x = random(2, 3)
    loaded, report = export(
        ({}, model), inputs, kwargs={"scale": 2.0}, validate=True,
        examples=[({"x": x, "norm": False},), {"batch": {"x": x, "norm": False}, "scale": 2.0}],
    )  # fmt: skip
    assert_close(loaded({"x": x, "norm": False}), x, atol=1e-6)
    assert [entry.name for entry in report.signatures["serving_default"].inputs] == ["batch.x"]
    to_stablehlo(({}, model), tmp_path / "bundle", inputs, kwargs={"scale": 2.0})
    assert_close(load(tmp_path / "bundle")({"x": x, "norm": False}, scale=2.0), x, atol=1e-6)


@pytest.mark.parametrize("inputs", ["n", ("n",), ("batch", 8), ("batch, 8",)])
def test_text_that_was_to_be_a_shape_is_still_refused(tmp_path, inputs):
    with pytest.raises(InvalidArgumentTypeError):
        to_saved_model(({}, lambda p, x: x), tmp_path / "m", inputs)


def test_a_report_with_them_is_read_with_its_types_checked():
    structure.check({"static": {"value": True}}, (), "x")
    structure.check({"static": {"text": "Mode.SUM"}}, (), "x")
    for content in ({}, {"value": [1]}, {"text": 3}, {"value": 1, "text": "a"}, 3, {"other": 1}):
        with pytest.raises(ValueError):
            structure.check(json.loads(json.dumps({"static": content})), (), "x")


# --- new state ----------------------------------------------------------------------------


def test_state_of_another_shape_is_told_what_to_do_about_shapes(tmp_path):
    class Growing(pax.Module):
        def __init__(self):
            super().__init__()
            self.seen = jnp.zeros((1,))

        def __call__(self, x):
            self.seen = jnp.zeros((4, 6)) + x.sum()
            return self.seen.sum() + x

    with refused(StateChangeError, where="seen", got="float32[4, 6] after float32[1]") as caught:
        to_saved_model(Growing(), tmp_path / "m", spec("n"), state="update")
    assert caught.value.write.startswith("new state of shape [1]: a buffer of the maximum size")
    assert "astype" not in caught.value.write


def test_a_text_among_the_outputs_is_refused(tmp_path):
    with pytest.raises(TypeError, match="<class 'str'>"):
        to_stablehlo(lambda x: {"x": x, "unit": "mm"}, tmp_path / "m", spec("n"))


class Periods(pax.Module):
    def __init__(self):
        super().__init__()
        self.periods, self.linear = jnp.arange(4.0), pax.Linear(3, 4)

    def __call__(self, x):
        return self.linear(x) * np.asarray(self.periods)


@pytest.mark.parametrize("to", [to_saved_model, to_onnx])
def test_arrays_that_python_reads_are_constants(tmp_path, to):
    net, x = Periods(), np.ones((2, 3), "float32")
    options = {"trainable": True} if to is to_saved_model else {}
    report = to(net, tmp_path / "m.onnx", spec("b, 3"), card=False, **options)
    assert_close(load(tmp_path / "m.onnx")(x), net(x), rtol=1e-5)
    assert report.signatures["serving_default"].constants == ("periods",)
    assert "constant periods, whose values Python reads" in str(report)
    assert [each.name for each in report.variables if each.trainable] == (
        ["linear.weight", "linear.bias"] if options else []
    )


def test_values_of_inputs_are_not_read(tmp_path):
    scale = lambda p, x: x * float((p * x).sum())  # noqa: E731
    with pytest.raises(TracedValueError):
        to_onnx((jnp.ones(3), scale), tmp_path / "m.onnx", spec("3"))


# --- models that read the shardings of their arrays, which exports are traced without ---


SPEC = jax.sharding.PartitionSpec("x")


@pytest.fixture
def sharded():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, SPEC))


def is_split(x):
    return jax.typeof(x).sharding.spec[0] == "x"


READING = {
    "branch": lambda p, x: x * 2 if is_split(x) else x,
    "number": lambda p, x: x * (2 if is_split(x) else 3),
    "leaf": lambda p, x: x * 2 if is_split(p) else x,
    "operand": lambda p, x: x if is_split(p) else p,
    "in_specs": lambda p, x: jax.shard_map(lambda y: y * 2, in_specs=SPEC, out_specs=SPEC)(x),
}


@pytest.mark.parametrize("name", READING)
def test_shardings_that_are_read_are_refused(tmp_path, sharded, name):
    with pytest.raises(UnsupportedOperationError) as caught:
        to_stablehlo((sharded, READING[name]), tmp_path / "m", sharded)
    assert "AxisType.Auto" in caught.value.write


def test_other_models_are_exported(tmp_path, sharded):
    net = lambda p, x: jnp.tanh(x * p).sum() + jax.sharding.reshard(x, jax.P())  # noqa: E731
    to_onnx((sharded, net), tmp_path / "m.onnx", sharded)
    assert_close(load(tmp_path / "m.onnx")(sharded), net(sharded, sharded), rtol=1e-5)


def test_inputs_may_be_described_without_shardings(tmp_path, sharded):
    to_stablehlo(lambda x: READING["branch"](None, x), tmp_path / "m", spec("4"))
    assert load(tmp_path / "m")(np.ones(4, "float32")).tolist() == [1] * 4
