"""Models through `to_saved_model` and back through `load`, run by TensorFlow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_saved_model, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import UnreadCounter, random
from tests.refusals import refused


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


def test_state_that_nothing_reads_does_no_harm(export):
    loaded, report = export(UnreadCounter(), spec("n"))
    loaded(np.ones(2, np.float32))
    assert int(loaded.variables["steps"]) == 0
    assert report.signatures["serving_default"].assigns == ()


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


def test_names_that_differ_in_capitals_only(export):
    params = {"w": jnp.ones(3), "W": 2 * jnp.ones(3)}
    model = (params, lambda p, x, X: {"y": x * p["w"], "Y": X * p["W"]})
    loaded, report = export(model, (spec("n, 3"), spec("n, 3")))
    assert [entry.name for entry in report.signatures["serving_default"].inputs] == ["x", "X-1"]
    assert sorted(loaded.variables) == ["W", "w"]
    result = loaded(np.zeros((1, 3)), X=np.ones((1, 3)))
    assert (result["y"].tolist(), result["Y"].tolist()) == ([[0, 0, 0]], [[2, 2, 2]])


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


DTYPES = ("bfloat16", "float16", "int8", "bool", "complex64")
DTYPES += ("float8_e4m3fn", "float8_e5m2", "uint8", "uint16", "int16")


def test_every_supported_dtype_goes_in_and_out_and_is_kept(export):
    params = {dtype: jnp.ones(3, dtype) for dtype in DTYPES}
    inputs = tuple([spec("n, 3", dtype) for dtype in DTYPES])
    loaded, report = export((params, lambda p, *x: {"in": x, **p}), inputs, validate=True)
    assert {v.name: v.dtype for v in report.variables} == {dtype: dtype for dtype in DTYPES}
    outputs = [*DTYPES, *(f"in.{place}" for place in range(len(DTYPES)))]
    assert {f"serving_default: {name}" for name in outputs} <= report.largest_error.keys()
    assert set(report.largest_error.values()) == {0.0}
    given = [np.zeros((2, 3), jnp.dtype(dtype)) for dtype in DTYPES]
    assert [str(each.dtype) for each in loaded(*given)["in"]] == list(DTYPES)
