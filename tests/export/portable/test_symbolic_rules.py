"""Operations that jax knows for numbers only, along sizes that nobody knows yet."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax._src.interpreters import mlir
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad, batching

from pax_export import errors
from pax_export.export import load, spec, symbolic_numpy, to_onnx, to_saved_model, to_stablehlo
from pax_export.export.portable.any_size import lowerable
from tests.closeness import assert_close
from tests.export.models import random
from tests.refusals import refused


def own_kernel(params, x):
    kernels = jnp.einsum("btc,tkcd->bkcd", x[:, :4], params["make"])

    def convolve(row, kernel):
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            row[None], kernel, (1,), "SAME", dimension_numbers=numbers
        )[0]

    return jax.vmap(convolve)(x, kernels)


def spectrum(params, x):
    """A real transform, one over two axes, and back again."""
    halves = jnp.fft.rfft(x * params["scale"], axis=1)
    mixed = jnp.fft.fft2(x, axes=(1, 2)).real
    filtered = symbolic_numpy.irfft(halves * jnp.exp(-jnp.abs(halves)), n=x.shape[1], axis=1)
    return {"size": jnp.abs(halves), "mixed": mixed, "filtered": filtered}


def recurrence(params, x):
    """A linear recurrence, as state space models have it, forwards and backwards."""

    def combine(before, after):
        return before[0] * after[0], before[1] * after[0] + after[1]

    decay = jax.nn.sigmoid(x * params["decay"])
    there = symbolic_numpy.associative_scan(combine, (decay, x), axis=1)[1]
    back = symbolic_numpy.associative_scan(combine, (decay, x), axis=1, reverse=True)[1]
    return there + back * jnp.cumprod(decay, axis=1)


def noisy(params, x):
    keys = jax.random.split(jax.random.key(3), x.shape[0])
    rows = jax.vmap(lambda key, row: row + jax.random.normal(key, row.shape))(keys, x)
    return rows * params["scale"], jax.random.bits(jax.random.key(1), x.shape[:2])


def grouped(params, x):
    """As many groups as there are examples, given by the model itself."""
    kernels = params["scale"] * jnp.arange(3.0) * jnp.ones((x.shape[0], 1, 1))
    return jax.lax.conv_general_dilated(
        x[None], kernels, (1,), "SAME", feature_group_count=x.shape[0]
    )[0]


def strided(params, x):
    """Windows with strides over a size that nobody knows, of convolutions and of pools."""
    numbers = ("NHC", "HIO", "NHC")
    for edges in ("SAME", "VALID", [(2, 1)]):
        x = jax.lax.conv_general_dilated(
            x, params["kernel"], (2,), edges, dimension_numbers=numbers
        )
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "SAME")


SCALE = {"scale": np.float32(0.5)}
MODELS = {
    "own kernels": (own_kernel, {"make": random(4, 3, 2, 5)}, "batch, 6, 2"),
    "transforms": (spectrum, SCALE, "batch, length, 4"),
    "recurrence": (recurrence, {"decay": np.float32(0.7)}, "batch, length, 3"),
    "keys": (noisy, SCALE, "batch, length"),
    "groups": (grouped, SCALE, "batch, 7"),
    "strides": (strided, {"kernel": random(3, 2, 2)}, "batch, length, 2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_exported_with_gradients(name, tmp_path):
    function, params, shape = MODELS[name]
    options = {"vjp_order": 1, "platforms": ("cpu",)}
    to_stablehlo((params, function), tmp_path / "m", spec(shape), **options)
    sizes = [3 if word == "batch" else 70 if word == "length" else int(word)
             for word in shape.split(", ")]  # fmt: skip
    x = random(*sizes)
    expected, found = jax.jit(function)(params, x), load(tmp_path / "m")(x)
    jax.tree.map(lambda one, two: assert_close(one, two, rtol=1e-4, atol=1e-4), found, expected)


def test_transforms_of_every_kind():
    def kinds(real, whole):
        size = real.shape[1]
        return [
            jnp.fft.fft(whole, axis=1),
            jnp.fft.ifft(whole, axis=1),
            jnp.fft.rfft(real, axis=1),
            symbolic_numpy.irfft(whole, axis=1, n=2 * size - 1),
            symbolic_numpy.irfft(whole, axis=1, n=2 * size),
            jnp.fft.rfftn(real),
            jnp.fft.ifft2(whole, axes=(1, 2)),
            jax.lax.fft(jnp.tile(whole, (1, 1, 100)), "irfft", (size, 598)),
        ]

    (n,) = jax.export.symbolic_shape("n")
    structs = [jax.ShapeDtypeStruct((2, n, 3), each) for each in (np.float32, np.complex64)]
    program = lowerable(jax.make_jaxpr(kinds)(*structs))
    exported = jax.export.export(jax.jit(jaxpr_as_fun(program)))(*structs)
    for length in (1, 2, 65):
        real = random(2, length, 3)
        whole = (real + 1j * real[::-1]).astype(np.complex64)
        wide = np.tile(whole, (1, 1, 100))
        expected = [
            np.fft.fft(whole, axis=1),
            np.fft.ifft(whole, axis=1),
            np.fft.rfft(real, axis=1),
            np.fft.irfft(whole, axis=1, n=2 * length - 1),
            np.fft.irfft(whole, axis=1, n=2 * length),
            np.fft.rfftn(real),
            np.fft.ifft2(whole, axes=(1, 2)),
            np.fft.irfft2(wide, (length, 598), axes=(1, 2)),
        ]
        for one, other in zip(exported.call(real, whole), expected, strict=True):
            assert_close(one, other, rtol=1e-4, atol=2e-4)


def tables_of_jax():
    """Namespaces, and rules to lower, batch and differentiate operations."""
    named = [jnp, jax.lax, jax.nn, jnp.fft, jnp.linalg, jax.lax.linalg, jax.random, jax.scipy]
    convolutions = inspect.unwrap(jax.lax.conv_general_dilated).__globals__
    tables = [*map(vars, named), convolutions, mlir._lowerings]
    tables += [table for table in vars(ad).values() if isinstance(table, dict)]
    tables += [table for table in vars(batching).values() if isinstance(table, dict)]
    specific = dict(mlir._platform_specific_lowerings)
    return [dict(table) for table in (*tables, *filter(None, specific.values()))]


def test_threads_that_train_see_the_namespaces_of_jax_unchanged(tmp_path):
    warm = jax.export.export(jax.jit(jnp.sin), platforms=("cpu", "cuda", "rocm", "tpu"))
    warm(jnp.ones(2))  # what jax itself registers when it is first asked
    before = tables_of_jax()
    done, changed, losses = threading.Event(), [], []

    def train():
        loss = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean(jax.nn.gelu(x @ w) ** 2)))
        w, x = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), jnp.ones((5, 4))
        while not done.wait(0.05):  # an export takes some hundred times as long
            value, slope = loss(w, x)
            w = w - 0.1 * slope
            losses.append(float(value))
            for held, now in zip(before, tables_of_jax()):
                # What a file registers for operations of its own when it is loaded is new.
                changed.extend(name for name in held if now.get(name) is not held[name])

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for name in ("strides", "transforms"):
            function, params, shape = MODELS[name]
            model = params, function
            report = to_saved_model(model, tmp_path / name, spec(shape), trainable=True)
            assert report.oldest_tensorflow == "2.15"
        options = {"validate": False}
        to_saved_model(({}, decomposed), tmp_path / "m", spec("batch, 3, 3"), **options)
        function, params, shape = MODELS["recurrence"]
        to_stablehlo((params, function), tmp_path / "bundle", spec(shape), vjp_order=1, **options)
        to_onnx((params, function), tmp_path / "onnx", spec(shape), **options)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not changed
    assert len(losses) > 4


def decomposed(params, x):
    return jnp.linalg.eigh(x)[0], jnp.linalg.svd(x)[1], jnp.linalg.cholesky(x @ x.mT)


@pytest.mark.parametrize(
    ("function", "write"),
    [
        (lambda p, x: jnp.ones(len(x)) * p["shift"], "x.shape[0] for len(x)"),
        (lambda p, x: x * jnp.linspace(0.0, p["shift"], x.shape[0]), "symbolic_numpy.linspace"),
        (lambda p, x: x[x.shape[0] // 2] * p["shift"], "jax.numpy.asarray(size) as the index"),
        (lambda p, x: jax.grad(lambda x: jnp.prod(x * p["shift"]))(x), "symbolic_numpy.grad"),
        (
            lambda p, x: jnp.pad(x, 1).sum() + jnp.linspace(0.0, p["shift"], x.shape[0]),
            "symbolic_numpy.linspace",
        ),
        (
            lambda p, x: jax.lax.associative_scan(jnp.add, x * p["shift"]),
            "symbolic_numpy.associative_scan",
        ),
        (lambda p, x: jax.hessian(lambda x: jnp.prod(x * p["shift"]))(x), "symbolic_numpy.hessian"),
    ],
)
def test_what_jax_wants_as_a_number_names_what_to_write(tmp_path, function, write):
    with pytest.raises(errors.SymbolicDimensionError) as caught:
        to_saved_model(({"shift": np.float32(1)}, function), tmp_path / "m", spec("n"))
    named = f"{write} of pax_export.export" if "symbolic" in write else write
    assert f"{named}; or " in caught.value.write
    assert caught.value.where.startswith("test_symbolic_rules.py:")


def reshaped_by(size):
    return lambda x: jnp.linspace(0.0, 1.0, 5).sum() + jnp.reshape(x, (-1, size)).sum(1)


@pytest.mark.parametrize("size", [2, 3])
def test_what_has_no_counterpart_is_refused_without_one(tmp_path, size):
    with refused(errors.SymbolicDimensionError, got="the symbolic dimension n") as caught:
        to_saved_model(reshaped_by(size), tmp_path / "m", spec("n"))
    assert "symbolic_numpy" not in caught.value.write


def accumulated(x):
    return {
        f"{function.__name__}_{reverse}": function(x[1:], 0, reverse)
        for function in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
        for reverse in (False, True)
    }


def test_accumulations_of_what_may_be_empty(tmp_path):
    to_stablehlo(accumulated, tmp_path / "m", spec("n, 2"), vjp_order=1)
    for n in (2, 5):
        x = np.random.default_rng(n).normal(size=(n, 2)).astype(np.float32)
        found, expected = load(tmp_path / "m")(x), accumulated(x)
        for name, value in expected.items():
            assert_close(found[name], value, rtol=1e-6, where=name)


def test_derivatives_of_derivatives_along_symbolic_sizes():
    def energy(x):
        return jnp.sum(jnp.cumprod(x)) + jnp.prod(x)

    def kinds(x):
        twice = symbolic_numpy.grad(lambda x: (symbolic_numpy.grad(energy)(x) ** 2).sum())
        value, pull_back = symbolic_numpy.vjp(energy, x)
        return [symbolic_numpy.hessian(energy)(x), twice(x),
                symbolic_numpy.jvp(energy, (x,), (x,))[1], pull_back(value)[0],
                *symbolic_numpy.value_and_grad(energy)(x),
                symbolic_numpy.jacfwd(jnp.cumprod)(x),
                symbolic_numpy.jacrev(jnp.cumprod)(x)]  # fmt: skip

    (n,) = jax.export.symbolic_shape("n")
    program = jax.make_jaxpr(kinds)(jax.ShapeDtypeStruct((n,), np.float32))
    exported = jax.export.export(jax.jit(jaxpr_as_fun(lowerable(program))))(
        jax.ShapeDtypeStruct((n,), np.float32)
    )
    x = random(4)
    for found, expected in zip(exported.call(x), jax.jit(kinds)(x)):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


REFUSED = {
    "inverses": (lambda p, x: jnp.linalg.inv(x) + p["shift"], "lu"),
    "eigenvalues": (lambda p, x: jnp.linalg.eigvalsh(x + p["shift"]), "eigh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_can_do_is_refused_with_operation_line_and_size(name, tmp_path):
    function, operation = REFUSED[name]
    with pytest.raises(errors.SymbolicDimensionError) as caught:
        to_saved_model(
            ({"shift": np.float32(1)}, function), tmp_path / "m", spec("n, n"), operations="xla"
        )
    error = caught.value
    assert error.what.startswith(f"The operation {operation} needs sizes that are known: ")
    assert error.where.startswith("test_symbolic_rules.py:")
    assert error.got == "the symbolic dimension n"
    assert error.write.startswith("a number instead of 'n' in its spec")
    assert not list(tmp_path.iterdir())


def counted(x):
    n = x.shape[0]
    rows = x[:, None] * jnp.array([1.0, -2.0])
    return {
        "linspace": symbolic_numpy.linspace(-1.0, 1.0, n),
        "open": symbolic_numpy.linspace(0, 1, n, endpoint=False),
        "whole": symbolic_numpy.linspace(0, 100, n, dtype=int),
        "many": symbolic_numpy.linspace(x[:2], x[:2] + 3, n, axis=1),
        "log": symbolic_numpy.logspace(0, 1, n),
        "arange": symbolic_numpy.arange(0.0, n),
        "indices": symbolic_numpy.indices((n, 2)),
        "sparse": symbolic_numpy.indices((2, n), sparse=True),
        "hanning": symbolic_numpy.hanning(n),
        "hamming": symbolic_numpy.hamming(n),
        "blackman": symbolic_numpy.blackman(n),
        "bartlett": symbolic_numpy.bartlett(n),
        "kaiser": symbolic_numpy.kaiser(n, 5.0),
        "left": symbolic_numpy.searchsorted(jnp.sort(x), jnp.append(x, jnp.nan)),
        "right": symbolic_numpy.searchsorted(jnp.sort(x), x, side="right"),
        "interp": symbolic_numpy.interp(symbolic_numpy.linspace(-2.0, 2.0, 7), jnp.sort(x), x),
        "reflect": symbolic_numpy.pad(x, (2, 3), mode="reflect"),
        "symmetric": symbolic_numpy.pad(rows, ((4, 1), (1, 1)), mode="symmetric"),
        "wrap": symbolic_numpy.pad(x, 2, mode="wrap"),
        "full": symbolic_numpy.convolve(x, jnp.array([1.0, 2.0, 5.0])),
        "same": symbolic_numpy.convolve(x, jnp.array([1.0, 2.0]), mode="same"),
        "valid": symbolic_numpy.correlate(x, jnp.array([1.0, 2.0]), mode="valid"),
        "slope": symbolic_numpy.gradient(x, 0.5),
        "slopes": symbolic_numpy.gradient(x[:, None] * jnp.arange(3.0), 0.5, 2.0),
        "one axis": symbolic_numpy.gradient(x[:, None] * jnp.arange(3.0), axis=(0,)),
        "unrolled": jax.lax.scan(lambda c, v: (c + v, c), 0.0, x, unroll=2),
        "rest": jax.lax.scan(lambda c, v: (c + v, c), 0.0, x[2:], reverse=True),
        "map": jax.lax.map(jnp.sin, x, batch_size=2),
        "filled": (x[:, None] * x).at[symbolic_numpy.diag_indices(n)].set(7.0),
    }  # fmt: skip


def test_functions_that_ask_for_a_size_give_what_jax_gives():
    (n,) = jax.export.symbolic_shape("n", constraints=("n >= 2",))
    struct = jax.ShapeDtypeStruct((n,), np.float32)
    program, result = jax.make_jaxpr(counted, return_shape=True)(struct)
    exported = jax.export.export(jax.jit(jaxpr_as_fun(lowerable(program))))(struct)
    for size in (2, 5):
        x = random(size)
        found = jax.tree.unflatten(jax.tree.structure(result), exported.call(x))
        expected = jax.jit(counted)(x)
        for name, value in expected.items():
            for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(value)):
                assert one.dtype == other.dtype, name
                assert_close(one, other, rtol=1e-5, atol=1e-5, where=name)


def test_a_size_that_is_asked_for_in_vain_is_refused_as_jax_does():
    (n,) = jax.export.symbolic_shape("n")
    struct = jax.ShapeDtypeStruct((n,), np.float32)
    with pytest.raises(Exception, match="'n' >= '3' is inconclusive"):
        jax.export.export(jax.jit(lambda x: symbolic_numpy.convolve(x, jnp.ones(3), mode="same")))(
            struct
        )
    with pytest.raises(TypeError, match="no_such"):
        jax.export.export(jax.jit(lambda x: symbolic_numpy.linspace(0, 1, x.shape[0], no_such=1)))(
            struct
        )


def dynamic_unroll():
    def forward(x):
        core = hk.LSTM(4)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    net = hk.without_apply_rng(hk.transform(forward))
    return net, net.init(jax.random.key(0), np.ones((5, 2, 3), np.float32))


OF_LIBRARIES = {
    "length": lambda x: lax.scan(lambda c, row: (c + row, c), 0 * x[0], x, length=x.shape[0]),
    "length alone": lambda x: lax.scan(lambda c, _: (c + x[0], c), x[0], length=x.shape[0]),
    "haiku": dynamic_unroll(),
    "circular": nnx.Conv(3, 2, 3, padding="CIRCULAR", rngs=nnx.Rngs(0)),
    "reflect": nnx.Conv(3, 2, 3, padding="REFLECT", rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_libraries_take_sizes_of_any_value(tmp_path, name):
    model, pad, scan = OF_LIBRARIES[name], jnp.pad, lax.scan
    to_onnx(model, tmp_path / "m.onnx", spec("t, b, 3"), card=False)
    x = random(6, 2, 3) if name in ("length", "length alone", "haiku") else random(2, 6, 3)
    expected = model[0].apply(model[1], x) if name == "haiku" else model(x)
    for one, other in zip(jax.tree.leaves(load(tmp_path / "m.onnx")(x)), jax.tree.leaves(expected)):
        assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (jnp.pad, lax.scan) == (pad, scan)


def test_other_threads_keep_the_functions_of_jax_meanwhile(tmp_path):
    refused = []

    def elsewhere():
        scan = OF_LIBRARIES["length"]
        (t,) = jax.export.symbolic_shape("t")
        with pytest.raises(Exception, match="constant"):
            jax.eval_shape(scan, jax.ShapeDtypeStruct((t, 3), np.float32))
        refused.append(lax.scan)

    def model(x):
        with ThreadPoolExecutor() as other:
            other.submit(elsewhere).result()
        return OF_LIBRARIES["length"](x)[0]

    to_onnx(model, tmp_path / "m.onnx", spec("t, 3"), card=False)
    assert len(refused) > 1 and lax.scan is refused[0]


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (lax.linalg.ormqr, [(4, 0), (0,), (4, 2)]),
        (lax.linalg.tridiagonal_solve, [(0,), (0,), (0,), (0, 2)]),
    ],
)
def test_arrays_without_elements_are_lowered(operation, shapes):
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    program = lowerable(jax.make_jaxpr(operation)(*arrays))
    function = jax.jit(jaxpr_as_fun(program))
    assert function.trace(*arrays).lower(lowering_platforms=("tpu",))
    np.testing.assert_array_equal(function(*arrays)[0], arrays[-1])
