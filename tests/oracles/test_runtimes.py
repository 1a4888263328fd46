"""Language models in the very runtimes: greedy tokens of every family are those of jax."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import pytest

import pax_export as pax
from pax_export.generation._export import RUNTIMES
from tests.generation.test_runtimes import WIDE, WIDE_GPT2, ascii_tokenizer, net
from tests.generation.test_tokenizer import TEMPLATE, byte_level
from tests.nets import decoder_reference as reference

#: What the tiny nets have, and llama.cpp has not, and what they have instead.
_CHANGES: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": 2},
    "gemma2": {"query_pre_attn_scalar": 4.0},
    "gemma3": {
        "query_pre_attn_scalar": 4.0, "rope_scaling": {}, "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
    },
    "phi3": {"sliding_window": None, "head_dim": 2, "partial_rotary_factor": 1.0},
    "olmo2": {"head_dim": 2},
    "starcoder2": {"head_dim": 2, "sliding_window": None},
}  # fmt: skip

#: Heads for which onnxruntime has kernels.
_WIDE = {"gpt2": WIDE_GPT2, "phi3": {**WIDE, "sliding_window": None}}


@pytest.mark.parametrize("family", list(reference.CONFIGS))
@pytest.mark.parametrize("format", sorted(RUNTIMES))
def test_a_runtime_says_what_jax_says(format, family, tmp_path):
    for package in RUNTIMES[format].packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    lm, served = net(family, tmp_path / "hf"), tmp_path / f"served.{format}"
    options = {"format": format, "tokenizer": ascii_tokenizer()}
    options["max_length"] = lm.config.max_positions
    if format == "gguf" and family in _CHANGES:
        with pytest.raises(pax.errors.InvalidArgumentError, match=RUNTIMES[format].title):
            pax.generation.export(lm, served, **options)
        lm = net(family, tmp_path / "changed", **_CHANGES[family])
    report = pax.generation.export(lm, served, **options)
    assert report.validated == "process"
    print(family, report.details["tokens"], report.differs)


@pytest.mark.parametrize("family", list(reference.CONFIGS))
def test_onnxruntime_genai_and_transformers_js_run_the_same_folder(family, tmp_path):
    for package in RUNTIMES["genai"].packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    wide = _WIDE.get(family, {"head_dim": 8, "partial_rotary_factor": 1.0, "rope_scaling": None})
    if family not in ("phi3", "phi4"):
        wide.pop("partial_rotary_factor", None)
    lm = net(family, tmp_path / "hf", **wide)
    options = {"format": "genai", "tokenizer": ascii_tokenizer()}
    report = pax.generation.export(lm, tmp_path / "served", max_length=16, **options)
    if report.left_out:
        pytest.skip(report.left_out[0])
    print(family, report.details["transformers.js"], report.differs)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["smollm2", "llama", "phi3", "gpt2"])
@pytest.mark.parametrize("format", ["genai", "gguf", "litertlm"])
def test_a_runtime_says_what_jax_says_of_a_quantized_net(format, family, bits, tmp_path):
    for package in RUNTIMES[format].packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    lm = net(family, tmp_path / "hf", **_WIDE.get(family, WIDE))
    small, _ = pax.quantize(lm, bits=bits, group=32)
    options = {"format": format, "tokenizer": ascii_tokenizer()}
    options["max_length"] = lm.config.max_positions
    if format == "litertlm" and bits == 4:
        options["accuracy_level"] = 1  # the kernel rounds scales of groups to bfloat16
    report = pax.generation.export(small, tmp_path / f"served.{format}", **options)
    assert report.validated == "process" and report.details["quantized"]["bits"] == [bits]
    print(family, report.details["tokens"], report.differs)


@pytest.mark.parametrize("family", list(reference.CONFIGS))
def test_transformers_says_what_jax_says(family, tmp_path):
    lm = net(family, tmp_path / "hf")
    report = pax.generation.save_pretrained(lm, tmp_path / "saved", tokenizer=ascii_tokenizer())
    assert report.validated == "process"
    print(family, report.details["tokens"], report.differs)


def test_an_error_has_the_words_of_llama_cpp(tmp_path):
    if find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    lm = net("smollm2", tmp_path / "hf")
    bare = byte_level(("<s>", "<e>", *map(chr, range(33, 127)), "Ġ", "Ċ"), ())
    plain = pax.generation.Tokenizer(bare._inner, bare.special_tokens, TEMPLATE)
    with pytest.raises(pax.errors.ValidationError) as caught:
        path = tmp_path / "served.gguf"
        pax.generation.export(lm, path, format="gguf", tokenizer=plain, max_length=16)
    assert "cannot find tokenizer merges" in caught.value.got


@pytest.mark.parametrize("family", ["smollm2", "gpt2"])
@pytest.mark.parametrize("format", ["genai", "gguf", "litertlm"])
def test_a_base_model_with_a_bare_tokenizer_continues_texts(format, family, tmp_path):
    """The path of a tokenizer.json: no chat template, and what ends a text is the model's."""
    for package in RUNTIMES[format].packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    lm, file = net(family, tmp_path / "hf"), tmp_path / "tokenizer.json"
    ends = dataclasses.replace(lm.config, generation=pax.nets.GenerationDefaults(stop=(1,)))
    lm = lm.set_attribute("config", ends)
    ascii_tokenizer()._inner.save(str(file))
    options = {"format": format, "tokenizer": str(file), "max_length": lm.config.max_positions}
    report = pax.generation.export(lm, tmp_path / f"served.{format}", **options)
    assert report.validated == "process"
    assert "no chat template" in report.differs[0]
    print(family, format, report.details["tokens"], report.differs[1:])
