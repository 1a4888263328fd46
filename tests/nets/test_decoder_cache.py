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


@jax.jit
def read_twice(lm, cache):
    """Logits of a prompt and of one token more, and the cache."""
    first, cache = lm(TOKENS, LENGTHS, cache=cache, last_only=True)
    second, cache = lm(first.argmax(-1)[:, None], cache=cache)
    return (first, second), cache


def shapes(config, change=lambda cache: cache, **options):
    return jax.eval_shape(lambda: change(Decoder(config).init_cache(2, 8, **options)))


@pytest.mark.parametrize(("net", "dtype"), [("listed", "int8"), ("scanned", None)])
def test_a_cache_of_each_layer_says_what_one_of_all_says(net, dtype):
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
def test_rows_and_heads_of_a_cache_lie_on_a_mesh(listed):
    mesh = pax.sharding.abstract_mesh(data=2, model=2)
    for dtype in (None, "int8"):
        cache = shapes(IN_TURN, dtype=dtype, listed=listed)
        table = pax.sharding.table(cache, mesh, cache.sharding_rules(mesh))
        front = () if listed else (1,)
        name = "keys" + ".0" * listed + (".codes" if dtype else "")
        assert table[name].shard_shape == (*front, 1, 8, 1, 2)
        assert table["lengths"].shard_shape == (1,)


def test_what_an_axis_does_not_divide_lies_everywhere():
    cache = shapes(LLAMA)
    mesh = pax.sharding.abstract_mesh(data=3, model=4)
    assert cache.sharding_rules(mesh)["keys"] == P(None, None, None, None)
    mesh = pax.sharding.abstract_mesh(data=2, fsdp=1, model=2)
    rules = cache.sharding_rules(mesh, data=("data", "fsdp"), model=None)
    assert rules["values"] == P(None, ("data", "fsdp"), None, None)
    assert rules["lengths"] == P(("data", "fsdp"))


def test_an_axis_that_the_mesh_has_not_is_named():
    mesh, cache = pax.sharding.abstract_mesh(rows=2), shapes(LLAMA)
    with refused(pax.errors.PaxError, "'data'"):
        pax.sharding.table(cache, mesh, cache.sharding_rules(mesh, model=None))


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((2, 8), {"dtype": "nope"}, ["or int8 with scales", "init_cache: dtype\n  got: 'nope'"]),
        ((2, 8), {"dtype": int}, ["<class 'int'>", 'write: dtype="bfloat16", or "int8"']),
        ((2, 8), {"dtype": "(2,"}, ["init_cache: dtype\n  got: '(2,'"]),
        ((2, 8), {"dtype": []}, ["init_cache: dtype\n  got: []"]),
        (("x", 8), {}, ["must be an integer", "init_cache: batch\n  got: str: 'x'"]),
        ((2.0, 8), {}, ["init_cache: batch\n  got: float: 2.0"]),
        ((-1, 8), {}, ["must be at least 0", "init_cache: batch\n  got: -1"]),
        ((2, -8), {"listed": True}, ["init_cache: max_length\n  got: -8"]),
        ((2, None), {}, ["init_cache: max_length\n  got: NoneType: None"]),
        ((2, 2**40), {}, ["in int32", "init_cache: max_length\n  got: max_length=1.1e+12"]),
    ],
)
def test_sizes_and_dtypes_that_no_cache_has_are_named(sizes, options, words):
    kinds = (pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError)
    with pytest.raises(kinds) as raised:
        shapes_of(*sizes, **options)
    assert [word for word in words if word not in str(raised.value)] == []


def shapes_of(batch, max_length, **options):
    return jax.eval_shape(lambda: Decoder(IN_TURN).init_cache(batch, max_length, **options))


def test_sizes_of_numpy_are_sizes():
    assert shapes_of(np.int64(2), np.int32(8)).keys.shape == (1, 2, 8, 2, 2)
    assert shapes_of(0, 8).lengths.shape == (0,)


@pytest.mark.parametrize("dtype", ["nope", "int8", bool])
def test_dtypes_that_no_weights_have_are_named(dtype, tmp_path):
    calls = {
        "Decoder": lambda: Decoder(LLAMA, dtype=dtype),
        "Decoder.from_gguf": lambda: Decoder.from_gguf(tmp_path / "none", dtype=dtype),
        "Decoder.from_pretrained": lambda: Decoder.from_pretrained(tmp_path, dtype=dtype),
    }
    for where, call in calls.items():
        with refused(
            pax.errors.InvalidArgumentTypeError, f"where: {where}: dtype\n  got: {dtype!r}\n"
        ):
            call()


SMALL = DecoderConfig.llama(
    vocab_size=9, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=8
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 3}, "got: (3, 0, 2, 2) layers, windowed layers, key heads and their size; "
                            "this net has (2, 0, 2, 2)"),
        ({"num_kv_heads": 1}, "got: (2, 0, 1, 2) layers"),
        ({"head_size": 4}, "got: (2, 0, 2, 4) layers"),
        ({"kinds": (LayerKind(window=3), LayerKind())}, "got: (1, 1, 2, 2) layers"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("listed", [False, True])
def test_the_cache_of_another_net_is_named(change, words, listed):
    other = Decoder(dataclasses.replace(SMALL, **change)).init_cache(1, 4, listed=listed)
    with pytest.raises(pax.errors.InvalidArgumentError) as raised:
        Decoder(SMALL)(np.ones((1, 2), np.int32), cache=other)
    assert str(raised.value).startswith("The cache belongs to another net.\n")
    assert words in str(raised.value)


def test_what_is_no_cache_and_no_integers_is_named():
    lm, token = Decoder(SMALL), np.ones((1, 1), np.int32)
    cache = lm.init_cache(1, 4)
    cases = {
        "Expected a cache of a Decoder.\n  where: Decoder(cache=...)\n  got: dict": (
            lambda: lm(token, cache={"keys": cache.keys})
        ),
        "Tokens are integers.\n  where: Decoder(tokens)\n  got: 'text'": lambda: lm("text"),
        "Tokens are integers.\n  where: Decoder(tokens)\n  got: [[1, 2], [3]]": (
            lambda: lm([[1, 2], [3]])
        ),
        "Lengths are integers.\n  where: Decoder(lengths=...)\n  got: float32[1]": (
            lambda: lm(token, np.ones(1, np.float32))
        ),
        "Lengths are integers.\n  where: DecoderCache.with_lengths\n  got: None": (
            lambda: cache.with_lengths(None)
        ),
        "There must be a length for each row.\n  where: DecoderCache.with_lengths\n": (
            lambda: cache.with_lengths(1)
        ),
        "Lengths must not be negative.\n  where: DecoderCache.with_lengths\n  got: -1": (
            lambda: cache.with_lengths([-1])
        ),
        "A cache must hold arrays.\n  where: generate: cache\n  got: str: 'x'": (
            lambda: pax.generate(lm, token, max_new_tokens=1, cache="x")
        ),
    }
    for text, call in cases.items():
        kinds = (pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError)
        with pytest.raises(kinds) as raised:
            call()
        assert str(raised.value).startswith(text)
