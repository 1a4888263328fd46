"""Keys of configurations: which are read, ignored and refused."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

import pax_export as pax
from pax_export.nets import Decoder, DecoderConfig, LayerKind
from pax_export.nets.decoder._fields import shortest_pattern
from tests.closeness import assert_close
from tests.nets import decoder_recorded as recorded
from tests.nets import decoder_reference as reference
from tests.nets.decoder_gguf import of_gguf, write_gguf
from tests.refusals import refused

BY_HAND = "Decoder.from_pretrained(folder, config=...) with a DecoderConfig that computes the same"
PLAIN = reference.CONFIGS["smollm2"]
INVALID = pax.errors.InvalidArgumentError


def of_hf(**config) -> DecoderConfig:
    return DecoderConfig.from_hf(config)


def folder_of(folder, config, **changes):
    weights = reference.random_weights(config) | changes
    return reference.write_folder(folder, config, {k: v for k, v in weights.items() if v.size})


# --- config.json ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(recorded.CONFIGS))
def test_logits_are_those_that_transformers_gave(name, tmp_path):
    lm = Decoder.from_pretrained(folder_of(tmp_path / "net", recorded.CONFIGS[name]))
    found = lm(np.array(recorded.TOKENS))[0, -1, :5]
    assert_close(found, recorded.LOGITS[name], rtol=2e-5, atol=1e-5)


def test_missing_keys_have_the_defaults_of_transformers():
    """The text_config of google/gemma-3-4b-it has no heads, and the whole one a head of its own."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    whole = of_hf(
        model_type="gemma3", text_config=text, vision_config={"hidden_size": 1152},
        boi_token_index=255999, mm_tokens_per_image=256, eos_token_id=[1, 106],
        architectures=["Gemma3ForConditionalGeneration"], transformers_version="4.50.0.dev0",
    )  # fmt: skip
    assert (whole.num_heads, whole.num_kv_heads, whole.head_size) == (8, 4, 256)
    assert (whole.vocab_size, whole.max_positions, whole.tied) == (262208, 131072, True)
    assert whole.rotary_base == 1e6 and whole.rotary_scaling == pax.RotaryScaling("linear", 8.0)
    local = LayerKind(window=1024, rotary_base=10000.0, scaled=False)
    assert whole.kinds == (local,) * 5 + (LayerKind(),) and whole.attention_scale == 1 / 16
    assert whole == of_hf(**text)
    assert of_hf(model_type="mistral").kinds == (LayerKind(window=4096),)
    assert of_hf(model_type="mistral", sliding_window=None).kinds == (LayerKind(),)
    assert of_hf(model_type="mistral", num_key_value_heads=None).num_kv_heads == 32
    gemma2 = of_hf(model_type="gemma2")
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)


def test_keys_without_effect_are_ignored():
    plain = of_hf(**PLAIN)
    others = {
        "_name_or_path": "a/b", "auto_map": {"AutoModel": "a.B"}, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0", "pretraining_tp": 1, "attention_dropout": 0.1,
        "rope_interleaved": False, "transformers.js_config": {}, "is_llama_config": True,
        "quantization_config": None, "head_dim": 4, "rope_scaling": None, "temperature": 0.7,
        "id2label": {"0": "a"}, "pruned_heads": {}, "qkv_bias": False, "unheard_of": None,
    }  # fmt: skip
    assert of_hf(**PLAIN | others) == plain


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"embedding_multiplier": 12.0, "logits_scaling": 8.0},
         "got: embedding_multiplier: 12.0, logits_scaling: 8.0\n  fix: " + BY_HAND),
        ({"quantization_config": {"quant_method": "int8"}},
         "config.json: quantization_config\n  got: {'quant_method': 'int8'}\n"),
        ({"model_type": "gemma3_text", "hidden_act": None, "use_bidirectional_attention": True},
         "where: config.json: use_bidirectional_attention\n  got: True"),
        ({"model_type": "gemma3_text", "hidden_act": None, "attn_logit_softcapping": 5.0},
         "where: config.json: attn_logit_softcapping\n  got: 5.0"),
        ({"model_type": "gemma3_text", "hidden_act": None,
          "rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_scaling: type\n  got: 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor\n  got: 0.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling\n  got: no 'factor' among"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1, 1]}},
         "where: config.json: rope_scaling\n  got: mrope_section: [1, 1]"),
        ({"rope_scaling": {"rope_type": "su", "long_factor": [2.0]}},
         "rope_scaling\n  got: 'su'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}}},
         "rope_parameters\n  got: full_attention: {'factor': 2"),
        ({"model_type": "gemma", "hidden_act": "silu", "hidden_activation": "gelu"},
         "hidden_activation\n  got: 'gelu'"),
        ({"model_type": "gemma2", "hidden_act": "silu"}, "hidden_act\n  got: 'silu'"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
         "layer_types\n  got: 'sliding_attention'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "got: layer_types: ["),
        ({"sliding_window": 5}, "got: sliding_window: 5"),
        ({"model_type": "cohere", "logit_scale": 0.1, "use_qk_norm": True},
         "got: 'cohere', with unknown keys logit_scale, use_qk_norm\n"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "got: clip_qkv: 8.0"),
        ({"model_type": "starcoder2", "rms_norm_eps": None, "norm_type": "rms_norm"},
         "norm_type\n  got: 'rms_norm'"),
        ({"model_type": "phi3", "lm_head_bias": True}, "lm_head_bias\n  got: True"),
    ],
)  # fmt: skip
def test_keys_that_change_the_function_are_refused_by_name(others, text):
    with refused(INVALID, text):
        of_hf(**PLAIN | others)


def test_a_window_of_all_positions_is_none():
    """Phi-4-mini has one of 262,144, and is for 131,072."""
    for family in ("mistral", "phi3", "starcoder2"):
        sizes = {"model_type": family, "max_position_embeddings": 64}
        assert of_hf(**sizes, sliding_window=64).kinds == (LayerKind(),)
        assert of_hf(**sizes, sliding_window=63).kinds == (LayerKind(63),)


def test_local_layers_of_gemma3_have_their_own_rotary_base():
    sliding = {"rope_type": "linear", "factor": 2.0, "rope_theta": 30.0}
    ropes = {"full_attention": {**sliding, "rope_theta": 40.0}, "sliding_attention": sliding}
    both = of_hf(model_type="gemma3_text", rope_parameters=ropes)
    assert both.kinds[0] == LayerKind(4096, 30.0, scaled=True) and both.rotary_base == 40.0
    ropes["full_attention"] = {"rope_type": "default"}
    where = "config.json: rope_parameters: sliding_attention"
    with refused(INVALID, where=where, got="'linear'"):
        of_hf(model_type="gemma3_text", rope_parameters=ropes)


# --- the head, and a configuration by hand --------------------------------------------------


def test_another_head_in_the_file_of_a_tied_model_is_taken_with_a_warning(tmp_path):
    weights = reference.random_weights(PLAIN)
    same = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Decoder.from_pretrained(folder_of(tmp_path / "same", PLAIN, **same)).config.tied
    head = reference.random_weights({**PLAIN, "tie_word_embeddings": False})["lm_head.weight"]
    path = folder_of(tmp_path / "other", PLAIN, **{"lm_head.weight": head})
    with pytest.warns(pax.errors.PaxWarning) as caught:
        lm = Decoder.from_pretrained(path)
    assert caught[0].filename == __file__ and f"lm_head.weight, in {path}" in str(caught[0].message)
    assert not lm.config.tied
    untied = {**PLAIN, "tie_word_embeddings": False}
    expected = reference.logits(untied, weights | {"lm_head.weight": head}, [3, 1, 4])
    assert_close(lm(np.array([[3, 1, 4]]))[0], expected, rtol=5e-6)


@pytest.mark.parametrize("family", ["smollm2", "gemma3", "gpt2"])
def test_one_name_of_a_tied_array_is_enough_if_the_file_notes_the_other(family, tmp_path):
    """As safetensors.torch.save_model writes it: the first in the alphabet."""
    config = reference.CONFIGS[family]
    weights = reference.random_weights(config)
    folder = reference.write_folder(tmp_path, config, weights)
    expected = np.asarray(Decoder.from_pretrained(folder)(np.array([[3, 1, 4]])))
    ends = ("embed_tokens.weight", "wte.weight")
    embedding = next(name for name in weights if name.endswith(ends))
    weights["lm_head.weight"] = weights.pop(embedding)
    noted = {embedding: "lm_head.weight", "format": "pt"}
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file(weights, folder / "model.safetensors", metadata=noted)
    lm = Decoder.from_pretrained(folder)
    assert lm.config.tied and np.array_equal(lm(np.array([[3, 1, 4]])), expected)


def test_a_given_configuration_replaces_that_of_the_file(tmp_path):
    other = {**PLAIN, "model_type": "unheard-of", "rope_theta": 7.0, "their_own": 3}
    path = folder_of(tmp_path / "net", other)
    with refused(INVALID, "'unheard-of'", "their_own", BY_HAND):
        Decoder.from_pretrained(path)
    config = of_hf(**PLAIN)
    lm = Decoder.from_pretrained(path, config=config)
    weights = reference.random_weights(PLAIN)
    expected = reference.logits(PLAIN, weights, [3, 1, 4])
    assert_close(lm(np.array([[3, 1, 4]]))[0], expected, rtol=5e-6)

    mismatch, missing = pax.errors.WeightsMismatchError, pax.errors.MissingWeightError
    for kind, name, changes in (
        (mismatch, "model.layers.1.input_layernorm.weight", {"num_layers": 1}),
        (missing, "layers.attention.query.bias", {"projection_bias": True}),
        (missing, "input_layernorm.bias", {"norm": "layer"}),
        (missing, "Decoder: place_embed.weight", {"positions": "learned"}),
    ):
        with refused(kind, name):
            Decoder.from_pretrained(path, config=dataclasses.replace(config, **changes))
    kind = pax.errors.InvalidArgumentTypeError
    with refused(kind, "got: dict", where="Decoder.from_pretrained(config=...)"):
        Decoder.from_pretrained(path, config=PLAIN)


def test_integer_weights_are_refused(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    path = folder_of(tmp_path / "net", PLAIN, **{name: np.ones((20, 12), np.int8)})
    with refused(pax.errors.WeightsMismatchError, f"{name} of int8", "from_gguf"):
        Decoder.from_pretrained(path)


# --- GGUF -----------------------------------------------------------------------------------


def test_scaling_in_a_gguf_file_is_that_of_llama_cpp():
    """Without a type a factor is linear; the old key counts where the new one is missing."""
    linear = pax.RotaryScaling("linear", 4.0)
    assert of_gguf(rope__scaling__factor=4.0).rotary_scaling == linear
    assert of_gguf(rope__scale_linear=4.0).rotary_scaling == linear
    assert of_gguf(rope__scaling__factor=0.0).rotary_scaling is None
    assert of_gguf(rope__scaling__type="none", rope__scaling__factor=4.0).rotary_scaling is None
    yarn = of_gguf(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, context_length=64,
        rope__scaling__yarn_beta_fast=32.0, rope__scaling__finetuned=True,
    )  # fmt: skip
    assert yarn.rotary_scaling == pax.RotaryScaling("yarn", 4.0, 64, 1.0, 32.0)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"logit_scale": 0.5, "embedding_scale": 12.0},
         "where: GGUF metadata: llama\n  got: logit_scale: 0.5, embedding_scale: 12.0\n"),
        ({"residual_scale": 0.2}, "got: residual_scale: 0.2"),
        ({"attention__scale": 0.1}, "got: attention.scale: 0.1"),
        ({"attention__causal": False}, "attention.causal\n  got: False"),
        ({"attention__sliding_window": 3}, "attention.sliding_window\n  got: 3"),
        ({"attention__clamp_kqv": 8.0}, "attention.clamp_kqv\n  got: 8.0"),
        ({"attention__value_length": 2}, "attention.value_length\n  got: 2"),
        ({"rope__scaling__attn_factor": 1.2}, "rope.scaling.attn_factor\n  got: 1.2"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier\n  got: 0.1"),
        ({"rope__scaling__yarn_beta_fast": 16.0}, "rope.scaling.yarn_beta_fast\n  got: 16.0"),
        ({"rope__scaling__yarn_beta_slow": 2.0}, "rope.scaling.yarn_beta_slow\n  got: 2.0"),
        ({"rope__dimension_sections": np.array([1, 1])}, "got: rope.dimension_sections: ["),
        ({"expert_count": 8}, "expert_count\n  got: 8"),
        ({"final_logit_softcapping": 30.0}, "got: final_logit_softcapping: 30.0"),
    ],
)  # fmt: skip
def test_metadata_that_changes_the_function_is_refused_by_name(others, text):
    with refused(INVALID, text):
        of_gguf(**others)


def test_an_output_in_a_gguf_file_is_the_head(tmp_path):
    untied = {**PLAIN, "tie_word_embeddings": False}
    weights = reference.random_weights(untied)
    lm = Decoder.from_gguf(write_gguf(tmp_path / "net.gguf", untied, weights))
    assert not lm.config.tied
    expected = reference.logits(untied, weights, [3, 1, 4])
    assert_close(lm(np.array([[3, 1, 4]]))[0], expected, rtol=5e-6)


# --- decoder fields ------------------------------------------------------------------


MANY = np.array([2, 4], np.int32)  # as lists of a GGUF file are read
SLIDING, FULL = "sliding_attention", "full_attention"


def llama_with(**others):
    return pax.nets.DecoderConfig.from_hf({**reference.LLAMA, **others})


class Counted(LayerKind):
    """A kind that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return self.window == other.window

    __hash__ = LayerKind.__hash__


@pytest.mark.parametrize("windows", [[3] * 999 + [4], [3, 3, 4] * 333 + [3], [3, 4] * 500])
def test_a_pattern_is_found_by_few_comparisons(windows):
    Counted.compared = 0
    pattern = shortest_pattern([Counted(window) for window in windows])
    assert Counted.compared <= 4 * len(windows)
    assert [pattern[i % len(pattern)].window for i in range(len(windows))] == windows
    shorter = [windows[i % n] for n in range(1, len(pattern)) for i in range(len(windows))]
    rows = np.reshape(shorter, (-1, len(windows)))
    assert not (rows == windows).all(1).any()


def test_layer_types_have_one_entry_per_layer():
    words = [FULL, SLIDING, FULL, FULL]  # of a net of four, cut to two
    window = {"use_sliding_window": True, "sliding_window": 3}
    two = llama_with(model_type="qwen3", layer_types=words, **window)
    assert [two.kind_of(i).window for i in range(two.num_layers)] == [None, 3]
    with refused(INVALID, where="config.json: layer_types", got="['full_attention']"):
        llama_with(model_type="gemma2", layer_types=[FULL], hidden_act=None)


@pytest.mark.parametrize(
    ("call", "where", "got"),
    [
        (lambda: llama_with(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2.0}),
         "DecoderConfig.rotary_base", "1.0"),
        (lambda: of_gguf(attention__head_count=MANY), "head_count", "[2, 4]"),
        (lambda: of_gguf(expert_count=MANY), "expert_count", "[2, 4]"),
        (lambda: of_gguf(rope__scaling__type=MANY), "scaling.type", "[2, 4]"),
        (lambda: of_gguf(embedding_length=MANY), "embedding_length", "[2, 4]"),
    ],
)  # fmt: skip
def test_invalid_numbers_are_refused(call, where, got):
    with refused(INVALID, f"{where}\n  got: {got}\n"):
        call()
    assert llama_with(rope_theta=1.0).rotary_base == 1.0  # without yarn


def test_messages_are_short_whatever_they_show():
    deep = []
    for _ in range(5000):
        deep = [deep]
    for value in ("x" * 10**6, deep, {"a" * 10**6: deep}):
        for name in ("model_type", "hidden_size", "hidden_act", "rope_theta", "layer_types"):
            config = {"model_type": "qwen3", name: value}
            with refused(INVALID) as caught:
                llama_with(**config)
            assert len(str(caught.value)) < 600
    keys = {"model_type": "llama", **{f"{'k' * 10**5}{i}": 1 for i in range(9)}}
    with refused(INVALID) as caught:
        pax.nets.DecoderConfig.from_hf(keys)
    assert len(str(caught.value)) < 1200


def test_invalid_frequency_tables_are_refused(tmp_path):
    config = reference.CONFIGS["smollm2"]
    weights, path = reference.random_weights(config), tmp_path / "net.gguf"
    for table, text in (
        (np.ones(3, np.float32), "got: 3 numbers for 4 rotated channels"),
        (np.zeros(2, np.float32), f"where: RotaryScaling.table, in {path}\n  got: 0.0"),
        (np.ones((2, 2), np.float32), f"where: RotaryScaling.table, in {path}\n  got: [1.0, 1.0]"),
    ):
        write_gguf(path, config, weights, rope_freqs=table)
        with refused(INVALID, text):
            pax.nets.Decoder.from_gguf(path)
