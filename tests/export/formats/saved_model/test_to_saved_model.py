"""Models through `to_saved_model` and back through `load`, run by TensorFlow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_saved_model, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import Counter, Net, UnreadCounter, affine, affine_params, random
from tests.refusals import refused


@pytest.mark.parametrize("batch", [1, 7])
def test_a_module_serves_any_batch(export, batch):
    net = Net()
    loaded, report = export(net, spec("batch, 3"))
    x = random(batch, 3)
    assert_close(loaded(x), net(x), atol=1e-6)
    assert report.oldest_tensorflow == "2.15"


def test_a_function_of_any_pytree(export):
    params = affine_params()
    loaded, report = export((params, affine), spec("batch, 3"))
    assert_close(loaded(random(2, 3)), affine(params, random(2, 3)), atol=1e-6)
    assert report.model == "affine"


def test_variables_have_the_names_of_the_leaves(export):
    net = pax.Sequential(pax.Linear(3, 4), pax.BatchNorm1D(4, data_format="NWC"))
    loaded, report = export(net, spec("batch, 5, 3"))
    names = [name for name, _ in pax.core.named_leaves(net)]
    assert [variable.name for variable in report.variables] == names
    assert "modules.0.weight" in loaded.variables
    assert loaded.variables["modules.0.weight"].name == "modules.0.weight:0"
    np.testing.assert_array_equal(loaded.variables["modules.0.weight"], net[0].weight)


def test_names_that_clash_are_told_apart_and_explained(export):
    params = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}, "my w": jnp.ones(2), "_": jnp.ones(2)}
    _, report = export((params, lambda p, x: x + sum(jax.tree.leaves(p))), spec("n, 2"))
    names = {variable.name: variable.leaves for variable in report.variables}
    assert names == {
        "a.b": ("['a']['b']",),
        "a.b-1": ("['a.b']",),
        "my_w": ("['my w']",),
        "value": ("['_']",),
    }


def test_tied_weights_are_one_variable(export):
    table = jnp.asarray(random(5, 3))
    params = {"embed": table, "head": table}
    loaded, report = export(
        (params, lambda p, i: p["embed"][i] @ p["head"].T), spec("n", "int32"), validate=True,
        trainable=True,
    )  # fmt: skip
    assert [variable.leaves for variable in report.variables] == [("['embed']", "['head']")]
    assert_close(loaded(np.array([1, 4])), table[np.array([1, 4])] @ table.T, rtol=1e-5)


def test_closed_over_arrays_are_one_variable_for_all_methods_and_gradients(export):
    table = jnp.asarray(random(300, 4))
    methods = {"one": lambda p, x: x @ table * p, "two": lambda p, x: jnp.sin(x @ table) * p}
    loaded, report = export(
        (jnp.ones(()), methods["one"]), {"one": spec("n, 300"), "two": spec("n, 300")},
        methods=methods, trainable=True, vjp_order=1, validate=True,
    )  # fmt: skip
    assert [(v.name, v.leaves, v.trainable) for v in report.variables] == [
        ("params", ("",), True),
        ("constants.0", (), False),
    ]
    assert report.graph_bytes < 10 * table.nbytes
    assert_close(loaded.signatures["one"](random(2, 300)), random(2, 300) @ table, rtol=1e-4)


def test_a_closed_over_parameter_is_the_parameter(export):
    weight = jnp.asarray(random(40, 40))
    _, report = export((weight, lambda p, x: x @ p @ weight), spec("n, 40"))
    assert len(report.variables) == 1


def test_nested_inputs_and_outputs_come_back_nested(export):
    def model(params, batch, *, scale):
        return {"sums": [batch["a"] + batch["b"][0], None], "pair": (batch["b"][1], {"s": scale})}

    loaded, report = export(
        ({}, model), {"a": spec("n"), "b": (spec("n"), spec("n, 2"))}, kwargs={"scale": spec("")}
    )
    (signature,) = report.signatures.values()
    assert [entry.name for entry in signature.inputs] == [
        "batch.a",
        "batch.b.0",
        "batch.b.1",
        "scale",
    ]
    assert [entry.name for entry in signature.outputs] == ["pair.0", "pair.1.s", "sums.0"]
    a, b = np.ones(3, np.float32), (np.ones(3, np.float32), np.zeros((3, 2), np.float32))
    result = loaded({"a": a, "b": b}, scale=2.0)
    assert result["sums"][0].tolist() == [2.0, 2.0, 2.0]
    assert result["sums"][1] is None
    assert result["pair"][0].shape == (3, 2)
    assert float(result["pair"][1]["s"]) == 2.0


def test_several_methods_share_the_variables(export):
    net = Net()
    inputs = {"serving_default": spec("batch, 3"), "encode": spec("batch, 3")}
    loaded, report = export(
        net, inputs, kwargs={"encode": {"scale": spec("")}},
        methods={"serving_default": "__call__", "encode": "encode"},
    )  # fmt: skip
    assert len(report.variables) == 2
    x = random(2, 3)
    assert_close(loaded(x), net(x), atol=1e-6)
    encoded = loaded.signatures["encode"](x, scale=np.float32(2))
    assert_close(encoded["code"], 2 * net.layer(x), atol=1e-6)
    assert_close(encoded["total"], x.sum(axis=1), atol=1e-6)


def test_state_is_updated_by_every_call(export):
    loaded, report = export(Counter(), spec("n"), state="update", validate=True)
    assert report.signatures["serving_default"].assigns == ("steps",)
    x = np.zeros(2, np.float32)
    assert [float(loaded(x)[0]) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert int(loaded.variables["steps"]) == 3


def test_state_that_nothing_reads_does_no_harm(export):
    loaded, report = export(UnreadCounter(), spec("n"))
    loaded(np.ones(2, np.float32))
    assert int(loaded.variables["steps"]) == 0
    assert report.signatures["serving_default"].assigns == ()


def test_a_module_is_exported_in_eval_mode(export):
    net = pax.Sequential(pax.BatchNorm1D(3), pax.Dropout(0.9)).train()
    x = random(4, 2, 3)
    loaded, _ = export(net, spec("n, 2, 3"))
    assert_close(loaded(x), net.eval()(x), atol=1e-6)


def test_first_gradients_beside_an_integer_output(export):
    import tensorflow as tf

    def model(params, x):
        logits = jnp.tanh(x @ params["w"] + params["b"])
        return {"logits": logits, "class": jnp.argmax(logits, axis=-1), "unused": params["n"]}

    params = affine_params() | {"n": jnp.zeros((), jnp.int32)}
    loaded, report = export((params, model), spec("n, 3"), trainable=True, validate=True)
    assert report.signatures["serving_default"].differentiable
    assert [v.name for v in report.variables if v.trainable] == ["b", "w"]
    x = tf.constant(random(5, 3))
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(loaded(x)["logits"] ** 2)
    weights = {"b": loaded.variables["b"], "w": loaded.variables["w"]}
    by_weights, by_x = tape.gradient(loss, (weights, x))
    expected = jax.grad(lambda p, x: (model(params | p, x)["logits"] ** 2).sum(), argnums=(0, 1))(
        affine_params(), random(5, 3)
    )
    assert_close(by_x, expected[1], atol=1e-5)
    for name in weights:
        assert_close(by_weights[name], expected[0][name], atol=1e-5)


def test_dtypes_are_kept(export):
    params = {
        "bf16": jnp.ones(3, jnp.bfloat16),
        "half": jnp.ones(3, jnp.float16),
        "small": jnp.ones(3, jnp.int8),
        "flag": jnp.ones(3, bool),
        "complex": jnp.ones(3, jnp.complex64),
    }

    def model(p, x):
        return {**p, "x": x + p["bf16"]}

    loaded, report = export((params, model), spec("n, 3", "bfloat16"), validate=True)
    assert {v.name: v.dtype for v in report.variables} == {
        "bf16": "bfloat16", "half": "float16", "small": "int8", "flag": "bool",
        "complex": "complex64",
    }  # fmt: skip
    assert loaded(np.zeros((2, 3), jnp.bfloat16))["x"].dtype == jnp.bfloat16


@pytest.mark.parametrize("call", [to_saved_model, to_stablehlo])
def test_four_bits_stand_outside_as_eight(call, tmp_path):
    signed = jnp.arange(-8, 8, dtype=jnp.int8).reshape(4, 4).astype(jnp.int4)
    params = {"q": signed, "u": jnp.arange(4).astype(jnp.uint4)}

    def model(p, x, n):
        return {"y": x @ p["q"].astype(jnp.float32), "next": n, "u": p["u"] + 12}

    report = call((params, model), tmp_path / "model", (spec("n, 4"), spec("4", "int4")))
    assert {v.name: (v.dtype, v.bytes) for v in report.variables} == {
        "q": ("int8", 16), "u": ("uint8", 4),
    }  # fmt: skip
    found = load(tmp_path / "model")(np.ones((3, 4), np.float32), np.arange(-4, 0, dtype=np.int8))
    np.testing.assert_array_equal(found["y"], np.ones((3, 4)) @ np.arange(-8, 8).reshape(4, 4))
    np.testing.assert_array_equal(found["next"], np.arange(-4, 0, dtype=np.int8))
    np.testing.assert_array_equal(found["u"], np.arange(12, 16, dtype=np.uint8))


def test_typed_keys_and_python_numbers_are_variables(export):
    params = {"key": jax.random.key(3), "scale": 2, "shift": 0.5}

    def model(p, x):
        return x * p["scale"] + p["shift"] + jax.random.normal(p["key"], (3,))

    _, report = export((params, model), spec("n, 3", "bfloat16"), validate=True, state="keep")
    assert {v.name: (v.dtype, v.shape) for v in report.variables} == {
        "key": ("uint32", (2,)),
        "scale": ("int32", ()),
        "shift": ("float32", ()),
    }
    # Python numbers are weakly typed: they leave a bfloat16 what it is.
    assert report.signatures["serving_default"].outputs[0].dtype == str(
        jax.eval_shape(model, params, jax.ShapeDtypeStruct((1, 3), jnp.bfloat16)).dtype
    )


def test_keys_may_be_inputs_and_outputs(export):
    def model(params, key):
        return jax.random.split(key)[0], jax.random.normal(key, (2,))

    loaded, report = export(({}, model), jax.random.key(0), validate=True)
    assert report.signatures["serving_default"].inputs[0].dtype == "uint32"
    data, _ = loaded(np.asarray(jax.random.key_data(jax.random.key(5))))
    expected, _ = model({}, jax.random.key(5))
    np.testing.assert_array_equal(data, jax.random.key_data(expected))


def test_the_bytes_depend_on_the_model_alone(tmp_path):
    for name in "ab":

        def model(params, x):  # each time a function that jax has not traced
            return affine(params, x)

        to_saved_model(
            (affine_params(), model), tmp_path / name, spec("n, 3"), trainable=True, validate=False
        )
    graphs = [(tmp_path / name / "saved_model.pb").read_bytes() for name in "ab"]
    assert graphs[0] == graphs[1]
    assert str(tmp_path).encode() not in graphs[0]
    assert b".py" not in graphs[0]


def test_linear_algebra_runs_on_every_platform_that_was_asked_for(export):
    def model(params, x):
        return jnp.linalg.cholesky(x @ x.mT + 3 * jnp.eye(3))

    loaded, report = export(({}, model), spec("n, 3, 3"), validate=True)
    assert report.platforms == ("cpu", "cuda", "rocm", "tpu")
    assert_close(loaded(random(2, 3, 3)), model({}, random(2, 3, 3)), atol=1e-5)


def test_two_dimensions_and_a_constraint(export):
    def model(params, x, y):
        return {"product": x @ y, "total": x.sum()}

    loaded, report = export(
        ({}, model), (spec("b, n"), spec("n, 3")), constraints=("n >= 20",), validate=True,
        trainable=True,
    )  # fmt: skip
    assert loaded(random(2, 30), random(30, 3))["product"].shape == (2, 3)
    assert [str(entry) for entry in report.signatures["serving_default"].inputs] == [
        "x: float32[b, n]",
        "y: float32[n, 3]",
    ]


def test_a_platform_of_its_own(export):
    loaded, report = export(({}, lambda p, x: jnp.sin(x)), spec("n"), platforms="cpu")
    assert report.platforms == ("cpu",)
    assert_close(loaded(random(3)), np.sin(random(3)), atol=1e-6)


def test_names_that_differ_in_capitals_only(export):
    params = {"w": jnp.ones(3), "W": 2 * jnp.ones(3)}
    model = (params, lambda p, x, X: {"y": x * p["w"], "Y": X * p["W"]})
    loaded, report = export(model, (spec("n, 3"), spec("n, 3")))
    assert [entry.name for entry in report.signatures["serving_default"].inputs] == ["x", "X-1"]
    assert sorted(loaded.variables) == ["W", "w"]
    result = loaded(np.zeros((1, 3)), X=np.ones((1, 3)))
    assert (result["y"].tolist(), result["Y"].tolist()) == ([[0, 0, 0]], [[2, 2, 2]])


def test_every_supported_dtype_goes_in_and_out(export):
    dtypes = ("float8_e4m3fn", "float8_e5m2", "uint8", "uint16", "int16")
    params = {dtype: jnp.ones(3, dtype) for dtype in dtypes}
    inputs = tuple([spec("n, 3", dtype) for dtype in dtypes])
    _, report = export((params, lambda p, *x: {"in": x, **p}), inputs, validate=True)
    assert len(report.largest_error) == 2 * len(dtypes)
    assert set(report.largest_error.values()) == {0.0}


@pytest.mark.parametrize("make", [np.ones, jnp.ones])
def test_a_large_array_that_a_function_closes_over_is_tested_as_an_argument(tmp_path, make):
    # XLA gives NaN where it is a constant of 16 MiB.
    w = make((1024, 4096), np.float32)
    done = to_saved_model(({}, lambda p, x: (x @ w).sum(-1)), tmp_path / "m", spec("n, 1024"))
    assert len(done.variables) == 1


def test_an_export_for_other_platforms_is_not_validated_and_refuses_calls_by_name(export):
    with pytest.warns(errors.NotValidatedWarning, match="tpu"):
        loaded, report = export(pax.Linear(3, 2), spec("n, 3"), platforms="tpu", validate=True)
    assert report.validated is None and "tpu" in report.left_out[0]
    with refused(errors.InvalidArgumentError, where="serving_default", got="a call on cpu"):
        loaded(random(2, 3))
