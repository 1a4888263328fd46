"""Array names and layouts of pretrained Decoders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pax_export.nets._decoder_config import DecoderConfig

Pieces = dict[str, "SourceArray"]


@dataclass(frozen=True)
class SourceArray:
    """One array of a file, and how it becomes a leaf."""

    name: str  # in the file; {} is the layer's number
    transposed: bool = False  # [out, in] in the file
    part: tuple[int, int] | None = None  # (first, size) along the output of a fused array
    paired_heads: int = 0  # heads with neighboring rotary pairs

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The array of the leaf."""
        if self.paired_heads:
            split = array.reshape((self.paired_heads, -1, 2, *array.shape[1:]))
            array = split.swapaxes(1, 2).reshape(array.shape)
        if self.transposed:
            array = array.T
        if self.part is not None:
            first, size = self.part
            array = array[..., first : first + size]
        return array


def pieces_of_hf(config: DecoderConfig, names: Iterable[str]) -> Pieces:
    """Where the files of transformers keep the leaves; names begin as those of this file do."""
    names = list(names)
    if config.family == "gpt2":
        return _of_gpt2(config, _prefix(names, "wte.weight"), _GPT2_HF, transposed=False)
    own = _prefix(names, "embed_tokens.weight")
    layer = own + "layers.{}."
    heads = [name for name in names if name.endswith("lm_head.weight")]
    head = heads[0] if len(heads) == 1 else own.removesuffix("model.") + "lm_head.weight"
    found = {
        "embed.weight": SourceArray(own + "embed_tokens.weight"),
        "norm.scale": SourceArray(own + "norm.weight"),
        "norm.offset": SourceArray(own + "norm.bias"),
        "head.weight": SourceArray(head, transposed=True),
    }
    return found | _of_layers(config, layer, _LLAMA_HF, _NORMS_HF[config.post_norms])


def pieces_of_gguf(config: DecoderConfig) -> Pieces:
    """Where GGUF files keep the leaves."""
    if config.family == "gpt2":
        return _of_gpt2(config, "", _GPT2_GGUF, transposed=True)
    found = {
        "embed.weight": SourceArray("token_embd.weight"),
        "norm.scale": SourceArray("output_norm.weight"),
        "head.weight": SourceArray("output.weight", transposed=True),
    }
    paired = config.family == "llama"
    return found | _of_layers(config, "blk.{}.", _LLAMA_GGUF, _NORMS_GGUF, paired)


_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
_LLAMA_HF = dict(
    zip(
        _LINEARS,
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj "
        "mlp.up_proj mlp.down_proj".split(),
    )
)
_LLAMA_GGUF = dict(
    zip(_LINEARS, "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split())
)
_HEAD_NORMS_HF = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
# With norms after the blocks, the one before the dense block has another name.
_NORMS_HF = {
    False: {
        "attention_norm": "input_layernorm",
        "dense_norm": "post_attention_layernorm",
        **_HEAD_NORMS_HF,
    },
    True: {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "dense_norm": "pre_feedforward_layernorm",
        "dense_post_norm": "post_feedforward_layernorm",
        **_HEAD_NORMS_HF,
    },
}
_NORMS_GGUF = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "dense_norm": "ffn_norm",
    "dense_post_norm": "post_ffw_norm",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
}
_GPT2_HF = {
    "embed": "wte",
    "place_embed": "wpe",
    "norm": "ln_f",
    "head": "lm_head",
    "attention_norm": "h.{}.ln_1",
    "dense_norm": "h.{}.ln_2",
    "fused": "h.{}.attn.c_attn",
    "output": "h.{}.attn.c_proj",
    "up": "h.{}.mlp.c_fc",
    "down": "h.{}.mlp.c_proj",
}
_GPT2_GGUF = {
    "embed": "token_embd",
    "place_embed": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "dense_norm": "blk.{}.ffn_norm",
    "fused": "blk.{}.attn_qkv",
    "output": "blk.{}.attn_output",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
}


def _prefix(names: list[str], ending: str) -> str:
    """What stands before the names of the language model: nothing, ``model.`` and others."""
    found = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return min(found, key=len, default="model.")


def _of_layers(
    config: DecoderConfig, start: str, linears: dict, norms: dict, paired: bool = False
) -> Pieces:
    found: Pieces = {}
    heads = {"query": config.num_heads, "key": config.num_kv_heads} if paired else {}
    for own, name in linears.items():
        room = "dense" if own in ("gate", "up", "down") else "attention"
        for leaf in ("weight", "bias"):
            found[f"layers.{room}.{own}.{leaf}"] = SourceArray(
                f"{start}{name}.{leaf}", leaf == "weight", paired_heads=heads.get(own, 0)
            )
    for own, name in norms.items():
        found[f"layers.{own}.scale"] = SourceArray(f"{start}{name}.weight")
        found[f"layers.{own}.offset"] = SourceArray(f"{start}{name}.bias")
    return found


def _of_gpt2(config: DecoderConfig, start: str, names: dict, transposed: bool) -> Pieces:
    """GPT-2 keeps query, key and value in one array, in transformers as ``[in, out]``."""
    head = start.removesuffix("transformer.") + names["head"]
    found = {
        "embed.weight": SourceArray(f"{start}{names['embed']}.weight"),
        "place_embed.weight": SourceArray(f"{start}{names['place_embed']}.weight"),
        "head.weight": SourceArray(f"{head}.weight", transposed=True),
    }
    for own in ("norm", "attention_norm", "dense_norm"):
        place = own if own == "norm" else f"layers.{own}"
        for leaf, ending in (("scale", "weight"), ("offset", "bias")):
            found[f"{place}.{leaf}"] = SourceArray(f"{start}{names[own]}.{ending}")
    for leaf in ("weight", "bias"):
        turned = transposed and leaf == "weight"
        for number, own in enumerate(("query", "key", "value")):
            part = (number * config.dim, config.dim)
            found[f"layers.attention.{own}.{leaf}"] = SourceArray(
                f"{start}{names['fused']}.{leaf}", turned, part
            )
        for place in ("attention.output", "dense.up", "dense.down"):
            name = f"{start}{names[place.split('.')[1]]}.{leaf}"
            found[f"layers.{place}.{leaf}"] = SourceArray(name, turned)
    return found
