"""The global random key stream: Python's generator, per thread, equal on all platforms."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from pax_export._check import checked_integer
from pax_export._errors import InvalidArgumentTypeError
from pax_export._types import PyTree

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


def split_rng_key(key: PyTree, count: int, where: str) -> jax.Array:
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
def keys_changed_by(change: Callable[[jax.Array], jax.Array]) -> Iterator[None]:
    """While the block runs, `next_rng_key` returns ``change(key)``; inner blocks come last."""
    token = _changes.set((*_changes.get(), change))
    try:
        yield
    finally:
        _changes.reset(token)
