"""A function over a net in train mode, whose call changes what nobody gets back."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import pax_export as pax
from pax_export.errors import StateChangeError
from pax_export.export import load, spec, to_onnx, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import Counter
from tests.refusals import refused

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
KEY = jax.random.key(3)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.bn(self.dense(x)))


class Linen(linen.Module):
    rate: float

    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))
        return linen.Dropout(self.rate, deterministic=not train)(x)


def merged(net):
    graph, params = nnx.split(net)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def closed_over(net):
    return {}, lambda _, x: net(x)


def partly_closed_over(net):
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    return params, lambda params, x: nnx.merge(graph, params, rest)(x)


def of_linen(rate, train, closed_over=False):
    net = Linen(rate)
    variables = net.init(jax.random.key(0), X, False)

    def run(variables, x):
        rngs = {"dropout": KEY}
        return net.apply(variables, x, train, mutable=["batch_stats"], rngs=rngs)[0]

    return ({}, lambda _, x: run(variables, x)) if closed_over else (variables, run)


def of_pax():
    net = pax.Sequential(pax.Linear(4, 4), pax.BatchNorm1D(4), pax.Dropout(0.5)).train()
    return net, lambda net, x: (net % x)[1]


def of_haiku():
    run = lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True)  # noqa: E731
    net = hk.without_apply_rng(hk.transform_with_state(run))
    return net.init(KEY, X), lambda both, x: net.apply(*both, x)[0]


def actor_critic():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            hidden = linen.relu(linen.Dense(8)(x))
            return linen.Dense(2)(hidden), linen.Dense(1)(linen.LayerNorm()(hidden))

    net = Net()
    return net.init(KEY, X[0]), lambda params, x: net.apply(params, x[0])[0]


def scanned(params, x):
    def step(carry, row):
        key, new = jax.random.split(carry)
        return new, row + jax.random.normal(key)

    return jax.lax.scan(step, params["key"], x)[1]


def looped(params, x):
    def step(state):
        count, key, x = state
        return count + 1, jax.random.split(key)[0], x + jax.random.uniform(key)

    return jax.lax.while_loop(lambda state: state[0] < 2, step, (0, params["key"], x))[2]


def branched(params, x):
    draw = lambda x: x * jax.random.bernoulli(params["key"], 0.5, x.shape)  # noqa: E731
    return jax.lax.cond(x.sum() > 0, draw, lambda x: x, x)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key=None):
        each = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        x, state = each(x, state)
        return (x if key is None else self.dropout(x, key=key)), state


NORMED = eqx.nn.make_with_state(Normed)()


class Counting(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.array(0.0))

    def __call__(self, x, state):
        count = state.get(self.index) + 1
        return x * count, state.set(self.index, count)


COUNTING = eqx.nn.make_with_state(Counting)()


REFUSED = {
    "equinox, averages": (
        lambda: (NORMED, lambda both, x: both[0](x, both[1])[0]),
        "where: 0.norm: BatchNorm\n",
    ),
    "equinox, dropout": (
        lambda: (NORMED, lambda both, x: both[0](x, both[1], KEY)[0]),
        "a key that the function closes over, 0.norm: BatchNorm in train mode, 0.dropout: Dropout",
    ),
    "merged": (lambda: merged(Net()), "bn.mean.value, bn.var.value, dropout.rngs.count.value"),
    "a net as params": (lambda: (Net(), lambda net, x: net(x)), "dropout.rngs.count.value"),
    "closed over": (lambda: closed_over(Net()), "where: test_dropped_state.py:"),
    "partly closed over": (lambda: partly_closed_over(Net()), "where: test_dropped_state.py:"),
    "a pax module": (of_pax, "modules.2.rng_key, modules.1.ema_mean.averages"),
    "linen, dropout": (lambda: of_linen(0.5, True), "a key that the function closes over"),
    "linen, statistics": (lambda: of_linen(0.0, True), "batch_stats.BatchNorm_0.mean"),
    "haiku, statistics": (of_haiku, "batch_norm/~/mean_ema.hidden"),
    "a difference to the mean": (
        lambda: (
            {"mean": jnp.ones(4)},
            lambda p, x: (x, p["mean"] + 0.1 * (x.mean(0) - p["mean"]))[0],
        ),
        "where: mean",
    ),
    "linen, all closed over": (lambda: of_linen(0.0, True, True), "an array that the function"),
    "a key closed over": (
        lambda: ({}, lambda _, x: x * jax.random.normal(KEY, (4,))),
        "a key that the function closes over",
    ),
    "an old key": (
        lambda: ({}, lambda _, x: x * jax.random.normal(jax.random.key_data(KEY), (4,))),
        "a key that the function closes over",
    ),
    **{
        name: (lambda function=function: ({"key": KEY}, function), "where: key")
        for name, function in {
            "in a scan": scanned,
            "in a loop": looped,
            "in a branch": branched,
            "jitted": jax.jit(scanned),
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_or_is_used_up_is_named(name, tmp_path):
    make, where = REFUSED[name]
    with refused(StateChangeError, where, "equinox.nn.inference_mode(model)") as caught:
        to_stablehlo(make(), tmp_path / "net", spec("3, 4"), validate=False)
    assert name == "equinox, averages" or "model.eval()" in caught.value.write
    assert not (tmp_path / "net").exists()


ACCEPTED = {
    "equinox": lambda: (eqx.nn.inference_mode(NORMED), lambda both, x: both[0](x, both[1], KEY)[0]),
    "equinox, with its state": lambda: (
        NORMED,
        lambda both, x: jax.tree.leaves(both[0](x, both[1])),
    ),
    "in eval mode": lambda: merged(_in_eval_mode()),
    "a net in eval mode": lambda: (_in_eval_mode(), lambda net, x: net(x)),
    "a count that nothing reads": lambda: merged(_recurrent()),
    "linen": lambda: of_linen(0.5, False),
    "a pax module": lambda: (of_pax()[0].eval(), lambda net, x: net(x)),
    "a key made there": lambda: ({}, lambda _, x: x * jax.random.normal(jax.random.key(0), (4,))),
    "a seed": lambda: (
        {"seed": np.int32(1)},
        lambda p, x: x * jax.random.normal(jax.random.key(p["seed"]), (4,)),
    ),
    "a key folded with an input": lambda: (
        {"key": KEY},
        lambda p, x: x * jax.random.normal(jax.random.fold_in(p["key"], x[0, 0].astype(int))),
    ),
    "a draw that nothing needs": lambda: (
        {"key": KEY, "w": jnp.ones(4)},
        lambda p, x: (x * p["w"], jax.random.normal(p["key"], x.shape) + x)[0],
    ),
    "one example of a net with an unused part": actor_critic,
    "an unused normalization": lambda: (
        {"mean": jnp.ones(4), "std": jnp.ones(4), "bias": jnp.ones(4)},
        lambda p, x: (x * 2, (x[0] - p["mean"]) / p["std"], x[0] + 0.01 * p["bias"])[0],
    ),
    "jitted by nnx": lambda: (
        _in_eval_mode(),
        nnx.jit(lambda net, x: nnx.remat(Net.__call__)(net, x)),
    ),
    "a branch of nnx": lambda: (
        _in_eval_mode(),
        lambda net, x: nnx.cond(x.sum() > 9, lambda net, x: x, lambda net, x: net(x), net, x),
    ),
    "a state that is set": lambda: (COUNTING, lambda both, x: both[0](x, both[1])[0]),
    "a weight that is unused": lambda: (
        {"w": jnp.ones((4, 4)), "old": jnp.ones((4, 4))},
        lambda p, x: (x @ p["w"], p["old"] * 2)[0],
    ),
}


def _in_eval_mode():
    net = Net()
    net.eval()
    return net


def _recurrent():
    """One that takes a new key in each call, for a first state of zeros."""
    rngs = nnx.Rngs(0)
    return nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs), rngs=rngs)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_gives_the_same_for_good_reason_is_exported(name, tmp_path):
    params, function = ACCEPTED[name]()
    x = X[None] if "count" in name else X
    to_stablehlo((params, function), tmp_path / "net", spec(x.shape), validate=False)
    found, expected = map(jax.tree.leaves, (load(tmp_path / "net")(x), function(params, x)))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_every_call_begins_with_the_state_that_is_kept(tmp_path):
    net = Net()
    to_stablehlo(merged(net), tmp_path / "net", spec("3, 4"), state="keep", validate=False)
    kept = load(tmp_path / "net")
    np.testing.assert_array_equal(kept(X), kept(X))
    assert_close(kept(X), net(X), rtol=1e-5, atol=1e-6)


def test_a_net_of_nnx_goes_on_where_its_last_call_stopped(tmp_path):
    net = Net()
    to_stablehlo(merged(net), tmp_path / "net", spec("3, 4"), state="update", validate=False)
    bundle = load(tmp_path / "net")
    for _ in range(2):
        bundle, y = bundle.purecall(X)
        assert_close(y, net(X), rtol=1e-5, atol=1e-6)


def test_a_file_may_keep_the_state_of_a_module(tmp_path):
    to_onnx(Counter(), tmp_path / "net.onnx", spec("2"), state="keep")
    counter = load(tmp_path / "net.onnx")
    assert [counter(np.zeros(2, "float32")).tolist() for _ in range(2)] == [[1, 1], [1, 1]]


def test_a_cached_partial_of_nnx_is_a_partial(tmp_path):
    net = _in_eval_mode()
    model = nnx.cached_partial(nnx.jit(lambda net, x: net(x)), net)
    report = to_stablehlo(model, tmp_path / "net", spec("b, 4"))
    assert "net.dense.kernel.value" in [each.name for each in report.variables]
    assert_close(load(tmp_path / "net")(X), net(X), rtol=1e-5)
