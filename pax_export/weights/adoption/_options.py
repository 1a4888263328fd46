"""Options of an adoption: name patterns, conventions, ignored arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pax_export._foundations.check import as_strings, checked_choice
from pax_export._foundations.errors import InvalidArgumentError, near_names
from pax_export.core import is_at, path_pattern
from pax_export.weights.adoption._flatten import AS_IT_IS, FIRST
from pax_export.weights.adoption._groups import ORIGINS
from pax_export.weights.adoption._name_parsing import paths_above
from pax_export.weights.sources import Source

T = TypeVar("T")

_ORDERS = ("blocks", "by head")


@dataclass(frozen=True)
class Options:
    """The naming options of `adopt` or `save_as`; `where` is which of them."""

    where: str
    rename: Mapping[str, str]
    ignore: tuple[str, ...]
    keep: tuple[str, ...]
    axes: Mapping[str, tuple[int, ...]]
    origin: str | None
    fused: str | None
    flatten: str | Mapping[str, int] | None
    zeros: tuple[str, ...]

    def match(
        self, option: str, patterns: Iterable[str], names: Iterable[str], side: str = "module"
    ) -> set[str]:
        """Returns the names that match a pattern or a prefix; raises for one without matches."""
        names = list(names)
        found: set[str] = set()
        for pattern in patterns:
            mine = _match_names(pattern, names)
            if not mine:
                raise self._no_match(option, pattern, names, side)
            found |= set(mine)
        return found

    def by_path(self, option: str, values: Mapping[str, T], paths: Sequence[str]) -> dict[str, T]:
        """The values of an option by path instead of by pattern."""
        return {
            path: value
            for pattern, value in values.items()
            for path in self.match(option, [pattern], paths)
        }

    def renamed(self, source: Source, leaves: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Returns, for each array that ``rename`` matches, its new name and its target path."""
        found: dict[str, tuple[str, str]] = {}
        for pattern, target in self.rename.items():
            hits = _match_names(pattern, source.entries)
            if not hits:
                raise self._no_match("rename", pattern, list(source.entries), "source")
            for name, (matched, rest) in hits.items():
                stars = iter(matched)
                try:
                    base = re.sub(r"\*\*|\*", lambda _, stars=stars: next(stars), target)
                except StopIteration:
                    raise InvalidArgumentError(
                        "A new name has more wildcards than its pattern.",
                        where=f"{self.where}(rename=)",
                        got=f"{pattern!r}: {target!r}",
                        write="one * on both sides for each part that is kept",
                    ) from None
                base = re.sub(r"\.+", ".", base).strip(".")  # of a ** that matches no step
                if not any(is_at(leaf, base) for leaf in leaves):
                    above = (path for leaf in leaves for path in (leaf, *paths_above(leaf)[::-1]))
                    raise self._no_match("rename", base, list(dict.fromkeys(above)))
                found[name] = (base + rest, base)
        return found

    def _no_match(
        self, option: str, pattern: str, names: Sequence[str], side: str = "module"
    ) -> InvalidArgumentError:
        near = near_names(pattern, names, 3)
        return InvalidArgumentError(
            f"This names nothing in the {side}.",
            where=f"{self.where}({option}=)",
            got=repr(pattern),
            write=" or ".join(near) if near else "names as the report prints them, such as "
            + ", ".join(names[:3]),
        )  # fmt: skip


def options_of(
    where: str,
    *,
    rename: Mapping[str, str] | None,
    ignore: str | Iterable[str] | None,
    keep: str | Iterable[str] | None,
    axes: Mapping[str, Sequence[int]] | None,
    origin: str | None,
    fused: str | None,
    flatten: str | Mapping[str, int] | None,
    zeros: str | Iterable[str] | None = None,
) -> Options:
    """The options, checked."""
    for name, value, known in (("origin", origin, ORIGINS), ("fused", fused, _ORDERS)):
        if value is not None:
            checked_choice(value, known, f"{where}({name}=)")
    for path, order in (axes or {}).items():
        whole = isinstance(order, Sequence) and all(isinstance(one, int) for one in order)
        if not whole or sorted(order) != list(range(len(order))):
            raise InvalidArgumentError(
                "axes= maps each axis of a leaf to an axis of the array.",
                where=f"{where}(axes=), {path}",
                got=repr(order)[:200],
                write="a permutation of all axes, such as (1, 0)",
            )
    counts = flatten.values() if isinstance(flatten, Mapping) else [None]
    if flatten not in (None, AS_IT_IS, FIRST) and not all(
        isinstance(count, int) and count > 0 for count in counts
    ):
        raise InvalidArgumentError(
            "flatten=: expected a number of channels for a layer, or the order of its inputs.",
            where=f"{where}(flatten=)",
            got=repr(flatten)[:200],
            write=f'{{"path.of.the.layer": 64}}, "{FIRST}" or "{AS_IT_IS}"',
        )
    return Options(
        where,
        {str(key): str(value) for key, value in (rename or {}).items()},
        as_strings("ignore", ignore or (), 'ignore=["head.*"]'),
        as_strings("keep", keep or (), 'keep=["head.*"]'),
        {key: tuple(order) for key, order in (axes or {}).items()},
        origin,
        fused,
        flatten,
        as_strings("zeros", zeros or (), 'zeros=["head.*"]'),
    )


_SEPARATORS = re.compile(r"[./:]+")


def _match_names(pattern: str, names: Iterable[str]) -> dict[str, tuple[tuple[str, ...], str]]:
    """The names that a pattern matches, whole or as a prefix: values of its stars, and the rest.

    Slashes and colons separate steps as dots do; a literal name matches itself.
    """
    found: dict[str, tuple[tuple[str, ...], str]] = {
        name: ((), name[len(pattern) :])
        for name in names
        if name == pattern or (pattern and name.startswith(tuple(f"{pattern}{s}" for s in "./:")))
    }
    if found:
        return found
    asked = path_pattern(_SEPARATORS.sub(".", pattern))
    for name in names:
        steps = list(re.finditer(r"[^./:]+", name))
        matched = asked.taken(".".join([step[0] for step in steps]))
        if matched is not None:
            stars, below = matched
            count = len(steps) - (below.count(".") + 1 if below else 0)
            found[name] = (stars, name[steps[count - 1].end() :] if count else f".{name}")
    return found


def named_by(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a pattern names, or the beginning of; it may name none."""
    return set(_match_names(pattern, list(names)))
