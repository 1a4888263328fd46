"""A program before the passes and after them, in jax alone."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pax_export as pax
from pax_export._foundations.jaxpr import walk_equations
from pax_export.export import spec
from pax_export.export.portable import PassOptions, Weight, optimized
from pax_export.export.portable.arithmetic import LARGE
from pax_export.export.portable.graph import Producers
from pax_export.export.portable.kept import name_of
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.programs import trace_all
from tests.closeness import assert_close


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def portable(model, inputs, **options):
    """A model as a portable program, and the program as it was traced."""
    model = make_exportable(model, None)
    (program,) = trace_all(model, inputs, None, (), False)
    leaves = [Weight(each.name, np.asarray(each.value)) for each in model.leaves]
    constants = {id(each): f"constant{i}" for i, each in enumerate(program.traced.constants)}
    whole = program.traced.program
    return optimized(whole, leaves, constants, PassOptions(**options)), program, model


def primitives(made):
    names = (name_of(e.params) if e.primitive.name == "composite" else "" for e in made.jaxpr.eqns)
    return Counter(name or e.primitive.name for name, e in zip(names, made.jaxpr.eqns))


def check(params, function, inputs, *calls, rtol=1e-5, **options):
    """The passes change no result; gives what the program is made of then."""
    made, program, model = portable((params, function), inputs, **options)
    for arrays in calls:
        expected = program.traced.run([*(leaf.value for leaf in model.leaves), *arrays])
        for one, other in zip(made.run(*arrays), expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert_close(one, other, rtol=rtol, atol=rtol, where="result")
    return primitives(made), made


NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, kernel, stride=1, numbers=NHWC, **more):
    around = kernel.shape[numbers[1].index("H")] // 2
    padding = [(around, around)] * 2
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=numbers, **more
    )


def norm(p, x):
    return (x - p["mean"]) * lax.rsqrt(p["var"] + 1e-5) * p["scale"] + p["bias"]


def statistics(count):
    return {
        "mean": random(count, seed=1),
        "var": random(count, seed=2) ** 2 + 0.1,
        "scale": random(count, seed=3),
        "bias": random(count, seed=4),
    }


BATCHES = [(random(2, 8, 8, 4),), (random(3, 8, 8, 4, seed=9),)]
KINDS = {
    "plain": {},
    "strided": {"stride": 2},
    "grouped": {"feature_group_count": 2},
    "depthwise": {"feature_group_count": 4},
    "dilated": {"rhs_dilation": (2, 2)},
    "transposed": {"lhs_dilation": (2, 2)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_goes_into_the_convolution_before_it(kind):
    told = KINDS[kind]
    params = {"kernel": random(3, 3, 4 // told.get("feature_group_count", 1), 8)}
    params["norm"] = statistics(8)

    def apply(params, x):
        return jax.nn.relu(norm(params["norm"], conv(x, params["kernel"], **told)))

    found, made = check(params, apply, spec("batch, 8, 8, 4"), *BATCHES)
    assert found == {
        "conv_general_dilated": 1,
        "broadcast_in_dim": 1,
        "add": 1,
        "clip": 1,
        "transpose": 2,
    }
    kernels = [each for each in made.weights if each.name == "kernel:folded"]
    assert set(kernels[0].sources) == {"kernel", "norm.scale", "norm.var"}
    kept, _ = check(params, apply, spec("batch, 8, 8, 4"), *BATCHES, fold=False)
    assert kept["mul"] == 2


def test_a_scale_goes_into_a_product_and_its_numbers_may_stand_on_either_side():
    params = {"w": random(4, 6), "b": random(6), "s": random(6)}

    def apply(params, x):
        return 3.0 - params["s"] * (2.0 * (x @ params["w"]) / 5.0 + params["b"])

    found, _ = check(params, apply, spec("batch, 4"), (random(5, 4),))
    assert found == {"dot_general": 1, "broadcast_in_dim": 1, "add": 1}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_other_numbers_are_not_folded(dtype):
    params = {"w": jnp.asarray(random(3, 3, 4, 8) * 5, dtype), "s": jnp.asarray([2] * 8, dtype)}

    def apply(params, x):
        return conv(x.astype(dtype), params["w"]) * params["s"]

    found, _ = check(params, apply, spec("batch, 8, 8, 4"), *BATCHES, rtol=1e-2)
    assert found["mul"] == 1


def test_a_kernel_that_is_read_twice_is_stored_once():
    params = {"w": random(3, 3, 4, 4), "one": statistics(4), "other": statistics(4)}

    def apply(params, x):
        return norm(params["other"], conv(norm(params["one"], conv(x, params["w"])), params["w"]))

    _, made = check(params, apply, spec("batch, 8, 8, 4"), *BATCHES, rtol=1e-4)
    assert sum(np.size(each.array) == params["w"].size for each in made.weights) == 1


def test_a_result_that_is_read_twice_is_not_scaled():
    params = {"w": random(3, 3, 4, 8), "norm": statistics(8)}

    def apply(params, x):
        y = conv(x, params["w"])
        return norm(params["norm"], y) + y.max()

    check(params, apply, spec("batch, 8, 8, 4"), *BATCHES, rtol=1e-4)


def test_weights_that_would_overflow_are_kept_and_said():
    params = {"w": np.full((4, 4), 1e30, np.float32), "s": np.full(4, 1e20, np.float32)}

    def apply(params, x):
        return (x * 1e-30) @ params["w"] * params["s"]

    found, made = check(params, apply, spec("batch, 4"), (np.full((2, 4), 1e-9, np.float32),))
    assert found["mul"] == 2
    assert made.notes == ("w is not folded: its numbers would not be finite",)


def test_features_that_are_not_the_last_axis_are_scaled_along_theirs():
    params = {"w": random(8, 4, 3, 3), "s": random(8), "rows": random(8)}

    def apply(params, x):
        y = conv(x, params["w"], numbers=("NCHW", "OIHW", "NCHW")) * params["s"][:, None, None]
        return y * params["rows"]  # along the width, which is as large

    found, _ = check(params, apply, spec("batch, 4, 8, 8"), (random(2, 4, 8, 8),), rtol=1e-4)
    assert found["mul"] == 1


def _every_other(x):
    return lax.slice_in_dim(lax.slice_in_dim(x, 1, None, 2, 1), 0, None, 2, 2)


def test_transposes_go_to_the_ends():
    params = {"a": random(3, 3, 4, 8), "b": random(1, 1, 8, 2), "c": random(1, 1, 2, 8)}
    params["d"] = random(2, 2, 16, 4)

    def apply(params, x):
        x = jnp.pad(jax.nn.silu(conv(x, params["a"])), ((0, 0), (1, 1), (1, 1), (0, 0)))
        gate = conv(x.mean((1, 2), keepdims=True), params["b"])
        gate = jax.nn.sigmoid(conv(jax.nn.relu(gate), params["c"]))
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        y = jnp.concatenate([pooled, _every_other(x * gate)], -1)
        groups = lax.rev(y.reshape(*y.shape[:3], 4, 4), (4,))
        y = conv(groups.reshape(y.shape), params["d"])
        return y.max((1, 2)), (y + y.mean((1, 2))[:, None, None]).sum(-1)

    found, _ = check(params, apply, spec("batch, 8, 8, 4"), *BATCHES, rtol=1e-4)
    assert found["transpose"] == 1  # of the input


def test_an_order_that_nothing_needs_is_taken_back():
    params = {"w": random(3, 3, 4, 8)}

    def apply(params, x):
        y = jnp.transpose(conv(x, params["w"]), (3, 0, 2, 1))
        y, total = lax.optimization_barrier((y, y.sum()))
        return jnp.sort(y, 0), y.reshape(8, -1), y[::-1, :, 1:], jnp.cumsum(y, 1), total

    check(params, apply, spec("2, 8, 8, 4"), BATCHES[0])


def test_bodies_of_loops_keep_their_layout():
    params = {"w": random(3, 3, 4, 4), "norm": statistics(4)}

    def apply(params, x):
        def step(y, _):
            y = jax.nn.relu(norm(params["norm"], conv(y, params["w"])))
            return lax.cond(y.sum() > 0, jnp.tanh, jnp.negative, y), y[0]

        return lax.scan(step, conv(x, params["w"]), None, length=3)

    check(params, apply, spec("batch, 8, 8, 4"), *BATCHES, rtol=1e-3)


def test_a_padding_goes_into_a_convolution_or_a_pool():
    params = {"w": random(3, 3, 4, 4)}

    def apply(params, x):
        wide = lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (1, 0, 0), (0, 0, 0)))
        y = jax.nn.relu(lax.conv_general_dilated(
            wide, params["w"], (1, 1), "VALID", dimension_numbers=NHWC
        ))  # fmt: skip
        return lax.reduce_window(
            lax.pad(y, 0.0, ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0))),
            -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID",
        )  # fmt: skip

    found, _ = check(params, apply, spec("batch, 8, 8, 4"), *BATCHES)
    assert "pad" not in found

    def other(params, x):
        wide = lax.pad(x, 1.0, ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)))
        pooled = lax.reduce_window(
            lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0))),
            -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID",
        )  # fmt: skip
        return conv(wide, params["w"]), pooled

    found, _ = check(params, other, spec("batch, 8, 8, 4"), *BATCHES)
    assert found["pad"] == 2  # neither is neutral there

    def beyond(params, x):  # the first windows are in the paddings
        wide = lax.pad(jax.nn.relu(x), 0.0, ((0, 0, 0), (2, 0, 0), (0, 0, 0), (0, 0, 0)))
        edges = ((0, 0), (2, 0), (0, 0), (0, 0))
        return lax.reduce_window(wide, -jnp.inf, lax.max, (1, 3, 1, 1), (1, 1, 1, 1), edges)

    found, _ = check(params, beyond, spec("batch, 8, 8, 4"), *BATCHES)
    assert found["pad"] == 1


def test_large_weights_are_not_stored_twice():
    table = random(64, LARGE // 64)

    def apply(params, x):
        y = params["table"][x]
        return y @ params["table"].T

    _, made = check({"table": table}, apply, spec("batch", "int32"), (np.arange(5, dtype="i4"),))
    assert [each.name for each in made.weights if np.size(each.array) == table.size] == ["table"]


def test_intermediate_results_may_be_larger_than_weights():
    points = random(40, 8)

    def apply(params, x):
        apart = params["points"][:, None] - params["points"]  # 12,800 numbers, of 320
        kernel = jnp.exp(-(apart**2).sum(-1)) + jnp.eye(40)
        return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(kernel), True), x[:, None])

    def solved(params, x):
        return x @ apply(params, params["points"][:, 0])

    found, made = check({"points": points}, solved, spec("40"), (random(40),))
    assert not {"cholesky", "exp", "triangular_solve"} & found.keys()
    assert max(np.size(each.array) for each in made.weights) == 40
    found, made = check({"points": points}, apply, spec("40"), (random(40),))
    assert found["cholesky"] == 1  # its result is larger than the points
    assert max(np.size(each.array) for each in made.weights) == points.size


def test_tied_leaves_are_one_weight_and_calls_are_inlined():
    w = random(8, 8)
    layer = jax.jit(lambda w, x: jax.nn.relu(x @ w))

    def apply(params, x):
        for _ in range(12):  # repeated layers are outlined as calls
            x = layer(params["w"], jnp.sin(x) + layer(params["v"], x))
        return x

    found, _ = check({"w": w, "v": w.copy()}, apply, spec("batch, 8"), (random(2, 8),), rtol=1e-3)
    assert found["dot_general"] == 24
    assert not {"jit", "pjit", "custom_jvp_call"} & found.keys()


def test_of_branches_by_platform_that_of_cpus_is_inlined():
    def apply(params, x):
        return lax.platform_dependent(x * params["w"], cpu=jnp.sin, default=jnp.cos)

    found, _ = check({"w": random(3)}, apply, spec("batch, 3"), (random(2, 3),))
    assert found.keys() == {"mul", "sin"}
    found, _ = check({"w": random(3, 3)}, lambda p, x: x * jnp.diagonal(p["w"]), spec("b, 3"),
                     (random(2, 3),))  # fmt: skip
    assert found.keys() == {"mul"}  # the rest is computed


KEPT = {
    "clip": lambda x: jnp.clip(x, -1, 2),
    "clip of relu6": jax.nn.relu6,
    "clip of one side": lambda x: jnp.minimum(x, 3),
    "silu": jax.nn.silu,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "gelu": jax.nn.gelu,
    "gelu by erf": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu by hand": lambda x: 0.5 * x * (1 + lax.erf(x / jnp.sqrt(2.0))),
    "softmax": jax.nn.softmax,
    "softmax over another axis": lambda x: jax.nn.softmax(x, 1),
    "softmax of a mapped axis": jax.vmap(jax.nn.softmax, 2, 2),
    "log_softmax": jax.nn.log_softmax,
    "layer_norm": jax.nn.standardize,
    "layer_norm times an array": lambda x: x[..., ::-1] * jax.nn.standardize(x),
    "layer_norm of a function": lambda x: pax.LayerNorm(5, -1, True, True)(x),
    "rms_norm": lambda x: x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6),
    "rms_norm of a product": lambda x: pax.RMSNorm(5)(3.0 * jnp.sin(x) * x),
    "mean": lambda x: x.mean((1, 2)),
    "mean with axes": lambda x: x.mean(-1, keepdims=True),
}


@pytest.mark.parametrize("name", KEPT)
def test_functions_are_kept_whole(name):
    found, _ = check({}, lambda _, x: KEPT[name](x), spec("batch, 5, 5"), (3 * random(2, 5, 5),))
    assert name.split()[0] in found


def _attention(q, k, v, mask):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None]).swapaxes(1, 2)


@pytest.mark.parametrize(
    "function, shapes, count",
    [
        # Queries of 6 heads, and keys of 2: no keys, values or weights are transposed.
        (_attention, ["b, 6, n, 4", "b, 2, m, 4", "b, 2, m, 4", "b, n, m"], 3),
        (lambda q, k, v, mask: jnp.einsum("bhnm,bmhd->bnhd",
            jax.nn.softmax(jnp.where(mask[:, None], jnp.einsum("bnhd,bmhd->bhnm", q, k), -9.0)), v),
         ["b, n, 2, 4", "b, m, 2, 4", "b, m, 2, 4", "b, n, m"], 1),
        # A softmax over another axis than the last; a product of three.
        (lambda q, k, v, mask: jnp.einsum("bnm,bmd->bdn", jax.nn.softmax(
            jnp.einsum("bnd,bmd->bmn", q, k), 1).swapaxes(1, 2) * mask, v),
         ["b, n, 4", "b, m, 4", "b, m, 3", "b, n, m"], 2),
    ],
)  # fmt: skip
def test_attention_has_few_transposes(function, shapes, count):
    dtypes = ["float32"] * 3 + ["bool"]
    inputs = tuple(map(spec, shapes, dtypes))
    sizes = {"b": 2, "n": 3, "m": 5}
    arrays = [random(*(sizes.get(s) or int(s) for s in each.split(", "))) for each in shapes]
    arrays[3] = arrays[3] > -1
    found, _ = check({}, lambda _, *x: function(*x), inputs, tuple(arrays))
    assert found["transpose"] <= count


def test_caches_are_not_transposed():
    """A transpose of what is appended would become one of the whole cache."""

    def append(_, cache, x, q):
        keys = jnp.concatenate([cache, x.swapaxes(1, 2)], 2)
        return keys, jnp.einsum("bhnd,bhmd->bhnm", q, keys)

    inputs = spec("b, 2, past, 4"), spec("b, n, 2, 4"), spec("b, 2, n, 4")
    arrays = random(2, 2, 7, 4), random(2, 3, 2, 4), random(2, 2, 3, 4)
    _, made = check({}, append, inputs, arrays)
    moved = [e.invars[0].aval for e in made.jaxpr.eqns if e.primitive.name == "transpose"]
    assert [str(each.shape) for each in moved] == ["(b, n, 2, 4)"]


def test_layer_norms_of_all_kinds_are_kept():
    def fast(p, x):  # as flax has it
        mean, squares = x.mean(-1), (x * x).mean(-1)
        var = jnp.maximum(0.0, squares - mean * mean)
        y = x - mean[..., None]
        return y * (lax.rsqrt(var[..., None] + 1e-6) * p["scale"]) + p["bias"]

    params = {"scale": random(6), "bias": random(6)}
    found, _ = check(params, fast, spec("batch, 4, 6"), (random(2, 4, 6),), rtol=1e-4)
    assert found["layer_norm"] == 1


LOOKALIKES = {
    "another axis": lambda x: (
        jnp.exp(x - x.max(1, keepdims=True))
        / jnp.exp(x - x.max(1, keepdims=True)).sum(2, keepdims=True)
    ),
    "transposed": lambda x: jnp.exp(x) / jnp.exp(x).sum(-1)[:, None, :],
    "turned": lambda x: (
        jnp.exp(x - x.swapaxes(1, 2).max(-1, keepdims=True))
        / jnp.exp(x - x.swapaxes(1, 2).max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
    "gelu of two": lambda x: 0.5 * x * (1 + lax.erf(x[::-1] / jnp.sqrt(2.0))),
    "gelu of another number": lambda x: 0.5 * x * (1 + lax.erf(x / jnp.sqrt(3.0))),
    "silu of two": lambda x: x * jax.nn.sigmoid(x + 1),
    "norm along the wrong axis": lambda x: (
        (x - x.mean(-1)[:, None, :]) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    ),
    "mean square of another": lambda x: (
        jnp.sin(x) * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    ),
    "sum of squares": lambda x: x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-5),
    "variance of another": lambda x: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt((2 * x).var(-1, keepdims=True) + 1e-5)
    ),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_them_is_not(name):
    found, _ = check({}, lambda _, x: LOOKALIKES[name](x), spec("3, 5, 5"), (random(3, 5, 5),))
    assert not {"softmax", "gelu", "silu", "layer_norm", "rms_norm"} & found.keys()


@pytest.mark.parametrize("norm", [False, True])
def test_factors_are_searched_in_linear_time(norm, monkeypatch):
    """A number squared n times has 2 ** n factors; a norm may be behind them."""

    def squared(count):
        def function(_, x):
            root = lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
            y = jnp.sin(x)
            for _ in range(count):
                y = y * y
            return root * y if norm else y * jnp.tanh(y)

        return function

    visits, maker = Counter(), Producers.maker

    def counted(self, *given):
        visits[count] += 1
        return maker(self, *given)

    monkeypatch.setattr(Producers, "maker", counted)
    for count in (8, 16):
        portable(({}, squared(count)), spec("batch, 4"))
    assert 0 < visits[16] < 3 * visits[8]


def test_lines_and_modules_are_kept():
    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.first = pax.Conv2D(4, 4, 3)
            self.second = pax.Linear(4, 4)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    from pax_export.core import path_in, with_labels

    made = with_labels(lambda label: portable(label(Net()), spec("batch, 8, 8, 4"))[0])
    paths = {each.primitive.name: path_in(each, "") for each in made.jaxpr.eqns}
    assert paths["conv_general_dilated"] == "first"
    assert paths["dot_general"] == "second"


def test_functions_are_found_in_loops_and_branches():
    def block(x, w):
        apart = x - x.mean(-1, keepdims=True)
        x = apart * lax.rsqrt(jnp.mean(apart * apart, -1, keepdims=True) + 1e-6)
        return jax.nn.softmax(jax.nn.gelu(x @ w, approximate=False)), None

    def function(params, x):
        x = lax.scan(block, x, params["w"])[0]
        x = lax.fori_loop(0, x.shape[0] * 0 + 2, lambda _, x: jax.nn.silu(x), x)
        return lax.cond(x.sum() > 0, lambda x: jax.nn.log_softmax(x), lambda x: x, x)

    _, made = check(
        {"w": random(3, 4, 4)}, function, spec("n, 4"), [random(2, 4)], [random(5, 4, seed=1)]
    )
    found = set()
    for equation, _ in walk_equations(made.program):
        if equation.primitive.name == "composite":
            found.add(name_of(equation.params))
    assert found.issuperset({"gelu", "softmax", "layer_norm", "silu", "log_softmax"}), found


def test_numbers_that_are_trained_are_not_read():
    def model(params, x):
        return jnp.minimum(x, params["limit"])

    for fold, name in ((False, "min"), (True, "clip")):
        made, _ = check({"limit": jnp.float32(0.5)}, model, spec("n"), (random(3),), fold=fold)
        assert name in made
