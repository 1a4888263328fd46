"""A step of training as a signature: TensorFlow goes on where jax stopped.

`tests/consumers` trains a net of digits without jax.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentError, StateChangeError, StructureMismatchError
from pax_export.export import load, spec, to_saved_model
from tests.closeness import assert_close, is_close
from tests.export.models import affine, affine_params, random


@pytest.fixture
def train(tmp_path):
    def run(model, inputs, given, **options):
        options.setdefault("validate", False)  # what the calls return is compared with jax
        report = to_saved_model(model, tmp_path / "model", inputs, **options)
        loaded = load(tmp_path / "model")
        return loaded, report, [loaded.signatures["train_step"](*each) for each in given]

    return run


def test_training_mode_inside_and_eval_mode_outside(train):
    net = pax.Sequential(pax.BatchNorm1D(3), pax.Dropout(0.5)).eval()

    def forward(net, optimizer, x):
        net, y = net % x
        return net, optimizer, {"y": y, "training": jnp.array(net.training)}

    x = random(4, 2, 3)
    loaded, report, (first, second) = train(
        net, spec("n, 2, 3"), [(x,), (x,)], train_step=forward, optimizer=None,
        train_inputs=spec("n, 2, 3"),
    )  # fmt: skip
    assert bool(first["training"])
    assert not np.array_equal(first["y"], second["y"])  # another dropout
    expected = net.train()
    for result in (first, second):
        expected, y = expected % x
        assert_close(result["y"], y, atol=1e-5)
    assert_close(loaded(x), expected.eval()(x), atol=1e-5)  # other statistics
    assert "modules.1.rng_key" in report.signatures["train_step"].assigns
    assert report.signatures["serving_default"].assigns == ()


def test_a_model_in_modes_of_its_own_keeps_them(train):
    net = pax.Sequential(pax.BatchNorm1D(3).eval(), pax.BatchNorm1D(3))

    def forward(net, optimizer, x):
        flags = jnp.array([layer.training for layer in net.modules[:2]])
        return net, optimizer, flags

    _, _, (flags,) = train(
        net, spec("n, 2, 3"), [(random(1, 2, 3),)], train_step=forward,
        train_inputs=spec("n, 2, 3"),
    )  # fmt: skip
    assert flags.tolist() == [False, True]


def test_strides_along_a_symbolic_length(train):
    net = pax.Sequential(pax.Conv1D(2, 3, 3, stride=2), lambda x: x.max(axis=1), pax.Linear(3, 1))

    def step(net, optimizer, x):
        loss, slope = pax.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        return jax.tree.map(lambda w, g: w - 0.1 * g, net, slope), optimizer, loss

    def found(net, x):
        losses = []
        for _ in range(3):
            net, _, loss = step(net, None, x)
            losses.append(loss)
        return losses

    shape, x = spec("n, length, 2"), random(4, 9, 2)
    losses = train(net, shape, [(x,)] * 3, train_step=step, train_inputs=shape)[2]
    assert_close(losses, found(net, x), rtol=1e-4)


def test_any_pytree_trains_with_any_optimizer(train):
    rule = optax.sgd(0.1, momentum=0.9)
    params = jax.tree.map(jnp.asarray, affine_params())

    def step(params, state, x, *, target=1.0):
        loss, gradients = jax.value_and_grad(lambda p: ((affine(p, x) - target) ** 2).mean())(
            params
        )
        updates, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    x = random(5, 3)
    loaded, report, losses = train(
        (params, affine), spec("n, 3"), [(x,)] * 4, train_step=step,
        optimizer=rule.init(params), train_inputs=spec("n, 3"), trainable=True,
    )  # fmt: skip
    state, expected = rule.init(params), []
    for _ in range(4):
        params, state, loss = step(params, state, x)
        expected.append(float(loss))
    assert_close(losses, expected, rtol=1e-4)
    assert_close(loaded(x), affine(params, x), atol=1e-5)
    assert [v.name for v in report.variables] == [
        "b", "w", "optimizer.0.trace.b", "optimizer.0.trace.w",
    ]  # fmt: skip
    assert [v.name for v in report.variables if v.trainable] == ["b", "w"]


def test_text_trains_too_and_several_methods_serve(train):
    tf = pytest.importorskip("tensorflow")
    params = jax.tree.map(jnp.asarray, affine_params())

    def step(params, rate, x):
        gradient = jax.grad(lambda p: (affine(p, x) ** 2).mean())(params)
        new = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
        return new, 0.5 * rate, rate

    loaded, _, rates = train(
        (params, affine), {"a": spec("n, 3"), "b": spec("n, 3")}, [([["1", "2", "3"]],)] * 2,
        methods={"a": affine, "b": lambda p, x: -affine(p, x)},
        train_step=step, optimizer=0.5, train_inputs=spec("n, 3"),
        preprocess={"train_step": tf.strings.to_number},
        preprocess_inputs={"train_step": spec("n, 3", "string")},
        examples={"train_step": [[["1", "2", "3"]]]},
    )  # fmt: skip
    assert [float(rate) for rate in rates] == [0.5, 0.25]
    x = random(2, 3)
    assert_close(loaded.signatures["a"](x), -loaded.signatures["b"](x), atol=1e-6)
    assert not is_close(loaded.signatures["a"](x), affine(params, x))


def test_a_step_that_trains_wrongly_is_found_out(tmp_path, monkeypatch):
    from pax_export.errors import ValidationError
    from pax_export.export.formats.saved_model import writer as saved_model

    def export(name, factor, **options):
        def step(params, optimizer, x):
            gradient = jax.grad(lambda p: (affine(p, x) ** 2).mean())(params)
            rate = factor * optimizer["rate"]
            new = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
            return new, optimizer, x.sum()

        to_saved_model(
            (affine_params(), affine), tmp_path / name, spec("n, 3"), train_step=step,
            optimizer={"rate": jnp.float32(0.1)}, train_inputs=spec("n, 3"), **options,
        )  # fmt: skip

    def write(directory, *_):
        shutil.copytree(tmp_path / "wrong", directory, dirs_exist_ok=True)

    export("wrong", 1.01, validate=False)
    monkeypatch.setattr(saved_model, "write", write)
    with pytest.raises(ValidationError, match="variable:b"):
        export("right", 1.0)


def ok(params, optimizer, x):
    return params, optimizer, x.sum()


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (InvalidArgumentError, {"optimizer": 1}, "train_step=None"),
        (InvalidArgumentError, {"train_step": ok}, "requires train_inputs"),
        (InvalidArgumentError, {"train_step": 3, "train_inputs": spec("n")}, "train_step=3"),
        (
            InvalidArgumentError,
            {"train_step": lambda p, o, x: (p, o), "train_inputs": spec("n")},
            "(?s)must return .model, optimizer, metrics.*got: 2 values",
        ),
        (
            InvalidArgumentError,
            {"train_step": lambda p, o, x: (p, o, {}), "train_inputs": spec("n")},
            "returns no array",
        ),
        (
            StructureMismatchError,
            {"train_step": lambda p, o, x: (p, {}, x), "train_inputs": spec("n"), "optimizer": 1},
            "(?s)where: train_step.*the structure that it was given",
        ),
        (
            StateChangeError,
            {"train_step": lambda p, o, x: (p, o + 0.5, x), "train_inputs": spec("n"),
             "optimizer": 1},
            "(?s)where: optimizer.*float32",
        ),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_exported(tmp_path, error, options, message):
    with pytest.raises(error, match=message):
        to_saved_model((affine_params(), affine), tmp_path / "model", spec("n, 3"), **options)
    assert not list(tmp_path.iterdir())


def test_the_name_of_the_step_is_taken(tmp_path):
    with pytest.raises(InvalidArgumentError, match="is reserved for"):
        to_saved_model(
            (affine_params(), affine), tmp_path / "model", {"train_step": spec("n, 3")},
            methods={"train_step": affine}, train_step=ok, train_inputs=spec("n"),
        )  # fmt: skip
