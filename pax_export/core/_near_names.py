"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

#: From which likeness on a name is proposed, between 0 and 1.
_ALIKE = 0.6


def near_names(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Returns the `count` nearest names, best first; also compares the last steps of paths.

    Example:
        >>> near_names("wieght", ["bias", "weight"])
        ['weight']
        >>> near_names("atention", ["encoder.attention", "encoder.norm"])
        ['encoder.attention']
        >>> near_names("flux", ["bias", "weight"])
        []
    """
    parts = name.count(".") + 1
    found = []
    for place, other in enumerate(names):
        end = ".".join(other.split(".")[-parts:])
        likeness = max(_name_similarity(name, each) for each in {other, end})
        if likeness >= _ALIKE:
            found.append((-likeness, place, other))
    return [other for _, _, other in sorted(found)[:count]]


def _name_similarity(name: str, other: str) -> float:
    matcher = SequenceMatcher(None, other, name)
    # The quick bounds first: the whole comparison takes long for long names.
    if matcher.real_quick_ratio() < _ALIKE or matcher.quick_ratio() < _ALIKE:
        return 0.0
    return matcher.ratio()
