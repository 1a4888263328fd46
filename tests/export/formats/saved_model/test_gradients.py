"""Gradients of an export after loading, and gradients of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
import pax_export.transforms as T
from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import spec, to_saved_model
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.training import mark_trainable
from tests.closeness import assert_close
from tests.export.models import affine_params, random

tf = pytest.importorskip("tensorflow")


def model(params, x):
    logits = jnp.tanh(x @ params["w"] + params["b"])
    return {"logits": logits, "class": jnp.argmax(logits, axis=-1), "unused": params["n"]}


def params():
    return jax.tree.map(jnp.asarray, affine_params()) | {"n": jnp.zeros((), jnp.int32)}


def loss(floats, x):
    return (model(params() | floats, x)["logits"] ** 2).sum()


def test_gradients_of_inputs_need_no_trainable_variables(export):
    loaded, report = export((params(), model), spec("n, 3"), validate=True)
    assert not loaded.trainable_variables
    assert report.signatures["serving_default"].vjp_order == 1
    assert "serving_default: gradient:x" in report.largest_error
    x = tf.constant(random(5, 3))
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(loaded(x)["logits"] ** 2)
    expected = jax.grad(loss, 1)(affine_params(), random(5, 3))
    assert_close(tape.gradient(value, x), expected, atol=1e-5)


def test_first_and_second_order_beside_integers(export):
    loaded, report = export((params(), model), spec("n, 3"), trainable=True, validate=True)
    assert report.signatures["serving_default"].vjp_order == 2
    assert [v.name for v in report.variables if v.trainable] == ["b", "w"]
    assert report.oldest_tensorflow == "2.15"
    x = tf.constant(random(5, 3))
    sources = {"x": x, "w": loaded.variables["w"], "b": loaded.variables["b"]}
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = tf.reduce_sum(loaded(x)["logits"] ** 2)
        first = inner.gradient(value, sources)
        penalty = sum(tf.reduce_sum(each**2) for each in first.values())
    found = outer.gradient(penalty, sources)

    def squared(params, x):
        return sum((each**2).sum() for each in jax.tree.leaves(jax.grad(loss, (0, 1))(params, x)))

    for function, got in ((loss, first), (squared, found)):
        by_params, by_x = jax.grad(function, (0, 1))(affine_params(), random(5, 3))
        for name, expected in {**by_params, "x": by_x}.items():
            assert_close(got[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"vjp_order": 3}, {"vjp_order": True}, {"vjp_order": 0, "trainable": True}]
)
def test_orders_that_no_export_has(tmp_path, options):
    with pytest.raises(InvalidArgumentError, match="vjp_order"):
        to_saved_model((params(), model), tmp_path / "model", spec("n, 3"), **options)


NESTED = {
    "body": {"w": jnp.ones(3), "v": jnp.ones(3)},
    "head": jnp.ones(3),
    "n": jnp.zeros((), int),
}


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (True, ["body.v", "body.w", "head"]),
        ("body", ["body.v", "body.w"]),
        (("body.w", "head"), ["body.w", "head"]),
        (lambda name, array: name.endswith("v"), ["body.v"]),
        ({"body": False, "head": True, "n": True}, ["head"]),
        ({"body": {"w": True, "v": False}, "head": False, "n": False}, ["body.w"]),
    ],
)
def test_some_of_the_parameters_are_trainable(trainable, expected):
    leaves = mark_trainable(make_exportable((NESTED, mixed), None), trainable).leaves
    assert [leaf.name for leaf in leaves if leaf.trainable] == expected


def mixed(params, x):
    return x * params["body"]["w"] + params["body"]["v"] * params["head"]


def test_names_that_choose_nothing(tmp_path):
    for trainable in ("tail", ("body", "n")):
        with pytest.raises(InvalidArgumentError, match="(?s)No trainable.*body.v, body.w, head"):
            to_saved_model(
                (NESTED, lambda p, x: x), tmp_path / "model", spec("n"), trainable=trainable
            )
    with pytest.raises(ValueError, match="pytree"):
        to_saved_model(
            (NESTED, lambda p, x: x), tmp_path / "model", spec("n"), trainable={"body": True}
        )


def test_frozen_modules_and_state_are_not_trainable(export):
    net = pax.Sequential(
        pax.freeze_parameters(pax.Linear(3, 4)), pax.BatchNorm1D(4), pax.Linear(4, 2)
    )
    _, report = export(net, spec("n, t, 3"), trainable=True, validate=True)
    assert [variable.name for variable in report.variables if variable.trainable] == [
        "modules.1.scale", "modules.1.offset", "modules.2.weight", "modules.2.bias",
    ]  # fmt: skip


def test_filters_of_transforms_choose_parameters(export, tmp_path):
    net = pax.Sequential(pax.Linear(3, 4), jnp.tanh, pax.BatchNorm1D(4), pax.Linear(4, 2))
    expected = {
        T.All(pax.Linear, T.Not("bias")): ["modules.0.weight", "modules.3.weight"],
        pax.BatchNorm1D: ["modules.2.scale", "modules.2.offset"],
        T.PathContains(3): ["modules.3.weight", "modules.3.bias"],
        T.PathIn(("modules", 0, "bias")): ["modules.0.bias"],
    }
    chosen = make_exportable(net, None)
    for trainable, names in expected.items():
        found = [leaf.name for leaf in mark_trainable(chosen, trainable).leaves if leaf.trainable]
        assert found == names
    for trainable in (..., T.Param):
        assert sum(leaf.trainable for leaf in mark_trainable(chosen, trainable).leaves) == 6
    trainable = T.All(pax.Linear, T.Not("bias"))
    loaded, _ = export(net, spec("n, t, 3"), trainable=trainable, validate=True)
    assert len(loaded.trainable_variables) == 2
    with pytest.raises(InvalidArgumentError, match="(?s)filter selects no trainable.*0.weight"):
        to_saved_model(net, tmp_path / "new", spec("n, t, 3"), trainable=pax.Embed)
    with pytest.raises(InvalidArgumentTypeError, match="Filters select leaves of modules"):
        to_saved_model(
            (NESTED, lambda p, x: x), tmp_path / "new", spec("n"), trainable=T.PathContains("w")
        )
    assert not (tmp_path / "new").exists()


def test_gradients_of_complex_numbers_are_those_of_tensorflow(export):
    weight = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64)
    loaded, _ = export(
        ({"w": weight}, lambda p, z: jnp.abs(z * p["w"] + z**2) ** 2), spec("n, 2", "complex64"),
        trainable=True, validate=True,
    )  # fmt: skip
    z = tf.constant((random(3, 2) + 1j * random(3, 2)[::-1]).astype(np.complex64))
    w = tf.Variable(weight)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(z)
        ours = tf.reduce_sum(loaded(z))
        theirs = tf.reduce_sum(tf.abs(z * w + z**2) ** 2)
    for mine, other in ((z, z), (loaded.variables["w"], w)):
        assert_close(tape.gradient(ours, mine), tape.gradient(theirs, other), rtol=1e-4)
