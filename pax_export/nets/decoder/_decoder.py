"""Decoder: causal language models, with an optional KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import Array, DTypeLike
from pax_export.core import Module
from pax_export.nets.decoder._cache import DecoderCache, check_cache, new_store
from pax_export.nets.decoder._checks import (
    cache_dtype,
    cache_size,
    check_config,
    check_positions,
    checked_tokens,
    weight_dtype,
)
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._layer import (
    CachedReading,
    DecoderLayer,
    PlacedReading,
    UncachedCall,
    norm_of,
)
from pax_export.nets.decoder._loading import decoder_of_folder, decoder_of_gguf
from pax_export.nn import (
    Embed,
    GroupedQueryAttention,
    Linear,
    join_specs,
    normal,
    on_explicit_mesh,
    sinusoidal_positions,
    spec_of,
    under_auto_axes,
    weight_in_use,
)
from pax_export.precision.quantized import times_transposed
from pax_export.transforms import stack_layers, unstack_layers, vmap
from pax_export.weights import local_path

_FORMS = ("scanned", "listed")


class Decoder(Module):
    """A causal language model, which maps tokens to logits of the next token.

    The configuration sets the architecture: Llama, Mistral, SmolLM 2 and 3, Qwen 2 and 3, Gemma 1
    to 3, Phi-3 and Phi-4-mini, Granite, OLMo 2 and 3, StarCoder 2, Ministral, Seed-OSS, ERNIE 4.5,
    Helium, EXAONE 4 and GPT-2 are supported.

    Args:
        config: a `DecoderConfig`.
        layers: ``"scanned"``: one `DecoderLayer` with stacked weights in a scan, which traces and
            compiles as fast as one layer; ``"listed"``: a list of layers.  `scanned` and `listed`
            convert between them.
        dtype: the dtype of the weights; float32 by default.
        remat: recompute the activations of layers in the backward pass.

    Attributes:
        config: the configuration.
        embed: an `Embed`.
        place_embed: an `Embed` of positions, only with learned positions.
        layers: a stacked `DecoderLayer`, or a list.
        norm: the final norm.
        head: a `Linear` to the vocabulary, unless the embedding is tied.

    Raises:
        InvalidArgumentError: the configuration or ``layers`` is invalid.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> lm = pax.nets.Decoder(config)
        >>> tokens = jnp.array([[3, 1, 4, 1, 5]])
        >>> lm(tokens).shape
        (1, 5, 100)
        >>> cache = lm.init_cache(1, max_length=8)
        >>> logits, cache = lm(tokens, cache=cache, last_only=True)
        >>> logits.shape, cache.lengths.tolist()
        ((1, 100), [5])
    """

    _pax_stacked = ("layers",)  # which sharding asks: its first axis is that of layers

    def __init__(
        self,
        config: DecoderConfig,
        layers: str = "scanned",
        dtype: DTypeLike | None = None,
        remat: bool = True,
    ):
        super().__init__()
        check_config(config, "Decoder.config")
        checked_choice(layers, _FORMS, "Decoder.layers")
        dtype = weight_dtype(dtype, "Decoder")
        self.config, self.remat = config, bool(remat)
        self.embed = Embed(config.vocab_size, config.dim, normal(0.02))
        if config.positions == "learned":
            size = (config.max_positions, config.dim)
            self.place_embed = Embed(*size, normal(0.02))
        if layers == "scanned":
            self.layers: Any = vmap(lambda: DecoderLayer(config), axis_size=config.num_layers)()
        else:
            self.layers = [DecoderLayer(config) for _ in range(config.num_layers)]
        self.norm = norm_of(config)
        if not config.tied:
            self.head = Linear(config.dim, config.vocab_size, with_bias=False)
        if dtype is not None:
            for name in ("embed", "place_embed", "layers", "norm", "head"):
                if hasattr(self, name):
                    cast = tree_map(lambda x: x.astype(dtype), getattr(self, name))
                    setattr(self, name, cast)

    # --- of a file ------------------------------------------------------------------------

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        *,
        layers: str = "scanned",
        dtype: DTypeLike | None = None,
    ) -> Decoder:
        """Loads a GGUF file of llama.cpp.

        Quantized weights are dequantized one leaf at a time, so at most one leaf is in memory in
        addition to the net.

        Args:
            path: the path of the file; see `DecoderConfig.from_gguf` for supported models.
            layers: ``"scanned"`` or ``"listed"``.
            dtype: the dtype of the weights; by default that of the file, and float32 for
                quantized weights.

        Returns:
            A `Decoder`.

        Raises:
            InvalidArgumentError: the architecture is not supported.
            MissingWeightError: a tensor is missing.
            WeightsMismatchError: a tensor has another shape, or is unexpected.
            WeightsFileError: the file is not a GGUF file, or corrupted.
            MissingPackageError: gguf is not installed.
        """
        checked_choice(layers, _FORMS, "Decoder.from_gguf(layers=...)")
        dtype = weight_dtype(dtype, "Decoder.from_gguf")
        return decoder_of_gguf(cls, path, layers, dtype)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        config: DecoderConfig | None = None,
        layers: str = "scanned",
        dtype: DTypeLike | None = None,
        revision: str | None = None,
    ) -> Decoder:
        """Loads a transformers folder with ``config.json`` and safetensors files.

        Unknown keys of ``config.json``, unused tensors and missing tensors raise errors.  If the
        file has a head that differs from the embedding, it is used with a warning, whatever
        ``tie_word_embeddings`` is.

        Args:
            folder: the path of the folder, or ``"organization/name"`` on the Hugging Face Hub; see
                `DecoderConfig.from_hf` for supported models.
            config: a configuration to use instead of ``config.json``, for other architectures
                that compute the same and have the tensor names of Llama (of GPT-2, Phi-3 or
                StarCoder 2 with ``family="gpt2"``, ``"phi3"`` or ``"starcoder2"``, of Gemma 2
                with ``post_norms``).
            layers: ``"scanned"`` or ``"listed"``.
            dtype: the dtype of the weights, as a jax, numpy or torch dtype or a name; by default
                that of the file.
            revision: a branch, tag or commit on the Hub.

        Returns:
            A `Decoder`.

        Raises:
            InvalidArgumentTypeError: (a TypeError) an unsupported argument, such as some of
                transformers' `from_pretrained`; the error names the alternative.
            InvalidArgumentError: the architecture or a key is not supported.
            MissingWeightError: a tensor is missing.
            WeightsMismatchError: a tensor has another shape, is unexpected, or quantized.
            WeightsFileError: the folder does not exist, or a file is corrupted.
        """
        checked_choice(layers, _FORMS, "Decoder.from_pretrained(layers=...)")
        dtype = weight_dtype(dtype, "Decoder.from_pretrained")
        if config is not None:
            check_config(config, "Decoder.from_pretrained(config=...)")
        return decoder_of_folder(cls, local_path(folder, revision), config, layers, dtype)

    # --- with stacked layers or with a list -----------------------------------------------

    @property
    def is_scanned(self) -> bool:
        """Whether the layers are stacked."""
        return not isinstance(self.layers, (list, tuple))

    def listed(self) -> Decoder:
        """The same net with a list of layers.

        Example:
            >>> import pax_export as pax
            >>> config = pax.nets.DecoderConfig.llama(
            ...     vocab_size=9, dim=4, num_layers=2, num_heads=2, hidden_dim=8)
            >>> lm = pax.nets.Decoder(config)
            >>> lm.layers.dense.up.weight.shape, lm.listed().layers[0].dense.up.weight.shape
            ((2, 4, 8), (4, 8))
        """
        return (
            self.set_attribute("layers", unstack_layers(self.layers)) if self.is_scanned else self
        )

    def scanned(self) -> Decoder:
        """Returns the net with stacked layers."""
        return self if self.is_scanned else self.set_attribute("layers", stack_layers(self.layers))

    def untied(self) -> Decoder:
        """Returns the net with a head of its own, a copy of the embedding.

        Example:
            >>> import pax_export as pax
            >>> config = pax.nets.DecoderConfig.llama(
            ...     vocab_size=9, dim=4, num_layers=2, num_heads=2, hidden_dim=8, tied=True)
            >>> pax.nets.Decoder(config).untied().head.weight.shape
            (4, 9)
        """
        config = self.config
        if not config.tied:
            return self
        table = jnp.asarray(weight_in_use(self.embed)).T
        head = Linear(config.dim, config.vocab_size, with_bias=False, w_init=lambda *_: table)
        net = self.set_attribute("config", replace(config, tied=False))
        return net.set_attribute("head", head)

    @property
    def _pax_tied(self) -> tuple[str, ...]:
        """Layers whose weight is also the head's, which adapters ask."""
        return ("embed",) if self.config.tied else ()

    # --- a call ---------------------------------------------------------------------------

    def init_cache(
        self,
        batch: int,
        max_length: int,
        dtype: DTypeLike | None = None,
        *,
        rolling: bool = True,
        listed: bool = False,
    ) -> DecoderCache:
        """Returns an empty KV cache.

        Args:
            batch: the number of rows.
            max_length: the number of tokens per row.
            dtype: the dtype of keys and values; by default that of the weights.  ``"int8"`` stores
                integers with a scale per vector, a quarter of float32.
            rolling: store only the window for layers with a sliding window.
            listed: store separate arrays per layer, see `DecoderCache.listed`.

        Returns:
            A `DecoderCache`.

        Raises:
            InvalidArgumentError: a size is negative or above int32, or exceeds learned positions.
            InvalidArgumentTypeError: (a TypeError) the dtype is not supported, or a size is not
                an integer.
        """
        config = self.config
        own = self.embed.weight.dtype
        stored = own if dtype is None else cache_dtype(dtype, "Decoder.init_cache")
        batch, max_length = cache_size(batch, "batch"), cache_size(max_length, "max_length")
        check_positions(config, max_length, "max_length")
        windows = [config.kind_of(i).window for i in range(config.num_layers)]
        rolled = [window for window in windows if rolling and window is not None]
        tail = (config.num_kv_heads, config.head_size)

        def pair(layers: int, places: int) -> tuple:
            shape = (layers, batch, places, *tail)
            return new_store(shape, stored, listed), new_store(shape, stored, listed)

        window_keys = window_values = None
        if rolled:
            if len(set(rolled)) > 1:
                raise InvalidArgumentError(
                    "A rolling cache needs windows of one size.",
                    where="Decoder.init_cache",
                    got=f"windows {sorted(set(rolled))}",
                    write="rolling=False",
                )
            short = isinstance(max_length, int) and max_length < rolled[0]
            places = max_length if short else rolled[0]
            window_keys, window_values = pair(len(rolled), places)
        keys, values = pair(len(windows) - len(rolled), max_length)
        return DecoderCache(
            keys, values, window_keys, window_values, jnp.zeros((batch,), jnp.int32)
        )

    def __call__(
        self,
        tokens: Array,
        lengths: Array | None = None,
        *,
        cache: DecoderCache | None = None,
        last_only: bool = False,
    ) -> Any:
        """Returns the logits of the next token.

        Without a cache, each row starts at position 0.  With a cache, the tokens are appended to
        those in the cache, and attend to these, too.

        Args:
            tokens: integers ``[batch, length]``, padded on the right.
            lengths: ``[batch]``, the number of tokens in each row; all by default.  Logits after
                them are undefined, and these tokens are not cached.
            cache: a cache from `init_cache` or a previous call.
            last_only: compute only the logits of the last token; undefined for rows of length 0.

        Returns:
            Logits ``[batch, length, vocab_size]``, or ``[batch, vocab_size]`` with ``last_only``,
            in at least float32; with a cache, the pair of logits and updated cache.
            In jitted functions and exports, where values cannot be checked, the logits of a row
            are NaN if one of its tokens is not in the vocabulary, or exceeds
            ``cache.max_length`` (see ``cache.overflowed``) or the learned positions.

        Raises:
            InvalidArgumentError: shapes do not match, or the cache is of another net; outside of
                jit also for ids outside of the vocabulary, invalid lengths, and a full cache.
            InvalidArgumentTypeError: (a TypeError) tokens or lengths are not integers.
        """
        tokens, counts = checked_tokens(tokens, lengths, self.config.vocab_size)
        if cache is None:
            check_positions(self.config, tokens.shape[1], "tokens")
        else:
            check_cache(cache, self.config, counts)
        return _compiled_call(self, tokens, counts, cache, last_only=bool(last_only))

    def _read(
        self, tokens: Array, counts: Array, cache: DecoderCache | None, last_only: bool
    ) -> Any:
        if cache is not None and cache.is_listed and self.is_scanned:
            # The number of a layer is a number of the loop, by which no tuple is asked.
            logits, after = self._read(tokens, counts, cache.stacked(), last_only)
            return logits, after.listed()
        batch, length = tokens.shape
        if cache is None:
            places = jnp.arange(length, dtype=jnp.int32)[None, :]
            reading, stores = UncachedCall(self.config, places), ()
        else:
            reading = CachedReading(self.config, cache, counts, length)
            stores = (cache.keys, cache.values, cache.window_keys, cache.window_values)
        h, stores = self._through_layers(self._embedded(tokens, reading), stores, reading)
        if last_only:
            last = jnp.clip(counts - 1, 0)
            h = h[jnp.arange(batch, dtype=jnp.int32), last]
        logits = self._logits(self.norm(h))
        # A program that is compiled cannot raise.
        not_read = reading.not_read(tokens, counts).reshape(-1, *[1] * (logits.ndim - 1))
        logits = jnp.where(not_read, jnp.nan, logits)
        return logits if cache is None else (logits, reading.after(stores, counts))

    def _embedded(self, tokens: Array, reading: UncachedCall) -> jax.Array:
        config, h = self.config, self.embed(tokens)
        if config.embed_scale != 1.0:
            h = h * jnp.asarray(config.embed_scale, h.dtype)
        if config.positions == "learned":
            h = h + self.place_embed(reading.positions)
        if config.positions == "sinusoidal":
            h = h + sinusoidal_positions(reading.positions, config.dim).astype(h.dtype)
        return h

    def _logits(self, h: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(h.dtype, jnp.float32)
        if self.config.tied:
            table = weight_in_use(self.embed)
            logits = times_transposed(h, table, dtype)
        else:
            logits = self.head(h).astype(dtype)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _through_layers(self, h: Array, stores: tuple, reading: UncachedCall) -> tuple:
        config = self.config
        kinds = config.kinds
        groups, rest = divmod(config.num_layers, len(kinds))
        # The number of a layer among those that share its stores.
        rolls = [reading.rolls(kind) for kind in kinds]

        def call(layer: Module, h: Array, stores: tuple, group: int | Array, number: int) -> tuple:
            before = rolls[:number].count(rolls[number])
            index = group * rolls.count(rolls[number]) + before
            after = stores

            def attend(attention: GroupedQueryAttention, x: Array) -> Any:
                nonlocal after
                heads, after = reading.attend(attention, x, kinds[number], index, stores)
                return heads

            # Arrays that a policy widens inside a layer keep their dtype between layers.
            return layer(h, attend).astype(h.dtype), after

        def of_list(
            layers: list[DecoderLayer], h: Array, stores: tuple, group: int | Array
        ) -> tuple:
            for number, layer in enumerate(layers):
                h, stores = call(layer, h, stores, group, number)
            return h, stores

        if not self.is_scanned:
            for group in range(groups + bool(rest)):
                layers = self.layers[group * len(kinds) : (group + 1) * len(kinds)]
                h, stores = of_list(layers, h, stores, group)
            return h, stores

        def step(carry: tuple, x: tuple) -> tuple:
            (layers, group), (h, stores) = x, carry
            return of_list(_unstack_group(layers, len(kinds)), h, stores, group), None

        body = jax.checkpoint(step) if self.remat and not stores else step  # pyright: ignore
        whole = tree_map(lambda x: _group_layers(x, groups, len(kinds)), self.layers)
        (h, stores), _ = jax.lax.scan(
            body, (h, stores), (whole, jnp.arange(groups, dtype=jnp.int32))
        )
        if rest:
            left = tree_map(lambda x: x[-rest:], self.layers)
            h, stores = of_list(unstack_layers(left), h, stores, groups)
        return h, stores

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        config = self.config
        own = {"family": config.family, "num_layers": config.num_layers, "dim": config.dim}
        return super()._repr({**own, **self._pax_contents(), **(info or {})})


@partial(jax.jit, static_argnames="last_only", inline=True)
def _compiled_call(
    lm: Decoder, tokens: Array, counts: Array, cache: DecoderCache | None, *, last_only: bool
) -> Any:
    # Called directly, this would recompile its loop each time; within a program it does not exist.
    if not on_explicit_mesh((lm, tokens, cache)):
        return lm._read(tokens, counts, cache, last_only)
    # On Explicit axes jax cannot go over layers that are split along their number, nor turn halves
    # of split heads.  The layout of the cache is restored afterwards.
    operands, treedef = tree_flatten((lm, tokens, counts, cache))

    def read(*operands: Array) -> tuple:
        lm, tokens, counts, cache = treedef.unflatten(operands)
        return tuple(tree_leaves(lm._read(tokens, counts, cache, last_only)))

    stores, structure = tree_flatten(cache)
    specs = (join_specs(spec_of(tokens)[0]), *[join_specs(*spec_of(store)) for store in stores])
    logits, *stores = under_auto_axes(read, tuple(operands), lambda: specs)
    return logits if cache is None else (logits, structure.unflatten(stores))


def _group_layers(x: Array, groups: int, size: int) -> Any:
    """Reshapes ``[layers, ...]`` to ``[groups, size, ...]``, without the remainder."""
    if size == 1:
        return x
    return x[: groups * size].reshape((groups, size, *x.shape[1:]))


def _unstack_group(layers: DecoderLayer, size: int) -> list[Any]:
    if size == 1:
        return [layers]
    return [tree_map(lambda x: x[i], layers) for i in range(size)]  # noqa: B023


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
