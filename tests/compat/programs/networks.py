"""The networks of pax.nets: a Transformer that is trained, a ResNet that is called."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax.nets import ResNet18, Transformer


class LanguageModel(pax.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = pax.Embed(vocab, dim)
        self.body = Transformer(dim, 2, 2, dropout_rate=0.0)
        self.head = pax.Linear(dim, vocab)

    def __call__(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def loss_fn(model, tokens):
    model, logits = model % tokens[:, :-1]
    logs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked), (-jnp.mean(picked), model)


def main():
    pax.seed_rng_key(2)
    model = LanguageModel(11, 8)
    optimizer = opax.adamw(1e-2, weight_decay=1e-3)(model.parameters())
    tokens = jnp.asarray((np.arange(13)[None] * np.arange(1, 5)[:, None]) % 11)
    update = pax.build_update_fn(loss_fn, scan_mode=True)

    @jax.jit
    def many(model, optimizer, batches):
        (model, optimizer), losses = pax.scan(update, (model, optimizer), batches)
        return model, optimizer, losses

    model, optimizer, losses = many(model, optimizer, jnp.stack([tokens] * 20))
    for i in (0, 4, 9, 14, 19):
        print("loss", i, float(losses[i]))

    net = ResNet18(3, 10).eval()
    size = sum(leaf.size for leaf in jax.tree_util.tree_leaves(net.parameters()))
    x = jnp.asarray(np.random.RandomState(5).randn(1, 3, 32, 32), jnp.float32)
    print("resnet", size, float(jax.jit(lambda net, x: net(x))(net, x).std()))
    print("features", 0, float(net.initial_conv(x).std()))


if __name__ == "__main__":
    main()
