"""Serves exports where there is no jax: TensorFlow, numpy and pytest are enough.

    PAX_EXPORT_ARTIFACTS=DIR python -m pytest --confcutdir=tests/consumers \
        tests/consumers/test_served.py

DIR holds what `test_exported.py` wrote there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.consumers import artifacts

ROOT = artifacts.served_root()

tf = importlib.import_module("tensorflow")

each_name = pytest.mark.parametrize("name", artifacts.NAMES)
each_size = pytest.mark.parametrize(
    ("name", "batch"), [(name, n) for name in artifacts.NAMES for n in artifacts.batches(name)]
)
each_batch = pytest.mark.parametrize("batch", artifacts.BATCHES)


def folders(name):
    """The exports of this name, one for each environment; that of the newest jax comes first."""
    found = [folder for folder in artifacts.found(ROOT) if folder.name == name]
    assert found, f"{ROOT} holds no export {name!r}: run tests/consumers/test_exported.py with it"
    return found


@functools.cache
def load(folder):
    """The loaded model, and the values of its variables."""
    model = tf.saved_model.load(str(folder / "model"))
    leaves = getattr(model, "leaves", {})  # what others wrote has none
    return model, {name: variable.numpy() for name, variable in leaves.items()}


def fresh(folder):
    """The loaded model with the state that it was exported with."""
    model, values = load(folder)
    for name, value in values.items():
        model.leaves[name].assign(value)
    return model


def expected(folder, batch):
    """Groups of arrays: in, out, gradient."""
    groups = {"in": {}, "out": {}, "gradient": {}}
    with np.load(folder / "cases.npz") as stored:
        for key in stored.files:
            number, group, name = key.split("/", 2)
            if int(number) == batch:
                groups[group][name] = stored[key]
    assert groups["in"] and groups["out"]
    return groups


def assert_equal(got, case, context):
    assert sorted(got) == sorted(case)
    for name, value in case.items():
        result = got[name].numpy()
        assert result.dtype == value.dtype
        assert_close(result, value, rtol=1e-3, atol=1e-4, where=f"{context}: {name}")


def tensors(arrays):
    return {name: tf.constant(value) for name, value in arrays.items()}


def test_every_environment_exported_everything():
    exported = {}
    for folder in artifacts.found(ROOT):
        exported.setdefault(folder.parent, set()).add(folder.name)
    assert exported, f"{ROOT} holds no exports"
    assert all(names >= set(artifacts.NAMES) for names in exported.values()), exported


@each_size
def test_results_are_those_of_jax(name, batch):
    for folder in folders(name):
        case = expected(folder, batch)
        outputs = fresh(folder).signatures["serving_default"](**tensors(case["in"]))
        assert_equal(outputs, case["out"], folder)


@each_name
def test_results_are_the_same_when_xla_compiles_all(name):
    for folder in folders(name)[:1]:
        case = expected(folder, artifacts.batches(name)[-1])
        compiled = tf.function(fresh(folder).signatures["serving_default"], jit_compile=True)
        assert_equal(compiled(**tensors(case["in"])), case["out"], folder)


@each_name
def test_results_are_the_same_in_a_session(name):
    """C programs, Java and TensorFlow Serving call the graph, not the objects."""
    for folder in folders(name)[:1]:
        case = expected(folder, artifacts.batches(name)[-1])
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            graph = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / "model"))
            signature = graph.signature_def["serving_default"]
            given = {signature.inputs[key].name: value for key, value in case["in"].items()}
            wanted = {key: each.name for key, each in signature.outputs.items()}
            outputs = session.run(wanted, given)
        assert_equal(tensors(outputs), case["out"], folder)


@pytest.fixture
def without_xla():
    """XLA is off, as tensorflow_model_server starts."""
    (file,) = Path(tf.__file__).parent.glob("libtensorflow_cc.*")
    library = ctypes.CDLL(str(file))
    library._ZN10tensorflow21DisableXlaCompilationEv()
    yield
    library._ZN10tensorflow20EnableXlaCompilationEv()


@pytest.mark.parametrize("name", artifacts.OPERATIONS)
def test_operations_run_without_xla(name, without_xla):
    name += "_operations"
    for folder in folders(name):
        for batch in artifacts.batches(name):
            case = expected(folder, batch)
            model = tf.saved_model.load(str(folder / "model"))
            outputs = model.signatures["serving_default"](**tensors(case["in"]))
            assert_equal(outputs, case["out"], folder)


def test_xla_is_off(without_xla):
    (folder, *_) = folders("graph")
    # Programs of sizes that were called before are compiled already.
    given = {name: np.repeat(x, 11, 0) for name, x in expected(folder, 1)["in"].items()}
    model = tf.saved_model.load(str(folder / "model"))
    with pytest.raises(tf.errors.InternalError, match="XLA compilation disabled"):
        model.signatures["serving_default"](**tensors(given))


@each_batch
def test_gradients_are_those_of_jax(batch):
    for folder in folders("trainable"):
        model, case = fresh(folder), expected(folder, batch)
        x = tf.constant(case["in"]["x"])
        with tf.GradientTape() as tape:
            tape.watch(x)
            logits = model.signatures["serving_default"](x=x)["logits"]
            loss = 0.5 * tf.reduce_sum(logits**2)
        gradients = tape.gradient(loss, {**model.leaves, "x": x})
        assert_equal(gradients, case["gradient"], folder)


def test_training_goes_on_in_tensorflow():
    for folder in folders("trainable"):
        model = fresh(folder)
        weights = list(model.trainable_variables)
        x = tf.constant(expected(folder, 7)["in"]["x"])
        losses = []
        for _ in range(20):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model.signatures["serving_default"](x=x)["logits"] ** 2)
            for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(0.1 * gradient)
            losses.append(float(loss))
        assert losses[-1] < 0.2 * losses[0]


def test_state_is_kept_between_calls():
    for folder in folders("stateful"):
        model = fresh(folder)
        x = tf.constant(expected(folder, 7)["in"]["x"])
        counts = [int(model.signatures["serving_default"](x=x)["count"]) for _ in range(3)]
        assert counts == [1, 2, 3]
