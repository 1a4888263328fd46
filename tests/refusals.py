"""What an error says, by its fields: sentences may change, places and values may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class fields:
    """Equal to the errors that have these fields, a sentence, and what to write instead."""

    def __init__(self, **expected: str):
        self.expected = expected

    def __eq__(self, error: Any) -> bool:
        found = {name: str(getattr(error, name)) for name in self.expected}
        return bool(error.what) and found == self.expected

    def __hash__(self) -> int:
        return hash(tuple(self.expected.items()))

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.expected.items())


@contextmanager
def refused(
    kind: type | tuple[type, ...], *names: str, **expected: str
) -> Iterator[pytest.ExceptionInfo]:
    """The block raises an error of this class with these fields, whose text has these names."""
    with pytest.raises(kind) as caught:
        yield caught
    if expected:
        assert caught.value == fields(**expected)
    assert [name for name in names if name not in str(caught.value)] == [], str(caught.value)
