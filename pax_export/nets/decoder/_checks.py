"""Checks of the arguments of a Decoder: dtypes, tokens, lengths and sizes."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import Array, DTypeLike, Size
from pax_export.nets.decoder._config import DecoderConfig

_MOST = np.iinfo(np.int32).max


def check_config(config: DecoderConfig, where: str) -> None:
    """Raises for another class, such as a dict."""
    if not isinstance(config, DecoderConfig):
        raise InvalidArgumentTypeError(
            "A Decoder needs a configuration.",
            where=where,
            got=f"{type(config).__name__}: {config!r:.100}",
            write="DecoderConfig.llama(...), or DecoderConfig.from_hf(json.load(file))",
        )


def weight_dtype(value: DTypeLike | None, where: str) -> np.dtype | None:
    """Returns a floating dtype for the weights; None keeps theirs."""
    dtype = None if value is None else _to_dtype(value)
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return dtype
    raise InvalidArgumentTypeError(
        "The weights of a language model must have a floating-point dtype.",
        where=f"{where}: dtype",
        got=f"{value!r:.80}",
        write='dtype="bfloat16", or another of these; without it, that of the file',
    )


def cache_dtype(value: DTypeLike, where: str, name: str = "dtype") -> np.dtype:
    """Converts a dtype of jax, numpy or torch, or its name, to the dtype of a cache."""
    dtype = _to_dtype(value)
    if dtype == jnp.int8 or jnp.issubdtype(dtype, jnp.floating):
        return dtype
    raise InvalidArgumentTypeError(
        "A cache must have a floating-point dtype, or int8 with scales.",
        where=f"{where}: {name}",
        got=f"{value!r:.80}",
        write=f'{name}="bfloat16", or "int8"',
    )


def _to_dtype(value: DTypeLike) -> np.dtype:
    if type(value).__module__ == "torch":  # torch's dtypes have the names of numpy's
        value = str(value).removeprefix("torch.")
    try:
        return jnp.dtype(value)
    except (TypeError, ValueError, SyntaxError):  # of numpy, which reads words as a language
        return np.dtype(object)


def require_integers(value: object, what: str, where: str) -> jax.Array:
    """Converts a value to an array of integers."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):  # words, None, or lists of different lengths
        array = None
    if array is None or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentTypeError(
            f"{what} are integers.",
            where=where,
            got=f"{value!r:.80}" if array is None else f"{array.dtype}{list(array.shape)}",
            write=f"{what.lower()}.astype(jnp.int32)",
        )
    if isinstance(value, np.ndarray) and _is_cut(value, array.dtype):
        raise InvalidArgumentError(
            f"{what} are larger than the integers of jax here.",
            where=where,
            got=f"from {value.min()} to {value.max()}",
            write=f"{what.lower()} within {array.dtype}",
        )
    return array


def _is_cut(value: np.ndarray, dtype: np.dtype) -> bool:
    """Whether jax has narrower integers than an array of numpy needs."""
    if value.dtype.itemsize <= dtype.itemsize or not value.size:
        return False
    return value.min() < np.iinfo(dtype).min or value.max() > np.iinfo(dtype).max


def checked_tokens(tokens: object, lengths: object, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """The tokens ``[batch, length]`` of a call, and how many there are in each row."""
    ids = require_integers(tokens, "Tokens", "Decoder(tokens)")
    if ids.ndim != 2:
        raise InvalidArgumentError(
            "Tokens must have shape [batch, length].",
            where="Decoder(tokens)",
            got=f"shape {ids.shape}",
            write="tokens[None] for a single row" if ids.ndim == 1 else None,
        )
    batch, length = ids.shape
    if lengths is None:
        check_ids(ids, None, vocab_size, "Decoder(tokens)")
        return ids, jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch,))
    counts = require_integers(lengths, "Lengths", "Decoder(lengths=...)")
    _check_lengths(counts, batch, length)
    check_ids(ids, counts, vocab_size, "Decoder(tokens)")
    return ids, jnp.clip(counts.astype(jnp.int32), 0, length)


def _check_lengths(lengths: jax.Array, batch: int, length: int) -> None:
    got = None
    if lengths.shape != (batch,):
        got = f"shape {lengths.shape} for tokens of shape {(batch, length)}"
    elif not is_tracer(lengths) and isinstance(length, int):
        low, high = int(lengths.min(initial=0)), int(lengths.max(initial=0))
        if low < 0 or high > length:
            got = f"lengths from {low} to {high} for {length} tokens"
    if got is not None:
        raise InvalidArgumentError(
            "There must be a length for each row, between 0 and the number of its tokens.",
            where="Decoder(lengths=...)",
            got=got,
            write=f"lengths from 0 to {length}, in an array of shape ({batch},)",
        )


def check_positions(config: DecoderConfig, length: int, where: str) -> None:
    """Raises if a net has learned fewer positions."""
    most = config.max_positions
    if config.positions == "learned" and isinstance(length, int) and length > most:
        raise InvalidArgumentError(
            f"This net has learned {most} positions.",
            where=f"Decoder.{where}",
            got=f"{length}",
            write=f"at most {most}",
        )


def check_ids(tokens: Array, lengths: Array | None, size: int | None, where: str) -> None:
    """Raises for invalid tokens in the first `lengths` of each row, if values are concrete."""
    for each in (tokens, lengths):
        if is_tracer(each) or (isinstance(each, jax.Array) and not each.is_fully_addressable):
            return
    tokens, most = np.asarray(tokens), _MOST if size is None else size - 1
    if not tokens.size or (tokens.min() >= 0 and tokens.max() <= most):
        return
    outside = (tokens < 0) | (tokens > most)
    if lengths is not None:
        outside &= np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
    if outside.any():
        row, column = (int(index[0]) for index in np.nonzero(outside))
        raise InvalidArgumentError(
            "A token is not in the vocabulary.",
            where=f"{where}[{row}, {column}]",
            got=str(tokens[row, column]),
            write="ids from the net's own tokenizer"
            + ("" if size is None else f", from 0 to {size - 1}"),
        )


def cache_size(value: Size, name: str) -> Any:
    """A number of rows, or of places, of a cache; one with a name while an export is traced."""
    if not isinstance(value, numbers.Integral) and jax.export.is_symbolic_dim(value):
        return value
    where = f"Decoder.init_cache: {name}"
    size = checked_integer(value, where, least=0)
    if size > _MOST:
        raise InvalidArgumentError(
            "The size of a cache must fit in int32.",
            where=where,
            got=f"{name}={size}",
            write=f"at most {_MOST}",
        )
    return size
