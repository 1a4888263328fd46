"""Other rules in jax's tables for as long as a block runs, whatever threads and blocks do so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

#: A table, what stands in it under a key, and what is to stand there.
Rules = Iterable[tuple[MutableMapping, Any, Any]]

_ABSENT = object()


def exchange(rules: Callable[[], Rules]) -> Callable[[], AbstractContextManager[None]]:
    """Makes a context in which these rules hold; the last block that leaves it ends them."""
    lock = threading.Lock()
    inside = 0  # how many threads and blocks are in it now
    before: list[tuple[MutableMapping, Any, Any]] = []

    @contextmanager
    def exchanged() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                for table, key, rule in rules():
                    before.append((table, key, table.get(key, _ABSENT)))
                    table[key] = rule
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                while not inside and before:
                    table, key, rule = before.pop()
                    if rule is _ABSENT:
                        del table[key]
                    else:
                        table[key] = rule

    return exchanged
