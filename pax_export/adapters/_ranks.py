"""Pads the adapters of repeated layers to one rank, so that the layers can be stacked."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import jax.numpy as jnp

from pax_export.adapters import _layer as layers
from pax_export.adapters._lora import LoRA
from pax_export.adapters._net import apply_changes, require_adapters
from pax_export.core import with_static

M = TypeVar("M")


def pad_ranks(net: M) -> M:
    """Pads the adapters of repeated layers with zeros to the same rank.

    PEFT's ``rank_pattern`` and ``alpha_pattern`` give layers adapters of different ranks and
    scales, but only equal layers can be stacked.  The outputs do not change, and the padding stays
    zero, since it gets no gradient.

    Args:
        net: the net with adapters.

    Returns:
        The net, in which all adapters with one name at, for example, ``layers.*.query`` have the
        rank and alpha of the largest.

    Raises:
        InvalidArgumentError: the net has no adapters.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(4, 4), pax.Linear(4, 4))
        >>> net = pax.adapters.add(net, "modules.0", rank=1)
        >>> net = pax.adapters.add(net, "modules.1", rank=3)
        >>> [layer.adapters["default"].rank for layer in pax.adapters.pad_ranks(net).modules]
        [3, 3]
    """
    found = require_adapters(net, "adapters.pad_ranks")
    largest: dict[tuple[str, str], LoRA] = {}
    for path, layer in found:
        for name, adapter in layers.adapters_of(layer).items():
            old = largest.setdefault((_pattern_of_path(path), name), adapter)
            if adapter.rank > old.rank:
                largest[_pattern_of_path(path), name] = adapter

    def with_padded(path: str) -> Any:
        def padded(layer: Any) -> Any:
            now = layers.adapters_of(layer)
            new = {
                name: _pad_adapter(each, largest[_pattern_of_path(path), name])
                for name, each in now.items()
            }
            return layers.with_adapters(layer, new)

        return padded

    return apply_changes(net, {id(layer): with_padded(path) for path, layer in found})


def _pattern_of_path(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _pad_adapter(adapter: LoRA, like: LoRA) -> LoRA:
    """Pads an adapter to the rank and scale of another one, with the same output."""
    missing = like.rank - adapter.rank
    if not missing and adapter.scale == like.scale:
        return adapter
    a, b = adapter.lora_a, adapter.lora_b * (adapter.scale / like.scale)
    kept = [(0, 0)] * (b.ndim - 2)
    adapter = adapter.replace(
        lora_a=jnp.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, missing)]),
        lora_b=jnp.pad(b.astype(adapter.lora_b.dtype), [*kept, (0, missing), (0, 0)]),
    )
    return with_static(adapter, rank=like.rank, alpha=like.alpha)
