"""A language model of characters: LSTM and GRU in scan, data parallel, text from a prompt."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


class LM(pax.Module):
    core: pax.Module
    embed: pax.Module
    output: pax.Module
    vocab_size: int

    def __init__(self, vocab_size: int, hidden_dim: int, make_core):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed = pax.Embed(vocab_size, hidden_dim)
        self.core = make_core(hidden_dim, hidden_dim)
        self.output = pax.Linear(hidden_dim, vocab_size)

    def __call__(self, x):
        x = self.embed(x)
        state = self.core.initial_state(x.shape[0])
        _, x = pax.utils.scan(self.core, state, x, time_major=False)
        return self.output(x)

    def inference(self, prompt: Sequence[int], length: int):
        state = self.core.initial_state(1)
        x = jnp.array([prompt[0]], dtype=jnp.int32)
        out = [x]

        @jax.jit
        def step(x, state):
            state, x = self.core(state, self.embed(x))
            return self.output(x), state

        for i in range(1, len(prompt) + length):
            logits, state = step(x, state)
            if i < len(prompt):
                x = jnp.array([prompt[i]], dtype=jnp.int32)
            else:
                x = jnp.argmax(logits, axis=-1)
            out.append(x)
        return jnp.concatenate(out)


def loss_fn(model: LM, batch: jnp.ndarray):
    logits = model(batch[:, :-1])
    targets = jax.nn.one_hot(batch[:, 1:], num_classes=model.vocab_size)
    loss = -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))
    return loss, (loss, model)


def update_step(model_and_optimizer, batch: jnp.ndarray):
    model, optimizer = model_and_optimizer
    grads, (loss, model) = pax.grad(loss_fn, has_aux=True)(model, batch)
    grads = jax.lax.pmean(grads, axis_name="i")
    model, optimizer = opax.apply_gradients(model, optimizer, grads=grads)
    return (model, optimizer), loss


@partial(jax.pmap, axis_name="i")
def update_fn(model, optimizer, multi_batch: jnp.ndarray):
    (model, optimizer), losses = pax.scan(update_step, (model, optimizer), multi_batch)
    return model, optimizer, losses


def replicate(tree):
    return jax.tree_util.tree_map(lambda x: jnp.stack([x] * jax.device_count()), tree)


def main():
    pax.seed_rng_key(42)
    text = "the quick brown fox jumps over the lazy dog. " * 3
    tokens = np.array([ord(c) % 32 for c in text])
    for make_core in (pax.LSTM, pax.GRU, partial(pax.VanillaRNN, name="core")):
        net = LM(32, 8, make_core)
        print(net.summary())
        optimizer = opax.chain(opax.clip_by_global_norm(1.0), opax.adam(1e-2))(net.parameters())
        net, optimizer = replicate(net), replicate(optimizer)
        for i in range(4):
            starts = np.random.RandomState(i).randint(0, 100, (6, 4))
            batch = np.stack([[tokens[s : s + 11] for s in row] for row in starts])
            net, optimizer, losses = update_fn(net, optimizer, replicate(batch))
            print("losses", [float(x) for x in losses[0]])
        net = jax.tree_util.tree_map(lambda x: x[0], net.eval())
        print(net.inference(tokens[:5].tolist(), 6).tolist())


if __name__ == "__main__":
    main()
