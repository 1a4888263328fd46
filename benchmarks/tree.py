"""Flatten, unflatten and compare: what every call of a jitted function pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

import pax_export as pax
from benchmarks.compare import compare, table
from benchmarks.same_tree import as_dicts, as_equinox, as_nnx

_GOAL = "1.6 times nested dicts"
_PAX = {"Transformer": "4.7 times", "ResNet18": "9.0 times", "ResNet200": "6.6 ms"}


def tables() -> Iterator[str]:
    """Round trips of three models, and the comparison of treedefs."""
    models = {
        "Transformer": pax.nets.Transformer(64, 4, 12, 0.1),
        "ResNet18": pax.nets.ResNet18(3, 10),
        "ResNet200": pax.nets.ResNet200(3, 10),
    }
    for name, module in models.items():
        trees = {
            "nested dicts": as_dicts(module),
            "pax_export": module,
            "equinox": as_equinox(module),
            "flax nnx": as_nnx(module),
        }
        leaves = len(jax.tree.leaves(module))
        title = f"flatten + unflatten, {name} ({leaves} leaves)"
        yield table(title, _compared(trees, _round_trip), _GOAL, _PAX[name])
        if name == "Transformer":
            rows = _compared(trees, _equal)
            yield table("comparing treedefs, Transformer", rows, "4 µs", "12.7 µs, 1.6 times")


def _compared(trees: dict[str, Any], of: Callable[[Any], Callable]) -> list:
    return compare({name: of(tree) for name, tree in trees.items()})


def _round_trip(tree: Any) -> Callable[[], Any]:
    def round_trip() -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, leaves)

    return round_trip


def _equal(tree: Any) -> Callable[[], Any]:
    leaves, first = jax.tree.flatten(tree)
    second = jax.tree.structure(jax.tree.unflatten(first, leaves))
    return lambda: first == second
