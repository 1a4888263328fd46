"""Calls that pass by TensorFlow's reading of arguments, and those that must not."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import load, spec
from pax_export.export.formats.saved_model.load import DirectCall
from tests.closeness import assert_close
from tests.export.models import Counter, affine, affine_params, random


@pytest.fixture
def direct(monkeypatch):
    calls, call = [], DirectCall.__call__

    def counted(self, named):
        calls.append(named)
        return call(self, named)

    monkeypatch.setattr(DirectCall, "__call__", counted)
    return calls


def _tf():
    import tensorflow as tf

    return tf


@pytest.mark.parametrize("make", [lambda x: x, jnp.asarray, lambda x: _tf().constant(x)])
def test_the_second_call_of_a_kind_is_direct(export, direct, make):
    loaded, _ = export((affine_params(), affine), spec("n, 3"))
    for count, batch in enumerate([2, 2, 5, 5, 2]):
        x = random(batch, 3)
        found = loaded(make(x))
        assert type(found) is type(loaded(make(x)))
        assert_close(np.asarray(found), affine(affine_params(), x), rtol=1e-5)
        assert len(direct) == [1, 3, 4, 6, 8][count]


def test_names_stay_with_their_arrays(export, direct):
    loaded, _ = export(
        ({}, lambda p, z, a: {"y": z - 2 * a, "b": (a, z)}), (spec("n"), spec("n"))
    )  # fmt: skip
    z, a = random(2), random(2)
    for _ in range(2):
        found = loaded(z, a=a)
        assert_close(found["y"], z - 2 * a, rtol=1e-6)
        np.testing.assert_array_equal(found["b"], (a, z))
    assert len(direct) == 1


def test_arguments_are_in_the_order_of_their_keywords(export, direct):
    inputs = ({"a": spec("n")}, spec("n"), spec("n"))
    loaded, _ = export(({}, lambda p, x, x2, self: x["a"] - 2 * x2 - 3 * self), inputs)
    for _ in range(2):
        assert loaded({"a": np.ones(1)}, np.zeros(1), np.ones(1)).tolist() == [-2]
    assert len(direct) == 1


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.complex64, ml_dtypes.bfloat16])
def test_any_dtype_and_layout_can_be_given(export, direct, dtype):
    loaded, _ = export(({}, lambda p, x: x), spec("n, m", dtype=np.dtype(dtype).name))
    x = np.arange(12).reshape(3, 4).astype(dtype)
    for given in (x, x, x[::2, ::-1], x.T, np.asfortranarray(x)):
        found = loaded(given)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, given)
    assert len(direct) == 2  # of one shape with the first


def test_results_do_not_share_memory_with_arguments(export, direct):
    loaded, _ = export(({}, lambda p, x: x), spec("n"))
    x = np.zeros(1024, np.float32)
    found = [loaded(x) for _ in range(2)]
    x += 1
    assert direct and not np.any(found)


def test_gradients_are_recorded(export, direct):
    tf = _tf()
    loaded, _ = export((affine_params(), affine), spec("n, 3"), trainable=True, vjp_order=2)
    x = tf.constant(random(2, 3))
    loaded(x), loaded(x)
    assert len(direct) == 1
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(loaded(x))
    of_w, of_x = tape.gradient(total, [loaded.variables["w"], x])
    expected = jax.grad(lambda p, x: affine(p, x).sum(), (0, 1))(affine_params(), x.numpy())
    assert_close(of_w, expected[0]["w"], rtol=1e-5)
    assert_close(of_x, expected[1], rtol=1e-5)
    with tf.GradientTape() as tape:
        found = loaded(x.numpy())  # no tensor, but variables
    assert type(found) is np.ndarray
    assert {variable.name for variable in tape.watched_variables()} == {"w:0", "b:0"}
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        slopes = forward.jvp(loaded(x))
    assert_close(
        slopes, jax.jvp(partial(affine, affine_params()), *[(np.ones((2, 3), "float32"),)] * 2)[1]
    )
    assert len(direct) == 1
    loaded(x)
    assert len(direct) == 2


def test_a_traced_call_can_be_differentiated_later(export, direct):
    tf = _tf()
    loaded, _ = export((affine_params(), affine), spec("n, 3"))
    x = tf.constant(random(2, 3))
    loaded(x), loaded(x)
    function = tf.function(lambda scale: scale * loaded(x))
    assert function(tf.constant(2.0)).shape == (2, 4)
    assert len(direct) == 1


def test_new_values_of_variables_are_seen(export, direct):
    loaded, _ = export((affine_params(), affine), spec("n, 3"))
    x = random(2, 3)
    before = loaded(x)
    for variable in loaded.variables.values():
        variable.assign(2 * variable)
    assert_close(loaded(x), 2 * before, rtol=1e-5)
    assert len(direct) == 1


def test_a_call_that_changes_variables_goes_the_way_of_tensorflow(export, direct):
    loaded, _ = export(Counter(), spec("n"), state="update")
    x = np.zeros(1, np.float32)
    assert [loaded(x).item() for _ in range(4)] == [1, 2, 3, 4]
    assert loaded.variables["steps"].numpy() == 4
    assert not direct


def test_wrong_arguments_are_refused_as_at_the_first_call(export, direct):
    tf = _tf()

    def first(params, x, unused):
        return affine(params, x)

    loaded, _ = export((affine_params(), first), (spec("n, 3"), spec("n, 2")))
    x, unused = tf.ones((2, 3)), tf.ones((2, 2))
    wrong = [
        (tf.ones((2, 4)), unused),
        (x, tf.ones((2, 7))),
        (x, tf.ones(2)),
        (tf.ones((2, 3), tf.float64), unused),
    ]

    def errors():
        found = []
        for args in wrong:
            with pytest.raises((InvalidArgumentError, InvalidArgumentTypeError)) as caught:
                loaded(*args)
            found.append((caught.type, str(caught.value)))
        return found

    before = errors()
    loaded(x, unused), loaded(x, unused)
    assert len(direct) == 1
    assert errors() == before
    assert [kind for kind, _ in before[:3]] == [InvalidArgumentError] * 3
    assert before[3] == (
        InvalidArgumentTypeError,
        "An argument has a different dtype than the exported one.\n"
        "  where: serving_default: x\n"
        "  got: float64\n"
        "  fix: float32",
    )


def test_where_there_is_something_to_place_tensorflow_does_it(
    export, direct, monkeypatch, tmp_path
):
    tf = _tf()
    export((affine_params(), affine), spec("n, 3"))
    x = random(2, 3)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        loaded = load(tmp_path / "model")
    expected = loaded(x)
    assert_close(loaded(x), expected)
    devices = tf.config.list_logical_devices()
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices * 2)
    loaded = load(tmp_path / "model")
    for _ in range(2):
        assert_close(loaded(x), expected)
    assert not direct


def test_where_nothing_says_whether_gradients_are_recorded_they_may_be(
    export, direct, monkeypatch, tmp_path
):
    export((affine_params(), affine), spec("n, 3"))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.record", None)
    loaded = load(tmp_path / "model")
    assert loaded(random(2, 3)).shape == loaded(random(2, 3)).shape == (2, 4)
    assert not direct
