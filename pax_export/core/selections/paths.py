"""Places in a net: modules and leaves with their paths, and patterns of paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import tree_structure, tree_unflatten

from pax_export._foundations.errors import InvalidArgumentError, a_few, near_names
from pax_export._foundations.types import PyTree, TreeDef
from pax_export.core._containers import is_dict, is_sequence
from pax_export.core._traversal import Steps, one_level, plain_key
from pax_export.core._tree import Node, attributes_of, flatten, is_array


def dotted_path(steps: Iterable[Any]) -> str:
    """The dotted path; empty for the root."""
    return ".".join(map(str, steps))


def path_or_root(path: str) -> str:
    """The path as messages name it."""
    return path or "(the root)"


class Chosen:
    """Places of a tree, as filters, rules and exemptions accept them.

    Attributes:
        paths: the steps to each place, in tree order.
    """

    paths: tuple[Steps, ...]


@dataclass(frozen=True)
class Place:
    """The path of a module, leaf or container, independent of a tree."""

    steps: Steps
    path: str
    owner: Steps  # leads to the innermost module around it
    cls: type | None  # the class of a module; None for a leaf or container
    training: bool = True  # the mode of a module


def values_of(tree: Node, containers: bool = False) -> Iterator[tuple[Steps, Any]]:
    """Returns all modules and leaves with their steps, parents first; or containers, too."""
    left: list[tuple[Steps, Any]] = [((), tree)]
    while left:
        steps, value = left.pop()
        below = _children_of(value)
        if below is None or isinstance(value, Node) or (containers and below):
            yield steps, value
        left += [((*steps, step), child) for step, child in reversed(below or [])]


def _children_of(value: PyTree) -> list[tuple[Any, Any]] | None:
    """The children of a module or container with the step to each; None for a leaf."""
    if isinstance(value, Node):
        children, moduledef = flatten(value)
        return list(zip(moduledef.names, children))
    if is_array(value):
        return None
    items, _ = one_level(value)
    if len(items) == 1 and not items[0][0]:
        return None
    return [(plain_key(path[0]), item) for path, item in items]


def places_of(tree: Node) -> tuple[Place, ...]:
    """Returns all modules and leaves of a tree, parents first; cached by treedef."""
    return places_in(tree_structure(tree))


@functools.lru_cache(maxsize=64)
def places_in(treedef: TreeDef, containers: bool = False) -> tuple[Place, ...]:
    """The places of all trees of a treedef."""
    skeleton = tree_unflatten(treedef, [object() for _ in range(treedef.num_leaves)])
    values = list(values_of(skeleton, containers))
    modules = {steps for steps, value in values if isinstance(value, Node)}
    return tuple([_make_place(steps, value, modules) for steps, value in values])


def _make_place(steps: Steps, value: PyTree, modules: set[Steps]) -> Place:
    above = (steps[:n] for n in range(len(steps) - 1, -1, -1))
    owner = next((each for each in above if each in modules), ())
    if not isinstance(value, Node):
        return Place(steps, dotted_path(steps), owner, None)
    training = attributes_of(value).get("_training", True)
    return Place(steps, dotted_path(steps), owner, type(value), training)


def value_at(tree: Node, steps: Steps) -> Any:
    """Returns the value at these steps; raises an InvalidArgumentError if there is none."""
    value = tree
    for number, step in enumerate(steps):
        found = dict(_children_with_static(value)).get(step, _children_with_static)
        if found is _children_with_static:
            raise InvalidArgumentError(
                "The tree does not have this path.",
                where=dotted_path(steps[: number + 1]),
                got=f"{type(value).__name__} at {path_or_root(dotted_path(steps[:number]))}",
                write="a selection of this net, or of one with the same paths",
            )
        value = found
    return value


def _children_with_static(value: PyTree) -> Iterable[tuple[Any, Any]]:
    """The children of a value on a path, including static attributes."""
    if isinstance(value, Node):
        return attributes_of(value).items()
    if is_dict(value):
        return value.items()
    if is_sequence(value) and not hasattr(value, "_fields"):
        return enumerate(value)
    try:
        return _children_of(value) or ()
    except (TypeError, ValueError):  # a container that jax cannot flatten
        return ()


def written_out(tree: Node, names: Sequence[str]) -> Steps | None:
    """The steps of a path without wildcards, which may also lead to containers and static data."""
    steps: list[Any] = []
    value = tree
    for name in names:
        found = next((pair for pair in _children_with_static(value) if str(pair[0]) == name), None)
        if found is None:
            return None
        step, value = found
        steps.append(step)
    return tuple(steps)


def at_or_below(steps: Steps, chosen: set[Steps] | frozenset[Steps]) -> bool:
    """True if a place is one of the chosen ones or inside one."""
    return any(steps[:n] in chosen for n in range(len(steps) + 1))


def outermost_paths(paths: Sequence[Steps]) -> tuple[Steps, ...]:
    """The places that are not inside another one."""
    chosen = set(paths)
    return tuple([p for p in paths if not any(p[:n] in chosen for n in range(len(p)))])


def rest_of(tree: Node, paths: Sequence[Steps]) -> tuple[Steps, ...]:
    """Returns the largest places of a tree that are disjoint from these."""
    chosen = frozenset(paths)
    around = {path[:n] for path in paths for n in range(len(path))}
    found: set[Steps] = set()
    for entry in places_of(tree):
        steps = entry.steps
        if steps not in around and not at_or_below(steps, chosen) and not at_or_below(steps, found):
            found.add(steps)
    return tuple([entry.steps for entry in places_of(tree) if entry.steps in found])


# --- patterns of paths, such as encoder.layers.*.attention (docs/decisions/selections.md)


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
    parts: list[str] = []
    index = 0
    while index < len(step):
        letter = step[index]
        end = step.find("]", index + (3 if step[index + 1 : index + 2] == "!" else 2))
        if letter == "[" and end > 0:
            letters = re.escape(step[index + 1 : end]).replace(r"\-", "-")
            parts.append(f"[^.{letters[1:]}]" if letters[:1] == "!" else f"[{letters}]")
            index = end
        else:
            parts.append({"*": star, "?": r"[^.]"}.get(letter) or re.escape(letter))
        index += 1
    return "".join(parts)


def escape_step(step: Hashable) -> str:
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
