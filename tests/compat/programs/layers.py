"""Every layer once: what it draws from one seed, and what it computes in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pax

ROW = (5, 4)
SEQUENCE = (2, 5, 4)
IMAGE = (2, 6, 6, 4)
IMAGE_FIRST = (2, 4, 6, 6)

LAYERS = [
    (lambda: pax.Linear(4, 3), ROW),
    (lambda: pax.Linear(4, 3, with_bias=False), ROW),
    (lambda: pax.Linear(4, 3, w_init=jax.nn.initializers.orthogonal()), ROW),
    (lambda: pax.Conv1D(4, 6, 3), SEQUENCE),
    (lambda: pax.Conv1D(4, 6, 3, stride=2, rate=1, padding="VALID"), SEQUENCE),
    (lambda: pax.Conv1D(4, 6, 2, rate=2, data_format="NCW"), (2, 4, 5)),
    (lambda: pax.Conv2D(4, 6, 3, feature_group_count=2), IMAGE),
    (lambda: pax.Conv2D(4, 6, (3, 2), stride=(2, 1), padding=[(1, 1), (0, 2)]), IMAGE),
    (lambda: pax.Conv2D(4, 6, 3, with_bias=False, data_format="NCHW"), IMAGE_FIRST),
    (lambda: pax.Conv1DTranspose(4, 6, 3, stride=2), SEQUENCE),
    (lambda: pax.Conv2DTranspose(4, 6, (2, 3), stride=2, padding="VALID"), IMAGE),
    (lambda: pax.Conv2DTranspose(4, 6, 3, data_format="NCHW"), IMAGE_FIRST),
    (lambda: pax.BatchNorm1D(4, decay_rate=0.8), SEQUENCE),
    (lambda: pax.BatchNorm2D(4, True, False, 0.9), IMAGE),
    (lambda: pax.BatchNorm2D(4, False, False, data_format="NCHW"), IMAGE_FIRST),
    (lambda: pax.LayerNorm(4, -1, True, True), SEQUENCE),
    (lambda: pax.LayerNorm(4, (1, 2), False, False), SEQUENCE),
    (lambda: pax.GroupNorm(2, 4), IMAGE),
    (lambda: pax.GroupNorm(4, 4, create_scale=False), SEQUENCE),
    (lambda: pax.Dropout(0.4), SEQUENCE),
    (lambda: pax.EMA(jnp.zeros(ROW), 0.7, debias=True), ROW),
    (lambda: pax.MultiHeadAttention(2, 2, w_init_scale=1.0), SEQUENCE),
    (lambda: pax.Identity(), ROW),
    (lambda: pax.Lambda(jnp.tanh), ROW),
    (lambda: pax.Sequential(pax.Linear(4, 4), jnp.tanh) >> pax.Dropout(0.5), ROW),
    (lambda: pax.nets.Transformer(4, 2, 2, 0.1), SEQUENCE),
]


def describe(value):
    leaves = jax.tree_util.tree_leaves(value)
    sizes = sum(np.size(leaf) for leaf in leaves)
    return sizes, float(sum(np.sum(np.cos(np.asarray(leaf, "float64"))) for leaf in leaves))


def call(module, x):
    return module(x, x, x) if isinstance(module, pax.MultiHeadAttention) else module(x)


def floating(module):
    """The arrays but for random keys, which are too large to be compared as floats."""
    leaves = jax.tree_util.tree_leaves(module)
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def main():
    rng = np.random.RandomState(0)
    for number, (make, shape) in enumerate(LAYERS):
        pax.seed_rng_key(number)
        x = jnp.asarray(rng.randn(*shape), jnp.float32)
        module, next_key = make(), pax.next_rng_key()
        print(number, module, next_key)
        print("  drawn", *describe(floating(module)))
        print("  trainable", *describe(module.parameters()))
        module, y = step(module, x)
        print("  train", *describe(y))
        print("  changed", *describe(floating(module)))
        _, y = step(module.eval(), x)
        print("  eval", *describe(y))

    for cell in (pax.LSTM, pax.GRU, pax.VanillaRNN):
        pax.seed_rng_key(5)
        module = cell(4, 3)
        state, y = module(module.initial_state(5), jnp.asarray(rng.randn(*ROW), jnp.float32))
        print(module, *describe((state, y)), *describe(module))
    pax.seed_rng_key(6)
    print("embed", *describe(pax.Embed(7, 3)(jnp.array([[1, 2], [6, -1]]))))
    image = jnp.asarray(rng.randn(*IMAGE), jnp.float32)
    for pool in (pax.max_pool, pax.avg_pool):
        for padding in ("SAME", "VALID"):
            print(pool.__name__, *describe(pool(image, (3, 3, 1), (2, 2, 1), padding)))
    keys = pax.RngSeq(seed=3)
    print("keys", *pax.pure(lambda keys: keys.next_rng_key(2))(keys))


@jax.jit
def step(module, x):
    return pax.pure(lambda module, x: (module, call(module, x)))(module, x)


if __name__ == "__main__":
    main()
