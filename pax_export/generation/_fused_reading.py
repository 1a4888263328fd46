"""A call of a Decoder with the operators that onnxruntime has for attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._types import Array, PyTree
from pax_export.export.formats.onnx.graph import HEAD_CHANNELS
from pax_export.export.portable.kept import call
from pax_export.nets import Decoder, LayerKind, PlacedReading

#: The bias of a masked key.
_LOWEST = -1e30


def is_fused(lm: Decoder) -> bool:
    """Whether onnxruntime has kernels for the attention of a net on all of its devices.

    For float16 its kernel on GPUs takes no mask of the prompts' padding.
    """
    return lm.embed.weight.dtype == jnp.float32 and lm.config.head_size % HEAD_CHANNELS == 0


class FusedReading(PlacedReading):
    """A call whose rotary embedding and attention are kept whole; attention appends to the stores.

    Args:
        config: the configuration of the net.
        positions: the positions of the tokens, ``[batch, length]``.
        held: the positions of all tokens, ``[batch, places]``; negative: padding.
        put: unused.
    """

    def angles(self, kind: LayerKind) -> Any:
        """Returns the place of each token in two tables of cosines and sines, and these."""
        found = super().angles(kind)
        if found is not None and ("angles", kind) not in self._kept:
            tables = [each.reshape((-1, each.shape[-1])) for each in found]
            places = jnp.arange(tables[0].shape[0]).reshape(self.positions.shape)
            self._kept["angles", kind] = places, *tables
        return self._kept.get(("angles", kind))

    def projected(self, attention: PyTree, x: Array, kind: LayerKind) -> tuple:
        heads, angles = attention.project(x), self.angles(kind)
        query, key, value = (each.reshape((*each.shape[:2], -1)) for each in heads)
        if angles is not None:
            neighbors = self.config.rotary_pairing == "neighbors"
            query, key = (
                call("rotary", each, *angles, heads=count, neighbors=neighbors)
                for each, count in ((query, self.config.num_heads), (key, self.config.num_kv_heads))
            )
        return query, key, value

    def attend_layer(
        self, attention: PyTree, x: Array, kind: LayerKind, pair: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        config = self.config
        scale = config.head_size**-0.5 if attention.scale is None else attention.scale
        heads, *pair = call(
            "cached_attention", *self.projected(attention, x, kind), *pair, self._mask(kind),
            heads=config.num_heads, kv_heads=config.num_kv_heads, scale=scale,
            softcap=attention.softcap or 0.0,
        )  # fmt: skip
        return heads.reshape((*heads.shape[:2], config.num_heads, -1)), pair

    def _mask(self, kind: LayerKind) -> jax.Array:
        """The bias of the logits, which masks keys."""
        if ("mask", kind.window) not in self._kept:
            mask, bias = self.seen(kind)
            bias = jnp.float32(0.0) if bias is None else bias
            self._kept["mask", kind.window] = jnp.where(mask, bias, jnp.float32(_LOWEST))
        return self._kept["mask", kind.window]
