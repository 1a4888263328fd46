"""Everything that `jax.export` offers, through bundles: each feature of its reference."""

import os
import subprocess
import sys
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export

from pax_export import errors
from pax_export.export import load, spec, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import affine, affine_params, random
from tests.refusals import refused

KEY = "serving_default"


@pytest.fixture
def save(tmp_path):
    def run(model, *inputs, **options):
        options.setdefault("validate", False)
        to_stablehlo(model, tmp_path / "bundle", *inputs, **options)
        return load(tmp_path / "bundle")

    return run


@pytest.fixture
def model():
    return affine_params(), affine


# Exported out: everything that it is, is there.


def test_the_exported_describes_the_function(save, model):
    bundle = save(model, spec("batch, 3"))
    exported = bundle.exported[KEY]
    assert isinstance(exported, jax_export.Exported)
    lowest = jax_export.minimum_supported_calling_convention_version
    version = bundle.report.calling_convention
    assert version == exported.calling_convention_version
    assert lowest <= version <= jax_export.maximum_supported_calling_convention_version
    assert exported.fun_name == KEY
    assert exported.in_tree == jax.tree.structure((({"b": 0, "w": 0}, {"x": 0}), {}))
    assert [str(aval) for aval in exported.in_avals] == [
        "float32[4]", "float32[3,4]", "float32[batch,3]",
    ]  # fmt: skip
    assert exported.out_tree == jax.tree.structure({"output": {"output": 0}})
    assert [str(aval) for aval in exported.out_avals] == ["float32[batch,4]"]
    assert exported.in_shardings_hlo == (None, None, None)
    assert exported.out_shardings_hlo == (None,)
    assert exported.nr_devices == 1
    assert exported.platforms == ("cpu", "cuda", "rocm", "tpu")
    assert (exported.ordered_effects, exported.unordered_effects) == ((), ())
    assert exported.disabled_safety_checks == ()
    assert exported.module_kept_var_idx == (0, 1, 2)
    assert exported.uses_global_constants
    assert "stablehlo" in exported.mlir_module()


def test_arguments_that_are_not_used_are_not_kept(save):
    params = {"used": jnp.ones(3), "unused": jnp.ones(4)}
    exported = save((params, lambda p, x, y: p["used"] * x), (spec("3"), spec("3"))).exported[KEY]
    assert [str(exported.in_avals[i]) for i in exported.module_kept_var_idx] == ["float32[3]"] * 2


def test_a_platform_that_is_not_exported_is_refused_when_called(save, model):
    bundle = save(model, spec("2, 3"), platforms=("tpu",))
    here = jax_export.default_export_platform()
    with refused(errors.InvalidArgumentError, where=KEY, got=f"a call on {here}"):
        bundle(random(2, 3))


@pytest.mark.parametrize("exported", [False, True])
def test_an_export_for_other_platforms_is_not_validated(save, model, exported):
    inputs = (spec("2, 3"),)
    if exported:
        model = jax_export.export(jax.jit(jnp.sin), platforms=("tpu",))(jnp.ones(3))
        inputs = ()
    with pytest.warns(errors.NotValidatedWarning, match="tpu"):
        bundle = save(model, *inputs, platforms=("tpu",), validate=True)
    assert bundle.exported[KEY].platforms == ("tpu",)
    assert bundle.report.validated is None and "tpu" in bundle.report.left_out[0]


@pytest.mark.parametrize("validate", ["full", "process"])
def test_a_validation_that_no_platform_can_run_is_refused(save, model, validate):
    with refused(errors.InvalidArgumentError, where="platforms"):
        save(model, spec("2, 3"), platforms=("tpu",), validate=validate)


def test_a_disabled_check_of_platforms_lets_the_validation_run(save):
    checks = [jax_export.DisabledSafetyCheck.platform()]
    options = {"platforms": ("tpu",), "disabled_checks": checks, "validate": True}
    bundle = save(lambda x: x + 1, spec("3"), **options)
    assert bundle.report.validated and bundle(np.ones(3, np.float32)).tolist() == [2, 2, 2]


# Exported in.


def test_an_exported_becomes_a_bundle(save):
    function = jax.jit(lambda x, *, scale: {"y": (jnp.sin(x) * scale, x.sum())})
    exported = jax_export.export(function)(
        jax.ShapeDtypeStruct(jax_export.symbolic_shape("n"), "float32"),
        scale=jax.ShapeDtypeStruct((), "float32"),
    )
    bundle = save(exported, validate=True, vjp_order=2)
    found = bundle(random(5), scale=jnp.float32(2))
    assert_close(found["y"][0], 2 * np.sin(random(5)), rtol=1e-5)
    assert bundle.report.model == "<lambda>"
    second = jax.grad(jax.grad(lambda x: bundle(x[None], scale=jnp.float32(1))["y"][0][0]))
    assert_close(second(0.5), -np.sin(0.5), rtol=1e-5)
    assert str(bundle.exported[KEY].in_avals) == str(exported.in_avals)


def test_several_exporteds_become_signatures(save):
    struct = jax.ShapeDtypeStruct((2,), "float32")
    both = {name: jax_export.export(jax.jit(f))(struct) for name, f in
            {"sine": jnp.sin, "cosine": jnp.cos}.items()}  # fmt: skip
    bundle = save(both)
    assert_close(bundle.signatures["cosine"](random(2)), np.cos(random(2)), rtol=1e-6)
    with pytest.raises(errors.InvalidArgumentError, match="several signatures"):
        bundle(random(2))


def test_an_exported_has_its_inputs_already(tmp_path):
    exported = jax_export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((2,), "float32"))
    with pytest.raises(errors.InvalidArgumentError, match="has its inputs"):
        to_stablehlo(exported, tmp_path / "bundle", spec("2"))


def test_a_function_that_calls_an_exported_has_its_platforms(tmp_path):
    here = jax_export.default_export_platform()
    inner = jax_export.export(jax.jit(jnp.sin))(jnp.ones(3))
    model = lambda x: inner.call(x) + 1  # noqa: E731
    with refused(errors.UnsupportedOperationError, "call_exported") as error:
        to_stablehlo(model, tmp_path / "bundle", spec("3"))
    assert error.value.write.endswith(f"platforms=[{here!r}]")
    to_stablehlo(model, tmp_path / "bundle", spec("3"), platforms=[here])
    assert_close(load(tmp_path / "bundle")(random(3)), np.sin(random(3)) + 1, rtol=1e-6)


# vjp_order.


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_gradients_are_there_up_to_the_order(save, order):
    function = ({}, lambda _, x: jnp.sin(x))
    bundle = save(function, spec(""), vjp_order=order, platforms="cpu")
    gradient, exported = bundle, bundle.exported[KEY]
    for place in range(order):
        gradient = jax.grad(gradient)
        expected = [np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)][place]
        assert_close(gradient(0.5), expected(0.5), rtol=1e-5)
        assert exported.has_vjp()
        exported = exported.vjp()
    assert not exported.has_vjp()
    with refused(errors.NotDifferentiableError) as error:
        jax.grad(gradient)(0.5)
    assert order or error.value.write == "to_stablehlo(..., vjp_order=1)"


# Symbolic dimensions.


def test_constraints_and_expressions(save):
    function = ({}, lambda _, x: x.reshape(x.shape[0] // 2, 2)[:2])
    bundle = save(function, spec("2*n"), constraints=("n >= 2",), validate=True)
    assert bundle(np.arange(6.0)).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(ValueError, match="n|Input shapes"):
        bundle(random(2))
    with pytest.raises(ValueError, match=r"2\*n|divi|Input shapes"):
        bundle(random(5))


def test_a_scope_of_the_user(save):
    scope = jax_export.SymbolicScope(["a >= 3"])
    x, y = (
        jax.ShapeDtypeStruct(jax_export.symbolic_shape(text, scope=scope), "float32")
        for text in ("a, b", "b")
    )
    bundle = save(({}, lambda _, x, y: x[2] + y), (x, y))
    assert bundle(random(3, 2), random(2)).shape == (2,)
    with pytest.raises(errors.InvalidArgumentError, match="b = 2 by x"):
        bundle(random(3, 2), random(4))
    with pytest.raises(ValueError, match="a"):
        bundle(random(2, 2), random(2))


# Custom calls, safety checks, effects, custom nodes, keys.


def test_calls_that_jax_does_not_promise_need_a_disabled_check(tmp_path):
    def unknown(_, x):
        return jax.ffi.ffi_call("nobody_has_this", jax.ShapeDtypeStruct((2,), "float32"))(x)

    check = jax_export.DisabledSafetyCheck.custom_call("nobody_has_this")
    with pytest.raises(errors.UnsupportedOperationError, match="disabled_checks"):
        to_stablehlo(({}, unknown), tmp_path / "refused", spec("2"), platforms="cpu")
    assert not list(tmp_path.iterdir())
    path = tmp_path / "bundle"
    options = {"platforms": "cpu", "validate": False}
    to_stablehlo(({}, unknown), path, spec("2"), disabled_checks=[check], **options)
    with pytest.raises(errors.UntrustedExportError, match="calls of nobody_has_this"):
        load(path)
    exported = load(path, trusted=True).exported[KEY]
    assert exported.disabled_safety_checks == (check,)
    assert check.is_custom_call() == "nobody_has_this"


def test_linear_algebra_calls_what_jax_promises(save):
    def solve(params, x):
        return jnp.linalg.solve(params["a"], x)

    matrix = random(3, 3) + 3 * np.eye(3, dtype=np.float32)
    bundle = save(({"a": matrix}, solve), spec("3"), platforms="cpu", vjp_order=1)
    assert_close(bundle(random(3)), np.linalg.solve(matrix, random(3)), rtol=1e-4)
    found = jax.grad(lambda x: bundle(x).sum())(random(3))
    assert_close(found, np.linalg.inv(matrix).sum(0), rtol=1e-4)


Point = namedtuple("Point", ["x", "y"])


def test_nodes_need_no_registration(save):
    """jax.export wants `register_namedtuple_serialization`; a bundle names the fields."""
    inputs = Point(spec("2"), spec("2"))
    bundle = save(({}, lambda _, point: Point(point.y, point.x)), inputs, platforms="cpu")
    found = bundle(Point(np.zeros(2), np.ones(2)))
    assert found["x"].tolist() == [1.0, 1.0]


def test_nodes_in_a_function_of_jax_are_written_if_jax_is_told_how(tmp_path):
    def turn(point, x):
        return Point(point.y, point.x * x)

    point = Point(jnp.ones(3), jnp.zeros(3))
    exported = jax_export.export(jax.jit(turn))(point, jnp.ones((2, 3)))
    with pytest.raises(errors.InvalidArgumentError, match="(?s)Point.*fix: .*register_named"):
        to_stablehlo(exported, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())
    jax_export.register_namedtuple_serialization(Point, serialized_name="tests.Point")
    to_stablehlo(exported, tmp_path / "bundle")
    bundle = load(tmp_path / "bundle")
    assert bundle.exported[KEY].call(point, jnp.ones((2, 3))).y.shape == (2, 3)
    found = bundle(point, np.ones((2, 3), np.float32))  # by field, as all exports give it
    assert {name: value.shape for name, value in found.items()} == {"x": (3,), "y": (2, 3)}
    program = "import sys; from pax_export.export import load; load(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "bundle")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert "fix: jax.export.register_namedtuple_serialization or" in done.stderr


def test_typed_keys_as_weights_and_as_arguments(save):
    def draw(params, key):
        return jax.random.normal(jax.random.fold_in(key, 1)) + jax.random.normal(params["key"])

    params = {"key": jax.random.key(3)}
    key = jax.random.key(4)
    bundle = save((params, draw), jax.ShapeDtypeStruct((), key.dtype), state="keep")
    assert_close(bundle(key), draw(params, key), rtol=1e-6)
    assert_close(bundle(jax.random.key_data(key)), draw(params, key), rtol=1e-6)
