"""Selects flatten and unflatten in C, or in Python where ``PAX_EXPORT_PURE_PYTHON=1``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from types import MemberDescriptorType
from typing import Any


def _load_compiled() -> Any:
    """Returns the compiled module, or None where it is missing or turned off."""
    if os.environ.get("PAX_EXPORT_PURE_PYTHON", "0") not in ("", "0"):
        return None
    try:
        return importlib.import_module("pax_export.core._round_trip")
    except ImportError:  # not compiled, or for another kind of machine
        return None


_round_trip = _load_compiled()
compiled = _round_trip is not None


def fastest_flatten(
    flat: MemberDescriptorType, otherwise: Callable[[Any], tuple]
) -> Callable[[Any], tuple]:
    """Returns a function that reads the slot `flat`, or calls `otherwise` if it is empty."""
    return _round_trip.make_flatten(flat, otherwise) if compiled else otherwise


def fastest_unflatten(
    flat: MemberDescriptorType, moduledef: type, otherwise: Callable[[Any, Iterable], Any]
) -> Callable[[Any, Iterable], Any]:
    """Builds modules from moduledef and children in C; `otherwise` builds those not lazy."""
    if not compiled:
        return otherwise
    slots = vars(moduledef)
    return _round_trip.make_unflatten(flat, slots["lazy"], slots["cls"], otherwise)


def fastest_collect(otherwise: Callable[..., Callable[[Any], bool]]) -> Callable[..., Any]:
    """The function of `_traversal.py` that makes one which jax asks of each value of a tree."""
    return _round_trip.make_collect if compiled else otherwise


def fastest_looks(
    dicts: frozenset[type],
    seen_in: Callable[[Iterable], tuple],
    is_unchanged: Callable[[tuple], bool],
) -> tuple[Callable[[Iterable], tuple], Callable[[tuple], bool]]:
    """Returns the functions of `_mutation_detection.py`; `dicts` are the supported dict classes."""
    if not compiled:
        return seen_in, is_unchanged
    return _round_trip.make_seen_in(dicts), _round_trip.is_unchanged
