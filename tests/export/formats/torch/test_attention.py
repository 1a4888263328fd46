"""Attention becomes one call of torch, with jax's numbers and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import as_torch, spec, to_torch
from tests.closeness import assert_close

torch = pytest.importorskip("torch")

HEADS = 4


def weights():
    random = np.random.default_rng(0)
    return {n: random.normal(size=(16, 16)).astype(np.float32) / 4 for n in ("q", "k", "v")}


def attention(scores_of=lambda scores, x: scores):
    def run(params, x):
        batch, length, _ = x.shape
        q, k, v = (
            (x @ params[n]).reshape(batch, length, HEADS, 4).swapaxes(1, 2) for n in ("q", "k", "v")
        )
        scores = scores_of(q @ k.swapaxes(2, 3) / jnp.sqrt(4.0), x)
        return (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)

    return weights(), run


def causal(scores, x):
    return jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)


def seen(scores, x):
    """Tokens that begin with a negative number are seen by none, and see none."""
    is_token = x[:, None, :, 0] > 0
    return jnp.where(is_token[..., None] & is_token[..., None, :], scores, -1e30)


def hidden(scores, x):
    return jnp.where(x[:, None, None, :, 0] > 0.5, -1e10, scores)


def learned(scores, x):
    return hidden(scores + weights()["q"][:HEADS, :1, None], x)


def grouped(params, x):
    q, k, v = ((x @ params[n]).reshape(*x.shape[:2], HEADS, 4) for n in ("q", "k", "v"))
    mask = x[:, None, None, :, 0] > 0
    found = jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], mask=mask, is_causal=True)
    return found.reshape(x.shape)


def of_one(params, x):
    """Keys come first, and there are no heads."""
    scores = jnp.einsum("sd,td->st", x @ params["k"], x @ params["q"]) * 0.25
    return jnp.einsum("st,sd->td", jax.nn.softmax(scores, axis=0), x @ params["v"])


def stacked(params, x):
    """A loop over layers."""
    step = attention(causal)[1]
    layers = {name: jnp.stack([each, each / 2]) for name, each in params.items()}
    return jax.lax.scan(lambda x, layer: (x + step(layer, x), None), x, layers)[0]


MODELS = {
    "plain": attention(),
    **{each.__name__: attention(each) for each in (causal, seen, hidden, learned)},
    "whole": (weights(), lambda p, x: pax_attention(p, x)),
    "grouped": (weights(), grouped),
    "mapped": (weights(), lambda p, x: jax.vmap(lambda x: of_one(p, x))(x)),
    "stacked": (weights(), stacked),
}


def pax_attention(params, x):
    q, k, v = ((x @ params[n]).reshape(*x.shape[:2], HEADS, 4) for n in ("q", "k", "v"))
    return pax.dot_product_attention(q, k, v).reshape(x.shape)


def calls(module):
    parts = (each for each in module.modules() if isinstance(each, torch.fx.GraphModule))
    return sum("scaled_dot_product_attention" in str(node.target)
               for part in parts for node in part.graph.nodes)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_one_call_with_the_numbers_of_jax(name, tmp_path):
    params, function = MODELS[name]
    to_torch((params, function), tmp_path / "net.pt2", spec("batch, time, 16"), validate=False)
    module = torch.export.load(tmp_path / "net.pt2").module()
    assert calls(module) >= 1
    x = np.random.default_rng(1).normal(size=(3, 7, 16)).astype(np.float32)
    x[1, :, 0] = -1  # an example that is all padding
    given = torch.from_numpy(x).requires_grad_()
    found = module(given)
    assert_close(found.detach().numpy(), function(params, x), rtol=1e-6, atol=1e-6)
    slopes = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    found.backward(torch.from_numpy(slopes))
    wanted, of_x = jax.grad(lambda p, x: (function(p, x) * slopes).sum(), (0, 1))(params, x)
    assert_close(given.grad.numpy(), of_x, rtol=1e-5, atol=1e-5)
    for key, parameter in module.named_parameters():
        assert_close(parameter.grad.numpy(), wanted[key], rtol=1e-5, atol=1e-5)


def returned(params, x):
    """The weights are a result, too."""
    q, k, v = (x @ params[n] for n in ("q", "k", "v"))
    found = jax.nn.softmax(q @ k.swapaxes(1, 2))
    return found @ v, found


@pytest.mark.parametrize(
    "function",
    [
        returned,
        attention(lambda s, x: jax.lax.stop_gradient(s))[1],
        attention(lambda s, x: jnp.where(s > 0, s, -jnp.inf))[1],  # NaN in jax where none is seen
        attention(lambda s, x: s + jnp.where(x[:, None, None, :, 0] > 0, 0.0, -1e9))[1],
        attention(lambda s, x: jnp.tanh(s))[1],
    ],
)
def test_what_torch_would_compute_differently_stays_apart(function):
    module = as_torch((weights(), function), spec("batch, time, 16"), validate=False)
    assert "scaled_dot_product_attention" not in module.code()


def test_a_program_for_inference_joins_masks_that_are_added():
    function = attention(lambda s, x: s + jnp.where(x[:, None, None, :, 0] > 0, 0.0, -1e9))[1]
    inputs = spec("batch, time, 16")
    module = as_torch((weights(), function), inputs, trainable=False, validate=False)
    assert "scaled_dot_product_attention" in module.code()


def test_a_deep_sum_before_a_softmax_is_looked_at_once():
    def function(x):
        for _ in range(60):  # two ways lead to each of them, so 2^60 to the first
            x = x + x * 0.01
        return jax.nn.softmax(x) @ jnp.ones((4, 2))

    assert "softmax" in as_torch(function, spec("3, 4"), validate=False).code()
