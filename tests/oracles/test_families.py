"""Language models of transformers: equal logits, or a refusal that names the key."""

from __future__ import annotations

import copy
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

import pax_export as pax
from pax_export.nets import Decoder, DecoderConfig
from pax_export.nets.decoder._hf import FAMILIES, OF_IMAGES
from tests.closeness import assert_close
from tests.nets import decoder_recorded as recorded
from tests.nets import decoder_reference as reference

TOKENS = np.random.RandomState(1).randint(0, 48, (2, 20))
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "helium": (transformers.HeliumConfig, transformers.HeliumForCausalLM),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
}
_SIZES = {
    "vocab_size": 48, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 100.0,
    "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
BASES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 5},
    "qwen2": {**_SIZES, **_WINDOW},
    "qwen3": {**_SIZES, **_WINDOW},
    "gemma": _SIZES,
    "gemma2": {**_SIZES, "sliding_window": 5},
    "gemma3_text": {**_SIZES, "sliding_window": 5, "sliding_window_pattern": 2},
    "phi3": {**_SIZES, "hidden_size": 32, "sliding_window": 5},
    "smollm3": {**_SIZES, "num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 5},
    "granite": {
        **_SIZES, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 7.0,
        "residual_multiplier": 0.3,
    },
    "olmo2": _SIZES,
    "olmo3": {**_SIZES, "sliding_window": 5, "num_hidden_layers": 5, "head_dim": 6},
    "exaone4": {**_SIZES, "sliding_window": 5, "sliding_window_pattern": 2},
    "ministral": {**_SIZES, "sliding_window": 5},
    "seed_oss": _SIZES,
    "ernie4_5": _SIZES,
    "helium": {**_SIZES, "head_dim": 6},
    "starcoder2": {**_SIZES, "sliding_window": 5},
    "gpt2": {
        "vocab_size": 48, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    },
}  # fmt: skip
each_family = pytest.mark.parametrize("family", list(CLASSES))


def model_of(family: str, config: dict[str, Any]) -> Any:
    """A model of transformers with weights that depend on their names alone."""
    config_class, model_class = CLASSES[family]
    # Its constructor writes into what it is given.
    return drawn(model_class, config_class(**copy.deepcopy(config)))


def drawn(model_class: Any, config: Any) -> Any:
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = np.random.RandomState(zlib.crc32(name.encode()) % 2**31)
            array = draws.standard_normal(parameter.shape).astype(np.float32)
            parameter.copy_(torch.from_numpy(array * (0.3 if parameter.ndim > 1 else 0.5)))
    return model


def logits_of(model: Any, tokens: Any = TOKENS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens)), use_cache=False).logits.numpy()


def written(folder: Path, family: str, config: dict[str, Any], model: Any) -> Path:
    """A folder with the configuration as it is given, and the weights by their names."""
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        arrays.pop("lm_head.weight", None)
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    return folder


# --- what a configuration says ------------------------------------------------------------------


HF = {each.model_type or name: each.keys for name, each in FAMILIES.items()}


@each_family
def test_defaults_are_those_of_the_configuration_class(family):
    said = json.loads(CLASSES[family][0]().to_json_string(use_diff=False))
    unknown = [key for key in said if key not in HF[family]]
    assert not unknown
    own = {each.name: each.default for each in dataclasses.fields(CLASSES[family][0])}
    assert {key: own.get(key, value) for key, value in HF[family].defaults.items()} == dict(
        HF[family].defaults
    )
    assert DecoderConfig.from_hf({"model_type": family}) == DecoderConfig.from_hf(said)


def test_keys_of_generation_and_of_images_are_known():
    for key in transformers.GenerationConfig._get_default_generation_params():
        assert all(key in keys for keys in HF.values()), key
    for kind, config in (
        ("gemma3", transformers.Gemma3Config),
        ("mistral3", transformers.Mistral3Config),
    ):
        said = json.loads(config().to_json_string(use_diff=False))
        assert [key for key in said if key not in OF_IMAGES[kind][1]] == []


def _others(value: Any) -> list[Any]:
    """Values beside one, of its kind."""
    if isinstance(value, bool) or value is None:
        return [not value, 1.5, 3]
    if isinstance(value, (int, float)):
        return [value + 1, value * 2, value / 2, None]
    return [None]


_ACTS = ["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "mish", "relu2"]
_PERTURBED: dict[str, list[Any]] = {
    "hidden_act": _ACTS, "hidden_activation": _ACTS, "activation_function": _ACTS,
    "sliding_window": [None, 3, 100],
    "layer_types": [
        ["full_attention"] * 3, ["sliding_attention"] * 3,
        ["full_attention", "sliding_attention", "sliding_attention"], ["linear_attention"] * 3,
    ],
    "model_type": [],
    "torch_dtype": ["float32"], "dtype": ["float32"], "transformers_version": ["4.40.0"],
    "architectures": [["Other"]], "_name_or_path": ["a/b"], "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}], "problem_type": ["regression"], "attn_implementation": [],
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2, 3, 4, 5],
    "original_max_position_embeddings": 16,
}  # fmt: skip
_SCALINGS: list[Any] = [
    {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}, {"type": "linear"},
    {"rope_type": "linear", "factor": 2.0, "type": "yarn", "mscale": 0.3},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    {"rope_type": "default"}, {"rope_type": "default", "factor": 8.0}, {},
    _LLAMA3, {**_LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {k: v for k, v in _LLAMA3.items() if k != "original_max_position_embeddings"},
    {k: v for k, v in _LLAMA3.items() if k != "low_freq_factor"},
    _YARN, {"type": "yarn", "factor": 4.0}, {**_YARN, "factor": None},
    {k: v for k, v in _YARN.items() if k != "factor"},
    {**_YARN, "truncate": False}, {**_YARN, "beta_fast": 4, "beta_slow": 2},
    {**_YARN, "beta_fast": 8, "truncate": False}, {**_YARN, "beta_fast": 0.5, "beta_slow": 0.2},
    {**_YARN, "mscale": 0.5}, {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**_YARN, "mscale": 0.7, "mscale_all_dim": 0}, {**_YARN, "attention_factor": 1.7},
    {**_YARN, "attention_factor": 1.7, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**_YARN, "partial_rotary_factor": 0.5}, {**_YARN, "mrope_section": [1, 1, 2]},
    {**_YARN, "original_max_position_embeddings": 10**6}, {**_YARN, "finetuned": True},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "proportional", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.1] * 4, "long_factor": [2.0] * 4},
    {"type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [2.0, 3.0, 4.5, 7.5]},
    {**_LONG, "factor": 3.0}, {**_LONG, "attention_factor": 1.7}, {**_LONG, "type": "su"},
    {**_LONG, "original_max_position_embeddings": 40}, {**_LONG, "long_factor": [1.0]},
    {**_LONG, "short_factor": None}, {"partial_rotary_factor": 0.5},
    {**_LONG, "short_factor": [1.5], "long_factor": [2.5], "partial_rotary_factor": 0.25},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": None},
    {"full_attention": {**_YARN, "truncate": False}},
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 30.0}},
    {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 40.0},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 30.0},
    },
    {"full_attention": {"rope_type": "default", "rope_theta": 40.0}, "factor": 3.0},
]  # fmt: skip
# Keys that files have besides those of their class: of older versions, of other models.
_BESIDES: dict[str, list[Any]] = {
    "rope_scaling": _SCALINGS,
    "rope_parameters": [each and {"rope_theta": 70.0, **each} for each in _SCALINGS],
    "rope_theta": [50.0], "rope_local_base_freq": [50.0], "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [8],
    "hidden_act": _ACTS, "hidden_activation": _ACTS, "sliding_window": [3],
    "use_sliding_window": [False, True], "max_window_layers": [0, 2, 9],
    "sliding_window_pattern": [1, 3], "_sliding_window_pattern": [3], "sliding_window_size": [3, 5],
    "layer_types": _PERTURBED["layer_types"], "attention_bias": [True], "mlp_bias": [True],
    "qkv_bias": [True], "head_dim": [None, 12], "num_key_value_heads": [None, 1],
    "use_bidirectional_attention": [True, False], "is_causal": [False, True],
    "is_decoder": [True], "is_encoder_decoder": [True], "add_cross_attention": [True],
    "attn_logit_softcapping": [2.0, None], "final_logit_softcapping": [2.0, None],
    "query_pre_attn_scalar": [5], "embedding_multiplier": [2.0], "logits_scaling": [2.0],
    "attention_multiplier": [0.1], "residual_multiplier": [0.5],
    "tie_word_embeddings": [True, False], "quantization_config": [{"quant_method": "other"}],
    "no_rope_layer_interval": [1, 2], "use_bias": [False], "norm_epsilon": [0.1],
    "norm_type": ["rms_norm", "layer_norm"], "mlp_type": ["default"], "clip_qkv": [1.0],
    "lm_head_bias": [False, True], "full_attn_mod": [1, 2], "interpolate_factor": [1, 2],
    "per_layer_config": [{"0": {"head_dim": 4}}],
    "num_experts": [4], "no_rope_layers": [[1, 0, 1], [0, 1, 1, 0, 0, 1]],
    "pretraining_tp": [2], "use_mrope": [True],
    "pruned_heads": [{"0": [1]}], "hidden_size": [12], "num_attention_heads": [2], "n_inner": [10],
    "n_ctx": [8], "use_cache": [False], "temperature": [0.5], "auto_map": [{"AutoModel": "a.b"}],
    "reorder_and_upcast_attn": [True], "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False], "unheard_of": [1],
}  # fmt: skip


def cases_of(family: str) -> list[tuple[str, Any]]:
    """Each key with other values than those that the base has."""
    base = BASES[family]
    said = json.loads(CLASSES[family][0](**copy.deepcopy(base)).to_json_string(use_diff=False))
    found: dict[str, list[Any]] = {}
    for key, value in said.items():
        found[key] = list(_PERTURBED.get(key, _others(value)))
    for key, values in _BESIDES.items():
        found[key] = found.get(key, []) + values
    return [(key, value) for key, values in found.items() for value in values]


@each_family
def test_each_key_counts_as_in_transformers_or_is_refused(family, tmp_path):
    """The heart: one key after the other gets another value, and nothing is silently ignored."""
    base = BASES[family]
    base_logits = logits_of(model_of(family, base))
    base_config = DecoderConfig.from_hf({"model_type": family, **base})
    wrong, counted = [], {"equal": 0, "refused": 0, "no model": 0}
    for key, value in cases_of(family):
        config = {**base, key: value}
        try:
            model = model_of(family, config)
            expected = logits_of(model)
        except Exception:  # transformers cannot do it
            counted["no model"] += 1
            continue
        try:
            if DecoderConfig.from_hf({"model_type": family, **config}) == base_config:
                found = base_logits
            else:
                lm = Decoder.from_pretrained(written(tmp_path, family, config, model))
                with jax.disable_jit():  # nothing is compiled for one call
                    found = np.asarray(lm(TOKENS))
        except pax.errors.PaxError as error:
            assert key in str(error) or "rope" in key or "bias" in key, (key, value, str(error))
            counted["refused"] += 1
            continue
        error = np.abs(found - expected).max() / np.abs(expected).max()
        if not (found.shape == expected.shape and error < 1e-4):
            wrong.append((key, value, float(error)))
        counted["equal"] += 1
    assert wrong == []
    assert counted["equal"] > 70 and counted["refused"] > 50, counted


# --- whole folders --------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, BASES[family]) for family in CLASSES},
    "llama 3": ("llama", {**_SIZES, "rope_scaling": _LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "qwen2 with yarn": ("qwen2", {**_SIZES, "rope_scaling": {**_YARN, "mscale": 0.7}}),
    "mistral without a window": ("mistral", {**_SIZES, "sliding_window": None}),
    "phi3 with a part of each head": ("phi3", {
        **_SIZES, "head_dim": 6, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    }),
    "phi3 with short longrope": (
        "phi3", {**BASES["phi3"], "rope_scaling": _LONG, "original_max_position_embeddings": 28}
    ),
    "phi3 with long longrope": (
        "phi3", {**BASES["phi3"], "rope_scaling": _LONG, "original_max_position_embeddings": 16}
    ),
    "smollm3 with biases": ("smollm3", {
        **_SIZES, "attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 0],
        "tie_word_embeddings": False, "rope_scaling": _YARN,
    }),
    "granite with biases": (
        "granite", {**BASES["granite"], "attention_bias": True, "mlp_bias": True, "head_dim": 6}
    ),
    "olmo2 with one key head": (
        "olmo2", {**_SIZES, "num_key_value_heads": 1, "attention_bias": True, "head_dim": 6}
    ),
    "starcoder2 without biases": (
        "starcoder2", {**_SIZES, "use_bias": False, "tie_word_embeddings": False}
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", list(FORMS))
def test_a_saved_model_gives_equal_logits_and_greedy_tokens(form, tmp_path):
    family, config = FORMS[form]
    model = model_of(family, config)
    model.save_pretrained(tmp_path)
    lm = Decoder.from_pretrained(tmp_path)
    assert_close(lm(TOKENS), logits_of(model), rtol=2e-5)
    made = model.generate(
        torch.from_numpy(TOKENS), do_sample=False, max_new_tokens=8, eos_token_id=None
    )
    assert pax.generate(lm, TOKENS, max_new_tokens=8).tolist() == made[:, 20:].tolist()


def test_the_language_model_of_a_gemma_of_images(tmp_path):
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=BASES["gemma3_text"], vision_config=vision, image_token_index=47
    )
    model = drawn(transformers.Gemma3ForConditionalGeneration, config)
    model.save_pretrained(tmp_path)
    tokens = TOKENS % 47
    assert_close(Decoder.from_pretrained(tmp_path)(tokens), logits_of(model, tokens), rtol=2e-5)


def test_the_language_model_of_a_mistral_of_images(tmp_path):
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14, "head_dim": 8,
    }  # fmt: skip
    text = {**BASES["mistral"], "model_type": "mistral"}
    config = transformers.Mistral3Config(
        text_config=text, vision_config={**vision, "model_type": "pixtral"}, image_token_index=47,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = drawn(transformers.Mistral3ForConditionalGeneration, config)
    model.save_pretrained(tmp_path)
    tokens = TOKENS % 47
    assert_close(Decoder.from_pretrained(tmp_path)(tokens), logits_of(model, tokens), rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_head_in_the_file_counts_as_in_transformers(family, tmp_path):
    config = {**BASES[family], "tie_word_embeddings": True}
    untied = model_of(family, {**config, "tie_word_embeddings": False})
    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(written(tmp_path, family, config, untied), dtype=torch.float32)
    with pytest.warns(pax.errors.PaxWarning, match="a separate head"):
        lm = Decoder.from_pretrained(tmp_path)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert not lm.config.tied
    assert_close(lm(TOKENS), logits_of(model), rtol=2e-5)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.get_input_embeddings().weight)
    model = read(written(tmp_path, family, config, untied), dtype=torch.float32)
    lm = Decoder.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.get_input_embeddings().weight and lm.config.tied
    assert_close(lm(TOKENS), logits_of(model), rtol=2e-5)


def test_recorded_numbers_are_those_of_transformers(tmp_path):
    for name, config in recorded.CONFIGS.items():
        folder = reference.write_folder(tmp_path, config, reference.random_weights(config))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        found = logits_of(model, recorded.TOKENS)[0, -1, :5]
        assert_close(found, recorded.LOGITS[name], rtol=1e-5, atol=1e-5, where=name)
