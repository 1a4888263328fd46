"""Adapters of language models between PEFT and here, both ways: equal logits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import peft
import pytest
import torch

from pax_export import adapters, generation
from pax_export.errors import PaxError
from pax_export.generation._export import RUNTIMES
from pax_export.nets import Decoder
from tests.adapters.layers import disturbed
from tests.closeness import assert_close
from tests.generation.test_runtimes import ascii_tokenizer
from tests.oracles.test_families import BASES, TOKENS, logits_of, model_of

# Of transformers, in what peft calls.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

_LLAMA = {
    "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.value": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
    "layers.*.dense.up": "model.layers.*.mlp.up_proj",
}
_TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj"]
FAMILIES = ["llama", "gemma3_text", "olmo2"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 7},
    },
}


def loaded(folder: Any, family: str) -> tuple[Any, Decoder]:
    model = model_of(family, BASES[family])
    model.save_pretrained(folder)
    return model, Decoder.from_pretrained(folder, layers="listed")


def moved(model: Any) -> Any:
    """A model whose adapters add something."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(std=0.3)
            elif "lora_magnitude" in name:
                parameter.mul_(1.0 + 0.3 * torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", list(OPTIONS))
def test_adapters_of_peft_give_its_logits(options, family, tmp_path):
    model, lm = loaded(tmp_path / "base", family)
    before = logits_of(model)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=_TARGETS, **OPTIONS[options]
    )
    model = moved(peft.get_peft_model(model, config)).eval()
    model.save_pretrained(tmp_path / "adapter")
    tuned = adapters.load(lm, tmp_path / "adapter", rename=_LLAMA)
    expected = logits_of(model)
    assert np.abs(expected - before).max() > 0.1
    assert_close(tuned(TOKENS), expected, rtol=3e-5)
    assert_close(adapters.merge(tuned)(TOKENS), expected, rtol=1e-4)
    assert_close(adapters.pad_ranks(tuned).scanned()(TOKENS), expected, rtol=1e-4)


_PHI3 = {
    **{f"layers.*.attention.{each}": "model.layers.*.self_attn.qkv_proj"
       for each in ("query", "key", "value")},
    **{f"layers.*.dense.{each}": "model.layers.*.mlp.gate_up_proj" for each in ("gate", "up")},
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
}  # fmt: skip
_STARCODER2 = {**_LLAMA, "layers.*.dense.up": "model.layers.*.mlp.c_fc"}


@pytest.mark.parametrize("options", ["plain", "rslora", "dora"])
@pytest.mark.parametrize(
    ("family", "rename", "targets"),
    [
        ("phi3", _PHI3, ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("starcoder2", _STARCODER2, ["q_proj", "v_proj", "o_proj", "c_fc"]),
    ],
    ids=["phi3", "starcoder2"],
)
def test_adapters_of_other_projections_give_the_logits_of_peft(
    family, rename, targets, options, tmp_path
):
    """Those of Phi-3 are fused: the outputs of an adapter belong to several layers."""
    model, lm = loaded(tmp_path / "base", family)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **OPTIONS[options])
    model = moved(peft.get_peft_model(model, config)).eval()
    model.save_pretrained(tmp_path / "adapter")
    tuned = adapters.load(lm, tmp_path / "adapter", rename=rename)
    expected = logits_of(model)
    assert np.abs(expected - np.asarray(lm(TOKENS))).max() > 0.1
    assert_close(tuned(TOKENS), expected, rtol=3e-5)
    assert_close(adapters.merge(tuned).scanned()(TOKENS), expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft: about tied layers, and keys
@pytest.mark.parametrize("whole", [None, ["embed_tokens"], ["embed_tokens", "lm_head"]], ids=str)
def test_adapters_of_a_tied_embedding_give_the_logits_of_peft(whole, tmp_path):
    tied = {**BASES["llama"], "tie_word_embeddings": True}
    model = model_of("llama", tied)
    model.save_pretrained(tmp_path / "base")
    lm = Decoder.from_pretrained(tmp_path / "base", layers="listed")
    target = ["q_proj"] if whole else ["embed_tokens"]
    config = peft.LoraConfig(r=4, target_modules=target, modules_to_save=whole)
    model = moved(peft.get_peft_model(model, config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "lora_embedding" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path / "adapter")
    rename = {**_LLAMA, "embed": "model.embed_tokens"}
    with_head = {**rename, "head": "lm_head"}
    with pytest.raises(PaxError):
        adapters.load(lm, tmp_path / "adapter", rename=with_head)
    tuned = adapters.load(lm.untied(), tmp_path / "adapter", rename=with_head)
    assert_close(tuned(TOKENS), logits_of(model), rtol=3e-5)
    tuned = disturbed(adapters.add(lm, "embed", 3))
    adapters.save(tuned, tmp_path / "own", rename=rename)
    read = peft.PeftModel.from_pretrained(model_of("llama", tied), tmp_path / "own")
    assert_close(logits_of(read.eval()), tuned(TOKENS), rtol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_adapters_saved_here_give_their_logits_in_peft(options, family, tmp_path):
    model, lm = loaded(tmp_path / "base", family)
    own = [f"layers.*.{path}" for path in ("attention.query", "attention.value")]
    tuned = adapters.add(lm, own, 4, alpha=6, **options)
    tuned = adapters.add(tuned, "layers.1.dense.up", 2, alpha=5, name="other", **options)
    tuned = disturbed(tuned)
    for name in ("default", "other"):
        one = adapters.activate(tuned, name)
        adapters.save(one, tmp_path / name, name=name, rename=_LLAMA)
        read = peft.PeftModel.from_pretrained(model_of(family, BASES[family]), tmp_path / name)
        expected = np.asarray(one(TOKENS))
        assert np.abs(expected - logits_of(model)).max() > 0.05
        assert_close(logits_of(read.eval()), expected, rtol=3e-5)


#: A folder for browsers has the model of "genai"; it is tested in tests/generation.
@pytest.mark.parametrize("format", ["genai", "gguf", "litertlm", "transformers"])
def test_a_merged_adapter_says_in_each_runtime_what_peft_says(format, tmp_path):
    runtime = RUNTIMES.get(format)
    for package in runtime.packages if runtime else ():
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    model = model_of("llama", BASES["llama"] | {"vocab_size": 270})
    model.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=_TARGETS, use_dora=True
    )
    model = moved(peft.get_peft_model(model, options)).eval()
    model.save_pretrained(tmp_path / "adapter")
    lm = Decoder.from_pretrained(tmp_path / "base", layers="listed")
    lm = adapters.merge(adapters.load(lm, tmp_path / "adapter", rename=_LLAMA))
    prompts = [[5, 6, 7], list(range(40, 60))]
    given = {"tokenizer": ascii_tokenizer(), "prompts": prompts}
    if runtime:
        path = tmp_path / f"served.{format}"
        report = generation.export(lm, path, format=format, max_length=32, **given)
    else:
        report = generation.save_pretrained(lm, tmp_path / "saved", **given)
    assert report.validated == "process"
    assert all("eos_token" in each for each in report.differs)
    # The runtime says what jax says, and jax what peft says.
    for prompt in prompts:
        ours = generation.generate(lm, [prompt], max_new_tokens=6)[0].tolist()
        ids = torch.tensor([prompt])
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        assert made[0, len(prompt) :].tolist() == ours
