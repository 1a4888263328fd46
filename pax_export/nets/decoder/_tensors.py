"""Arrays of pretrained Decoders in files: their names and layouts, read and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import tree_flatten_with_path

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array
from pax_export.core import Module, path_name
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.precision.quantized import ArrayLike, Form, QuantizedArray

Pieces = dict[str, "SourceArray"]

#: The beginning of the name of a leaf in a list of layers.
_LISTED = re.compile(r"^layers\.(\d+)\.")


def name_in_layers(leaf: str) -> str:
    """The name of a leaf in `Pieces`, which is without the number of a layer."""
    return _LISTED.sub("layers.", leaf)


def is_stacked(leaf: str) -> bool:
    """Whether the first axis of a leaf is that of layers."""
    return leaf.startswith("layers.") and not _LISTED.match(leaf)


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

    def names(self, leaf: str, shape: Sequence[int]) -> list[str]:
        """The names in the file of the array of a leaf, or of those of all layers."""
        if is_stacked(leaf):
            return [self.name.format(i) for i in range(shape[0])]
        listed = _LISTED.match(leaf)
        return [self.name.format(listed and listed[1])]


# The modules of a Decoder and of its layers, and their names in files: in transformers' folders of
# Llama and of GPT-2, and in GGUF.
_MODULES = """
embed                embed_tokens              wte          token_embd
place_embed          -                         wpe          position_embd
norm                 norm                      ln_f         output_norm
"""
_OF_LAYERS = """
attention_norm       input_layernorm           ln_1         attn_norm
attention.query      self_attn.q_proj          -            attn_q
attention.key        self_attn.k_proj          -            attn_k
attention.value      self_attn.v_proj          -            attn_v
attention.query_norm self_attn.q_norm          -            attn_q_norm
attention.key_norm   self_attn.k_norm          -            attn_k_norm
attention.output     self_attn.o_proj          attn.c_proj  attn_output
attention_post_norm  -                         -            post_attention_norm
dense_norm           post_attention_layernorm  ln_2         ffn_norm
dense.gate           mlp.gate_proj             -            ffn_gate
dense.up             mlp.up_proj               mlp.c_fc     ffn_up
dense.down           mlp.down_proj             mlp.c_proj   ffn_down
dense_post_norm      -                         -            post_ffw_norm
"""


def _column(number: int, layer: str) -> dict[str, str]:
    """The names of a column, by those of our modules; ``{}`` is the number of a layer."""
    tables = (_MODULES, "", ""), (_OF_LAYERS, "layers.", layer)
    return {
        own + row[0]: prefix + row[number]
        for table, own, prefix in tables
        for row in map(str.split, table.strip().splitlines())
        if row[number] != "-"
    }


_LLAMA, _GPT2, _GGUF = _column(1, "layers.{}."), _column(2, "h.{}."), _column(3, "blk.{}.")
#: With norms after the blocks, the one before the dense block has another name.
_POST_NORMS = {
    "layers.attention_post_norm": "layers.{}.post_attention_layernorm",
    "layers.dense_norm": "layers.{}.pre_feedforward_layernorm",
    "layers.dense_post_norm": "layers.{}.post_feedforward_layernorm",
}
_STARCODER2 = {"layers.dense.up": "layers.{}.mlp.c_fc", "layers.dense.down": "layers.{}.mlp.c_proj"}
_QKV = ("layers.attention.query", "layers.attention.key", "layers.attention.value")
_GATE_UP = ("layers.dense.gate", "layers.dense.up")
#: By the family, arrays that contain several modules.
_FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {"h.{}.attn.c_attn": _QKV},
    "phi3": {"layers.{}.self_attn.qkv_proj": _QKV, "layers.{}.mlp.gate_up_proj": _GATE_UP},
}
_FUSED_GGUF = {
    "gpt2": {"blk.{}.attn_qkv": _QKV},
    "phi3": {"blk.{}.attn_qkv": _QKV, "blk.{}.ffn_up": _GATE_UP},
}
#: Architectures of GGUF files in which the rotary pairs of queries and keys are neighbors.
_PAIRED = ("llama", "smollm3", "granite")


def pieces_of_hf(config: DecoderConfig, names: Iterable[str]) -> Pieces:
    """Returns the pieces of each leaf in transformers' files, with this file's prefix."""
    names, is_gpt2 = list(names), config.family == "gpt2"
    modules = _GPT2 if is_gpt2 else _LLAMA
    if config.family == "starcoder2":
        modules = modules | _STARCODER2
    elif config.post_norms and config.family not in _FUSED:
        modules = modules | _POST_NORMS
    ending = f"{modules['embed']}.weight"
    # Prefixes of the names of the language model: none, ``model.`` and others.
    found = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    start = min(found, key=len, default="model.")
    heads = [name for name in names if name.endswith("lm_head.weight") and not is_gpt2]
    above = start.removesuffix("transformer." if is_gpt2 else "model.")
    head = heads[0] if len(heads) == 1 else f"{above}lm_head.weight"
    fused = _FUSED.get(config.family, {})
    return _make_pieces(config, modules, fused, head, start, transposed=not is_gpt2)


def hf_pieces(config: DecoderConfig) -> Pieces:
    """Returns the pieces of each leaf in a transformers folder."""
    is_gpt2 = config.family == "gpt2"
    return pieces_of_hf(
        config, ["transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"]
    )


def pieces_of_gguf(config: DecoderConfig) -> Pieces:
    """Returns the pieces of each leaf in GGUF files."""
    fused = _FUSED_GGUF.get(config.family, {})
    return _make_pieces(config, _GGUF, fused, "output.weight", paired=config.family in _PAIRED)


def _make_pieces(
    config: DecoderConfig,
    modules: Mapping[str, str],
    fused: Mapping[str, tuple[str, ...]],
    head: str,
    start: str = "",
    transposed: bool = True,
    paired: bool = False,
) -> Pieces:
    """The array of each leaf.

    Args:
        config: the configuration of the net.
        modules: the name of each module.
        fused: the names of arrays, each with the modules whose weights it contains.
        head: the name of the head.
        start: the prefix of the other names.
        transposed: whether weights of layers are ``[out, in]``.
        paired: whether rotary pairs of queries and keys are neighbors.
    """
    found: Pieces = {"head.weight": SourceArray(head, transposed=True)}
    counts = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    for own, name in modules.items():
        last = own.rpartition(".")[2]
        if own.endswith("norm"):
            found[f"{own}.scale"] = SourceArray(f"{start}{name}.weight")
            found[f"{own}.offset"] = SourceArray(f"{start}{name}.bias")
        elif own.endswith("embed"):
            found[f"{own}.weight"] = SourceArray(f"{start}{name}.weight")
        else:
            pairs = counts[last] if paired and last in ("query", "key") else 0
            for leaf in ("weight", "bias"):
                found[f"{own}.{leaf}"] = SourceArray(
                    f"{start}{name}.{leaf}", transposed and leaf == "weight", paired_heads=pairs
                )
    for name, parts in fused.items():
        heads = [counts.get(own.rpartition(".")[2]) for own in parts]
        sizes = [config.hidden_dim if n is None else n * config.head_size for n in heads]
        for index, own in enumerate(parts):
            part = (sum(sizes[:index]), sizes[index], sum(sizes))
            for leaf in ("weight", "bias"):
                found[f"{own}.{leaf}"] = SourceArray(
                    f"{start}{name}.{leaf}", transposed and leaf == "weight", part
                )
    return found


# --- written ------------------------------------------------------------------------------

_NORMS = re.compile(r"(^|\.)(\w*_)?norm\.scale$")

_Part = tuple[SourceArray, Any, int | None, float]


class WrittenTensor(NamedTuple):
    """A tensor of a file, with data computed on demand.

    Attributes:
        name: the name in the file.
        shape: the shape of the data.
        dtype: the dtype of the data.
        read: returns the data; for a quantized tensor the integers, two 4-bit ones per byte.
        form: the format of a quantized tensor; None for others.
        scales: returns the scales of a quantized tensor.
        zeros: returns the zero points, for an asymmetric scheme.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    form: Form | None = None
    scales: Callable[[], np.ndarray] | None = None
    zeros: Callable[[], np.ndarray] | None = None


def file_tensors(
    lm: Module, pieces: Pieces, norm_shift: float = 0.0, where: str = "lm"
) -> list[WrittenTensor]:
    """Returns the tensors of a file from which these pieces can be read.

    Args:
        lm: a `Decoder`.
        pieces: the pieces of each leaf in the file.
        norm_shift: added to the scales of norms.
        where: the place in error messages.

    Raises:
        InvalidArgumentError: the net has a leaf that such files lack.
    """
    found: dict[str, list[_Part]] = {}
    leaves, _ = tree_flatten_with_path(lm, is_leaf=lambda each: isinstance(each, ArrayLike))
    for path, leaf in leaves:
        name = path_name(path)
        shift = norm_shift if _NORMS.search(name) else 0.0
        plain = name_in_layers(name)
        is_known = isinstance(leaf, QuantizedArray) or not isinstance(leaf, ArrayLike)
        if plain not in pieces or not is_known:
            raise InvalidArgumentError(
                "A leaf of the net is unsupported by this file format.",
                where=f"{where}.{name}",
                got=repr(leaf) if not is_known else "an additional leaf",
                write="pax_export.adapters.merge(lm) of adapters, pax.quantize(lm) of weights "
                "that are trained as integers",
            )
        piece = pieces[plain]
        for number, file_name in enumerate(piece.names(name, leaf.shape)):
            layer = number if is_stacked(name) else None
            found.setdefault(file_name, []).append((piece, leaf, layer, shift))
    return [_make_tensor(name, parts, where) for name, parts in sorted(found.items())]


def _describe_bits(leaf: Array | ArrayLike) -> str:
    form = leaf.form if isinstance(leaf, QuantizedArray) else None
    return str(leaf.dtype) if form is None else f"{form.bits} bits, {form.scheme}"


def _make_tensor(name: str, parts: list[_Part], where: str) -> WrittenTensor:
    parts = sorted(parts, key=lambda each: (each[0].part or (0,))[0])
    shapes = [leaf.shape if layer is None else leaf.shape[1:] for _, leaf, layer, _ in parts]
    shape = (*shapes[0][:-1], sum(each[-1] for each in shapes))
    if parts[0][0].transposed:
        shape = shape[::-1]
    dtype = np.dtype(parts[0][1].dtype)
    forms = {leaf.form if isinstance(leaf, QuantizedArray) else None for _, leaf, *_ in parts}
    if len(forms) > 1:
        raise InvalidArgumentError(
            "The parts of one tensor must have the same number of bits.",
            where=f"{where}: {name} of the file",
            got=", ".join(_describe_bits(leaf) for _, leaf, *_ in parts),
            write="pax.quantize(lm), or at= with all of them",
        )
    form = forms.pop()
    if form is None:
        return WrittenTensor(name, shape, dtype, lambda: _laid_out(parts, lambda leaf: leaf))
    if parts[0][0].transposed:
        form = form._replace(axis=-3 - form.axis)
    return WrittenTensor(
        name, shape, dtype, lambda: _laid_out(parts, lambda leaf: leaf.integers), form,
        lambda: _laid_out(parts, lambda leaf: leaf.scales),
        None if form.scheme != "asymmetric" else lambda: _laid_out(parts, lambda leaf: leaf.zeros),
    )  # fmt: skip


def _laid_out(parts: list[_Part], array_of: Callable[[Any], Any]) -> np.ndarray:
    """The parts of a tensor, as the file has them."""
    arrays = []
    for _, leaf, layer, shift in parts:
        array = array_of(leaf)
        one = np.asarray(array if layer is None else array[layer])
        arrays.append((one + np.asarray(shift, one.dtype)) if shift else one)
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1)
    piece = parts[0][0]
    if piece.transposed:
        whole = whole.T
    if piece.paired_heads:  # the pairs become neighbours
        split = whole.reshape((piece.paired_heads, 2, -1, *whole.shape[1:]))
        whole = split.swapaxes(1, 2).reshape(whole.shape)
    return np.ascontiguousarray(whole)
