"""Language models on a mesh: the tokens of one device, and a cache that stays where it lies."""

from __future__ import annotations

import jax
import numpy as np

import pax_export as pax
from pax_export import sharding

CONFIG = pax.nets.DecoderConfig.llama(
    vocab_size=32, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=16, tied=True
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 5))
LENGTHS = np.array([5, 1, 2, 3, 4, 5, 2, 3])


def test_rows_and_heads_in_parts_generate_the_tokens_of_one_device():
    pax.seed_rng_key(0)
    lm = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, pax.nets.Decoder(CONFIG))
    options = {"max_new_tokens": 6, "stop": 3}
    expected = pax.generate(lm, TOKENS, LENGTHS, **options)
    assert len(np.unique(expected)) > 6  # it does not say one thing again and again

    mesh = sharding.make_mesh(data=4, model=2)
    placed = sharding.shard(lm, mesh, sharding.tensor_parallel())
    empty = lm.init_cache(8, 16)
    cache = sharding.shard(empty, mesh, empty.sharding_rules(mesh))
    lies = cache.keys.sharding
    assert lies.shard_shape(cache.keys.shape) == (2, 2, 16, 1, 4)
    tokens = sharding.shard_batch(TOKENS, mesh)
    made = pax.generate(placed, tokens, LENGTHS, cache=cache, return_cache=True, **options)
    assert np.array_equal(made.tokens, expected)
    assert made.cache.keys.sharding.is_equivalent_to(lies, 5)
