"""DecoderCache: the KV cache of a language model.

The cache is an immutable pytree: a call of `Decoder` returns a new one, which reuses the memory
under donation.  Arrays are preallocated, and each row has its own length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import AnyMesh, Array, DTypeLike
from pax_export.nets.decoder._checks import require_integers
from pax_export.nets.decoder._config import DecoderConfig

Axis = str | tuple[str, ...] | None  # of a mesh


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Int8Store:
    """Vectors as 8-bit integers with a scale per vector.

    Attributes:
        codes: ``[layers, batch, places, kv_heads, head_size]`` of int8.
        scales: ``[layers, batch, places, kv_heads]`` of float32.

    Example:
        >>> import pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> cache = pax.nets.Decoder(config).init_cache(3, max_length=8, dtype="int8")
        >>> cache.keys.codes.dtype.name, cache.keys.scales.shape
        ('int8', (2, 3, 8, 2))
    """

    codes: Any
    scales: Any


#: An array [layers, batch, places, kv_heads, head_size] or an Int8Store; or a tuple of those of
#: each layer, without the first axis.
Store = Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "window_keys", "window_values", "lengths"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DecoderCache:
    """The KV cache of a `Decoder`, created by `Decoder.init_cache`.

    Layers with a sliding window have ring buffers of the size of the window, unless the cache was
    created with ``rolling=False``.

    The layers are in one array, or in a tuple of arrays; `stacked` and `listed` convert between the
    two. A `Decoder` accepts both, and returns the form of its input.

    Attributes:
        keys: ``[layers, batch, max_length, kv_heads, head_size]``, or an `Int8Store`; or a tuple of
            one for each layer, without the first axis.
        values: as `keys`.
        window_keys: ``[windowed layers, batch, window, kv_heads, head_size]``, or None.
        window_values: as `window_keys`.
        lengths: ``[batch]`` of int32, the number of tokens in each row.  A length above
            `max_length` means that tokens were dropped.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> lm = pax.nets.Decoder(config)
        >>> cache = lm.init_cache(3, max_length=8)
        >>> _, cache = lm(jnp.ones((3, 4), jnp.int32), cache=cache, lengths=jnp.array([4, 2, 3]))
        >>> cache.lengths.tolist(), cache.keys.shape, cache.overflowed.tolist()
        ([4, 2, 3], (2, 3, 8, 2, 4), [False, False, False])
    """

    keys: Store
    values: Store
    window_keys: Store | None
    window_values: Store | None
    lengths: Any

    @property
    def max_length(self) -> int:
        """The capacity of a row in tokens."""
        return places_of(self.keys)

    @property
    def batch(self) -> int:
        """The number of rows."""
        return _array_of_store(self.keys).shape[-4]

    @property
    def overflowed(self) -> jax.Array:
        """``[batch]``: rows that received more than `max_length` tokens, and lost the last ones."""
        return self.lengths > self.max_length

    @property
    def is_rolling(self) -> bool:
        """Whether layers with a window have ring buffers."""
        return self.window_keys is not None

    def with_lengths(self, lengths: Array) -> DecoderCache:
        """Returns the cache truncated to these lengths, ``[batch]``.

        A rolling cache cannot be truncated, except to zero, once it has overwritten earlier
        tokens.  In jitted functions this is not checked.

        Raises:
            InvalidArgumentError: the number of lengths is not that of rows, one is negative, or
                the tokens before it are overwritten.
            InvalidArgumentTypeError: (a TypeError) lengths are not integers.
        """
        where = "DecoderCache.with_lengths"
        lengths = require_integers(lengths, "Lengths", where)
        if lengths.shape != (self.batch,):
            raise InvalidArgumentError(
                "There must be a length for each row.",
                where=where,
                got=f"shape {lengths.shape} for {self.batch} rows",
                write=f"an array of shape ({self.batch},)",
            )
        if not is_tracer(lengths) and lengths.min(initial=0) < 0:
            raise InvalidArgumentError(
                "Lengths must not be negative.", where=where, got=f"{int(lengths.min())}",
                write="0 or more",
            )  # fmt: skip
        if self._loses_tokens(lengths):
            raise InvalidArgumentError(
                "The tokens before the new end of a row are overwritten.",
                where=where,
                got=f"lengths {lengths.tolist()} of a rolling cache with {self.lengths.tolist()}",
                write="lm.init_cache(batch, max_length, rolling=False), or lengths of 0",
            )
        return replace(self, lengths=lengths.astype(jnp.int32))

    def _loses_tokens(self, lengths: Array) -> bool:
        """Returns whether ring buffers lack tokens of rows of these lengths, as far as is known."""
        if self.window_keys is None or is_tracer(lengths) or is_tracer(self.lengths):
            return False
        has_wrapped = self.lengths > places_of(self.window_keys)
        return bool((has_wrapped & (lengths > 0) & (lengths < self.lengths)).any())

    def sharding_rules(
        self, mesh: AnyMesh, *, data: Axis = "data", model: Axis = "model"
    ) -> dict[str, PartitionSpec]:
        """Returns sharding rules for this cache, for a net under `tensor_parallel`.

        Args:
            mesh: a mesh, or an abstract one.
            data: the mesh axis, or axes, of rows; None replicates them.
            model: the mesh axis, or axes, of key heads; None replicates them.

        Returns:
            A mapping from names to specs.  Axes whose size is not divisible are replicated.

        Example:
            >>> import jax, pax_export as pax
            >>> config = pax.nets.DecoderConfig.llama(
            ...     vocab_size=9, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=8)
            >>> cache = jax.eval_shape(lambda: pax.nets.Decoder(config).init_cache(4, 8))
            >>> mesh = pax.sharding.abstract_mesh(data=2, model=2)
            >>> pax.sharding.table(cache, mesh, cache.sharding_rules(mesh))["keys"].shard_shape
            (2, 2, 8, 1, 2)
        """
        heads = _array_of_store(self.keys).shape[-2]
        rows, heads = _dividing_axis(mesh, data, self.batch), _dividing_axis(mesh, model, heads)
        rules = {"lengths": PartitionSpec(rows)}
        for name in _STORES:
            if (store := getattr(self, name)) is not None:
                layers = () if isinstance(store, tuple) else (None,)
                rules[name] = PartitionSpec(*layers, rows, None, heads)
        return rules

    @property
    def is_listed(self) -> bool:
        """Whether each layer has separate arrays."""
        return any(isinstance(store, tuple) for store in (self.keys, self.window_keys))

    def listed(self) -> DecoderCache:
        """Returns the cache with separate arrays per layer.

        Runtimes that copy an array to update a part of it, such as onnxruntime, then copy less.

        Example:
            >>> import pax_export as pax
            >>> config = pax.nets.DecoderConfig.llama(
            ...     vocab_size=9, dim=4, num_layers=2, num_heads=2, hidden_dim=8)
            >>> cache = pax.nets.Decoder(config).init_cache(1, max_length=3)
            >>> cache.keys.shape, [x.shape for x in cache.listed().keys]
            ((2, 1, 3, 2, 2), [(1, 3, 2, 2), (1, 3, 2, 2)])
        """
        return self._with_stores(_list_store)

    def stacked(self) -> DecoderCache:
        """Returns the cache with one array for all layers."""
        return self._with_stores(_stack_store)

    def _with_stores(self, change: Callable[[Store], Store]) -> DecoderCache:
        stores = {name: change(getattr(self, name)) for name in _STORES}
        return replace(self, **stores)


_STORES = ("keys", "values", "window_keys", "window_values")


def _dividing_axis(mesh: AnyMesh, axis: Axis, size: int) -> Axis:
    """Returns the axis of a mesh if it divides a size; `shard` reports unknown axes."""
    names = axis if isinstance(axis, tuple) else (axis,)
    return axis if size % math.prod([mesh.shape.get(name, 1) for name in names]) == 0 else None


def _list_store(store: Store) -> Store:
    if store is None or isinstance(store, tuple):
        return store
    count = _array_of_store(store).shape[0]
    # Without layers the array remains, because its shape has the length of the cache.
    each = tuple(jax.tree.map(lambda x: x[i], store) for i in range(count))  # noqa: B023
    return each or store


def _stack_store(store: Store) -> Store:
    if not isinstance(store, tuple):
        return store
    return jax.tree.map(lambda *layers: jnp.stack(layers), *store)


def new_store(shape: tuple, dtype: DTypeLike, listed: bool = False) -> Store:
    """Creates a zero array, whose first axis is that of layers; int8 arrays have scales."""
    if listed and shape[0]:
        return tuple(new_store(shape[1:], dtype) for _ in range(shape[0]))
    if jnp.dtype(dtype) == jnp.int8:
        return Int8Store(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def _array_of_store(store: Store) -> Any:
    """The array of a store, or that of its first layer; its last four axes are the same."""
    store = store[0] if isinstance(store, tuple) else store
    return store.codes if isinstance(store, Int8Store) else store


def check_cache(cache: DecoderCache, config: DecoderConfig, counts: Array) -> None:
    """Raises unless a cache is one of this net, and has room for these numbers of tokens."""
    where, full = "Decoder(cache=...)", config.num_layers
    if cache.is_rolling:
        full = sum(config.kind_of(i).window is None for i in range(config.num_layers))
    own = (full, config.num_layers - full, config.num_kv_heads, config.head_size)
    layers = _layers_of(cache.keys), _layers_of(cache.window_keys)
    found = (*layers, *_array_of_store(cache.keys).shape[-2:])
    if found != own:
        raise InvalidArgumentError(
            "The cache belongs to another net.",
            where=where,
            got=f"{found} layers, windowed layers, key heads and their size; this net has {own}",
            write="lm.init_cache(batch, max_length) of this net",
        )
    if cache.batch != counts.shape[0]:
        raise InvalidArgumentError(
            "The cache must have as many rows as the tokens.",
            where=where,
            got=f"{cache.batch} rows for {counts.shape[0]} of tokens",
            write=f"lm.init_cache({counts.shape[0]}, max_length)",
        )
    old, room = cache.lengths, cache.max_length
    if is_tracer(old) or is_tracer(counts) or not isinstance(room, int):
        return
    needed = old + counts
    if needed.size and int(needed.max()) > room:
        row = int(needed.argmax())
        raise InvalidArgumentError(
            "The cache is full: these tokens do not fit.",
            where=f"{where}, row {row}",
            got=f"{int(old[row])} tokens held and {int(counts[row])} more, for {room} places",
            write=f"lm.init_cache(batch, max_length={int(needed[row])}) or more",
        )


def _layers_of(store: Store | None) -> int:
    if isinstance(store, tuple):
        return len(store)
    return 0 if store is None else _array_of_store(store).shape[0]


def places_of(store: Store) -> int:
    """Returns the number of positions per row of a store."""
    return _array_of_store(store).shape[-3]


def read_store(
    store: Store, layer: int | Array, dtype: DTypeLike, count: int | None = None
) -> jax.Array:
    """Reads the first `count` positions of a layer, ``[batch, places, kv_heads, head_size]``."""
    if isinstance(store, tuple):
        one = store[layer]
    else:
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, False), store)
    one = jax.tree.map(lambda x: x[:, :count], one)
    if isinstance(one, Int8Store):
        return (one.codes.astype(jnp.float32) * one.scales[..., None]).astype(dtype)
    return one.astype(dtype)


def write_store(store: Store, layer: int | Array, places: Array, vectors: Array) -> Store:
    """Writes ``[batch, length, kv_heads, head_size]`` at `places`, dropping those past the end."""
    at = jax.lax.broadcasted_iota(jnp.int32, places.shape, 0), places
    if isinstance(store, tuple):
        return (*store[:layer], _write_layer(store[layer], at, vectors), *store[layer + 1 :])
    return _write_layer(store, (layer, *at), vectors)


def _write_layer(store: Store, at: tuple, vectors: Array) -> Store:
    def put(array: jax.Array, values: Array) -> Any:
        return array.at[at].set(values.astype(array.dtype), mode="drop", unique_indices=True)

    if not isinstance(store, Int8Store):
        return put(store, vectors)
    codes, scales = quantize_vectors(vectors)
    return Int8Store(put(store.codes, codes), put(store.scales, scales))


def quantize_vectors(vectors: Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes vectors to int8 with one scale each, such that the largest value is 127."""
    vectors = vectors.astype(jnp.float32)
    scales = jnp.max(jnp.abs(vectors), -1) / 127.0
    codes = jnp.round(vectors / jnp.where(scales == 0, 1.0, scales)[..., None])
    return codes.astype(jnp.int8), scales
