"""Exported language models: whole greedy texts, by each runtime, are those of jax."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import beam_search, export, samplers
from tests.closeness import assert_close
from tests.generation.nets import TinyLM, prompts
from tests.generation.serving import empty_cache, greedy_texts
from tests.hard.size import runs
from tests.refusals import refused

CONFIG = pax.nets.DecoderConfig.llama(
    vocab_size=31, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=16, tied=True
)
COUNT, ROOM, STOP = 6, 16, 7


def decoder(**options):
    """A net whose weights are so large that it does not say one thing again and again."""
    made = pax.nets.Decoder(CONFIG, **options)
    return jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, made)


@pytest.fixture(scope="module")
def lm():
    pax.seed_rng_key(0)
    return decoder()


TOKENS = np.array([[3, 14, 15, 9, 2], [6, 5, 3, 0, 0], [1, 0, 0, 0, 0]], np.int32)
LENGTHS = np.array([5, 3, 1], np.int32)

SUFFIX = {"onnx": "lm.onnx", "tflite": "lm.tflite"}
#: All formats write whole texts in `tox -e hard`: each compiles a loop of the net several times.
FORMATS = ["saved_model", "onnx", *["stablehlo", "tflite"] * runs(short=0, long=1)]


@pytest.fixture(scope="module")
def exported(lm, tmp_path_factory):
    """The net in a format, written once: its path and report."""

    @functools.cache
    def written(format, **more):
        path = tmp_path_factory.mktemp(format) / SUFFIX.get(format, "lm")
        room = "room" if format in ("onnx", "stablehlo") else ROOM
        options = {"max_length": room, "max_new_tokens": COUNT, "stop": STOP, **more}
        return path, export(lm, path, format=format, **options)

    return written


@pytest.mark.parametrize("format", FORMATS)
def test_prefill_and_decode_give_the_greedy_texts(lm, format, exported):
    path, report = exported(format)
    assert report.validated == "here"
    served = pax.export.load(path)
    expected = np.asarray(pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=COUNT))
    assert np.array_equal(greedy_texts(served, TOKENS, LENGTHS, COUNT, ROOM), expected)
    if format == "onnx":
        chunked = greedy_texts(served, TOKENS, LENGTHS, COUNT, ROOM, chunk=2)
        assert np.array_equal(chunked, expected)
        assert list(served.signatures) == ["prefill"]
        names = [entry.name for entry in report.signatures["prefill"].inputs]
        stores = [f"cache.{store}.{layer}" for store in ("keys", "values") for layer in (0, 1)]
        assert names == ["tokens", "lengths", *stores, "cache.lengths"]
        assert "Loop" not in _operations(path) and "Scan" not in _operations(path)
        assert "Pad" not in _operations(path)  # a cache is copied once, when it is written
        return
    whole = served.signatures["generate"](TOKENS, LENGTHS)
    expected = pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=COUNT, stop=STOP)
    assert np.array_equal(whole, expected)
    # The weights are there once, whatever the number of functions.
    assert report.variable_bytes == sum(x.nbytes for x in jax.tree.leaves(lm))
    names = [entry.name for entry in report.signatures["decode"].inputs]
    assert names == ["token", "cache.keys", "cache.values", "cache.lengths"]


def test_tensorflow_compiles_the_functions(lm, exported):
    import tensorflow as tf

    model = tf.saved_model.load(str(exported("saved_model")[0]))
    functions = {
        key: tf.function(model.signatures[key], jit_compile=True) for key in ("prefill", "decode")
    }
    tokens, lengths = tf.constant(TOKENS), tf.constant(LENGTHS)
    takes = model.signatures["decode"].structured_input_signature[1]
    empty = {name: tf.zeros([3 if n is None else n for n in each.shape], each.dtype)
             for name, each in takes.items() if name.startswith("cache.")}  # fmt: skip
    made = functions["prefill"](tokens=tokens, lengths=lengths, **empty)
    text = []
    for _ in range(3):
        text.append(tf.argmax(made["logits"], -1, tf.int32))
        made = functions["decode"](token=text[-1], **{name: made[name] for name in empty})
    expected = np.asarray(pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=COUNT))
    assert np.array_equal(np.stack(text, 1), expected[:, :3])
    # Its loop is a graph, of texts whose sizes XLA would have to know.
    (whole,) = model.signatures["generate"](tokens=tokens, lengths=lengths).values()
    expected = pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=COUNT, stop=STOP)
    assert np.array_equal(whole, expected)


@pytest.mark.skipif(not runs(short=0, long=1), reason="`tox -e hard` runs it: seconds")
def test_a_retargeted_model_keeps_its_caches(lm, exported, tmp_path):
    made = pax.export.retarget(exported("saved_model", operations="xla")[0], out=tmp_path / "new")
    assert made.oldest_tensorflow == "2.15"
    served = pax.export.load(tmp_path / "new")
    expected = np.asarray(pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=3))
    assert np.array_equal(greedy_texts(served, TOKENS, LENGTHS, 3, ROOM), expected)


def _operations(path):
    import onnx

    return {node.op_type for node in onnx.load(path).graph.node}


def test_a_loop_is_one_onnx_file_with_a_net_of_any_kind(tmp_path):
    lm, path = TinyLM(), tmp_path / "lm.onnx"
    export(lm, path, format="onnx", max_length=ROOM, max_new_tokens=COUNT, signatures="generate")
    rows = prompts(5, 3, 1)
    tokens = np.array([row + [0] * (5 - len(row)) for row in rows])
    expected = pax.generate(lm, rows, max_new_tokens=COUNT)
    assert np.array_equal(pax.export.load(path)(tokens, [5, 3, 1]), expected)


def test_a_sampler_that_draws_is_given_a_seed(lm, tmp_path):
    sampler = samplers.temperature(0.7) | samplers.top_p(0.9)
    options = {"max_length": ROOM, "max_new_tokens": 4, "signatures": ["generate"]}
    export(lm, tmp_path / "lm", format="stablehlo", sampler=sampler, validate=False, **options)
    served = pax.export.load(tmp_path / "lm")
    for seed in (0, 1):
        key = jax.random.PRNGKey(seed)
        expected = pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=4, sampler=sampler, key=key)
        assert np.array_equal(served(TOKENS, LENGTHS, np.asarray(key)), expected)


def test_a_negative_token_leaves_a_row_of_the_cache_as_it_is(lm, tmp_path):
    options = {"max_length": ROOM, "signatures": ["prefill", "decode"], "validate": False}
    export(lm, tmp_path / "lm", format="stablehlo", **options)
    served = pax.export.load(tmp_path / "lm")
    cache = empty_cache(served.signatures["prefill"].info, 3, ROOM)
    made = served.signatures["prefill"](TOKENS, LENGTHS, cache)
    after = served.signatures["decode"](np.array([4, -1, 5], np.int32), made["cache"])
    for name, axis in (("keys", 1), ("values", 1), ("lengths", 0)):
        old, new = (np.take(np.asarray(x["cache"][name]), 1, axis) for x in (made, after))
        assert np.array_equal(old, new)
    assert np.asarray(after["cache"]["lengths"]).tolist() == [6, 3, 2]
    # Lengths that lie count as far as there are tokens; what has no place is lost, and the
    # lengths say so; the cache of other rows is as it was.
    lies = served.signatures["prefill"](TOKENS, np.array([99, -3, 1], np.int32), cache)["cache"]
    assert np.asarray(lies["lengths"]).tolist() == [5, 0, 1]
    full = {**made["cache"], "lengths": np.array([ROOM - 1, 3, 1], np.int32)}
    over = served.signatures["prefill"](TOKENS, np.array([5, 0, 0], np.int32), full)["cache"]
    assert np.asarray(over["lengths"]).tolist() == [ROOM + 4, 3, 1]
    assert np.array_equal(np.asarray(over["keys"])[:, 1:], np.asarray(full["keys"])[:, 1:])


def test_a_beam_search_is_exported_as_a_function(tmp_path):
    def search(lm, tokens, lengths):
        return beam_search(lm, tokens, lengths, max_new_tokens=4, beams=3, stop=STOP)._asdict()

    specs = pax.export.spec("batch, 5", "int32"), pax.export.spec("batch", "int32")
    path, lm = tmp_path / "lm.onnx", TinyLM().eval()
    pax.export.to_onnx((lm, search), path, specs, validate=False)
    made, expected = pax.export.load(path)(TOKENS, LENGTHS), search(lm, TOKENS, LENGTHS)
    assert np.array_equal(made["tokens"], expected["tokens"])
    assert_close(made["scores"], expected["scores"], rtol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_invalid_rows_have_nan_logits(format, exported):
    served = pax.export.load(exported(format)[0])
    prefill = served.signatures["prefill"]
    cache = empty_cache(prefill.info, 3, ROOM)
    expected = np.asarray(prefill(TOKENS, LENGTHS, cache)["logits"])
    wrong = TOKENS.copy()
    wrong[0, 1], wrong[1, 1], wrong[2, 1] = 31, -1, 10**6  # the last one is not meant
    made = prefill(wrong, LENGTHS, cache)
    assert np.isnan(made["logits"][:2]).all()
    assert_close(made["logits"][2], expected[2], rtol=1e-5)
    # A row that was full stays so; the others go on.
    full = {**made["cache"], "lengths": np.array([ROOM, ROOM - 1, 1], np.int32)}
    token = np.array([[1], [1], [1]], np.int32)
    for count in (1, 2):
        made = prefill(token, np.ones(3, np.int32), full)
        is_nan = np.isnan(made["logits"])
        assert is_nan.all(1).tolist() == is_nan.any(1).tolist() == [True, count > 1, False]
        full = made["cache"]
    assert np.asarray(full["lengths"]).tolist() == [ROOM + 2, ROOM + 1, 3]
    if "generate" in served.signatures:
        texts = np.asarray(served.signatures["generate"](wrong, np.array([5, 0, 6], np.int32)))
        assert texts.tolist() == [[-1, *[0] * (COUNT - 1)]] * 3


def test_a_cache_of_its_own_dtype_is_exported(lm, tmp_path):
    for dtype, keys in (("bfloat16", ["decode"]), ("int8", ["prefill", "decode"])):
        options = {"max_length": ROOM, "signatures": keys, "cache_dtype": dtype}
        options["validate"] = dtype == "int8"
        report = export(lm, tmp_path / dtype, format="stablehlo", **options)
        named = {entry.name: entry for entry in report.signatures["decode"].inputs}
        codes = named["cache.keys" if dtype == "bfloat16" else "cache.keys.codes"]
        assert codes.dtype == dtype
        assert ("cache.keys.scales" in named) == (dtype == "int8")


def test_inspect_knows_caches_by_name(lm, tmp_path):
    options = {"max_length": ROOM, "signatures": ["decode"], "validate": False}
    export(lm, tmp_path / "lm", **options)
    text = str(pax.export.Report.read(tmp_path / "lm"))
    assert "in   cache.keys: float32[2, batch, 16, 1, 4]" in text
    assert "out  cache.lengths: int32[batch]" in text


def test_one_session_is_a_module_that_holds_its_cache(lm, tmp_path):
    class Session(pax.StateModule):
        def __init__(self, lm):
            super().__init__()
            self.lm, self.cache = lm, lm.init_cache(1, ROOM)

        def __call__(self, tokens):
            logits, self.cache = self.lm(tokens, cache=self.cache, last_only=True)
            return logits

    inputs = pax.export.spec("1, length", "int32")
    pax.export.to_saved_model(Session(lm), tmp_path / "lm", inputs, state="update", validate=False)
    served, made = pax.export.load(tmp_path / "lm"), []
    token = TOKENS[:1]
    for _ in range(4):
        token = np.argmax(served(token), -1).astype(np.int32)[:, None]
        made.append(int(token[0, 0]))
    assert made == pax.generate(lm, TOKENS[:1], max_new_tokens=4)[0].tolist()


@pytest.mark.parametrize("format", ["stablehlo", "onnx", "tflite"])
def test_every_format_is_tested_with_the_examples_that_are_given(format, tmp_path):
    def root(params, x):
        return jnp.sqrt(x) * params["w"]

    write = getattr(pax.export, f"to_{format}")
    model, path = ({"w": jnp.ones(3)}, root), tmp_path / SUFFIX.get(format, "lm")
    example = np.array([[4.0, 9.0, 16.0]], np.float32)
    report = write(model, path, pax.export.spec("n, 3"), examples=[example])
    assert report.largest_error["serving_default: output"] < 1e-5
    # By the key of a signature, too, though there is one only.
    named = {"root": root}
    inputs = {"root": pax.export.spec("n, 3")}
    write(model, path, inputs, methods=named, examples={"root": [example]}, overwrite=True)
    with refused(pax.errors.PaxError, "serving_default"):
        write(model, path, pax.export.spec("n, 3"), examples=[{"z": 1}], overwrite=True)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("format", ["onnx"]),
        ("signatures", 5),
        ("signatures", [1]),
        ("platforms", None),
        ("batch", None),
        ("batch", 1.5),
        ("length", [3]),
    ],
)
def test_invalid_arguments_are_refused(lm, tmp_path, argument, value):
    with refused(pax.errors.PaxError) as caught:
        export(lm, tmp_path / "lm", **{"max_length": ROOM, "format": "stablehlo", argument: value})
    assert caught.value.got.endswith(repr(value))
    assert argument in caught.value.where and caught.value.write
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", [("batch", 2, "room"), (2, 4, ROOM)])
def test_prompts_of_a_validation_fit_the_sizes_of_an_export(sizes, tmp_path):
    """In as many batches and parts as that takes; windows are wider than the room is long."""
    batch, length, room = sizes
    lm = pax.nets.Decoder(dataclasses.replace(CONFIG, kinds=(pax.nets.LayerKind(window=40),)))
    options = {"format": "onnx", "batch": batch, "length": length, "max_length": room}
    rows = [[3, 4, 5], [6, 7, 8, 9, 10], [1]]
    report = export(lm, tmp_path / "lm.onnx", prompts=rows, max_new_tokens=2, **options)
    assert report.validated and report.largest_error


def test_litert_keeps_all_tokens_of_a_net_whose_layers_all_have_windows(tmp_path):
    pax.seed_rng_key(0)
    config = dataclasses.replace(CONFIG, kinds=(pax.nets.LayerKind(window=3),))
    lm = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, pax.nets.Decoder(config))
    options = {"max_length": ROOM, "validate": False, "signatures": ["prefill", "decode"]}
    export(lm, tmp_path / "lm.tflite", format="tflite", **options)
    served = pax.export.load(tmp_path / "lm.tflite")
    expected = np.asarray(pax.generate(lm, TOKENS, LENGTHS, max_new_tokens=COUNT))
    assert np.array_equal(greedy_texts(served, TOKENS, LENGTHS, COUNT, ROOM), expected)


def test_unsupported_exports_are_refused(lm, tmp_path):
    path, decode = tmp_path / "lm", {"signatures": ["decode"]}
    learned = pax.nets.Decoder(dataclasses.replace(CONFIG, positions="learned", max_positions=8))
    for net, names, options in (
        (lm, ["format", "'coreml'"], {"format": "coreml"}),
        (lm, ["export: format", "'gguf'"], {"format": "llama.cpp", "tokenizer": "tokenizer.json"}),
        (lm, ["prefill, decode and generate"], {"signatures": ["serve"]}),
        (lm, ['signatures=["prefill"]'], {"format": "onnx", "signatures": ["prefill", "decode"]}),
        (lm, ["max_length"], {"max_length": 0}),
        (pax.Linear(2, 2), ["init_cache"], {}),
        (lm, ["99"], {"prompts": [[99]]}),
        (lm, ["layers", "'stacked'"], {"layers": "stacked"}),
        (TinyLM(), ["layers='listed'", "TinyLM"], {"layers": "listed"}),
        (lm, ["99"], {"stop": 99, **decode}),
        (lm, [f"length={ROOM + 1} and max_length={ROOM}"], {"length": ROOM + 1}),
        (lm, ["export: prompts"], {"prompts": [[1] * (ROOM + 1)], "format": "stablehlo"}),
        (learned, ["8 positions"], {"max_length": 8, "max_new_tokens": 8,
                                    "signatures": ["generate"]}),
        (lm, ["0 to 30"], {"pad": 31}),
    ):  # fmt: skip
        with refused(pax.errors.PaxError, *names):
            export(net, path, **{"max_length": ROOM, **options})
    assert not path.exists()
