"""Concatenates arrays of equal dtype, for packed optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from pax_export._errors import StructureMismatchError
from pax_export._types import PyTree
from pax_export.core import named_leaves


@dataclass(frozen=True)
class Entry:
    """One array of the parameters."""

    name: str  # with dots
    shape: tuple[int, ...]
    dtype: str  # its name

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Packing:
    """The offsets of parameters in one vector per dtype; static data."""

    entries: tuple[Entry, ...]  # in tree order; in a vector they follow each other

    @classmethod
    def of(cls, params: PyTree) -> Packing:
        """The packing of the arrays of a tree."""
        return cls(tuple([_entry_of(name, leaf) for name, leaf in named_leaves(params)]))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The keys of the result of `pack`."""
        return tuple(sorted({entry.dtype for entry in self.entries}))

    def pack(self, tree: PyTree, what: str = "parameters") -> dict[str, jax.Array]:
        """Concatenates the arrays of a tree by dtype; the tree must match the entries."""
        leaves = tree_leaves(tree)
        self._check(tree, leaves, what)
        packed: dict[str, list[Any]] = {dtype: [] for dtype in self.dtypes}
        for entry, leaf in zip(self.entries, leaves):
            packed[entry.dtype].append(jnp.ravel(leaf))
        return {dtype: jnp.concatenate(vectors) for dtype, vectors in packed.items()}

    def unpack(self, packed: dict[str, Any], like: object) -> Any:
        """The reverse of `pack`, in the structure of a tree."""
        start = dict.fromkeys(packed, 0)
        leaves = []
        for entry in self.entries:
            first = start[entry.dtype]
            start[entry.dtype] = stop = first + math.prod(entry.shape)
            # With numbers for bounds this is a plain slice, also of a SavedModel.
            part = jax.lax.slice(packed[entry.dtype], (first,), (stop,))
            leaves.append(part.reshape(entry.shape))
        return tree_unflatten(tree_structure(like), leaves)

    def is_packed(self, value: object) -> bool:
        """Returns whether a value is a result of `pack`."""
        return isinstance(value, dict) and tuple(sorted(value)) == self.dtypes

    def carried(self, packed: dict[str, Any], other: Packing, fresh: PyTree) -> dict[str, Any]:
        """Repacks arrays for another packing: this one's where entries agree, else `fresh`."""
        known = dict(zip(self.entries, self.unpack(packed, list(self.entries))))
        own = zip(other.entries, other.unpack(fresh, list(other.entries)))
        return other.pack([known.get(entry, array) for entry, array in own])

    def _check(self, tree: PyTree, leaves: list[Any], what: str) -> None:
        if len(leaves) == len(self.entries) and all(map(_fits_entry, self.entries, leaves)):
            return
        given = [_entry_of(name, leaf) for name, leaf in named_leaves(tree)]
        where, got = f"{len(given)} arrays", f"{len(given)} for {len(self.entries)}"
        for own, other in zip(self.entries, given):
            if own != other:
                where, got = own.name, f"{other.name}: {other} for {own}"
                break
        raise StructureMismatchError(
            f"A packed optimizer got {what} other than those that it was created for.",
            where=where,
            got=got,
            write="from_optax(transformation, packed=True)(model.parameters()) again, after the "
            "trainable parameters changed",
        )


def _entry_of(name: str, leaf: PyTree) -> Entry:
    return Entry(name, tuple(jnp.shape(leaf)), jnp.result_type(leaf).name)


def _fits_entry(entry: Entry, leaf: PyTree) -> bool:
    return entry.shape == jnp.shape(leaf) and entry.dtype == jnp.result_type(leaf).name
