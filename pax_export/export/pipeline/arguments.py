"""Arguments that several formats take, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pax_export._errors import InvalidArgumentError

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def checked_platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
    platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [name for name in platforms if name not in PLATFORMS]
    if unknown or not platforms:
        raise InvalidArgumentError(
            "The platforms to lower for are cpu, cuda, rocm and tpu.",
            got=f"platforms={platforms}",
            write='platforms=("cpu", "cuda")',
        )
    return platforms


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Refuses a value that is none of a few."""
    if not any(value is choice or (value == choice and value != 1) for choice in choices):
        raise InvalidArgumentError(
            f"{name} has a value that means nothing.",
            got=f"{name}={value!r}",
            write=" or ".join(f"{name}={choice!r}" for choice in choices),
        )


def by_signature(name: str, value: Any, keys: Sequence[str], several: bool) -> dict[str, Any]:
    """What an argument says of each signature: given for the only one, or as a dict over some keys.

    With `several`, the user has named the signatures, and it must be a dict.
    """
    if value is None:
        return {}
    named = several or len(keys) > 1
    if isinstance(value, Mapping) and set(value) <= set(keys) and named:
        return dict(value)
    if not several:
        return {keys[0]: value}
    raise InvalidArgumentError(
        "With several signatures, this is given for some or all of them.",
        where=name,
        got=sorted(value) if isinstance(value, Mapping) else type(value).__name__,
        write=f"{name}={{{keys[0]!r}: ...}}",
    )
