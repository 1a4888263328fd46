"""A decoder written with bare arrays, trained by optax with accumulated gradients."""

import math
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pax


class RMSNorm(pax.ParameterModule):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = jnp.ones(dim).astype(jnp.float32)

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + self.eps) * self.weight


class Attention(pax.ParameterModule):
    def __init__(self, dim, num_head):
        super().__init__()
        self.w_qkv = jnp.array(np.random.randn(dim, 3 * dim) / math.sqrt(dim)).astype(jnp.float32)
        self.w_out = jnp.array(np.random.randn(dim, dim) * 1e-2).astype(jnp.float32)
        self.num_head = num_head

    def __call__(self, x):
        n, length, dim = x.shape
        qkv = jnp.split(x @ self.w_qkv, 3, axis=-1)
        q, k, v = (y.reshape(n, length, self.num_head, -1) for y in qkv)
        scores = jnp.einsum("nshd,nthd->nsth", q, k) / math.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones((length, length), dtype=jnp.bool_))
        scores = jnp.where(mask[None, :, :, None], scores, float("-inf"))
        x = jnp.einsum("nthd,nsth->nshd", v, jax.nn.softmax(scores, axis=2))
        return x.reshape(n, length, dim) @ self.w_out


class MLP(pax.ParameterModule):
    def __init__(self, dim):
        super().__init__()
        self.w = [np.random.randn(dim, 2 * dim).astype(np.float32) * 0.2 for _ in range(2)]
        self.w_out = np.random.randn(2 * dim, dim).astype(np.float32) * 0.01

    def __call__(self, x):
        return (jax.nn.silu(x @ self.w[0]) * (x @ self.w[1])) @ self.w_out


class GPT(pax.ParameterModule):
    def __init__(self, dim, num_head, num_block, vocab_size, length):
        super().__init__()
        self.w_embed = jnp.array(np.random.randn(vocab_size, dim), jnp.float32) / math.sqrt(dim)
        self.w_pos = jnp.array(np.random.randn(length, dim), jnp.float32) / math.sqrt(dim)
        self.norms = [(RMSNorm(dim), RMSNorm(dim)) for _ in range(num_block)]
        self.blocks = {str(i): [Attention(dim, num_head), MLP(dim)] for i in range(num_block)}
        self.norm = RMSNorm(dim)

    def __call__(self, x):
        x = self.w_embed[(x,)] + self.w_pos[None]
        for i, (norm1, norm2) in enumerate(self.norms):
            attention, mlp = self.blocks[str(i)]
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return self.norm(x) @ self.w_embed.T


def loss_fn(model, x, y):
    logs = jax.nn.log_softmax(model(x))
    return -jnp.mean(jnp.take_along_axis(logs, y[..., None], axis=-1))


optimizer = optax.MultiSteps(
    optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(1e-1),
        optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 1.0, 3, 20, 1e-1)),
        optax.scale(-1e-2),
    ),
    every_k_schedule=2,
)


def update_step(net_and_state, xy):
    net, state = net_and_state
    loss, grads = pax.value_and_grad(loss_fn)(net, xy[:, :-1], xy[:, 1:])
    grads = jax.lax.pmean(grads, axis_name="i")
    updates, state = optimizer.update(grads, state, params=net.parameters())
    net = net.update_parameters(optax.apply_updates(net.parameters(), updates))
    return (net, state), loss


@partial(jax.pmap, axis_name="i")
def update_fn(model, state, multi_batch):
    (model, state), losses = pax.scan(update_step, (model, state), multi_batch)
    return model, state, losses


def main():
    np.random.seed(42)
    net = GPT(8, 2, 2, 11, 8)
    state = optimizer.init(net.parameters())
    net, state = jax.tree_util.tree_map(lambda x: jnp.stack([x]), (net, state))
    data = (np.arange(9)[None] * np.arange(1, 6)[:, None] + 3) % 11
    batch = np.stack([data] * 8)[None]
    for _ in range(5):
        net, state, losses = update_fn(net, state, batch)
        print("losses", [float(loss) for loss in losses[0]])
    net, state = jax.device_get(jax.tree_util.tree_map(lambda x: x[0], (net, state)))
    saved = pickle.loads(pickle.dumps({"net": net.state_dict(), "step": state.gradient_step}))
    again = GPT(8, 2, 2, 11, 8).load_state_dict(saved["net"])
    print("again", int(saved["step"]), float(loss_fn(again, data[:, :-1], data[:, 1:])))
    print(sorted(saved["net"]))


if __name__ == "__main__":
    main()
