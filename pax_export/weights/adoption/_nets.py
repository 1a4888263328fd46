"""Files with several nets: which arrays to ignore.

A file of a training run often has a generator and a discriminator, or a net and its averages, and
their names begin differently.  Here it is tried which beginnings can be left out, so that an error
proposes only what leads on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pax_export.core import escaped

#: The largest number of starting points that are tried.
_MOST = 12


def ways_out(
    names: Sequence[str], possible: Callable[[tuple[str, ...]], bool]
) -> list[tuple[str, ...]]:
    """What to ignore so that the rest has its place: patterns of names, for each net that fits.

    Args:
        names: the arrays of the file.
        possible: whether the rest has its place without the arrays of these patterns.
    """
    parts = _parts(names)
    nets = [at for at in parts if _is_net(at, parts)]
    nets = sorted(nets, key=lambda at: -len(parts[at]))[:_MOST]
    one = [(_pattern(at),) for at in nets]
    found = [patterns for patterns in one if possible(patterns)]
    if found or len(nets) != len(parts) or len(nets) < 3:
        return found
    most = [tuple([_pattern(at) for at in nets if at != kept]) for kept in nets]
    return [patterns for patterns in most if possible(patterns)]


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """By the beginnings at which the names part: what follows."""
    steps = [re.findall(r"[^./:]+", name) for name in names]
    for depth in range(1, max(map(len, steps), default=0)):
        found: dict[str, list[str]] = {}
        for each in steps:
            found.setdefault(".".join(each[:depth]), []).append(".".join(each[depth:]))
        if len(found) > 1:
            return found
    return {}


def _is_net(at: str, parts: dict[str, list[str]]) -> bool:
    """Whether what begins so may be a net: it has several layers, or is like another part."""
    mine = parts[at]
    layers = {name.rpartition(".")[0] for name in mine}
    return len(layers) > 1 or any(
        set(mine) == set(names) for other, names in parts.items() if other != at and layers != {""}
    )


def _pattern(beginning: str) -> str:
    return ".".join(escaped(step) for step in beginning.split(".")) + ".**"
