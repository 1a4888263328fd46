"""Tiny random nets of each family, in the files of others, against numpy in float64."""

from __future__ import annotations

import os
import struct

import jax
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nets import decoder_reference as reference
from tests.nets.decoder_gguf import of_gguf, write_gguf
from tests.refusals import refused

TOKENS = np.random.RandomState(1).randint(0, 31, (2, 9))
FULL = "full_attention"
each_family = pytest.mark.parametrize("family", list(reference.CONFIGS))


def expected(family: str) -> np.ndarray:
    config = reference.CONFIGS[family]
    weights = reference.random_weights(config)
    return np.stack([reference.logits(config, weights, row) for row in TOKENS])


def loaded(family: str, folder, files: int = 1, **options) -> pax.nets.Decoder:
    config = reference.CONFIGS[family]
    weights = reference.random_weights(config)
    path = reference.write_folder(folder, config, weights, files)
    return pax.nets.Decoder.from_pretrained(path, **options)


@each_family
def test_a_folder_of_transformers_gives_the_numbers_of_its_model(family, tmp_path):
    lm = loaded(family, tmp_path)
    assert lm.is_scanned
    assert_close(jax.jit(lambda lm: lm(TOKENS))(lm), expected(family), rtol=5e-6)


@pytest.mark.parametrize(("files", "layers"), [(3, "scanned"), (1, "listed")])
def test_shards_and_lists_give_the_same_net(files, layers, tmp_path):
    whole = loaded("llama", tmp_path / "one")
    other = loaded("llama", tmp_path / "other", files, layers=layers)
    assert other.is_scanned == (layers == "scanned")
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(other.scanned())):
        assert_close(a, b, rtol=0.0)


def test_weights_are_cast_while_they_are_read(tmp_path):
    lm = loaded("smollm2", tmp_path, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(lm)} == {"bfloat16"}


# --- GGUF -----------------------------------------------------------------------------------

# What these files do not say, llama.cpp knows: the scale of attention, Gemma 3's local base.
_KNOWN = {"query_pre_attn_scalar": 4.0, "rope_local_base_freq": 10000.0}
_PLAIN = {"rope_scaling": {}, "sliding_window_pattern": 6, **_KNOWN}
GGUF = {
    name: {**reference.CONFIGS[name], **_PLAIN}
    for name in (
        "smollm2", "llama with biases", "qwen2", "qwen3", "gemma2", "phi3", "smollm3", "granite",
        "olmo2", "starcoder2", "gpt2",
    )
}  # fmt: skip
GGUF["gemma3"] = {**reference.CONFIGS["gemma3"], **_PLAIN, "num_hidden_layers": 7}
for name in ("phi3", "starcoder2"):  # which have no windows in llama.cpp
    del GGUF[name]["sliding_window"]


@pytest.mark.parametrize("family", list(GGUF))
def test_a_gguf_file_gives_the_numbers_of_its_model(family, tmp_path):
    config = GGUF[family]
    weights = reference.random_weights(config)
    path = write_gguf(tmp_path / "net.gguf", config, weights)
    lm = pax.nets.Decoder.from_gguf(path)
    found = jax.jit(lambda lm: lm(TOKENS[:1]))(lm)
    assert_close(found[0], reference.logits(config, weights, TOKENS[0]), rtol=5e-6)


def test_the_table_of_frequencies_of_a_gguf_file_counts(tmp_path):
    """Files of Llama 3 keep by what each frequency is divided."""
    config = {**GGUF["smollm2"], "rope_scaling": {"type": "linear", "factor": 4.0}}
    weights = reference.random_weights(config)
    table = np.full(2, 4.0, np.float32)
    path = write_gguf(tmp_path / "net.gguf", config, weights, rope_freqs=table)
    found = pax.nets.Decoder.from_gguf(path)(TOKENS)
    assert_close(found[0], reference.logits(config, weights, TOKENS[0]), rtol=5e-6)


LONG = {**reference.CONFIGS["phi4"], "original_max_position_embeddings": 6}


def test_the_length_of_a_context_counts_with_longrope(tmp_path):
    """It is the number of tokens of a call, or the capacity of its cache."""
    weights = reference.random_weights(LONG)
    read = pax.nets.Decoder.from_pretrained
    lm = read(reference.write_folder(tmp_path / "net", LONG, weights))
    long, short = (reference.logits(LONG, weights, TOKENS[0, :n]) for n in (9, 6))
    assert_close(lm(TOKENS[:1])[0], long, rtol=5e-6)
    assert_close(lm(TOKENS[:1, :6])[0], short, rtol=5e-6)
    for room, expected in ((6, short), (7, long)):
        logits, _ = lm(TOKENS[:1, :6], cache=lm.init_cache(1, room))
        assert_close(logits[0], expected[:6], rtol=5e-6)
    tables = {f"rope_factors_{each}": np.float32(LONG["rope_scaling"][f"{each}_factor"])
              for each in ("short", "long")}  # fmt: skip
    path = write_gguf(tmp_path / "net.gguf", LONG, weights, **tables)
    other = pax.nets.Decoder.from_gguf(path)
    assert_close(other(TOKENS[:1])[0], long, rtol=5e-6)
    assert_close(other(TOKENS[:1, :6])[0], short, rtol=5e-6)
    path = write_gguf(tmp_path / "plain.gguf", LONG, weights)  # scaled, with plain frequencies
    scaling = pax.nets.Decoder.from_gguf(path).config.rotary_scaling
    assert scaling.table == (1.0, 1.0)
    assert_close(scaling.result_factor, lm.config.rotary_scaling.result_factor, rtol=1e-6)


def test_texts_that_stay_short_are_continued_with_the_frequencies_of_short_ones(tmp_path):
    """Sizes of caches are rounded up, but not beyond the length of the training."""
    config = {**LONG, "original_max_position_embeddings": 14}
    weights = reference.random_weights(config)
    path = reference.write_folder(tmp_path / "net", config, weights)
    lm = pax.nets.Decoder.from_pretrained(path)
    text = TOKENS[0].tolist()
    for _ in range(5):
        text.append(int(reference.logits(config, weights, text)[-1].argmax()))
    assert pax.generate(lm, TOKENS[:1], max_new_tokens=5)[0].tolist() == text[9:]
    # In one call the short row would have the frequencies of the long one.
    with refused(INVALID, "rows of 7 to 16 tokens", "original_length is 14"):
        pax.generate(lm, [[1, 2], [3] * 11], max_new_tokens=5)


def test_a_symbolic_length_chooses_while_the_program_runs(tmp_path):
    weights = reference.random_weights(LONG)
    path = reference.write_folder(tmp_path / "net", LONG, weights)
    lm = pax.nets.Decoder.from_pretrained(path)
    exported = jax.export.export(jax.jit(lm))(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("1, length"), "int32")
    )
    for length in (6, 9):
        tokens = TOKENS[:1, :length].astype("int32")
        expected = reference.logits(LONG, weights, tokens[0])
        assert_close(exported.call(tokens)[0], expected, rtol=5e-6)


# --- files that are not what they say ---------------------------------------------------------


INVALID, MISMATCH = pax.errors.InvalidArgumentError, pax.errors.WeightsMismatchError
NOTHING = {"a": np.zeros(2, np.float32)}


def test_another_architecture_is_refused(tmp_path):
    config = {**reference.LLAMA, "model_type": "mamba"}
    path = reference.write_folder(tmp_path / "net", config, NOTHING)
    with refused(INVALID, "gemma2", "llama", where="config.json: model_type", got="'mamba'"):
        pax.nets.DecoderConfig.from_hf(config)
    with refused(INVALID, where=f"config.json: model_type, in {path}", got="'mamba'"):
        pax.nets.Decoder.from_pretrained(path)
    with refused(INVALID, where="GGUF metadata: general.architecture", got="'rwkv6'"):
        pax.nets.DecoderConfig.from_gguf({"general.architecture": "rwkv6"})


def test_a_missing_tensor_is_named_with_its_place(tmp_path):
    name, kind = "model.layers.1.mlp.up_proj.weight", pax.errors.MissingWeightError
    weights = reference.random_weights(reference.CONFIGS["llama"])
    up = weights.pop(name)
    path = reference.write_folder(tmp_path / "net", reference.CONFIGS["llama"], weights)
    with refused(kind, f"no '{name}' among", f"where: layers.dense.up.weight, in {path}"):
        pax.nets.Decoder.from_pretrained(path)
    del weights["lm_head.weight"]
    path = reference.write_folder(
        tmp_path / "net", reference.CONFIGS["llama"], weights | {name: up}
    )
    with refused(kind, '"tie_word_embeddings": true', "config.json"):
        pax.nets.Decoder.from_pretrained(path)


def test_more_tensors_and_other_shapes_are_refused(tmp_path):
    config, bias = reference.CONFIGS["smollm2"], "model.layers.0.self_attn.q_proj.bias"
    weights = reference.random_weights(config)
    biased = weights | {bias: np.zeros(24, np.float32)}
    path = reference.write_folder(tmp_path / "net", config, biased)
    with refused(MISMATCH, bias):
        pax.nets.Decoder.from_pretrained(path)
    path = reference.write_folder(tmp_path / "net", {**config, "intermediate_size": 10}, weights)
    with refused(MISMATCH, "model.layers.0.mlp.gate_proj.weight (12, 20)", "(12, 10)"):
        pax.nets.Decoder.from_pretrained(path)


def test_a_fused_array_of_other_parts_is_refused(tmp_path):
    config = reference.CONFIGS["phi3"]
    weights = reference.random_weights(config)
    other = {**config, "num_key_value_heads": 1}
    assert config["num_key_value_heads"] == 2
    path = reference.write_folder(tmp_path / "net", other, weights)
    with refused(MISMATCH, "qkv_proj.weight", str(path)):
        pax.nets.Decoder.from_pretrained(path)


def test_weights_of_other_heads_are_refused(tmp_path):
    config = reference.CONFIGS["llama"]
    path = write_gguf(tmp_path / "a.gguf", config, reference.random_weights(config))
    key, form = b"llama.attention.head_count", "<II"  # the type of a value before it
    there, other = (key + struct.pack(form, 4, count) for count in (6, 10))
    assert there in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(there, other))
    with refused(MISMATCH, "attn_q.weight (24, 12)", str(path)):
        pax.nets.Decoder.from_gguf(path)


def test_files_of_another_kind_are_refused(tmp_path):
    kind, config = pax.errors.WeightsFileError, tmp_path / "config.json"
    with refused(kind, "config.json", str(tmp_path)):
        pax.nets.Decoder.from_pretrained(tmp_path)
    for text, error in (("[3", "JSONDecodeError"), ("[3]", "a list"),
                        ("[" * 100_000, "RecursionError")):  # fmt: skip
        config.write_text(text, encoding="utf-8")
        with refused(kind, error):
            pax.nets.Decoder.from_pretrained(tmp_path)
    config.unlink()
    os.mkfifo(config)
    with refused(kind, "a named pipe"):
        pax.nets.Decoder.from_pretrained(tmp_path)
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    with refused(kind, "npz", "Decoder.from_pretrained(folder)"):
        pax.nets.Decoder.from_gguf(tmp_path / "a.npz")


def test_hostile_configurations_are_taken_or_refused(tmp_path):
    for name in reference.LLAMA:
        for value in ("x", [], {}, {"a": []}, 0, -1, 1e400, True, [[]] * 3):
            try:
                pax.nets.DecoderConfig.from_hf({**reference.LLAMA, name: value})
            except pax.errors.PaxError:
                pass
    many = {**reference.LLAMA, "num_hidden_layers": 9000}
    path = reference.write_folder(tmp_path / "many", many, NOTHING)
    with refused(MISMATCH, "1 tensors", "9000 layers"):
        pax.nets.Decoder.from_pretrained(path)


@pytest.mark.parametrize(
    ("others", "where", "got"),
    [
        ({"hidden_size": "12"}, "config.json: hidden_size", "'12'"),
        ({"hidden_size": None}, "config.json", "null for 'hidden_size'"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads", "0"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "config.json: num_hidden_layers",
         "1000000000"),
        ({"rms_norm_eps": "1e-5"}, "config.json: rms_norm_eps", "'1e-5'"),
        ({"rope_theta": float("inf")}, "config.json: rope_theta", "inf"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling", "'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": "8"}}, "config.json: rope_scaling: factor",
         "'8'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "config.json: rope_scaling",
         "no 'long_factor' among"),
        ({"rope_scaling": {"type": "longrope", "short_factor": 2, "long_factor": [1.0]}},
         "config.json: rope_scaling: short_factor", "2"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 2], "long_factor": [1]}},
         "RotaryScaling.long_table", "1 numbers for 4 rotated channels"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.8},
         "config.json: partial_rotary_factor", "0.8"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "config.json: no_rope_layers", "[1]"),
        ({"model_type": "granite", "logits_scaling": 0}, "config.json: logits_scaling", "0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RotaryScaling.kind", "'dynamic'"),
        ({"tie_word_embeddings": "false"}, "config.json: tie_word_embeddings", "'false'"),
        ({"model_type": "qwen3", "layer_types": FULL}, "config.json: layer_types", f"'{FULL}'"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2},
         "config.json: layer_types", "'linear_attention'"),
        ({"hidden_act": ["silu"]}, "config.json: hidden_act", "['silu']"),
        ({"hidden_act": "mish"}, "config.json: hidden_act", "'mish'"),
        ({"model_type": ["llama"]}, "config.json: model_type", "['llama']"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_by_their_key(others, where, got):
    with refused(INVALID, f"where: {where}", f"got: {got}"):
        pax.nets.DecoderConfig.from_hf({**reference.LLAMA, **others})


def test_invalid_metadata_is_refused():
    for read in (pax.nets.DecoderConfig.from_hf, pax.nets.DecoderConfig.from_gguf):
        kind = pax.errors.InvalidArgumentTypeError
        with refused(kind, "Decoder.from_pretrained", got="str: 'config.json'"):
            read("config.json")
    for name, value in (("embedding_length", [8]), ("expert_count", 4)):
        with refused(INVALID, where=f"GGUF metadata: llama: {name}", got=str(value)):
            of_gguf(**{name: value})


def test_heads_of_an_odd_size_are_refused():
    sizes = {"vocab_size": 9, "dim": 6, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
    with refused(INVALID, where="DecoderConfig.rotary_size", got="3 of a head of 3"):
        pax.nets.DecoderConfig.llama(**sizes)
    pax.nets.DecoderConfig.llama(**sizes, positions="learned")
    with refused(INVALID, where="DecoderConfig.rotary_size", got="4 of a head of 3"):
        pax.nets.DecoderConfig.llama(**sizes, rotary_size=4)
