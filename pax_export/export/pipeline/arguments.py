"""Checks arguments shared by several formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pax_export._check import as_named, as_strings
from pax_export._errors import InvalidArgumentError
from pax_export.export.artifact.report import DEFAULT
from pax_export.export.tracing.programs import STATE_ELSEWHERE

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_SOME_PLATFORMS = 'platforms=("cpu", "cuda")'


def checked_platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
    platforms = as_strings("platforms", platforms, _SOME_PLATFORMS)
    if not platforms or not set(platforms) <= set(PLATFORMS):
        raise InvalidArgumentError(
            "platforms: expected some of cpu, cuda, rocm and tpu.",
            got=f"platforms={platforms}",
            write=_SOME_PLATFORMS,
        )
    return platforms


def signature_keys(methods: object) -> list[str]:
    """Returns the keys of the signatures: the given ones, or the default one."""
    if methods is None:
        return [DEFAULT]
    what = "methods must be a dict by signature."
    write = 'methods={"encode": "encode", "score": "__call__"}'
    return list(as_named("methods", methods, what, write))


def check_choice(name: str, value: object, choices: tuple, *, otherwise: str = "") -> None:
    comparable = isinstance(value, (str, int)) and value != 1
    if not any(value is choice or (comparable and value == choice) for choice in choices):
        raise InvalidArgumentError(
            f"{name} has an unknown value.",
            got=f"{name}={value!r}",
            write=" or ".join(
                [*(f"{name}={choice!r}" for choice in choices), *([otherwise] if otherwise else [])]
            ),
        )


def check_state(state: object, *, updates: bool = False) -> None:
    """Refuses an unknown `state=`, and "update" of a format without variables."""
    if not updates and isinstance(state, str) and state == "update":
        raise InvalidArgumentError(
            "A file of this format has no variables that a call could assign.",
            got="state='update'",
            write=f"state='keep'; or {STATE_ELSEWHERE}",
        )
    check_choice("state", state, ("frozen", "update", "keep") if updates else ("frozen", "keep"))


def by_signature(name: str, value: object, keys: Sequence[str], several: bool) -> dict[str, Any]:
    """An argument for each signature; with `several`, it must be a dict over some keys."""
    if value is None:
        return {}
    named = several or len(keys) > 1
    if isinstance(value, Mapping) and set(value) <= set(keys) and named:
        return dict(value)
    if not several:
        return {keys[0]: value}
    raise InvalidArgumentError(
        "With several signatures, the argument must be a dict over signatures.",
        where=name,
        got=sorted(value) if isinstance(value, Mapping) else type(value).__name__,
        write=f"{name}={{{keys[0]!r}: ...}}",
    )
