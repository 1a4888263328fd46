"""The order of norms in a block, from their names.

``post_attention_layernorm`` of a Llama is the norm before the dense block: such words give an
order, not the part of the block.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import Name

_BEFORE, _AFTER = {"pre", "before"}, {"post", "after"}
_START, _END = {"input", *_BEFORE}, {"output", "final", *_AFTER}
_ORDER = _START | _END
#: The parts of a block in the order in which they are computed; the first that is found counts.
_PARTS = {"cross": 1, "attention": 0, "self": 0, "mlp": 2, "linear": 2}


def is_norm(layer: Layer) -> bool:
    """Whether a layer is a norm, of this library or called so."""
    free = layer.kind == "free" and all(len(leaf.shape) == 1 for leaf in layer.leaves.values())
    return layer.kind in ("norm", "batch_norm") or (free and "norm" in layer.name.words)


@dataclass(frozen=True)
class NormPlace:
    """The position of a norm in its block, parsed from its name."""

    block: tuple[str, ...]  # words up to the last number, which counts blocks
    at: float | None  # position in the block; None if no word gives it
    number: int | None  # of the norm in the block
    exact: bool  # whether the name has before or after, and a part
    said: frozenset[str]  # the other words of the name


@functools.lru_cache
def norm_place(words: tuple[str, ...]) -> NormPlace:
    """Parses the name of a norm.

    Example:
        >>> norm_place(("layer", "#", "post", "attention", "norm")).at
        0.75
        >>> norm_place(("layer", "#", "final", "norm")).said == {"layer", "norm"}
        True
    """
    own = list(words[:-1] if words[-1:] == ("#",) else words)
    begin = len(own) - own[::-1].index("#") if "#" in own else 0
    block, own = tuple(own[:begin]), own[begin:]
    cross = "encoder attention" in " ".join(own)  # of a decoder, over the encoder's output
    part = next((n for w, n in _PARTS.items() if w in own or (w == "cross" and cross)), None)
    after, before = not _AFTER.isdisjoint(own), not _BEFORE.isdisjoint(own)
    if part is None:
        at = 9.0 if not _END.isdisjoint(own) else -1.0 if not _START.isdisjoint(own) else None
    else:
        at = part + (0.75 if after else 0.0 if before else 0.5)
    exact = part is not None and (after or before)
    silent = _ORDER | _PARTS.keys() if exact else _ORDER
    number = next((int(word) for word in own if word.isdigit()), None)
    return NormPlace(block, at, number, exact, Name((*block, *own), ()).said - silent)


def sort_norms(names: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    """Sorts the names of the norms of one block by position; None if names do not give it."""
    places = {name: norm_place(name) for name in names}
    if len({norm.block for norm in places.values()}) > 1:
        return None
    for key in ("at", "number"):
        found = {name: getattr(norm, key) for name, norm in places.items()}
        values = set(found.values())
        if values != {None}:  # some names give it: then all have to, and they have to differ
            decided = None not in values and len(values) == len(found)
            return sorted(found, key=found.__getitem__) if decided else None
    return None


def contradicts_order(pairs: Mapping[tuple[str, ...], tuple[str, ...]]) -> bool:
    """Returns whether matching would swap norms whose names give their order on each side."""
    places = [(norm_place(own), norm_place(other)) for own, other in pairs.items()]
    for own, other in places:
        for second, theirs in places:
            if own.block != second.block or other.block != theirs.block:
                continue
            if own.exact and theirs.exact and own.at == theirs.at and own != second:
                return True  # equal names were matched elsewhere
            if _comes_before(own, second) and _comes_before(theirs, other):
                return True
    return False


def _comes_before(one: NormPlace, other: NormPlace) -> bool:
    return one.at is not None and other.at is not None and one.at < other.at
