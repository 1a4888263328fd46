"""The forms of a cache: one array for all layers, or one for each; and how it lies on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export.nets import Decoder, DecoderCache, DecoderConfig, LayerKind
from tests.closeness import assert_close
from tests.refusals import refused

LLAMA = DecoderConfig.llama(
    vocab_size=30, dim=8, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=8
)
IN_TURN = dataclasses.replace(LLAMA, num_layers=2, kinds=(LayerKind(window=3), LayerKind()))
TOKENS = np.random.RandomState(0).randint(0, 30, (2, 5))
LENGTHS = np.array([5, 2])
TOKEN = np.ones((1, 1), np.int32)
REFUSALS = (pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError)


@jax.jit
def read_twice(lm, cache):
    """Logits of a prompt and of one token more, and the cache."""
    first, cache = lm(TOKENS, LENGTHS, cache=cache, last_only=True)
    second, cache = lm(first.argmax(-1)[:, None], cache=cache)
    return (first, second), cache


def shapes(config, change=lambda cache: cache, **options):
    return jax.eval_shape(lambda: change(Decoder(config).init_cache(2, 8, **options)))


@pytest.mark.parametrize(("net", "dtype"), [("listed", "int8"), ("scanned", None)])
def test_listed_and_stacked_caches_agree(net, dtype):
    lm = getattr(Decoder(IN_TURN), net)()
    expected, stacked = read_twice(lm, lm.init_cache(2, 8, dtype))
    empty = lm.init_cache(2, 8, dtype, listed=True)
    assert empty.is_listed and len(empty.keys) == len(empty.window_keys) == 1
    assert (empty.batch, empty.max_length) == (2, 8)
    logits, cache = read_twice(lm, empty)
    assert jax.tree.structure(cache) == jax.tree.structure(empty)  # it stays in its form
    for one, other in zip(logits, expected):
        assert_close(one, other, rtol=5e-6)
    assert cache.lengths.tolist() == [6, 3] and not cache.overflowed.any()
    back = cache.stacked()
    assert not back.is_listed and back.listed().is_listed
    assert jax.tree.map(np.shape, back) == jax.tree.map(np.shape, stacked)


def test_leaves_of_each_layer_have_names():
    found = pax.core.named_leaves(shapes(LLAMA, listed=True))
    stores = [f"{store}.{layer}" for store in ("keys", "values") for layer in range(3)]
    assert [name for name, _ in found] == [*stores, "lengths"]
    every_window = dataclasses.replace(LLAMA, kinds=(LayerKind(window=3),))
    for cache in (shapes(every_window, listed=True), shapes(every_window, DecoderCache.listed)):
        assert (cache.max_length, cache.batch, len(cache.window_keys)) == (8, 2, 3)


@pytest.mark.parametrize("listed", [False, True])
def test_sharding_rules_of_a_cache(listed):
    mesh = pax.sharding.abstract_mesh(data=2, model=2)
    for dtype in (None, "int8"):
        cache = shapes(IN_TURN, dtype=dtype, listed=listed)
        table = pax.sharding.table(cache, mesh, cache.sharding_rules(mesh))
        front = () if listed else (1,)
        name = "keys" + ".0" * listed + (".codes" if dtype else "")
        assert table[name].shard_shape == (*front, 1, 8, 1, 2)
        assert table["lengths"].shard_shape == (1,)


def test_indivisible_axes_are_replicated():
    cache = shapes(LLAMA)
    mesh = pax.sharding.abstract_mesh(data=3, model=4)
    assert cache.sharding_rules(mesh)["keys"] == P(None, None, None, None)
    mesh = pax.sharding.abstract_mesh(data=2, fsdp=1, model=2)
    rules = cache.sharding_rules(mesh, data=("data", "fsdp"), model=None)
    assert rules["values"] == P(None, ("data", "fsdp"), None, None)
    assert rules["lengths"] == P(("data", "fsdp"))


def test_unknown_mesh_axes_are_refused():
    mesh, cache = pax.sharding.abstract_mesh(rows=2), shapes(LLAMA)
    with refused(pax.errors.PaxError, "'data'"):
        pax.sharding.table(cache, mesh, cache.sharding_rules(mesh, model=None))


@pytest.mark.parametrize(
    ("sizes", "options", "argument", "got"),
    [
        ((2, 8), {"dtype": "nope"}, "dtype", "'nope'"),
        ((2, 8), {"dtype": int}, "dtype", "<class 'int'>"),
        ((2, 8), {"dtype": "(2,"}, "dtype", "'(2,'"),
        ((2, 8), {"dtype": []}, "dtype", "[]"),
        (("x", 8), {}, "batch", "str: 'x'"),
        ((2.0, 8), {}, "batch", "float: 2.0"),
        ((-1, 8), {}, "batch", "-1"),
        ((2, -8), {"listed": True}, "max_length", "-8"),
        ((2, None), {}, "max_length", "NoneType: None"),
        ((2, 2**40), {}, "max_length", "max_length=1099511627776"),
    ],
)
def test_invalid_sizes_and_dtypes_of_a_cache_are_refused(sizes, options, argument, got):
    with refused(REFUSALS, f"init_cache: {argument}", f"got: {got}"):
        shapes_of(*sizes, **options)


def shapes_of(batch, max_length, **options):
    return jax.eval_shape(lambda: Decoder(IN_TURN).init_cache(batch, max_length, **options))


def test_sizes_of_numpy_are_sizes():
    assert shapes_of(np.int64(2), np.int32(8)).keys.shape == (1, 2, 8, 2, 2)
    assert shapes_of(0, 8).lengths.shape == (0,)


@pytest.mark.parametrize("dtype", ["nope", "int8", bool])
def test_invalid_dtypes_of_weights_are_refused(dtype, tmp_path):
    calls = {
        "Decoder": lambda: Decoder(LLAMA, dtype=dtype),
        "Decoder.from_gguf": lambda: Decoder.from_gguf(tmp_path / "none", dtype=dtype),
        "Decoder.from_pretrained": lambda: Decoder.from_pretrained(tmp_path, dtype=dtype),
    }
    for where, call in calls.items():
        with refused(REFUSALS[1], where=f"{where}: dtype", got=repr(dtype)):
            call()


SMALL = DecoderConfig.llama(
    vocab_size=9, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=8
)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_layers": 3}, "(3, 0, 2, 2)"),
        ({"num_kv_heads": 1}, "(2, 0, 1, 2)"),
        ({"head_size": 4}, "(2, 0, 2, 4)"),
        ({"kinds": (LayerKind(window=3), LayerKind())}, "(1, 1, 2, 2)"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_the_cache_of_another_net_is_refused(change, found, listed):
    other = Decoder(dataclasses.replace(SMALL, **change)).init_cache(1, 4, listed=listed)
    with refused(REFUSALS[0], f"got: {found}", "(2, 0, 2, 2)"):
        Decoder(SMALL)(np.ones((1, 2), np.int32), cache=other)


@pytest.mark.parametrize(
    ("call", "where", "got"),
    [
        (lambda lm, _: lm("text"), "Decoder(tokens)", "'text'"),
        (lambda lm, _: lm([[1, 2], [3]]), "Decoder(tokens)", "[[1, 2], [3]]"),
        (lambda lm, _: lm(TOKEN, np.ones(1, "f4")), "Decoder(lengths=...)", "float32[1]"),
        (lambda _, cache: cache.with_lengths(None), "DecoderCache.with_lengths", "None"),
        (lambda _, cache: cache.with_lengths(1), "DecoderCache.with_lengths", ""),
        (lambda _, cache: cache.with_lengths([-1]), "DecoderCache.with_lengths", "-1"),
    ],
)
def test_wrong_caches_tokens_and_lengths_are_refused(call, where, got):
    lm = Decoder(SMALL)
    with refused(REFUSALS, f"where: {where}\n  got: {got}"):
        call(lm, lm.init_cache(1, 4))


def test_a_rolling_cache_is_not_cut_where_tokens_are_overwritten():
    lm = Decoder(IN_TURN)
    _, cache = lm(TOKENS, LENGTHS, cache=lm.init_cache(2, 8))
    assert cache.with_lengths([5, 1]).lengths.tolist() == [5, 1]  # the window of row 1 is whole
    assert cache.with_lengths([0, 2]).lengths.tolist() == [0, 2]
    with refused(pax.errors.InvalidArgumentError, where="DecoderCache.with_lengths"):
        cache.with_lengths([4, 2])
    whole = lm(TOKENS, LENGTHS, cache=lm.init_cache(2, 8, rolling=False))[1]
    assert whole.with_lengths([4, 2]).lengths.tolist() == [4, 2]
