"""What people have goes to the exporters as it is: functions, methods, modules of other libraries.

Stand-ins have the interface of equinox and haiku; `tests/oracles` has the libraries themselves.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.closeness import assert_close
from tests.refusals import refused
from tests.warm import ROOT

BATCH = spec("batch, 4")
X = np.arange(12, dtype="float32").reshape(3, 4)
W = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    """A pytree that can be called, as a module of equinox: its settings are leaves, too."""

    weight: Any
    function: Any = jnp.tanh
    power: int = 2

    def __call__(self, x):
        return self.function(x @ self.weight) ** self.power

    def twice(self, x):
        return 2 * self(x)


class Normal(NamedTuple):
    """A pytree that cannot be called, as a distribution of distrax."""

    mean: Any

    def log_prob(self, x):
        return -((x - self.mean) ** 2)


class Held:
    """An object that jax does not know."""

    def __init__(self):
        self.weight = jnp.asarray(W)

    def apply(self, x):
        return x @ self.weight


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = pax.Linear(4, 2), pax.Dropout(0.5)

    def encode(self, x, scale=1.0):
        return self.dropout(self.layer(x)) * scale

    def __call__(self, x):
        return self.encode(x) + 1


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.layer(x)))

    def encode(self, x):
        return self.layer(x)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        return linen.BatchNorm(use_running_average=not train)(linen.Dense(2)(x))


class Transformed(NamedTuple):
    """What `haiku.transform` gives."""

    init: Any
    apply: Any


def _apply(params, rng, image):
    assert rng is None
    return image @ params["linear"]["w"]


def _apply_with_state(params, state, rng, image):
    return image @ params["w"] + state["seen"], {"seen": state["seen"] + 1}


def affine(params, x, flip=False):
    return x @ params["w"] * (-1 if flip else 1)


SCALED, HELD, NET = Scaled(jnp.asarray(W)), Held(), Net()
NORMAL = Normal(jnp.asarray(W[:, 0]))
NNX = NnxNet(nnx.Rngs(0))
NNX.eval()
LINEN = LinenNet()
VARIABLES = LINEN.init(jax.random.key(0), X)
HAIKU = Transformed(None, _apply)
PARAMS = {"linear": {"w": jnp.asarray(W)}}

#: The model, its title, its leaves with those that are parameters, and what it gives.
FORMS = {
    "function": (jnp.sin, "sin", {}, lambda: np.sin(X)),
    "jitted": (jax.jit(lambda x: 2 * x), "function", {}, lambda: 2 * X),
    "ufunc": (jnp.square, "square", {}, lambda: X**2),
    "method": (NET.encode, "Net", {"layer.weight": True}, lambda: NET.eval().encode(X)),
    "jitted module": (jax.jit(NET), "Net", {"layer.weight": True}, lambda: NET.eval()(X)),
    "method of a pytree": (SCALED.twice, "Scaled", {"weight": True}, lambda: SCALED.twice(X)),
    "method of an object": (HELD.apply, "Held", {}, lambda: X @ W),
    "partial": (
        functools.partial(affine, {"w": W}, flip=True),
        "affine",
        {"params.w": True},
        lambda: -(X @ W),
    ),
    "partial of a module": (
        functools.partial(NET.encode, scale=3.0),
        "Net",
        {"layer.weight": True},
        lambda: NET.eval().encode(X, 3.0),
    ),
    "pytree": (SCALED, "Scaled", {"weight": True}, lambda: SCALED(X)),
    "method of a named tuple": (
        NORMAL.log_prob,
        "Normal",
        {"mean": True},
        lambda: NORMAL.log_prob(X),
    ),
    "vmap of a pytree": (jax.vmap(SCALED), "Scaled", {}, lambda: SCALED(X)),
    "pair with a lambda": (
        (SCALED, lambda model, x: jax.vmap(model)(x)),
        "Scaled",
        {"weight": True},
        lambda: SCALED(X),
    ),
    "nnx": (NNX, "NnxNet", {"layer.kernel": True, "norm.mean": False}, lambda: NNX(X)),
    "nnx, split": (nnx.split(NNX), "NnxNet", {"layer.kernel": True}, lambda: NNX(X)),
    "nnx, a method": (NNX.encode, "NnxNet", {"layer.kernel": True}, lambda: NNX.encode(X)),
    "linen": (
        (LINEN, VARIABLES),
        "LinenNet",
        {"params.Dense_0.kernel": True, "batch_stats.BatchNorm_0.mean": False},
        lambda: LINEN.apply(VARIABLES, X),
    ),
    "linen, bound": (
        LINEN.bind(VARIABLES),
        "LinenNet",
        {"params.Dense_0.kernel": True},
        lambda: LINEN.apply(VARIABLES, X),
    ),
    "haiku": ((HAIKU, PARAMS), "_apply", {"linear.w": True}, lambda: X @ W),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name, tmp_path):
    model, title, leaves, expected = FORMS[name]
    report = to_stablehlo(model, tmp_path / "net", BATCH, validate=False)
    assert report.model == title
    stored = {v.name.removesuffix(".value"): v.trainable for v in report.variables}
    assert leaves.items() <= stored.items(), stored
    assert_close(load(tmp_path / "net")(X), expected())


def test_names_of_inputs(tmp_path):
    """Those of the parameters, without what is bound and what holds the model."""
    for model, names in [
        (NET.encode, ["x"]),
        (functools.partial(affine, {"w": W}), ["x"]),
        ((HAIKU, PARAMS), ["image"]),
        ((LINEN, VARIABLES), ["x"]),
    ]:
        report = to_onnx(model, tmp_path / "net.onnx", BATCH, validate=False, overwrite=True)
        assert [each.name for each in report.signatures["serving_default"].inputs] == names


def test_settings_of_a_pytree_among_the_params(tmp_path):
    params = {"net": SCALED, "factor": 2.0}

    def apply(params, x):
        return jnp.concatenate([params["net"](x)] * params["net"].power) * params["factor"]

    report = to_stablehlo((params, apply), tmp_path / "net", BATCH, validate=False)
    assert sorted(each.name for each in report.variables) == ["factor", "net.weight"]
    assert_close(load(tmp_path / "net")(X), apply(params, X))


def test_settings_stay_what_they_are(tmp_path):
    """A number of a pytree, or bound in a partial, is Python's."""

    def repeated(x, *, times):
        return jnp.concatenate([x] * times)

    model = functools.partial(repeated, times=2)
    to_onnx(model, tmp_path / "net.onnx", BATCH, validate=False)
    assert load(tmp_path / "net.onnx")(X).shape == (6, 4)
    report = to_onnx(SCALED, tmp_path / "scaled.onnx", BATCH, validate=False)
    assert [each.name for each in report.variables] == ["weight"]


@pytest.mark.parametrize(
    "model, name",
    [(SCALED, "twice"), (NNX, "encode"), ((LINEN, VARIABLES), "__call__")],
    ids=["pytree", "nnx", "linen"],
)
def test_methods_by_name(model, name, tmp_path):
    methods = {"serving_default": "__call__", "other": name}
    inputs = dict.fromkeys(methods, BATCH)
    to_stablehlo(model, tmp_path / "net", inputs, methods=methods, validate=False)
    with pytest.raises(errors.InvalidArgumentError):
        to_stablehlo(model, tmp_path / "no", {"a": BATCH}, methods={"a": "missing"})


def test_state_of_a_transform(tmp_path):
    model = Transformed(None, _apply_with_state), {"w": W}, {"seen": np.float32(0)}
    with refused(errors.StateChangeError, "state.seen"):
        to_stablehlo(model, tmp_path / "net", BATCH)
    report = to_stablehlo(model, tmp_path / "net", BATCH, state="keep", validate=False)
    assert {v.name: v.trainable for v in report.variables} == {
        "params.w": True,
        "state.seen": False,
    }
    pair = model[0], model[1:]
    to_stablehlo(pair, tmp_path / "pair", BATCH, state="keep", validate=False)
    assert_close(load(tmp_path / "pair")(X), X @ W)


@pytest.mark.parametrize(
    "model, got, write",
    [
        (3, "int", "a function"),
        (pax.Linear, "the class Linear", "an instance of a Module"),
        (LINEN, "LinenNet", "(linen module, module.init(key, x))"),
        (HAIKU, "Transformed", "(haiku transform, its params)"),
        ((3, 4), "int, int", "(params, function)"),
        (jax.jit(jnp.sin).lower(X), "Lowered", "jitted, but not lowered"),
        (jax.jit(jnp.sin).lower(X).compile(), "Compiled", "jitted, but not lowered"),
    ],
    ids=["number", "class", "linen", "haiku", "tuple", "lowered", "compiled"],
)
def test_no_model(model, got, write, tmp_path):
    with refused(errors.InvalidArgumentTypeError, write, got=got):
        to_onnx(model, tmp_path / "net.onnx", BATCH)


def test_a_step_of_training(tmp_path):
    """The step is given the module itself."""

    def step(model, count, x):
        loss, slope = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), slope)
        )
        return model, count + 1, {"loss": loss}

    options = {"train_step": step, "optimizer": jnp.zeros(()), "train_inputs": BATCH}
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    to_saved_model(model, tmp_path / "net", BATCH, validate=False, **options)
    train = load(tmp_path / "net").signatures["train_step"]
    losses = [float(train(X / 10)["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_one_count_of_parameters_in_every_report(frozen, tmp_path):
    net = pax.Sequential(pax.Linear(4, 2), pax.BatchNorm1D(2), pax.Dropout(0.5))
    net = pax.freeze_parameters(net) if frozen else net
    count = 0 if frozen else 4
    for number, export in enumerate((to_saved_model, to_stablehlo, to_tflite, to_onnx)):
        path = tmp_path / f"{number}{['', '', '.tflite', '.onnx'][number]}"
        report = export(net, path, spec("batch, time, 4"), validate=False)
        assert sum(each.parameter for each in report.variables) == count
        assert f"({count} parameters" in str(report)
        roles = [row.role for row in pax.inspect(path) if row.kind == "array"]
        assert roles.count("trainable") == count


# --- keras models with the jax backend go to the exporters as they are ---


def test_exported_as_they_are(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.export.tracing.keras_models", str(tmp_path)],
        env={**os.environ, "KERAS_BACKEND": "jax"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr


def test_another_backend_is_refused(tmp_path):
    keras = pytest.importorskip("keras")
    if keras.config.backend() == "jax":
        pytest.skip("this process has the jax backend")
    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(errors.InvalidArgumentTypeError) as caught:
        to_onnx(net, tmp_path / "net.onnx", spec("batch, 4"))
    assert caught.value.got == "Sequential"
    assert "KERAS_BACKEND" in caught.value.write
