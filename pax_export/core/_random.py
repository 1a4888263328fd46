"""Random keys, and initial arrays drawn with them."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.jax import is_computing, is_mapped, is_tracer
from pax_export._foundations.types import DTypeLike, PRNGKey

# Parameters of some functions of jax have no types.
# pyright: reportUnknownMemberType=false

DEFAULT_SEED = 42
_LARGEST = 999_999_999

_threads = itertools.count(1)


class _ThreadStream(threading.local):
    """One generator per thread, created on first use."""

    def __init__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.generator = random.Random(DEFAULT_SEED)
        else:
            # Threads that all began at one seed would draw the same weights.
            self.generator = random.Random(f"{DEFAULT_SEED}/{next(_threads)}")


_stream = _ThreadStream()


def seed_rng_key(seed: int) -> None:
    """Seeds the key stream of the running thread.

    The main thread starts at seed 42. Each other thread starts at a seed of its own; seed it for
    reproducible keys.

    Args:
        seed: an integer, numpy's included; negative ones are allowed.

    Raises:
        InvalidArgumentTypeError: (an AssertionError, TypeError and ValueError)
            the seed is not an integer.

    Example:
        >>> import pax_export as pax
        >>> pax.seed_rng_key(42)
        >>> int(pax.next_rng_key()[1])
        686579304
    """
    number = checked_integer(seed, "seed_rng_key", what="A seed", write="pax.seed_rng_key(42)")
    _stream.generator = random.Random(number)


def next_rng_key() -> jax.Array:
    """Draws the next key of the running thread.

    Inside a jitted function the key is drawn while tracing and becomes a
    constant of the compiled program.

    Returns:
        A legacy key, uint32 ``[2]``.

    Example:
        >>> import pax_export as pax
        >>> pax.next_rng_key().shape
        (2,)
    """
    key = jax.random.PRNGKey(_stream.generator.randint(1, _LARGEST))
    for change in _changes.get():
        key = change(key)
    return key


def split_rng_key(key: PRNGKey | None, count: int, where: str) -> jax.Array:
    """Splits a key, or the next one of this thread if None, into ``n`` keys."""
    try:
        return jax.random.split(next_rng_key() if key is None else key, count)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(
            "Expected a random key.",
            where=where,
            got=f"{type(key).__name__}: {key!r}"[:120],
            write="key=jax.random.key(0)",
        ) from error


_changes: ContextVar[tuple[Callable[[jax.Array], jax.Array], ...]] = ContextVar(
    "pax_export_key_changes", default=()
)


@contextmanager
def keys_changed_by(change: Callable[[jax.Array], jax.Array]) -> Generator[None, None, None]:
    """While the block runs, `next_rng_key` returns ``change(key)``; inner blocks come last."""
    token = _changes.set((*_changes.get(), change))
    try:
        yield
    finally:
        _changes.reset(token)


# --- initial arrays of layers, without one XLA program (0.1 s on a CPU) per shape -----


#: Minimum number of values to draw, so that all smaller shapes share one program.
_LEAST = 1 << 10
#: Sizes are rounded up to a power of two up to here, then by a quarter: drawing takes time per
#: number.
_DOUBLED = 1 << 16
#: Above this size drawing takes longer than compiling, so arrays are drawn in their exact size.
_MOST = 1 << 22


def sample_padded(
    draw: Callable[[Any, tuple[int, ...]], jax.Array],
    rng_key: PRNGKey,
    shape: Sequence[int],
    scale: float | None = None,
) -> jax.Array:
    """``draw(rng_key, shape) * scale``, bit for bit, compiled for few sizes.

    The default generator of jax is counter-based: number ``i`` does not depend on how many
    numbers are drawn. So a padded size is drawn and cut. ``scale=None`` does not multiply.
    """
    shape = tuple(shape)
    if is_mapped(rng_key):
        return _for_each_key(draw, rng_key, shape, scale)
    size = math.prod(shape)
    cut = size <= _MOST and _is_free() and _is_counter_based(rng_key)
    values: Any = draw(rng_key, (_padded_size(size),) if cut else shape)
    by_numpy = cut and not is_tracer(values)  # a later jax may not report that it is tracing
    if by_numpy:
        values = np.asarray(values)
    if cut:
        values = values[:size].reshape(shape)
    if scale is not None:
        values = values * float(scale)
    # `jnp.asarray` raises where a user has turned on the guard against implicit transfers.
    return jax.device_put(values) if by_numpy else values


def _for_each_key(
    draw: Callable[..., Any], rng_key: PRNGKey, shape: tuple[int, ...], scale: float | None
) -> Any:
    """`sample_padded` under `jax.vmap`, key by key: a batched program compiles far longer."""

    def plainly(rng_key: PRNGKey | None) -> Any:
        values = draw(rng_key, shape)
        return values if scale is None else values * float(scale)

    drawn_once = jax.custom_batching.custom_vmap(plainly)

    @drawn_once.def_vmap
    def for_all(axis_size: int, is_batched: int, keys: PRNGKey) -> tuple[Any, bool]:
        if (
            math.prod(shape) > _MOST
            or is_tracer(keys)
            or not (_is_free() and _is_counter_based(keys[0]))
        ):
            return jax.vmap(plainly)(keys), True
        rows = [np.asarray(sample_padded(draw, key, shape, scale)) for key in keys]
        return jax.device_put(np.stack(rows)), True

    return drawn_once(rng_key)


def filled_array(shape: Sequence[int], value: float, dtype: DTypeLike = float) -> jax.Array:
    """``jnp.full(shape, value, dtype)``."""
    if not _is_free():
        return jnp.full(shape, value, dtype)
    return jax.device_put(np.full(shape, value, jnp.result_type(dtype)))


def _is_free() -> bool:
    """Whether arrays are made here and now, on a CPU, and on no mesh that is set."""
    chosen = getattr(jax.config, "jax_default_device", None)
    on_cpu = chosen is None and jax.default_backend() == "cpu"
    return on_cpu and is_computing() and jax.sharding.get_abstract_mesh().empty


def _is_counter_based(rng_key: PRNGKey) -> bool:
    """Whether a key is for any device, and of the generator that counts."""
    if is_tracer(rng_key) or getattr(rng_key, "committed", False):
        return False
    counts = getattr(jax.config, "jax_threefry_partitionable", True)
    return counts and jax.random.key_impl(rng_key) == "threefry2x32"


def _padded_size(size: int) -> int:
    """The number of values to draw for a size."""
    if size <= _LEAST:
        return _LEAST
    power = 1 << (size - 1).bit_length()
    step = power if size <= _DOUBLED else power // 8
    return -(-size // step) * step
