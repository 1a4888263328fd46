"""Nested outputs under the names that a signature gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pax_export.export.tracing.structure import dotted, signature_names


def is_flat(output: Any) -> bool:
    """Whether TensorFlow takes the output of a signature as it is."""
    if not isinstance(output, (Mapping, list, tuple)):
        return True
    parts = output.values() if isinstance(output, Mapping) else output
    return all(jax.tree_util.all_leaves([part]) for part in parts)


def flattened(output: Any) -> dict[str, Any]:
    """The arrays of a nested output by their names: ``a.0``, or ``output_0.a`` of a tuple."""
    paths, _ = jax.tree_util.tree_flatten_with_path(output)
    names: Sequence[str] = signature_names(_name(path) for path, _ in paths)
    return dict(zip(names, (value for _, value in paths)))


def _name(path: tuple) -> str:
    name = dotted("", path)
    return f"output_{name}" if hasattr(path[0], "idx") else name
