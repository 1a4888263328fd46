"""Converts a DecoderConfig to a ``config.json``: the inverse of `DecoderConfig.from_hf`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import tree_flatten_with_path

from pax_export._foundations.errors import InvalidArgumentError, a_few
from pax_export._foundations.types import PyTree
from pax_export.core import path_name
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._families import keys_of_hf
from pax_export.nets.decoder._generation_defaults import GenerationDefaults
from pax_export.nets.decoder._hf import FAMILIES
from pax_export.nets.decoder._names import Pieces, SourceArray, pieces_of_hf
from pax_export.precision.quantized import ArrayLike, Form, QuantizedArray

#: Fields that do not change the function; layer kinds are compared layer by layer.
_UNSEEN = ("generation", "implementation", "family", "kinds")


def config_of_hf(config: DecoderConfig) -> DecoderConfig:
    """The configuration of the net in a folder of transformers; Gemma's norms are 1 + scale."""
    offset = 1.0 if config.family.startswith("gemma") else 0.0
    return dataclasses.replace(config, norm_offset=offset)


def hf_config(config: DecoderConfig, where: str) -> dict[str, Any]:
    """Returns the content of ``config.json``.

    Raises:
        InvalidArgumentError: transformers has no such architecture.
    """
    target = config_of_hf(config)
    fields = keys_of_hf(target) if target.family in FAMILIES else {}
    try:
        back = DecoderConfig.from_hf(fields)
    except InvalidArgumentError as error:
        raise no_such_net_error(config, "transformers", where, str(error.got)) from error
    check_same(target, back, "transformers", where)
    return fields


def hf_pieces(config: DecoderConfig) -> Pieces:
    """Returns the pieces of each leaf in a transformers folder."""
    start = "transformer." if config.family == "gpt2" else "model."
    first = "wte.weight" if config.family == "gpt2" else "embed_tokens.weight"
    return pieces_of_hf(config, [start + first])


def check_same(meant: DecoderConfig, back: DecoderConfig, title: str, where: str) -> None:
    """Refuses a configuration that does not survive the conversion and back."""
    names = [each.name for each in dataclasses.fields(meant) if each.name not in _UNSEEN]
    lost = [
        name
        for name in names
        if not _nearly_equal(_field_as_computed(meant, name), _field_as_computed(back, name))
    ]
    for number in range(meant.num_layers):
        if _kind_as_computed(meant, number) != _kind_as_computed(back, number):
            lost.append(f"the kind of layer {number}")
    if lost:
        shown = [f"{each}={getattr(meant, each, '')!r:.60}".removesuffix("=''") for each in lost]
        raise no_such_net_error(meant, title, where, a_few(shown, 4))


def _kind_as_computed(config: DecoderConfig, number: int) -> tuple:
    kind = config.kind_of(number)
    base = config.rotary_base if kind.rotary_base is None else kind.rotary_base
    if config.positions != "rotary" or base == 0:
        return kind.window, 0
    return kind.window, base, config.rotary_scaling if kind.scaled else None


def _field_as_computed(config: DecoderConfig, name: str) -> object:
    """Returns the effective value of a field."""
    if config.positions != "rotary" and name.startswith("rotary"):
        return None
    own = {"attention_scale": config.head_size**-0.5, "rotary_size": config.head_size}
    value = getattr(config, name)
    return own.get(name) if value is None else value


def _nearly_equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def no_such_net_error(
    config: DecoderConfig, title: str, where: str, got: str
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{title} has no equivalent of this net.",
        where=f"{where}: lm.config",
        got=f"family={config.family!r}; {got}"[:300],
        write=f"a net of the families {', '.join(sorted(FAMILIES))} as their files describe them, "
        'or format="genai", which holds any Decoder',
    )


def generation_config(defaults: GenerationDefaults, bos: int | None) -> Mapping[str, Any]:
    """The content of ``generation_config.json``."""
    fields: dict[str, Any] = {"bos_token_id": bos, "pad_token_id": defaults.pad}
    fields["eos_token_id"] = list(defaults.stop) if len(defaults.stop) != 1 else defaults.stop[0]
    if defaults.repetition_penalty != 1:
        fields["repetition_penalty"] = defaults.repetition_penalty
    if defaults.do_sample:
        fields |= {"do_sample": True, "temperature": defaults.temperature, "top_k": defaults.top_k}
        fields["top_p"] = defaults.top_p
        fields |= {"min_p": defaults.min_p} if defaults.min_p else {}
    return {name: value for name, value in fields.items() if value not in (None, [])}


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
    lm: PyTree, pieces: Pieces, norm_shift: float = 0.0, where: str = "lm"
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
        plain = re.sub(r"^layers\.\d+\.", "layers.", name)
        is_known = isinstance(leaf, QuantizedArray) or not isinstance(leaf, ArrayLike)
        if plain not in pieces or not is_known:
            raise InvalidArgumentError(
                "A leaf of the net is unsupported by this file format.",
                where=f"{where}.{name}",
                got=repr(leaf) if not is_known else "an additional leaf",
                write="pax_export.adapters.merge(lm) of adapters, pax.quantize(lm) of weights "
                "that are trained as integers",
            )
        for file_name, piece, layer in _find_places(name, leaf, pieces[plain]):
            found.setdefault(file_name, []).append((piece, leaf, layer, shift))
    return [_make_tensor(name, parts, where) for name, parts in sorted(found.items())]


def _find_places(
    name: str, leaf: Any, piece: SourceArray
) -> Iterator[tuple[str, SourceArray, Any]]:
    listed = re.match(r"layers\.(\d+)\.", name)
    if listed:
        yield piece.name.format(listed[1]), piece, None
    elif name.startswith("layers."):
        yield from ((piece.name.format(i), piece, i) for i in range(leaf.shape[0]))
    else:
        yield piece.name, piece, None


def _describe_bits(leaf: Any) -> str:
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
