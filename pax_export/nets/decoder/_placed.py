"""A call of a Decoder over keys and values in external storage, as in language-model runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pax_export._foundations.types import Array
from pax_export.nets.decoder._attend import Stores, UncachedCall
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._decoder import Decoder
from pax_export.nets.decoder._fields import LayerKind
from pax_export.nets.decoder._layer import seen_in_order
from pax_export.nn import GroupedQueryAttention

#: Writes new vectors into the store of one layer, ``[batch, kv_heads, places, head_size]``.
Put = Callable[[Any, Any], Any]


class PlacedReading(UncachedCall):
    """A call that writes keys and values to each layer's stores, then attends to all of them.

    Args:
        config: the configuration of the net.
        positions: the positions of the tokens, ``[batch, length]``.
        in_stores: the positions in the stores after the call, ``[batch, places]``; negative: empty.
        put: writes new vectors to a store, both ``[batch, kv_heads, places, head_size]``.
    """

    def __init__(self, config: DecoderConfig, positions: Array, in_stores: Array, put: Put):
        self.in_stores, self.put = in_stores, put
        super().__init__(config, positions)

    @property
    def room(self) -> Any:
        return self.in_stores.shape[1]

    def attend(
        self,
        attention: GroupedQueryAttention,
        x: Array,
        kind: LayerKind,
        index: int,
        stores: Stores,
    ) -> tuple:
        heads, pair = self.attend_layer(attention, x, kind, [each[index] for each in stores])
        changed = [(*all[:index], own, *all[index + 1 :]) for all, own in zip(stores, pair)]
        return heads, tuple(changed)

    def attend_layer(
        self, attention: GroupedQueryAttention, x: Array, kind: LayerKind, pair: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The heads of a layer with these keys and values, and both with the new ones."""
        query, *new = self.projected(attention, x, kind)
        pair = [self.put(store, each.swapaxes(1, 2)) for store, each in zip(pair, new)]
        mask, bias = self.seen(kind)
        seen = [each.swapaxes(1, 2).astype(query.dtype) for each in pair]
        return attention.attend(query, *seen, mask=mask, bias=bias), pair

    def seen(self, kind: LayerKind) -> tuple:
        """The mask of the keys for a kind of layers, and the bias of their logits."""
        if kind.window not in self._kept:
            mask = seen_in_order(self.in_stores, self.positions, kind.window)
            self._kept[kind.window] = mask, self.bias(self.in_stores)
        return self._kept[kind.window]


def read_placed(
    lm: Decoder,
    tokens: Array,
    stores: tuple[Sequence[Any], Sequence[Any]],
    reading: Callable[[DecoderConfig], PlacedReading],
    last: bool = False,
) -> tuple[Any, Any, Any]:
    """Logits ``[batch, length, vocab_size]``, and the stores of each layer after a call.

    Args:
        lm: a net with a list of layers.
        tokens: ``[batch, length]``; invalid ones are not detected.
        stores: keys and values of each layer.
        reading: makes the `PlacedReading` of a configuration.
        last: return the logits of the last token only.
    """
    attention = reading(lm.config)
    tokens = jnp.clip(tokens, 0, lm.config.vocab_size - 1)
    stores_of_layers = tuple(map(tuple, stores))
    h, (keys, values) = lm._through_layers(
        lm._embedded(tokens, attention), stores_of_layers, attention
    )
    return lm._logits(lm.norm(h[:, -1:] if last else h)), keys, values
