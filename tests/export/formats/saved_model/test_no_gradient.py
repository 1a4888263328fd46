"""Gradients that nobody asked for are what an export can hold; the report says what it cannot."""

import jax
import jax.numpy as jnp
import pytest

from pax_export.errors import GradientMismatchError, NotDifferentiableError
from pax_export.export import load, spec, symbolic_numpy, to_saved_model, to_stablehlo
from pax_export.export.formats.saved_model import run as running
from pax_export.export.orbax import JaxModule
from tests.closeness import assert_close
from tests.export.models import affine, affine_params, random
from tests.refusals import refused

tf = pytest.importorskip("tensorflow")


def compares(params, x):
    """Its derivative compares two sizes, which nobody knows."""

    @jax.custom_jvp
    def function(x):
        return x * 2

    @function.defjvp
    def derivative(primals, tangents):
        (x,), (t,) = primals, tangents
        return function(x), 2 * t if x.shape[0] > 3 else t + t

    return function(x)


def doubled(backward):
    """A function whose derivative is this."""

    def model(params, x):
        @jax.custom_vjp
        def function(x):
            return x * 2

        function.defvjp(lambda x: (2 * x, x), backward)
        return function(x)

    return model


def raising(x, g):
    raise RuntimeError("nobody wrote this")


def calls_back(x, g):
    return (jax.pure_callback(lambda g: g, jax.ShapeDtypeStruct(g.shape, g.dtype), g),)


def until(params, x):
    return jax.lax.while_loop(lambda c: (c**2).sum() < 10, lambda c: 2 * c + 0.1, x)


FAILING = {
    "compares": (compares, "InconclusiveDimensionOperation: "),
    "of another shape": (doubled(lambda x, g: (g.sum(),)), "Custom VJP bwd rule"),
    "raises": (doubled(raising), "RuntimeError: nobody wrote this"),
    "until": (until, "Reverse-mode differentiation"),
    "calls back": (doubled(calls_back), "The model calls back into Python"),
}


@pytest.mark.parametrize("name", FAILING)
def test_without_a_gradient_there_is_a_whole_export_that_says_why(export, name):
    model, why = FAILING[name]
    loaded, report = export(({}, model), spec("n, 4"), validate=model is until)
    info = report.signatures["serving_default"]
    assert (info.vjp_order, info.differentiable) == (0, False)
    assert info.no_gradient.startswith("no gradients: jax cannot make them: ")
    assert why in info.no_gradient
    assert "\n" not in info.no_gradient
    assert f"    {info.no_gradient}\n" in str(report)
    if model is until:
        x = random(2, 4)
        assert_close(loaded(x), model({}, x), atol=1e-5)
        line = until.__code__.co_firstlineno + 1
        assert f"(test_no_gradient.py:{line})" in info.no_gradient


@pytest.mark.parametrize("name", FAILING)
def test_one_that_was_asked_for_is_refused(tmp_path, name):
    model, _ = FAILING[name]
    params, function = {"w": jnp.ones(4)}, lambda p, x: model({}, x * p["w"])
    words = r"(?s)where: serving_default\n.*while_loop" if model is until else r"where: |cannot"
    for options in ({"vjp_order": 1}, {"trainable": True}, {"vjp_order": 2}):
        with pytest.raises((NotDifferentiableError, NotImplementedError), match=words):
            to_saved_model((params, function), tmp_path / "model", spec("n, 4"), **options)
    assert not list(tmp_path.iterdir())
    module = JaxModule(params, function, trainable=True, input_polymorphic_shape="n, ...")
    with pytest.raises((NotDifferentiableError, NotImplementedError)):
        module.methods[JaxModule.DEFAULT_METHOD_KEY].get_concrete_function(tf.TensorSpec([None, 4]))


def test_integers_have_none_and_to_ask_for_it_is_a_mistake(tmp_path, export):
    def double(params, n):
        return 2 * n

    _, report = export(({}, double), spec("k", "int32"))
    assert report.signatures["serving_default"].no_gradient == (
        "no gradients: no floating-point output depends on a floating-point input or trainable "
        "variable"
    )
    with refused(
        NotDifferentiableError, where="serving_default", write="vjp_order=0, or no vjp_order at all"
    ):
        to_saved_model(({}, double), tmp_path / "b", spec("k", "int32"), vjp_order=1)


def test_nothing_is_said_where_nothing_is_missing(export):
    _, report = export((affine_params(), affine), spec("n, 3"), trainable=True)
    assert report.signatures["serving_default"].no_gradient == ""
    _, report = export(
        (affine_params(), affine), spec("n, 3"), vjp_order=0, overwrite=True
    )  # asked for
    assert report.signatures["serving_default"].no_gradient == ""


def test_second_order_that_is_missing_is_said(export, tmp_path):
    once = doubled(lambda x, g: (until(None, x) * g,))
    weights = ({"w": jnp.ones(4)}, lambda params, x: once({}, x * params["w"]))
    _, report = export(weights, spec("n, 4"), trainable=True)
    info = report.signatures["serving_default"]
    assert info.vjp_order == 1
    assert info.no_gradient.startswith("no gradients of gradients: jax cannot make them: ")
    with refused(NotDifferentiableError, "a lower vjp_order"):
        to_saved_model(weights, tmp_path / "other", spec("n, 4"), trainable=True, vjp_order=2)


def test_a_bundle_refuses_the_same(tmp_path):
    for model in (until, compares, doubled(raising)):
        with refused(NotDifferentiableError, write="a lower vjp_order"):
            to_stablehlo(({}, model), tmp_path / "model", spec("n, 4"), vjp_order=1)


# --- gradients that jax alone cannot make of symbolic sizes --------------------------------


PRODUCTS = [
    (lambda p, x: jnp.prod(x, -1), "n, 5"),
    (lambda p, x: jnp.prod(x, 0), "n, 3"),
    (lambda p, x: jnp.prod(x), "n, 3"),
    (lambda p, x: jax.vmap(jnp.prod)(x), "n, 4"),
    (lambda p, x: jax.lax.scan(lambda c, r: (c, jnp.prod(r * c)), 1.5, x)[1], "n, 3"),
]


@pytest.fixture
def bundle(tmp_path):
    def make(model, shape, order):
        path = tmp_path / "bundle"
        to_stablehlo(
            ({}, model), path, spec(shape), vjp_order=order, platforms=("cpu",), validate=False
        )
        return load(path)

    return make


@pytest.mark.parametrize(("model", "shape"), PRODUCTS)
def test_the_gradient_of_a_product(bundle, model, shape):
    x = random(3, int(shape[-1]))
    x[0, 0] = x[1, 1] = x[1, 2] = 0.0  # one zero, and two: no division will do

    def first(function):
        def loss(x):
            made = function(x)
            return jnp.sum(made.ravel() * jnp.arange(1.0, 1.0 + made.size))

        return jax.grad(loss)

    def second(function):
        return jax.grad(lambda x: (first(function)(x) ** 2).sum())(x)

    expected, found = lambda x: model({}, x), bundle(model, shape, 2)
    assert_close(first(found)(x), first(expected)(x), rtol=1e-4, atol=1e-5)
    assert_close(second(found), second(expected), rtol=1e-3, atol=1e-4)


def gram(x):
    return x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(x.shape[-2])


def triangular(**options):
    return lambda p, x: jax.lax.linalg.triangular_solve(gram(x), x, left_side=True, **options)


SYMBOLIC = {
    "cho_solve": lambda p, x: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram(x)), True), x),
    "upper": triangular(lower=False),
    "lower, transposed": triangular(lower=True, transpose_a=True),
    "unit": triangular(lower=True, unit_diagonal=True),
    "right": lambda p, x: jax.lax.linalg.triangular_solve(gram(x), x.T, lower=True),
    "cumprod": lambda p, x: jnp.cumprod(x, 0),
    "cummax": lambda p, x: jax.lax.cummax(x, 0, reverse=True),
    "cummin": lambda p, x: jax.lax.cummin(x, 0),
    "cumlogsumexp": lambda p, x: jax.lax.cumlogsumexp(x, 0),
    "forces": lambda p, x: symbolic_numpy.grad(lambda x: jnp.prod(jnp.tanh(x), -1).sum())(x),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_the_gradient_of_symbolic_rows(bundle, name):
    model, x = SYMBOLIC[name], random(7, 3)
    loaded = bundle(model, "n, 3", 1)
    found = jax.grad(lambda x: (loaded(x) ** 2).sum())(x)
    expected = jax.grad(lambda x: (model({}, x) ** 2).sum())(x)
    assert_close(found, expected, rtol=1e-3, atol=1e-4)


# --- a gradient that was made, and is not right where it is served --------------------------


@pytest.fixture
def broken_gradients(monkeypatch):
    """TensorFlow fails to compute gradients, or computes others, and is right otherwise."""

    def install(change):
        call = running._call_one

        def damaged(tf, model, case, function=None):
            results = call(tf, model, case, function)
            return change(results) if case.get("cotangents") else results

        monkeypatch.setattr(running, "_call_one", damaged)

    return install


def wrong(results):
    return {name: x + 1 if name.startswith("gradient:") else x for name, x in results.items()}


def fails(results):
    raise RuntimeError("no kernel for this gradient")


@pytest.mark.parametrize("change", [wrong, fails])
def test_one_that_fails_where_it_is_served_is_left_out(tmp_path, broken_gradients, change):
    broken_gradients(change)
    model = (affine_params(), affine)
    report = to_saved_model(model, tmp_path / "model", spec("n, 3"))
    info = report.signatures["serving_default"]
    assert info.vjp_order == 0
    assert info.no_gradient.startswith("no gradients: in TensorFlow they ")
    assert report.largest_error["serving_default: output"] < 1e-5
    for options in ({"vjp_order": 1}, {"trainable": True}):
        with pytest.raises(GradientMismatchError):
            to_saved_model(model, tmp_path / "other", spec("n, 3"), **options)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
