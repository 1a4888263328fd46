"""ONNX models tested in other runtimes than onnxruntime."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import (
    InvalidArgumentError,
    MissingPackageError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export.export import load, spec, to_onnx
from pax_export.export.formats.onnx import run, runtimes
from tests.closeness import assert_close
from tests.export import planted_runtimes

INSTALLED = {
    "openvino": bool(find_spec("openvino")),
    "iree": bool(find_spec("iree") and find_spec("iree.compiler") and find_spec("iree.runtime")),
    "web": runtimes._web_found(),
}


@pytest.fixture(scope="module")
def net():
    return pax.Sequential(
        pax.Conv2D(1, 4, 3), jax.nn.relu, lambda x: x.reshape(x.shape[0], -1), pax.Linear(64, 5)
    )


@pytest.mark.parametrize("name", runtimes.NAMES)
def test_a_model_is_tested_in_each_that_is_installed(tmp_path, net, name):
    if not INSTALLED[name]:
        pytest.skip(f"{name} is not installed")
    images = spec("batch, 4, 4, 1")
    report = to_onnx(net, tmp_path / "m.onnx", images, runtimes=["onnxruntime", name])
    assert 0 <= report.details["largest_error_in"][name] < 1e-4
    assert f"{name}: largest error {report.tested_in[name]}" in str(report)
    assert load(tmp_path / "m.onnx").report.details == report.details
    assert name in (tmp_path / "m.onnx.html").read_text()


@pytest.mark.skipif(not INSTALLED["web"], reason="web is not installed")
def test_web_takes_and_gives_halves(tmp_path):
    to_onnx(lambda x: x * 3, tmp_path / "m.onnx", spec("n", "float16"), runtimes=["web"])


@pytest.mark.parametrize("name", runtimes.NAMES)
def test_one_that_is_missing_is_said_before_any_work(tmp_path, name):
    if INSTALLED[name]:
        pytest.skip(f"{name} is installed")

    def model(x):
        raise AssertionError("it is traced")

    with pytest.raises(MissingPackageError, match=rf"runtimes=\['{name}'\]"):
        to_onnx(model, tmp_path / "m.onnx", spec("2"), runtimes=[name])


@pytest.fixture
def planted(monkeypatch):
    def plant(does):
        monkeypatch.setattr(runtimes, "check", lambda names: None)
        real = runtimes.in_process

        def in_process(kind, *arguments):
            assert kind.run.endswith(":openvino")
            place = f"{planted_runtimes.__name__}:{does}"
            return real(dataclasses.replace(kind, run=place), *arguments)

        monkeypatch.setattr(runtimes, "in_process", in_process)

    return plant


def test_another_result_there_is_refused(tmp_path, planted):
    planted("differs")
    with pytest.raises(ValidationError, match="in openvino"):
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("batch, 3"), runtimes=["openvino"])
    assert not list(tmp_path.iterdir())


def test_numbers_far_away_that_differ_there_are_reported(tmp_path, planted):
    planted("differs_far_away")
    inputs = spec("batch, 30")
    report = to_onnx(lambda x: x + x, tmp_path / "m.onnx", inputs, runtimes=["openvino"])
    (text,) = report.differs
    where = "serving_default: output where inputs are up to 1e4"
    assert text == f"differs from jax in openvino at: {where}"


@pytest.mark.parametrize(
    ("does", "what", "got"),
    [
        ("refuses", "openvino does not run this model", "no kernel"),
        ("crashes", "openvino crashes with this model", "signal 6; out of registers"),
    ],
)
def test_one_that_cannot_run_it_says_why(tmp_path, planted, does, what, got):
    planted(does)
    with pytest.raises(UnsupportedOperationError, match=what) as caught:
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("batch, 3"), runtimes=["openvino"])
    assert got in caught.value.got and not list(tmp_path.iterdir())


def test_one_that_hangs_is_stopped_with_all_that_it_started(tmp_path, planted):
    planted("hangs")
    case = {"inputs": {"x": np.zeros(3)}}
    for seconds in (3.0, 10.0, 30.0):  # a machine with much to do starts processes slowly
        with pytest.raises(UnsupportedOperationError, match="does not finish") as caught:
            runtimes.run("openvino", str(tmp_path / "m.onnx"), [case], seconds)
        assert f"had not finished after {seconds:g} s" in caught.value.got
        if (tmp_path / "started").exists():
            break
    started = int((tmp_path / "started").read_text())
    state = Path(f"/proc/{started}/stat")
    assert not state.exists() or ") Z " in state.read_text()


@pytest.mark.parametrize(
    "function",
    [lambda x: x // 10, lambda x: jnp.sort(x), lambda x: x.astype("float32")],
)
def test_integers_that_openvino_computes_otherwise_are_reported(tmp_path, function):
    """It has int32 for all integers, and compares these as float32."""
    pytest.importorskip("openvino")
    inputs = spec("3", "uint32")
    report = to_onnx(function, tmp_path / "m.onnx", inputs, runtimes=["openvino"])
    assert any("in openvino" in each for each in report.differs)


@pytest.mark.parametrize(
    "function, dtype",
    [
        (lambda x: jnp.arange(5.0)[x], "uint32"),
        (lambda x: jnp.clip(x, 3, jnp.uint32(3 << 30)), "uint32"),
        (lambda x: x % jnp.uint32(8), "uint32"),
        (lambda x: (x * 1e9).astype(jnp.uint32), "float32"),
    ],
)
def test_openvino_has_the_numbers_without_a_sign_that_it_can_have(tmp_path, function, dtype):
    pytest.importorskip("openvino")
    to_onnx(function, tmp_path / "m.onnx", spec("n", dtype))
    x = np.array([0, 1, 2, 3.5, 2**31 - 1, 2**31, 2**32 - 1])
    x = np.minimum(x, 5).astype(dtype) if dtype == "float32" else x.astype(dtype)
    (found,) = run.openvino(str(tmp_path / "m.onnx"), [{"inputs": {"x": x}}])
    (actual,) = found.values()
    assert np.array_equal(actual, function(jnp.asarray(x)))


def test_openvino_multiplies_by_a_square_weight_and_by_the_same_transposed(tmp_path):
    """It packs one for both, if the file transposes it by `Transpose`."""
    pytest.importorskip("openvino")
    w = jax.random.normal(jax.random.key(0), (8, 8))

    def both_ways(w, x):
        inner = x @ w
        return inner, jnp.tanh(inner) @ w.T

    to_onnx((w, both_ways), tmp_path / "m.onnx", spec("n, 8"), runtimes=["openvino"])


@pytest.mark.parametrize("bits", [8, 4])
def test_openvino_is_tested_without_rounding_the_inputs_of_quantized_products(tmp_path, bits):
    """It does so by itself where the processor multiplies integers."""
    pytest.importorskip("openvino")
    small, _ = pax.quantize(pax.Linear(256, 64), bits=bits)
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 256"), runtimes=["openvino"])
    assert report.details["largest_error_in"]["openvino"] < 1e-5


def test_openvino_draws_the_same_random_numbers(tmp_path):
    pytest.importorskip("openvino")
    drawn = lambda seed: jax.random.normal(jax.random.key(seed), (50,))  # noqa: E731
    to_onnx(drawn, tmp_path / "m.onnx", spec("", "uint32"), runtimes=["openvino"])


def _strided(x):
    return jax.lax.conv_general_dilated(x.T[None], jnp.ones((1, 3, 2)), (3,), "SAME")


def test_sizes_are_rounded_up_without_remainders_of_negative_sizes(tmp_path):
    """IREE takes these with another sign."""
    to_onnx(_strided, tmp_path / "m.onnx", spec("n, 3"))
    loaded = load(tmp_path / "m.onnx")
    for size in range(1, 8):
        x = np.arange(3.0 * size, dtype=np.float32).reshape(size, 3)
        np.testing.assert_array_equal(loaded(x), _strided(x))


@pytest.mark.parametrize(
    "function, shape, error",
    [
        (lambda x: jax.lax.scan(_add, jnp.zeros(3), x), "n, 3", ValidationError),
        (lambda x: jax.lax.scan(_add, jnp.zeros(3), x, reverse=True), "2, 3", ValidationError),
        (lambda x: (jnp.argsort(x), jnp.argsort(-x)), "n, 3", ValidationError),
        (lambda x: jnp.argsort(x, axis=0), "n, 3", UnsupportedOperationError),
    ],
)
def test_what_iree_computes_otherwise_is_found(tmp_path, function, shape, error):
    """It gives one row of a scan, ignores directions, and changes places that sorts share."""
    if not INSTALLED["iree"]:
        pytest.skip("iree is not installed")
    with pytest.raises(error, match="iree"):
        to_onnx(function, tmp_path / "m.onnx", spec(shape), runtimes=["iree"])


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda x: jax.lax.scan(_rows, jnp.zeros(3), x), "4, 3"),
        (lambda x: jax.lax.scan(lambda s, _: (s + x, s[0]), x, None, length=3), "4, 3"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x[:, None].sum(-1) * x, x), "n, 3"),
        (lambda x: jax.lax.cond(x[0, 0] > 0, _column, jnp.zeros_like, _column(x)), "n, 3"),
        (lambda x: jax.lax.top_k(x, 2)[1] + x[:, :2].astype(int), "n, 3"),
        (jax.nn.gelu, "n, 3"),
        (lambda x: (x > 0).astype(jnp.uint8), "n, 3"),
        (_strided, "n, 3"),
    ],
)
def test_iree_runs_loops_branches_and_sorts(tmp_path, function, shape):
    if not INSTALLED["iree"]:
        pytest.skip("iree is not installed")
    to_onnx(function, tmp_path / "m.onnx", spec(shape), exact=True)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    x = np.concatenate([x[:3], x[:1]])  # some ties
    (found,) = run.iree(str(tmp_path / "m.onnx"), [{"inputs": {"x": x}}])
    for actual, right in zip(found.values(), jax.tree.leaves(function(x)), strict=True):
        assert actual.dtype == right.dtype
        assert_close(actual, right, 1e-6)


def _column(x):
    return x.sum(-1)[:, None]


def _rows(state, row):
    return state + row[:, None].sum(-1), jnp.flip(state)[None] * row


def _add(state, row):
    return state + row, state * row


def test_refusals(tmp_path):
    with pytest.raises(InvalidArgumentError, match="runtimes"):
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("batch, 3"), runtimes=["tvm"])
    with pytest.raises(InvalidArgumentError, match="validate=False"):
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("3"), runtimes=["iree"], validate=False)


@pytest.mark.parametrize("kind", ["float32", "int32", "bool", "float32 with nan"])
def test_orders_do_not_depend_on_what_top_k_does_with_equal_numbers(tmp_path, kind):
    """A runtime may keep their order, as ONNX says, or not: each key is another number."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.ops.op_topk import TopK_11

    class Turned(TopK_11):
        op_domain = ""

        def _run(self, x, k, axis=None, largest=None, sorted=None):
            sign = -1 if largest else 1
            keys = np.flip(sign * x.astype(np.float64), axis)
            order = x.shape[axis] - 1 - np.argsort(keys, axis, kind="stable")
            index = np.take(order, np.arange(int(k[0])), axis)
            return np.take_along_axis(x, index, axis), index

    Turned.__name__ = "TopK"
    x = np.array([[2, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 0], [1, 1, 2, 2, 0, 0]])
    x = x > 0 if kind == "bool" else x.astype(kind.split()[0])
    if "nan" in kind:
        x[:, 1::3] = np.nan

    def model(x):
        key = x.astype(jnp.int32) if kind == "bool" else x
        return jax.lax.top_k(key, 4)[1], jnp.argsort(x, axis=1), jnp.sort(x, axis=0)

    to_onnx(model, tmp_path / "m.onnx", spec("n, 6", str(x.dtype)))
    run = ReferenceEvaluator(str(tmp_path / "m.onnx"), new_ops=[Turned]).run
    for got, expected in zip(run(None, {"x": x}), model(x)):
        np.testing.assert_array_equal(got, expected)
