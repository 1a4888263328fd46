"""Tiny random nets of each family, in the files of others, against numpy in float64."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nets import decoder_reference as reference
from tests.nets.decoder_gguf import write_gguf

TOKENS = np.random.RandomState(1).randint(0, 31, (2, 9))
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
    for name in ("smollm2", "llama with biases", "qwen2", "qwen3", "gemma2", "gpt2")
}
GGUF["gemma3"] = {**reference.CONFIGS["gemma3"], **_PLAIN, "num_hidden_layers": 7}
GGUF["llama with biases"]["mlp_bias"] = False


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


# --- files that are not what they say ---------------------------------------------------------


def refused(call, kind) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def test_another_architecture_is_named(tmp_path):
    config = {**reference.LLAMA, "model_type": "mamba"}
    path = reference.write_folder(tmp_path / "net", config, {"a": np.zeros(2, np.float32)})
    text = refused(lambda: pax.nets.Decoder.from_pretrained(path), pax.errors.InvalidArgumentError)
    assert text.startswith("The architecture is unsupported by Decoder.\n"
                           "  where: config.json: model_type\n  got: 'mamba'\n")  # fmt: skip
    assert "gemma2" in text and "llama" in text
    text = refused(
        lambda: pax.nets.DecoderConfig.from_gguf({"general.architecture": "rwkv6"}),
        pax.errors.InvalidArgumentError,
    )
    assert "where: GGUF metadata: general.architecture\n  got: 'rwkv6'" in text


def test_a_missing_tensor_is_named_with_its_place(tmp_path):
    weights = reference.random_weights(reference.CONFIGS["llama"])
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = reference.write_folder(tmp_path / "net", reference.CONFIGS["llama"], weights)
    text = refused(lambda: pax.nets.Decoder.from_pretrained(path), pax.errors.MissingWeightError)
    assert f"where: layers.dense.up.weight, in {path}" in text
    assert "got: no 'model.layers.1.mlp.up_proj.weight' among" in text
    del weights["lm_head.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((20, 12), np.float32)
    path = reference.write_folder(tmp_path / "net", reference.CONFIGS["llama"], weights)
    text = refused(lambda: pax.nets.Decoder.from_pretrained(path), pax.errors.MissingWeightError)
    assert '"tie_word_embeddings": true in config.json' in text


def test_tensors_too_many_or_of_another_shape_are_named(tmp_path):
    config = reference.CONFIGS["smollm2"]
    weights = reference.random_weights(config)
    biased = weights | {"model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)}
    path = reference.write_folder(tmp_path / "net", config, biased)
    kind = pax.errors.WeightsMismatchError
    text = refused(lambda: pax.nets.Decoder.from_pretrained(path), kind)
    assert "besides those of the net model.layers.0.self_attn.q_proj.bias" in text
    narrow = {**config, "intermediate_size": 10}
    path = reference.write_folder(tmp_path / "net", narrow, weights)
    text = refused(lambda: pax.nets.Decoder.from_pretrained(path), kind)
    assert "got: model.layers.0.mlp.gate_proj.weight (12, 20)" in text
    assert "write: a file with (12, 10)" in text


def test_a_folder_without_a_configuration_and_a_file_of_another_kind_are_named(tmp_path):
    kind = pax.errors.WeightsFileError
    text = refused(lambda: pax.nets.Decoder.from_pretrained(tmp_path), kind)
    assert "no config.json" in text and f"where: {tmp_path}" in text and "nothing in it" in text
    (tmp_path / "config.json").write_text("[3", encoding="utf-8")
    assert "JSONDecodeError" in refused(lambda: pax.nets.Decoder.from_pretrained(tmp_path), kind)
    (tmp_path / "config.json").write_text("[3]", encoding="utf-8")
    assert "got: ValueError: a list" in refused(
        lambda: pax.nets.Decoder.from_pretrained(tmp_path), kind
    )
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    text = refused(lambda: pax.nets.Decoder.from_gguf(tmp_path / "a.npz"), kind)
    assert "got: a file of npz" in text and "Decoder.from_pretrained(folder)" in text


def test_configurations_of_what_a_decoder_cannot_do_are_named():
    def of(**others):
        return refused(
            lambda: pax.nets.DecoderConfig.from_hf({**reference.LLAMA, **others}),
            pax.errors.InvalidArgumentError,
        )

    dynamic = of(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert "where: RotaryScaling.kind" in dynamic and "'yarn' or 'linear'" in dynamic
    assert "config.json: rope_scaling\n  got: 'longrope'" in of(rope_scaling={"type": "longrope"})
    assert "config.json: hidden_act\n  got: 'mish'" in of(hidden_act="mish")
    assert "got: null for 'hidden_size'" in of(hidden_size=None)
    assert "layer_types\n  got: 'linear_attention'" in of(
        model_type="qwen3", layer_types=["linear_attention"] * 2
    )
    experts = {"general.architecture": "llama", "llama.embedding_length": 8,
               "llama.attention.head_count": 2, "llama.expert_count": 4}  # fmt: skip
    text = refused(
        lambda: pax.nets.DecoderConfig.from_gguf(experts), pax.errors.InvalidArgumentError
    )
    assert "where: GGUF metadata: llama: expert_count\n  got: 4" in text


def test_hostile_configurations_are_refused_in_our_words(tmp_path):
    write = reference.write_folder
    path = write(tmp_path / "net", reference.LLAMA, {"a": np.zeros(2, np.float32)})
    config, kinds = path / "config.json", (pax.errors.InvalidArgumentError,)
    for name in reference.LLAMA:
        for value in ("x", [], {}, {"a": []}, 0, -1, 1e400, 10**9, 10**30, True, [[]] * 3):
            try:
                pax.nets.DecoderConfig.from_hf({**reference.LLAMA, name: value})
            except pax.errors.PaxError:
                pass
    layers = {**reference.LLAMA, "model_type": "gemma2", "num_hidden_layers": 10**9}
    text = refused(lambda: pax.nets.DecoderConfig.from_hf(layers), kinds)
    assert text.startswith("A configuration has a size that no net has.\n"
                           "  where: config.json: num_hidden_layers\n  got: 1e+09\n")  # fmt: skip
    text = refused(
        lambda: pax.nets.DecoderConfig.from_hf({**reference.LLAMA, "hidden_size": "x"}), kinds
    )
    assert text.startswith("A value of the configuration has the wrong type.\n"
                           "  where: config.json: hidden_size\n  got: 'x'\n")  # fmt: skip
    many = {**reference.LLAMA, "num_hidden_layers": 9000}
    text = refused(
        lambda: pax.nets.Decoder.from_pretrained(
            write(tmp_path / "many", many, {"a": np.zeros(2, np.float32)})
        ),
        pax.errors.WeightsMismatchError,
    )
    assert "got: 1 tensors\n  write: a file with those of 9000 layers" in text
    config.write_text("[" * 100_000, encoding="utf-8")
    kind = pax.errors.WeightsFileError
    assert "RecursionError" in refused(lambda: pax.nets.Decoder.from_pretrained(path), kind)
    config.unlink()
    os.mkfifo(config)
    assert "a named pipe" in refused(lambda: pax.nets.Decoder.from_pretrained(path), kind)


@pytest.mark.parametrize(
    ("others", "where", "write"),
    [
        ({"hidden_size": "12"}, "hidden_size", "an integer of 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads", "an integer of 1 or more"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps", "a number of 0 or more"),
        ({"rope_theta": float("inf")}, "rope_theta", "a number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling", "keys and values"),
        ({"rope_scaling": {"type": "yarn", "factor": "8"}}, "rope_scaling: factor", "a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "true or false"),
        ({"model_type": "qwen3", "layer_types": "full_attention"}, "layer_types", "a list of"),
        ({"hidden_act": ["silu"]}, "hidden_act", "'gelu' or"),
        ({"model_type": ["llama"]}, "model_type", "a model of"),
    ],
)
def test_values_of_another_kind_are_named_with_their_key(others, where, write):
    config = {**reference.LLAMA, **others}
    text = refused(lambda: pax.nets.DecoderConfig.from_hf(config), pax.errors.InvalidArgumentError)
    assert f"where: config.json: {where}\n" in text and f"write: {write}" in text


def test_what_is_no_configuration_is_named():
    for read in (pax.nets.DecoderConfig.from_hf, pax.nets.DecoderConfig.from_gguf):
        text = refused(lambda: read("config.json"), pax.errors.InvalidArgumentTypeError)  # noqa: B023
        assert "got: str: 'config.json'" in text and "Decoder.from_pretrained" in text
    lists = {"general.architecture": "llama", "llama.embedding_length": [8]}
    text = refused(lambda: pax.nets.DecoderConfig.from_gguf(lists), pax.errors.InvalidArgumentError)
    assert "where: GGUF metadata: llama: embedding_length\n  got: [8]" in text


def test_heads_that_cannot_turn_are_named():
    sizes = {"vocab_size": 9, "dim": 6, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
    kind = pax.errors.InvalidArgumentError
    text = refused(lambda: pax.nets.DecoderConfig.llama(**sizes), kind)
    assert "where: DecoderConfig.rotary_size\n  got: 3 of a head of 3" in text
    pax.nets.DecoderConfig.llama(**sizes, positions="learned")
    text = refused(lambda: pax.nets.DecoderConfig.llama(**sizes, rotary_size=4), kind)
    assert "got: 4 of a head of 3\n  write: an even number up to 3" in text
