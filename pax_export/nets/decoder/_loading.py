"""Loads a Decoder from pretrained files, one leaf at a time."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_structure

from pax_export._foundations.errors import (
    MissingWeightError,
    PaxWarning,
    WeightsFileError,
    WeightsMismatchError,
    a_few,
    errors_in,
)
from pax_export._foundations.files.own_files import some_names
from pax_export._foundations.files.system import read_small_file
from pax_export._foundations.types import DTypeLike
from pax_export.core import Module, named_leaves
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._generation import GENERATION, GenerationDefaults, read_defaults
from pax_export.nets.decoder._gguf import ROTARY_TENSORS, scaling_of_gguf
from pax_export.nets.decoder._tensors import (
    Pieces,
    SourceArray,
    is_stacked,
    name_in_layers,
    pieces_of_gguf,
    pieces_of_hf,
)
from pax_export.weights import Source, open_source

M = TypeVar("M", bound=Module)
Make = Callable[[DecoderConfig, str], M]  # the class `Decoder`

_LARGEST_CONFIG = 1 << 24  # bytes

# Tables stored with the weights, and parts that do not belong to the language model.
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^rope_freqs\.weight$|rope_factors_\w+\.weight$"
    r"|^(model\.)?(vision_tower|multi_modal_projector|vision_model)\."
)


def decoder_of_gguf(
    cls: Make[M], path: str | os.PathLike[str], layers: str, dtype: DTypeLike | None
) -> M:
    """See `Decoder.from_gguf`."""
    with open_source(path) as source:
        if source.kind != "gguf":
            raise WeightsFileError(
                "The file is not a GGUF file.",
                where=source.where,
                got=f"a file of {source.kind}",
                write="Decoder.from_pretrained(folder) for config.json and safetensors",
            )
        with errors_in(source.where):
            config = DecoderConfig.from_gguf(source.metadata)
        names = source.entries
        config = replace(
            config,
            tied="output.weight" not in names,
            vocab_size=_count_rows(source, "token_embd.weight", config.vocab_size),
            projection_bias=config.projection_bias or "blk.0.attn_q.bias" in names,
            output_bias=config.output_bias or "blk.0.attn_output.bias" in names,
            dense_bias=config.dense_bias or "blk.0.ffn_down.bias" in names,
        )
        config = _with_rotary_tables(config, source)
        return fill_decoder(cls, source, config, pieces_of_gguf(config), layers, dtype)


def _with_rotary_tables(config: DecoderConfig, source: Source) -> DecoderConfig:
    """Returns the configuration with the divisors of frequencies that are among the tensors."""
    for kind, names in ROTARY_TENSORS.items():
        is_used = kind == "table" or config.family == "phi3"
        if is_used and all(name in source.entries for name in names):
            tables = [source.entries[name].read().astype(np.float64).tolist() for name in names]
            with errors_in(source.where):
                scaling = scaling_of_gguf(source.metadata, config.family, tables)
                return replace(config, rotary_scaling=scaling)
    return config


def decoder_of_folder(
    cls: Make[M],
    folder: Path,
    config: DecoderConfig | None,
    layers: str,
    dtype: DTypeLike | None,
) -> M:
    """See `Decoder.from_pretrained`."""
    described = None
    if config is None:
        described = _read_json(folder / "config.json")
        with errors_in(folder):
            config = DecoderConfig.from_hf(described)
    config = _with_generation(config, folder / "generation_config.json", described)
    with open_source(folder) as source:
        pieces = pieces_of_hf(config, source.entries)
        if config.tied and _has_own_head(source, pieces):
            config = replace(config, tied=False)
        return fill_decoder(cls, source, config, pieces, layers, dtype)


def _with_generation(
    config: DecoderConfig, path: Path, described: dict[str, Any] | None
) -> DecoderConfig:
    """Adds the folder's generation settings to the configuration, unless it has its own."""
    if config.generation != GenerationDefaults():
        return config
    if path.exists():
        values = _read_json(path)
    else:  # where transformers finds them, too
        path = path.with_name("config.json")
        values = {name: each for name, each in (described or {}).items() if name in GENERATION}
    return replace(config, generation=read_defaults(values, str(path), config.vocab_size))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        folder = path.parent
        is_folder = folder.is_dir()
        raise WeightsFileError(
            "The folder has no config.json." if is_folder else "The path is not a folder.",
            where=str(folder),
            got=f"a folder with {some_names(folder)}" if is_folder else "no folder",
            write="the folder with config.json and *.safetensors, as transformers saves it; or "
            "from_pretrained(folder, config=pax.nets.DecoderConfig(...))",
        )
    try:
        described = json.loads(read_small_file(path, _LARGEST_CONFIG))
        if not isinstance(described, dict):
            raise ValueError(f"a {type(described).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsFileError(
            "The file config.json is not a JSON object.",
            where=str(path),
            got=f"{type(error).__name__}: {error}"[:200],
            write="the folder with config.json and *.safetensors, as transformers saves it",
        ) from None
    return described


def _has_own_head(source: Source, pieces: Pieces) -> bool:
    """Whether a file has a head that is not its embedding, although a configuration ties them."""
    names = pieces["head.weight"].name, pieces["embed.weight"].name
    if not all(name in source.entries for name in names):
        return False
    head, embedding = (source.entries[name] for name in names)
    if head is embedding:  # one array with two names
        return False
    if head.shape == embedding.shape and np.array_equal(head.read(), embedding.read()):
        return False
    warning = PaxWarning(
        "The configuration ties head and embedding, but the file has a separate head, which is "
        "used.",
        where=f"{names[0]}, in {source.where}",
        write='"tie_word_embeddings": false in config.json',
    )
    warnings.warn(warning, stacklevel=4)
    return True


def _count_rows(source: Source, name: str, default: int) -> int:
    entry = source.entries.get(name)
    return default if entry is None or not entry.shape else entry.shape[0]


def fill_decoder(
    cls: Make[M],
    source: Source,
    config: DecoderConfig,
    pieces: Pieces,
    layers: str,
    dtype: DTypeLike | None,
) -> M:
    """A `Decoder` with the arrays of a source, read one leaf at a time."""
    if config.num_layers > len(source.entries):  # before the layers are made
        raise _mismatch_error(
            source, "the layers of the net", f"{len(source.entries)} tensors",
            f"those of {config.num_layers} layers",
        )  # fmt: skip
    with errors_in(source.where):
        shapes: Any = jax.eval_shape(lambda: cls(config, layers))
    leaf_sources = [_LeafSource(name, leaf, pieces, config) for name, leaf in named_leaves(shapes)]
    used = {name for leaf_source in leaf_sources for name in leaf_source.names}
    if config.tied:  # some files have a tied embedding twice
        used.add(pieces["head.weight"].name)
    _check_names(source, leaf_sources, config, used)
    leaves = [leaf_source.read(source, dtype) for leaf_source in leaf_sources]
    return tree_structure(shapes).unflatten(leaves)


class _LeafSource:
    """A leaf of the net, and its array (or those of all layers) in a file."""

    def __init__(
        self, name: str, leaf: jax.ShapeDtypeStruct, pieces: Pieces, config: DecoderConfig
    ):
        self.name, self.shape = name, leaf.shape
        self.part_shape = leaf.shape[1:] if is_stacked(name) else leaf.shape
        piece = pieces.get(name_in_layers(name))
        if piece is None:
            raise MissingWeightError(
                "The name of the weight belongs to no supported model.",
                where=f"Decoder: {name}",
                got=f"a configuration of the family {config.family!r} with it",
                write="a configuration without it; or pax.weights.adopt and a rename",
            )
        self._convert: SourceArray = piece
        self.names = piece.names(name, leaf.shape)

    def read(self, source: Source, dtype: DTypeLike | None) -> jax.Array:
        arrays = (self._one(source, name) for name in self.names)
        first = next(arrays)
        if not is_stacked(self.name):
            return _as_leaf(first, dtype)
        whole = np.empty(self.shape, first.dtype if dtype is None else jnp.dtype(dtype))
        whole[0] = first
        for i, array in enumerate(arrays, 1):
            whole[i] = array
        return _as_leaf(whole, dtype)

    def _one(self, source: Source, name: str) -> np.ndarray:
        array = source.entries[name].read()
        try:
            array = self._convert(array)
        except ValueError as error:
            needed = f"{self.part_shape}: {error}"
            raise _mismatch_error(source, self.name, f"{name} {array.shape}", needed) from None
        if array.shape != self.part_shape:
            raise _mismatch_error(source, self.name, f"{name} {array.shape}", f"{self.part_shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise _mismatch_error(
                source, self.name, f"{name} of {array.dtype}, as quantized weights are",
                "floating-point numbers, or a GGUF file with Decoder.from_gguf",
            )  # fmt: skip
        return array


def _as_leaf(array: np.ndarray, dtype: DTypeLike | None) -> jax.Array:
    # A view of a file, or of another array, must not live on in the net.
    array = np.ascontiguousarray(array, None if dtype is None else jnp.dtype(dtype))
    return jnp.array(array) if array.base is not None else jnp.asarray(array)


def _check_names(
    source: Source, leaf_sources: list[_LeafSource], config: DecoderConfig, used: set
) -> None:
    """Raises if arrays are missing, or if unused ones would change the function of the net."""
    for leaf_source in leaf_sources:
        for name in leaf_source.names:
            if name not in source.entries:
                raise MissingWeightError(
                    "A tensor of the net is missing from the file.",
                    where=f"{leaf_source.name}, in {source.where}",
                    got=f"no {name!r} among {a_few(sorted(source.entries), 6)}",
                    write=_advice_for(leaf_source.name),
                )
    left = [name for name in source.entries if name not in used and not _IGNORED.search(name)]
    if left:
        raise _mismatch_error(
            source, "the tensors of the file", f"besides those of the net {a_few(left, 6)}",
            f"those of a {config.family} of {config.num_layers} layers",
        )  # fmt: skip


def _advice_for(name: str) -> str:
    if name == "head.weight":
        return 'the whole file; or "tie_word_embeddings": true in config.json, if so it is'
    return "the whole file, of the net that its configuration describes"


def _mismatch_error(source: Source, name: str, got: str, needed: str) -> WeightsMismatchError:
    return WeightsMismatchError(
        "The tensors of this file are not those of the net that its configuration describes.",
        where=f"{name}, in {source.where}",
        got=got,
        write=f"a file with {needed}, or its own configuration",
    )
