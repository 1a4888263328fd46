"""Array names and layouts of pretrained Decoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pax_export.nets.decoder._config import DecoderConfig

Pieces = dict[str, "SourceArray"]


@dataclass(frozen=True)
class SourceArray:
    """One array of a file, and how it becomes a leaf."""

    name: str  # in the file; {} is the layer's number
    transposed: bool = False  # [out, in] in the file
    #: (first, size, size of the whole) along the output of a fused array
    part: tuple[int, int, int] | None = None
    paired_heads: int = 0  # heads with neighboring rotary pairs

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The array of the leaf; a ValueError for an array that does not have the parts."""
        if self.paired_heads:
            split = array.reshape((self.paired_heads, -1, 2, *array.shape[1:]))
            array = split.swapaxes(1, 2).reshape(array.shape)
        if self.transposed:
            array = array.T
        if self.part is not None:
            first, size, whole = self.part
            if array.shape[-1:] != (whole,):
                raise ValueError(f"no fused array of {whole} outputs")
            array = array[..., first : first + size]
        return array


class _Names(NamedTuple):
    """The names of modules in the files of a format; ``{}`` is the layer's number."""

    top: dict[str, str]
    layers: dict[str, str]
    fused: Mapping[str, tuple[str, ...]] = {}  # of one array, those that it contains
    transposed: bool = True  # whether weights of layers are [out, in]


def pieces_of_hf(config: DecoderConfig, names: Iterable[str]) -> Pieces:
    """Returns the pieces of each leaf in transformers' files, with this file's prefix."""
    names, is_gpt2 = list(names), config.family == "gpt2"
    ending = "wte.weight" if is_gpt2 else "embed_tokens.weight"
    # Prefixes of the names of the language model: none, ``model.`` and others.
    found = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    start = min(found, key=len, default="model.")
    heads = [name for name in names if name.endswith("lm_head.weight") and not is_gpt2]
    above = start.removesuffix("transformer." if is_gpt2 else "model.")
    head = heads[0] if len(heads) == 1 else f"{above}lm_head.weight"
    usual = _LLAMA_HF
    if config.post_norms:
        usual = usual._replace(layers=usual.layers | _POST_NORMS_HF)
    return _make_pieces(config, _HF.get(config.family, usual), start, head)


def pieces_of_gguf(config: DecoderConfig) -> Pieces:
    """Returns the pieces of each leaf in GGUF files."""
    layout = _GGUF.get(config.family, _LLAMA_GGUF)
    return _make_pieces(config, layout, "", "output.weight", paired=config.family in _PAIRED)


def _make_pieces(
    config: DecoderConfig, names: _Names, start: str, head: str, paired: bool = False
) -> Pieces:
    """The array of each leaf; `paired`: rotary pairs of queries and keys are neighbors."""
    found: Pieces = {"head.weight": SourceArray(head, transposed=True)}
    heads = {"query": config.num_heads, "key": config.num_kv_heads} if paired else {}
    layers = {f"layers.{own}": name for own, name in names.layers.items()}
    for own, name in _prefix_names(start, names.top | layers).items():
        if own.endswith("norm"):
            found[f"{own}.scale"] = SourceArray(f"{name}.weight")
            found[f"{own}.offset"] = SourceArray(f"{name}.bias")
        elif own.endswith("embed"):
            found[f"{own}.weight"] = SourceArray(f"{name}.weight")
        else:
            for leaf in ("weight", "bias"):
                transposed = names.transposed and leaf == "weight"
                pairs = heads.get(own.rpartition(".")[2], 0)
                found[f"{own}.{leaf}"] = SourceArray(
                    f"{name}.{leaf}", transposed, paired_heads=pairs
                )
    kv_size = config.num_kv_heads * config.head_size
    sizes = {"attention.query": config.num_heads * config.head_size, "attention.key": kv_size,
             "attention.value": kv_size}  # fmt: skip
    for name, parts in names.fused.items():
        counts = [sizes.get(own, config.hidden_dim) for own in parts]
        for index, own in enumerate(parts):
            part = (sum(counts[:index]), counts[index], sum(counts))
            for leaf in ("weight", "bias"):
                transposed = names.transposed and leaf == "weight"
                found[f"layers.{own}.{leaf}"] = SourceArray(
                    f"{start}{name}.{leaf}", transposed, part
                )
    return found


def _prefix_names(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {own: prefix + name for own, name in names.items()}


_QKV = ("attention.query", "attention.key", "attention.value")
_GATE_UP = ("dense.gate", "dense.up")
_LLAMA_HF = _Names(
    {"embed": "embed_tokens", "norm": "norm"},
    _prefix_names("layers.{}.", {
        "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
        "dense.gate": "mlp.gate_proj", "dense.up": "mlp.up_proj", "dense.down": "mlp.down_proj",
        "attention_norm": "input_layernorm", "dense_norm": "post_attention_layernorm",
        "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    }),
)  # fmt: skip
#: With norms after the blocks, the one before the dense block has another name.
_POST_NORMS_HF = _prefix_names("layers.{}.", {
    "attention_post_norm": "post_attention_layernorm", "dense_norm": "pre_feedforward_layernorm",
    "dense_post_norm": "post_feedforward_layernorm",
})  # fmt: skip
_LLAMA_GGUF = _Names(
    {"embed": "token_embd", "norm": "output_norm"},
    _prefix_names("blk.{}.", {
        "attention.query": "attn_q", "attention.key": "attn_k", "attention.value": "attn_v",
        "attention.output": "attn_output", "dense.gate": "ffn_gate", "dense.up": "ffn_up",
        "dense.down": "ffn_down", "attention_norm": "attn_norm", "dense_norm": "ffn_norm",
        "attention_post_norm": "post_attention_norm", "dense_post_norm": "post_ffw_norm",
        "attention.query_norm": "attn_q_norm", "attention.key_norm": "attn_k_norm",
    }),
)  # fmt: skip
_GPT2_HF = _Names(
    {"embed": "wte", "place_embed": "wpe", "norm": "ln_f"},
    _prefix_names("h.{}.", {
        "attention_norm": "ln_1", "dense_norm": "ln_2", "attention.output": "attn.c_proj",
        "dense.up": "mlp.c_fc", "dense.down": "mlp.c_proj",
    }),
    fused={"h.{}.attn.c_attn": _QKV}, transposed=False,
)  # fmt: skip
_GPT2_GGUF = _Names(
    {"embed": "token_embd", "place_embed": "position_embd", "norm": "output_norm"},
    _prefix_names("blk.{}.", {
        "attention_norm": "attn_norm", "dense_norm": "ffn_norm",
        "attention.output": "attn_output", "dense.up": "ffn_up", "dense.down": "ffn_down",
    }),
    fused={"blk.{}.attn_qkv": _QKV},
)  # fmt: skip
_STARCODER2_HF = _LLAMA_HF._replace(layers=_LLAMA_HF.layers | _prefix_names("layers.{}.", {
    "dense.up": "mlp.c_fc", "dense.down": "mlp.c_proj",
}))  # fmt: skip
_PHI3_HF = _LLAMA_HF._replace(
    fused={"layers.{}.self_attn.qkv_proj": _QKV, "layers.{}.mlp.gate_up_proj": _GATE_UP}
)
_PHI3_GGUF = _LLAMA_GGUF._replace(fused={"blk.{}.attn_qkv": _QKV, "blk.{}.ffn_up": _GATE_UP})
#: Layouts by family, where they are not Llama's.
_HF = {"gpt2": _GPT2_HF, "phi3": _PHI3_HF, "starcoder2": _STARCODER2_HF}
_GGUF = {"gpt2": _GPT2_GGUF, "phi3": _PHI3_GGUF}
#: Tensors of GGUF files with divisors of rotary frequencies, by kinds of `RotaryScaling`.
ROTARY_TENSORS = {
    "table": ("rope_freqs.weight",),
    "longrope": ("rope_factors_short.weight", "rope_factors_long.weight"),
}
#: Architectures of GGUF files in which the rotary pairs of queries and keys are neighbors.
_PAIRED = ("llama", "smollm3", "granite")
