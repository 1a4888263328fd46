"""Path patterns such as ``encoder.layers.*.attention``; see docs/decisions/selections.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from pax_export._errors import InvalidArgumentError, a_few
from pax_export.core._near_names import near_names

_ANY_STEPS = r"(?:[^.]*\.)*"
_WILD = frozenset("*?[")


class PathPattern:
    """A path with wildcards.

    * Names are separated by dots. In a name, ``*`` matches any text, ``?`` one character,
      ``[abc]`` and ``[!abc]`` one of these letters or another; none crosses a dot.
    * ``**`` matches any number of names, including none.
    * A path begins at the root, unless it begins with ``*`` or `anywhere` is set; a leading dot
      anchors it at the root: ``.*``. The empty path is the root.

    Raises:
        InvalidArgumentError: a step is empty.

    Example:
        >>> PathPattern("layers.*.norm").fits("layers.3.norm")
        True
        >>> PathPattern("layers.*.norm").fits("layers.3.mlp.norm")
        False
        >>> PathPattern("layers.**.norm").fits("layers.3.mlp.norm")
        True
        >>> PathPattern("norm").fits("layers.3.norm"), PathPattern("*norm").fits("layers.3.norm")
        (False, True)
    """

    def __init__(self, text: str, anywhere: bool = False):
        self.text = text
        at_root = text.startswith(".") or not text
        self.steps: tuple[str, ...] = ()
        if text.strip("."):
            self.steps = tuple(text.removeprefix(".").split("."))
        if "" in self.steps or text.count(".") == len(text) > 1:
            raise InvalidArgumentError(
                "A path has an empty step.",
                got=repr(text),
                write="names parted by single dots, 'encoder.layers.*'; a dot before the first "
                "one where the path is to begin at the root",
            )
        self._free = not at_root and (anywhere or text.startswith("*"))
        whole = _of_steps(("**", *self.steps) if self._free else self.steps)
        self._whole, self._around = re.compile(whole), re.compile(whole + _ANY_STEPS)

    @property
    def is_written_out(self) -> bool:
        """True if the path has no wildcards."""
        return _WILD.isdisjoint(self.text)

    def fits(self, path: str) -> bool:
        """True for the paths that are meant."""
        return self._whole.fullmatch(_with_last_dot(path)) is not None

    def covers(self, path: str) -> bool:
        """True for matching paths, and for all paths below one."""
        return self._around.fullmatch(_with_last_dot(path)) is not None

    def taken(self, path: str) -> tuple[tuple[str, ...], str] | None:
        """Returns the text that each star matches in a path, and the rest of the path.

        Example:
            >>> PathPattern("h.*.attn_*").taken("h.3.attn_q.weight")
            (('3', 'q'), 'weight')
            >>> PathPattern("**.attn").taken("a.b.attn"), PathPattern("**.attn").taken("attn")
            ((('a.b',), ''), (('',), ''))
        """
        found = self._taking.fullmatch(_with_last_dot(path))
        if found is None:
            return None
        *stars, below = [part.removesuffix(".") for part in found.groups()]
        return tuple(stars), below

    @functools.cached_property
    def _taking(self) -> re.Pattern[str]:
        """The regular expression of `covers`, with a group per star and one for the rest."""
        parts = [
            r"((?:[^.]*\.)*?)" if step == "**" else rf"{_of_step(step, taking=True)}\."
            for step in self.steps
        ]
        anywhere = r"(?:[^.]*\.)*?" if self._free and self.steps[0] != "**" else ""
        return re.compile(f"{anywhere}{''.join(parts)}((?:[^.]*\\.)*)")

    def __repr__(self) -> str:
        return repr(self.text)


@functools.lru_cache(maxsize=1024)
def path_pattern(text: str, anywhere: bool = False) -> PathPattern:
    """The pattern of a text, made once."""
    return PathPattern(text, anywhere)


def _with_last_dot(path: str) -> str:
    return f"{path}." if path else ""


def _of_steps(steps: tuple[str, ...]) -> str:
    """The regular expression of steps that end with dots; parts between ``**`` match leftmost."""
    parts = [""]
    for step in steps:
        if step == "**":
            parts.append("")
        else:
            parts[-1] += rf"(?>{_of_step(step)}\.)"
    first, *rest = parts
    if not rest:
        return first
    between = "".join(rf"(?>(?:[^.]*\.)*?{part})" for part in rest[:-1] if part)
    return first + between + _ANY_STEPS + rest[-1]


def _of_step(step: str, taking: bool = False) -> str:
    """Returns the regular expression of one step, with a group for each star if `taking`."""
    if step == "*":
        return r"([^.]+)" if taking else r"[^.]+"
    star = r"([^.]*)" if taking else r"[^.]*"
    parts, place = [], 0
    while place < len(step):
        letter = step[place]
        end = step.find("]", place + (3 if step[place + 1 : place + 2] == "!" else 2))
        if letter == "[" and end > 0:
            letters = re.escape(step[place + 1 : end]).replace(r"\-", "-")
            parts.append(f"[^.{letters[1:]}]" if letters[:1] == "!" else f"[{letters}]")
            place = end
        else:
            parts.append({"*": star, "?": r"[^.]"}.get(letter) or re.escape(letter))
        place += 1
    return "".join(parts)


def escape_step(step: object) -> str:
    """A name as a step of a path that means this name alone.

    Example:
        >>> escape_step("w*"), escape_step(0)
        ('w[*]', '0')
    """
    return re.sub(r"([*?\[])", r"[\1]", str(step))


def better_path(text: str, paths: Iterable[str]) -> str:
    """Suggests a path in place of one that matches none of these."""
    paths = [path for path in dict.fromkeys(paths) if path]
    deeper = f"**.{text.removeprefix('.')}"
    found = [path for path in paths if text.strip(".") and path_pattern(deeper).fits(path)]
    if found:
        return f"{deeper!r}, which fits {a_few(found, 3)}; or one of them"
    return ", ".join(near_names(text, paths, 3) or paths[:3])


def with_several_steps(text: str, path: str) -> str:
    """The pattern with wildcards that also match several names, if that matches a path."""
    steps = []
    for number, step in enumerate(text.split(".")):
        before = ["**"] if number and step.startswith("*") else []
        steps += [*before, step, *(["**"] if step.endswith("*") and step != "*" else [])]
    wider = ".".join(steps)
    return wider if path_pattern(wider).covers(path) else f"**.{text.rpartition('.')[2]}"


def lost_by_steps(pattern: PathPattern, paths: Iterable[str]) -> list[str]:
    """Returns the paths that the pattern matched when wildcards still crossed dots.

    Patterns with a leading dot or ``**`` are explicit, so they are not checked.
    """
    if pattern.text.startswith(".") or "**" in pattern.steps or "*" not in pattern.text:
        return []
    crossing = [path for path in paths if fnmatchcase(path, pattern.text)]
    return [path for path in crossing if not pattern.covers(path)]
