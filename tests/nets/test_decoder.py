"""A Decoder read whole, in pieces, in rows of other lengths; its cache, its mistakes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export.nets import Decoder, DecoderCache, DecoderConfig, LayerKind
from tests.closeness import assert_close
from tests.refusals import refused

LLAMA = DecoderConfig.llama(
    vocab_size=50, dim=16, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=32
)
CONFIGS = {
    "llama": LLAMA,
    "windows in turn": dataclasses.replace(
        LLAMA, kinds=(LayerKind(window=3), LayerKind()), attention_softcap=5.0, logit_softcap=3.0
    ),
    "norms after blocks": dataclasses.replace(
        LLAMA,
        pre_norms=False,
        post_norms=True,
        query_key_norm=True,
        norm_per_head=False,
        residual_scale=0.5,
        logit_scale=2.0,
        kinds=(LayerKind(), LayerKind(rotary_base=0.0)),
    ),
    "alibi, a layer beside the loop": dataclasses.replace(
        LLAMA, num_layers=3, positions="alibi", kinds=(LayerKind(window=4), LayerKind())
    ),
}
TOKENS = np.random.RandomState(0).randint(0, 50, (2, 11))
CHUNKS = ((3, 1), (1, 1), (0, 4), (4, 3), (1, 1), (2, 1))  # of both rows, eleven in all
WHOLE = jax.jit(lambda lm: lm(TOKENS))


@functools.cache
def decoder(config: DecoderConfig = LLAMA, layers: str = "scanned") -> Decoder:
    pax.seed_rng_key(0)
    return Decoder(config, layers)


def read(lm: Decoder, tokens, lengths, cache):
    return lm(tokens, lengths, cache=cache)


READ = jax.jit(read)


def in_chunks(lm: Decoder, cache: DecoderCache) -> tuple[list, DecoderCache]:
    """The logits of both rows, read in chunks of other lengths."""
    logits: list = [[], []]
    for counts in CHUNKS:
        chunk = np.zeros((2, 1 if max(counts) == 1 else 4), np.int32)
        for row, count in enumerate(counts):
            first = len(logits[row])
            chunk[row, :count] = TOKENS[row, first : first + count]
        given, cache = READ(lm, chunk, np.array(counts), cache)
        for row, count in enumerate(counts):
            logits[row] += list(np.asarray(given[row, :count]))
    return [np.stack(rows) for rows in logits], cache


@pytest.mark.parametrize(
    ("name", "rolling"),
    [(name, rolling) for name in CONFIGS for rolling in (True, False)
     if rolling or name == "windows in turn"],
)  # fmt: skip
def test_chunks_of_other_lengths_give_the_logits_of_the_whole(name, rolling):
    lm = decoder(CONFIGS[name])
    whole = np.asarray(WHOLE(lm))
    logits, cache = in_chunks(lm, lm.init_cache(2, 12, rolling=rolling))
    assert cache.lengths.tolist() == [11, 11]
    has_window = any(kind.window is not None for kind in CONFIGS[name].kinds)
    assert cache.is_rolling == (rolling and has_window)
    for row in (0, 1):
        assert_close(logits[row], whole[row], rtol=5e-6)


def test_scanned_and_listed_layers_are_one_net():
    lm = decoder(CONFIGS["windows in turn"])
    listed = lm.listed()
    assert not listed.is_scanned and listed.listed() is listed
    assert_close(WHOLE(listed), WHOLE(lm), rtol=5e-6)
    back = listed.scanned()
    assert jax.tree.structure(back) == jax.tree.structure(lm) and back.scanned() is back
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(lm)):
        assert_close(a, b, rtol=0.0)
    assert jax.tree.structure(decoder(lm.config, "listed")) == jax.tree.structure(listed)


def test_thirty_scanned_layers_trace_as_one():
    def equations(layers: int) -> int:
        config = dataclasses.replace(LLAMA, num_layers=layers)
        shapes = jax.eval_shape(lambda: Decoder(config))
        cache = jax.eval_shape(lambda: Decoder(config).init_cache(2, 8))
        tokens = jax.ShapeDtypeStruct((2, 4), jnp.int32)
        traced = jax.jit(lambda lm, t, c: lm(t, cache=c)).trace(shapes, tokens, cache)
        return len(str(traced.jaxpr).split("="))

    assert equations(30) == equations(2)


def test_gradients_reach_every_weight_through_the_loop():
    lm = decoder()

    def loss(lm):
        return jnp.mean(jax.nn.log_softmax(lm(TOKENS))[..., 0])

    found = jax.jit(pax.grad(loss))(lm)
    listed = jax.jit(pax.grad(loss))(lm.listed())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(listed.scanned())):
        assert float(jnp.abs(a).max()) > 0
        assert_close(a, b, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 2e-2), ("int8", 2e-2), ("float32", 5e-6)])
def test_a_cache_of_another_dtype_gives_nearly_the_logits(dtype, near):
    lm = decoder()
    cache = lm.init_cache(2, 12, dtype)
    logits, cache = READ(lm, TOKENS, None, cache)
    whole = WHOLE(lm)
    assert np.abs(logits - whole).max() < near * np.abs(whole).max()
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    parts = [".codes", ".scales"] if dtype == "int8" else [""]
    assert names == [f".{s}{part}" for s in ("keys", "values") for part in parts] + [".lengths"]
    assert cache.keys.codes.dtype == "int8" if dtype == "int8" else cache.keys.dtype == dtype


def test_half_weights_compute_in_half_and_give_logits_in_float32():
    lm = Decoder(LLAMA, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(lm)} == {jnp.dtype(jnp.bfloat16)}
    logits, cache = READ(lm, TOKENS, None, lm.init_cache(2, 12))
    assert logits.dtype == jnp.float32 and cache.keys.dtype == jnp.bfloat16


def test_only_the_last_logits_are_computed_on_request():
    lm, lengths = decoder(), np.array([4, 11])
    whole = np.asarray(WHOLE(lm))
    last = lm(TOKENS, lengths, last_only=True)
    assert_close(last, whole[[0, 1], lengths - 1], rtol=5e-6)
    text = str(jax.make_jaxpr(lambda lm: lm(TOKENS, lengths, last_only=True))(lm))
    assert "f32[2,11,50]" not in text and "f32[2,50]" in text


def test_a_jitted_call_reports_overflow():
    lm = decoder()
    _, cache = READ(lm, TOKENS[:, :5], None, lm.init_cache(2, 6))
    before = cache
    logits, after = READ(lm, TOKENS[:, 5:9], np.array([4, 1]), cache)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert after.lengths.tolist() == [9, 6] and after.overflowed.tolist() == [True, False]
    assert before.overflowed.tolist() == [False, False]
    whole = READ(lm, TOKENS[:, :6], None, lm.init_cache(2, 6))[1]
    assert_close(after.keys[:, 1], whole.keys[:, 1], rtol=5e-6)  # of the other row
    assert_close(after.keys[:, 0], whole.keys[:, 0], rtol=5e-6)  # the first six
    # What is full stays full, until it is cut.
    assert np.isnan(READ(lm, TOKENS[:, :1], None, after)[0][0]).all()
    assert np.isfinite(READ(lm, TOKENS[:, :1], None, after.with_lengths([0, 0]))[0]).all()
    never = dataclasses.replace(after, lengths=jnp.array([-1, 3]))
    logits = READ(lm, TOKENS[:, :1], None, never)[0]
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize("wrong", [-1, 50, 2**31 - 1])
def test_unknown_tokens_have_nan_logits(wrong):
    lm, tokens = decoder(), TOKENS.copy()
    tokens[0, 2] = wrong
    whole = np.asarray(WHOLE(lm))
    logits = np.asarray(jax.jit(lambda lm, tokens: lm(tokens))(lm, tokens))
    assert np.isnan(logits[0]).all()
    assert_close(logits[1], whole[1], rtol=5e-6)
    # Behind the length of a row there may be anything, and a cache goes on.
    logits, cache = READ(lm, tokens, np.array([2, 11]), lm.init_cache(2, 20))
    assert np.isfinite(logits).all()
    logits, cache = READ(lm, tokens[:, 2:4], np.array([1, 0]), cache)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert np.isfinite(READ(lm, TOKENS[:, :1], None, cache)[0]).all()
    for given, lengths in ((tokens, None), (jnp.asarray(tokens), np.array([3, 1]))):
        with refused(
            pax.errors.InvalidArgumentError, where="Decoder(tokens)[0, 2]", got=str(wrong)
        ):
            lm(given, lengths)
    lm(tokens, np.array([2, 11]))


def test_a_position_that_was_not_learned_has_no_logits():
    lm = decoder(dataclasses.replace(LLAMA, positions="learned", max_positions=8))
    shape = jax.export.symbolic_shape("2, n")
    read = jax.jit(lambda lm, tokens: lm(tokens))
    program = jax.export.export(read)(lm, jax.ShapeDtypeStruct(shape, "int32"))
    assert np.isfinite(program.call(lm, TOKENS[:, :8].astype("int32"))).all()
    assert np.isnan(program.call(lm, TOKENS[:, :9].astype("int32"))).all()


def test_lengths_outside_of_their_range_are_clipped_under_jit():
    lm = decoder()
    _, cache = READ(lm, TOKENS, jnp.array([-3, 99]), lm.init_cache(2, 12))
    assert cache.lengths.tolist() == [0, 11]


def test_donated_caches_are_written_in_place():
    lm = decoder()
    cache = lm.init_cache(2, 64)
    compiled = jax.jit(read, donate_argnums=3).lower(lm, TOKENS[:, :1], None, cache).compile()
    sizes = compiled.memory_analysis()
    assert sizes.alias_size_in_bytes >= cache.keys.nbytes + cache.values.nbytes
    text = compiled.as_text()
    shape = f"f32[{','.join(map(str, cache.keys.shape))}]"
    copies = [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
    assert not copies, copies


def test_a_cut_cache_reads_on_from_there():
    lm = decoder()
    _, cache = lm(TOKENS, cache=lm.init_cache(2, 12))
    logits, _ = lm(TOKENS[:, 4:6], cache=cache.with_lengths([4, 4]))
    assert_close(logits, np.asarray(WHOLE(lm))[:, 4:6], rtol=5e-6)


def test_sharding_rules():
    mesh = pax.sharding.abstract_mesh(data=2, model=2)
    shapes = jax.eval_shape(lambda: Decoder(LLAMA))
    table = pax.sharding.table(shapes, mesh, pax.sharding.tensor_parallel())
    assert table["layers.attention.query.weight"].shard_shape == (3, 16, 8)
    assert table["layers.attention.output.weight"].shard_shape == (3, 8, 16)
    assert table["layers.dense.gate.weight"].shard_shape == (3, 16, 16)
    assert table["layers.dense.down.weight"].shard_shape == (3, 16, 16)
    assert table["layers.dense_norm.scale"].shard_shape == (3, 16)
    whole = pax.sharding.table(shapes, mesh, pax.sharding.fully_sharded(min_size=1))
    assert whole["layers.dense_norm.scale"].shard_shape == (3, 8)  # not along the layers
    cache = jax.eval_shape(lambda: decoder().init_cache(4, 8))
    rules = {"keys": P(None, "data", None, "model"), "values": P(None, "data", None, "model"),
             "lengths": P("data")}  # fmt: skip
    placed = pax.sharding.shard(cache, mesh, rules)
    assert placed.keys.sharding.shard_shape(placed.keys.shape) == (3, 2, 8, 1, 4)
    assert placed.lengths.sharding.spec == P("data")


def test_explicit_axes_keep_the_sharding_of_a_cache():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    lm = decoder()
    logits, _ = READ(lm, TOKENS, None, lm.init_cache(2, 12))
    heads = P(None, "data", None, "model")
    with jax.set_mesh(mesh):
        placed = pax.sharding.shard(lm, mesh, pax.sharding.tensor_parallel())
        rules = {"keys": heads, "values": heads, "lengths": P("data")}
        cache = pax.sharding.shard(lm.init_cache(2, 12), mesh, rules)
        tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, P("data")))
        found, cache = READ(placed, tokens, None, cache)
    assert cache.keys.sharding.is_equivalent_to(jax.NamedSharding(mesh, heads), 5)
    assert cache.lengths.sharding.spec == P("data")
    assert_close(found, logits, rtol=5e-6)


# --- mistakes -------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_cache_is_refused_and_the_cache_stays():
    lm = decoder()
    _, cache = lm(TOKENS[:, :5], cache=lm.init_cache(2, 8))
    with refused(
        INVALID, "max_length=9", where="Decoder(cache=...), row 1",
        got="5 tokens held and 4 more, for 8 places",
    ):  # fmt: skip
        lm(TOKENS[:, :4], np.array([1, 4]), cache=cache)
    assert cache.lengths.tolist() == [5, 5]


INVALID, WRONG_TYPE = pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError
LEARNED = dataclasses.replace(LLAMA, positions="learned", max_positions=8)
TWO_WINDOWS = dataclasses.replace(LLAMA, kinds=(LayerKind(window=3), LayerKind(window=4)))
MISTAKES = [
    (lambda lm: lm(TOKENS, np.array([3, 12])), INVALID,
     ["Decoder(lengths=...)", "lengths from 0 to 12 for 11 tokens", "lengths from 0 to 11"]),
    (lambda lm: lm(TOKENS, np.array([-1, 11])), INVALID, ["lengths from -1 to 11"]),
    (lambda lm: lm(TOKENS, np.ones(3, int)), INVALID, ["(3,)", "(2, 11)"]),
    (lambda lm: lm(TOKENS * 0.5), WRONG_TYPE, ["tokens.astype(jnp.int32)"]),
    (lambda lm: lm(TOKENS[0]), INVALID, ["tokens[None]"]),
    (lambda lm: lm(np.array([[1, 2**32 + 1]])), INVALID, []),
    (lambda lm: lm(TOKENS, cache=lm.init_cache(3, 12)), INVALID, ["3 rows for 2 of tokens"]),
    (lambda _: decoder(LEARNED)(TOKENS), INVALID, ["Decoder.tokens", "11", "at most 8"]),
    (lambda _: decoder(LEARNED).init_cache(1, 9), INVALID, ["Decoder.max_length", "9"]),
    (lambda _: decoder(TWO_WINDOWS).init_cache(1, 8), INVALID,
     ["Decoder.init_cache", "windows [3, 4]", "rolling=False"]),
    (lambda _: Decoder({"dim": 3}), WRONG_TYPE, ["Decoder.config"]),
    (lambda _: Decoder(LLAMA, "stacked"), INVALID, ["'stacked'"]),
    (lambda _: dataclasses.replace(LLAMA, norm="batch"), INVALID, ["DecoderConfig.norm"]),
    (lambda _: dataclasses.replace(LLAMA, activation="tanh"), INVALID,
     ["DecoderConfig.activation"]),
    (lambda _: dataclasses.replace(LLAMA, positions="rope"), INVALID, ["DecoderConfig.positions"]),
    (lambda _: dataclasses.replace(LLAMA, rotary_pairing="pairs"), INVALID,
     ["DecoderConfig.rotary_pairing"]),
    (lambda _: dataclasses.replace(LLAMA, kinds=()), INVALID, ["0 for 3 layers"]),
    (lambda _: dataclasses.replace(LLAMA, kinds=(3,)), WRONG_TYPE, ["DecoderConfig.kinds"]),
    (lambda _: dataclasses.replace(LLAMA, implementation="flash"), INVALID,
     ["DecoderConfig.implementation"]),
    (lambda _: dataclasses.replace(LLAMA, logit_softcap=0.0), INVALID,
     ["DecoderConfig.logit_softcap"]),
    (lambda _: LayerKind(window=0), INVALID, ["LayerKind.window"]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "names"), MISTAKES)
def test_mistakes_are_refused(call, kind, names):
    with refused(kind, *names):
        call(decoder())
