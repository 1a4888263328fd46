"""What a format refuses is named with its module: of layers alike the right one, wherever it is."""

import pickle

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import PaxError, SymbolicDimensionError, UnsupportedOperationError
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.refusals import refused


def of_lapack(x):
    return jnp.linalg.eigvals(x[..., None] * x[..., None, :]).real


def of_somebody(x):
    return jax.ffi.ffi_call("somebodys_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def of_python(x):
    return jax.pure_callback(np.sin, x, x)


def of_eigenvalues(x):
    return x + jnp.linalg.eigvals(x.T @ x).real


def of_few_bits(x):
    return jax.lax.reduce_precision(x, 4, 5)


class Attention(pax.Module):
    def __init__(self, function):
        super().__init__()
        self.inner = pax.Linear(3, 3)
        self.function = function

    def __call__(self, x):
        return self.function(self.inner(x))


class Layer(pax.Module):
    def __init__(self, function):
        super().__init__()
        self.attention = Attention(function)

    def __call__(self, x):
        return x + self.attention(x)


class Encoder(pax.Module):
    def __init__(self, function):
        super().__init__()
        self.layers = [Layer(each) for each in (jnp.tanh, jnp.tanh, function, jnp.tanh)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Net(pax.Module):
    def __init__(self, function, around=lambda call: call):
        super().__init__()
        self.encoder = Encoder(function)
        self.around = around

    def __call__(self, x):
        return self.around(self.encoder)(x)


def scanned(call):
    return lambda x: jax.lax.scan(lambda carry, _: (call(carry), None), x, None, length=2)[0]


AROUND = {
    "jit": lambda call: jax.jit(lambda x: call(x)),
    "remat": lambda call: jax.checkpoint(lambda x: call(x)),
    "scan": scanned,
}
REFUSED = {
    "saved_model: lapack": (to_saved_model, of_lapack, "x"),
    "saved_model: somebody": (to_saved_model, of_somebody, "x"),
    "saved_model: callback": (to_saved_model, of_python, "x"),
    "stablehlo: somebody": (to_stablehlo, of_somebody, "x"),
    "stablehlo: callback": (to_stablehlo, of_python, "x"),
    "tflite": (to_tflite, of_eigenvalues, "x.tflite"),
    "onnx": (to_onnx, of_few_bits, "x.onnx"),
}


def refusal(name, net, tmp_path, shape="2, 3"):
    export, _, file = REFUSED[name]
    with pytest.raises(PaxError) as caught:
        export(net, tmp_path / file, spec(shape))
    assert not list(tmp_path.iterdir())
    return caught.value


@pytest.mark.parametrize(
    ("name", "around"),
    [*((name, "plain") for name in REFUSED), *(("onnx", around) for around in AROUND)],
)
def test_a_refusal_names_the_module_of_the_operation(name, around, tmp_path):
    function = REFUSED[name][1]
    net = Net(function, AROUND[around]) if around in AROUND else Net(function)
    error = refusal(name, net, tmp_path)

    assert isinstance(error, UnsupportedOperationError)
    line = function.__code__.co_firstlineno + 1
    place = f"encoder.layers.2.attention: Attention, test_refused_modules.py:{line}"
    assert error.where.startswith(place)
    assert f"({function.__name__})" in error.where
    said = {"onnx": "ONNX cannot express the operation reduce_precision",
            "tflite": "TFLite cannot express the operation eig"}  # fmt: skip
    assert error.what.startswith(said.get(name, ""))
    assert pickle.loads(pickle.dumps(error)).where == error.where


def test_every_module_is_named_with_its_operation(tmp_path):
    error = refusal("tflite", Net(of_eigenvalues), tmp_path)
    assert ";" not in error.where
    error = refusal("onnx", Attention(of_few_bits), tmp_path)
    assert error.where.startswith("Attention, test_refused_modules.py:")
    both = pax.Sequential(Attention(of_python), pax.Identity(), Attention(of_python))
    first, second = refusal("saved_model: callback", both, tmp_path).where.split("; ")
    assert first.startswith("modules.0: Attention, ")
    assert second.startswith("modules.2: Attention, ")


def test_a_size_that_must_be_known_names_its_module(tmp_path):
    def inverse(x):
        return jnp.linalg.inv(x[..., None] + jnp.eye(x.shape[-1]))[..., 0]

    net = pax.Sequential(pax.Identity(), pax.Sequential(pax.Lambda(inverse)))
    with pytest.raises(SymbolicDimensionError) as caught:
        to_saved_model(net, tmp_path / "m", spec("2, n"), operations="xla")
    assert caught.value.where.startswith("modules.1.modules.0: Lambda, test_refused_modules.py:")


def test_a_gradient_that_is_refused_names_its_module(tmp_path):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, x), lambda x, slope: (of_somebody(slope),))
    net = pax.Sequential(pax.Identity(), pax.Lambda(double))
    with pytest.raises(UnsupportedOperationError) as caught:
        to_saved_model(net, tmp_path / "m", spec("2, 3"), vjp_order=1)
    assert caught.value.where.startswith("modules.1: Lambda, ")


def test_an_operation_outside_of_modules_is_named_by_its_line(tmp_path):
    error = refusal("onnx", ({}, lambda _, x: of_few_bits(x)), tmp_path)
    line = of_few_bits.__code__.co_firstlineno + 1
    assert error.where.startswith(f"test_refused_modules.py:{line}")


def test_names_do_not_change_the_artifact(tmp_path):
    """Nothing of the second look gets into an export, or into what is said of another."""
    net = Net(of_few_bits)
    refusal("onnx", net, tmp_path)
    report = to_saved_model(net, tmp_path / "m", spec("2, 3"), vjp_order=0)
    assert report.model == "Net"


MODELS = {
    "eig": lambda x: jnp.linalg.eig(x)[0].real,
    "schur": lambda x: jax.scipy.linalg.schur(x)[0],
    "hessenberg": jax.scipy.linalg.hessenberg,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_advice_is_an_exporter_that_takes_it(tmp_path, name):
    for exporter in (to_saved_model, to_onnx, to_tflite):
        with refused(UnsupportedOperationError, name) as error:
            exporter(MODELS[name], tmp_path / "model", spec("4, 4"))
        assert error.value.write.endswith('to_stablehlo(..., platforms=("cpu",))')
    to_stablehlo(MODELS[name], tmp_path / "bundle", spec("4, 4"), platforms=("cpu",))
    assert load(tmp_path / "bundle")(np.eye(4, dtype=np.float32)).shape[0] == 4
