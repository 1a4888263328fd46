"""Assigns groups of arrays to layers under hard constraints.

Layers and groups are connected if their shapes fit. In a component with several choices, names
decide, by three rules:

- Numbers: ``blocks.0.fc`` to ``blocks.5.fc`` match ``h.1.dense`` to ``h.6.dense`` in order.
  Numbers of several levels must branch alike.
- Words: a layer takes groups that share every word with it that any other group shares. If that
  leaves one assignment, and the groups would not choose another, it is taken.
- Order: words of norms tell their order in a block, see `NormPosition`.

The modules around a layer, and where their other layers went, count as words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pax_export.weights.adoption._groups import Fits, Group
from pax_export.weights.adoption._layers import Layer, is_norm
from pax_export.weights.adoption._name_parsing import (
    KINDS,
    ROLES,
    Name,
    contradicts_order,
    norm_position,
    paths_above,
    sort_norms,
)

#: The number of steps spent on looking for a second assignment.
_STEPS = 20_000
#: Words for a part or a copy that the model itself does not use.
_BESIDE = frozenset(
    "aux auxiliary extra teacher student ema swa shadow momentum velocity avg averaged backup "
    "old previous target draft optimizer optim opt grad gradient exp".split()
)
#: Words with a number that does not count blocks: norm1 and norm2 are in one block.
_APART = ((False, False), (True, False), (False, True))

Pairs = list[tuple[Layer, Group]]


@dataclass
class Component:
    """Layers and groups, in the order of module and file, with several assignments by shape."""

    layers: list[Layer]
    groups: list[Group]
    fits: Fits


@dataclass
class Outcome:
    """The result of the assignment, for all layers and groups."""

    pairs: Pairs = field(default_factory=list)
    why: dict[Layer, str] = field(default_factory=dict)
    open: list[Component] = field(default_factory=list)
    #: Pairs decided by the order of norms; a reference may override them.
    by_order: list[Component] = field(default_factory=list)
    missing: list[Layer] = field(default_factory=list)
    left: list[Group] = field(default_factory=list)
    #: Components with missing or unused arrays that names do not identify.
    unbalanced: list[Component] = field(default_factory=list)

    @property
    def possible(self) -> bool:
        """Whether no array is missing or unused."""
        return not (self.missing or self.left)


def assign_groups(layers: Sequence[Layer], groups: Sequence[Group], fits: Fits) -> Outcome:
    """Gives each group to a layer, as far as that is decided."""
    outcome = Outcome()
    waiting: list[Component] = []
    chosen = _user_choice(layers, groups, fits)
    outcome.pairs += chosen
    done = {one for pair in chosen for one in pair}
    rest = [layer for layer in layers if layer not in done]
    others = [group for group in groups if group not in done]
    for component in _find_components(rest, others, fits):
        if len(component.layers) != len(component.groups):
            _record_unbalanced(component, outcome)
        elif len(component.layers) == 1:
            layer, group = component.layers[0], component.groups[0]
            outcome.pairs.append((layer, group))
            outcome.why[layer] = "the only one that fits"
        else:
            waiting.append(component)
    while True:
        links = _find_links(outcome.pairs, layers, groups) if outcome.pairs else {}
        undecided = [each for each in waiting if not _decide_component(each, links, outcome)]
        if len(undecided) == len(waiting):
            break
        waiting = undecided
    outcome.open = waiting
    return outcome


def _user_choice(layers: Sequence[Layer], groups: Sequence[Group], fits: Fits) -> Pairs:
    """Applies the user's assignment of groups to layers; other pairs cannot use these."""
    found: dict[Layer, list[Group]] = {}
    for group in groups:
        if group.within is not None:
            fitting = [layer for layer in layers if fits(layer, group)]
            if len(fitting) == 1:
                found.setdefault(fitting[0], []).append(group)
    return [(layer, group[0]) for layer, group in found.items() if len(group) == 1]


def _find_components(
    layers: Sequence[Layer], groups: Sequence[Group], fits: Fits
) -> Iterator[Component]:
    left = list(groups)
    done: set[Layer] = set()
    for layer in layers:
        if layer in done:
            continue
        mine, theirs, new = [], [], [layer]
        while new:
            done.update(new)
            mine += new
            found = dict.fromkeys(g for g in left if any(fits(each, g) for each in new))
            theirs += found
            left = [group for group in left if group not in found]
            new = [
                each for each in layers
                if each not in done and any(fits(each, group) for group in found)
            ]  # fmt: skip
        yield Component(mine, sorted(theirs, key=lambda group: group.index), fits)
    for group in left:
        yield Component([], [group], fits)


def _record_unbalanced(component: Component, outcome: Outcome) -> None:
    missing, left = component.layers, component.groups
    if missing and left:
        found = [_find_extra(component, *apart) for apart in _APART]
        if len(missing) > len(left):
            left = []
            missing = min([some for some, _ in found if some], key=len, default=missing)
        else:
            missing = []
            left = min([some for _, some in found if some], key=len, default=left)
        if len(missing or left) == len(component.layers if missing else component.groups):
            outcome.unbalanced.append(component)  # which of them is unknown
    outcome.missing += missing
    outcome.left += left


def _find_extra(component: Component, apart: bool, others: bool) -> tuple[list[Layer], list[Group]]:
    ours, theirs = _by_words(component.layers, apart), _by_words(component.groups, others)
    counted = {own.count("#") for own in ours} & {other.count("#") for other in theirs}
    chosen: dict[Any, list[Any]] = {}
    for own, layers in ours.items():
        chosen[own] = _best_options({
            other: _common_words(layers[:1], groups[:1], {}) for other, groups in theirs.items()
            if component.fits(layers[0], groups[0])
            and (not counted or other.count("#") == own.count("#"))
        })  # fmt: skip
    chosen |= _by_order_of_norms({own: chosen[own] for own in ours if is_norm(ours[own][0])})
    return _without_counterpart(ours, theirs, chosen)


def _without_counterpart(
    ours: Mapping[Any, list[Any]], theirs: Mapping[Any, list[Any]], chosen: Mapping[Any, list[Any]]
) -> tuple[list[Layer], list[Group]]:
    """The layers and groups, each by their words, that remain without those of equal names."""
    wanted = {own: [own] if own in theirs else others for own, others in chosen.items()}
    missing: list[Layer] = []
    left = dict(theirs)
    for own, layers in ours.items():
        only = wanted[own][0] if len(wanted[own]) == 1 else None
        if only is None or sum(only in others for others in wanted.values()) > 1:
            missing += layers
            continue
        groups = left.pop(only)
        count = own.count("#")
        mine, other = ({each.name.numbers[:count] for each in side} for side in (layers, groups))
        if mine <= other or other <= mine:
            missing += [layer for layer in layers if layer.name.numbers[:count] not in other]
            left[only] = [group for group in groups if group.name.numbers[:count] not in mine]
        elif len(mine) > len(other):
            missing += layers
        else:
            left[only] = groups
    return missing, [group for groups in left.values() for group in groups]


# Names of other parts


def without_strangers(layers: Sequence[Layer], groups: Sequence[Group], fits: Fits) -> Fits:
    """Removes from `fits` arrays of other names: ``aux_bn`` must not fill a missing ``bn``."""
    names = [group.name for group in groups if group.within is None]
    theirs = {tail for name in names for tail in _name_endings(name)}
    whole = {(name.words, name.numbers) for name in names}
    alike = [
        layer for layer in layers
        if (layer.name.words, layer.name.numbers) in theirs
        or not whole.isdisjoint(_name_endings(layer.name))
    ]  # fmt: skip
    if 2 * len(alike) < len(layers):
        return fits
    # A word of most names, as in a file of the teacher alone, distinguishes none.
    beside = {
        word for word in _BESIDE if 2 * sum(word in name.meaning for name in names) <= len(names)
    }

    def fits_by_name(layer: Layer, group: Group) -> bool:
        if group.within is None and beside & group.own_words - layer.meaning:
            return False
        return fits(layer, group) and not _is_stranger(layer, group)

    return fits_by_name


def _name_endings(name: Name) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    for start in range(len(name.words)):
        words = name.words[start:]
        yield words, name.numbers[len(name.numbers) - words.count("#") :]


def _is_stranger(layer: Layer, group: Group) -> bool:
    """Returns whether the name of a group has meaningful words, and none of the layer's."""
    theirs, ours = group.own_words - ROLES, layer.meaning - ROLES
    if group.within is not None or theirs <= KINDS or not ours.isdisjoint(group.meaning):
        return False
    # "patches" and "patch", "pos" and "positions" are no other words.
    return not any(
        one.startswith(other) or other.startswith(one) for one in theirs for other in ours
    )


# Numbers


def _by_words(items: Sequence[Any], apart: bool = False) -> dict[tuple[str, ...], list[Any]]:
    """Items by the words of their names; with `apart`, the last number counts as a word."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        words = item.name.words
        if apart and "#" in words:
            index = len(words) - 1 - words[::-1].index("#")
            words = (*words[:index], str(item.name.numbers[-1]), *words[index + 1 :])
        found.setdefault(words, []).append(item)
    for same in found.values():
        same.sort(key=lambda item: item.name.numbers)
    return found


def number_tree(numbers: Sequence[tuple[int, ...]]) -> Any:
    """The shape of the tree that sorted tuples of numbers form; None if two tuples are equal.

    Example:
        >>> number_tree([(1, 0, 7), (1, 1, 7), (2, 0, 7)]) == number_tree([(0, 0), (0, 5), (3, 1)])
        True
    """
    if len(numbers) == 1:
        return 0
    if len(set(numbers)) != len(numbers):
        return None
    below = [
        number_tree([each[1:] for each in group])
        for _, group in itertools.groupby(numbers, key=lambda each: each[0])
    ]
    if None in below:
        return None
    if len(below) == 1:
        return below[0]
    return tuple(below)


# Words


def _decide_component(
    component: Component, links: Mapping[Any, frozenset], outcome: Outcome
) -> bool:
    norms = all(map(is_norm, component.layers))
    several = _APART if norms else _APART[:1]
    return any(_decide_by_words(component, links, outcome, *apart) for apart in several)


def _decide_by_words(
    component: Component, links: Mapping[Any, frozenset], outcome: Outcome, apart: bool,
    others: bool,
) -> bool:  # fmt: skip
    ours, theirs = _by_words(component.layers, apart), _by_words(component.groups, others)
    fitting: dict[Any, dict[Any, frozenset]] = {}
    for own, layers in ours.items():
        fitting[own] = {
            other: _common_words(layers, groups, links)
            for other, groups in theirs.items()
            if _fit_by_numbers(component, layers, groups, links)
        }
    chosen = {own: _best_options(options) for own, options in fitting.items()}
    wished = {
        other: _best_options(
            {o: options[other] for o, options in fitting.items() if other in options}
        )
        for other in theirs
    }
    ordered: set[Any] = set()
    found = list(itertools.islice(find_matchings(chosen), 2))
    norms = {own: layers for own, layers in ours.items() if is_norm(layers[0])}
    if len(found) > 1:
        by_order = _by_order_of_norms({own: chosen[own] for own in norms})
        ordered, found = set(by_order), list(itertools.islice(find_matchings(chosen | by_order), 2))
    if len(found) != 1 or len(found[0]) != len(ours):
        return False
    if any(own not in wished[other] for own, other in found[0].items()):
        return False  # a group that is called as another layer
    if contradicts_order({own: other for own, other in found[0].items() if own in norms}):
        return False
    one = len(ours) == 1
    for own, other in found[0].items():
        words = sorted(w if isinstance(w, str) else "where it stands" for w in fitting[own][other])
        why = (
            "by numbers" if one else "by their order" if own in ordered
            else f"by {', '.join(dict.fromkeys(words))}" if words else "what is left"
        )  # fmt: skip
        for layer, group in zip(ours[own], theirs[other]):
            outcome.pairs.append((layer, group))
            outcome.why[layer] = why
    outcome.by_order += [component] if ordered else []
    return True


def _by_order_of_norms(chosen: Mapping[Any, list[Any]]) -> dict[Any, list[Any]]:
    """Assigns norms of a block that may swap by their order."""
    by_order: dict[Any, list[Any]] = {}
    for options in chosen.values():
        same = [own for own, those in chosen.items() if those and set(those) <= set(options)]
        if len(same) == len(options) > 1 and not by_order.keys() & set(same):
            pairs = zip(sort_norms(same) or (), sort_norms(options) or ())
            by_order |= {own: [other] for own, other in pairs}
    return by_order


def _fit_by_numbers(
    component: Component, layers: list[Layer], groups: list[Group], links: Mapping[Any, frozenset]
) -> bool:
    """Whether groups are counted as layers are, and each fits the one of its number."""
    if not _fit_loosely(component, layers, groups):
        return False
    return len(layers) == 1 or all(
        _numbers_count_layers(layer, group) or (layer, group) in links
        for layer, group in zip(layers, groups)
    )


def _fit_loosely(component: Component, layers: list[Layer], groups: list[Group]) -> bool:
    """Like `_fit_by_numbers`, with numbers that need not count layers: a reference decides."""
    alike = number_tree([layer.name.numbers for layer in layers])
    return (
        len(layers) == len(groups)
        and alike is not None
        and alike == number_tree([group.name.numbers for group in groups])
        and all(component.fits(layer, group) for layer, group in zip(layers, groups))
    )


def _numbers_count_layers(layer: Layer, group: Group) -> bool:
    """Whether the numbers of a name count layers; those of ``arr_0`` and ``var_17`` do not."""
    if layer.meaning & group.meaning:
        return True
    return group.sure and (group.own_words <= KINDS or group.is_in_list)


def _common_words(
    layers: list[Layer], groups: list[Group], links: Mapping[Any, frozenset]
) -> frozenset:
    norms, pairs = is_norm(layers[0]), list(zip(layers, groups))
    shared = frozenset.intersection(*[_shared_words(*pair, norms) for pair in pairs])
    return shared | frozenset.intersection(*[links.get(pair, frozenset()) for pair in pairs])


def _shared_words(layer: Layer, group: Group, norms: bool) -> frozenset:
    """Returns the common words of a layer and a group that identify their position."""
    if not norms:
        return layer.meaning & group.meaning
    ours, theirs = norm_position(layer.name.words), norm_position(group.name.words)
    return (ours.meaning | layer.also) & theirs.meaning


def _best_options(options: Mapping[Any, frozenset]) -> list[Any]:
    """Returns the options whose words include those of all others; all options if none do."""
    every = frozenset().union(*options.values())
    best = [other for other, words in options.items() if words == every]
    return best or list(options)


def find_matchings(options: Mapping[Any, Sequence[Any]]) -> Iterator[dict[Any, Any]]:
    """Yields all ways to give each key one of its options, each option at most once."""
    steps = itertools.count()

    def search(left: dict[Any, list[Any]], done: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        if next(steps) > _STEPS:
            yield {}  # too many to enumerate: counts as one more way, without content
            return
        if not left:
            yield dict(done)
            return
        key = min(left, key=lambda each: len(left[each]))
        for option in left[key]:
            rest = {
                other: [one for one in several if one != option]
                for other, several in left.items()
                if other != key
            }
            if all(rest.values()):
                yield from search(rest, {**done, key: option})

    yield from search({key: list(several) for key, several in options.items()}, {})


# The position of a layer


def _find_links(
    pairs: Pairs, layers: Sequence[Layer], groups: Sequence[Group]
) -> dict[tuple[Layer, Group], frozenset]:
    """Returns, for each possible pair, the enclosing modules whose other layers are all matched."""
    ours: dict[str, set[int]] = {}
    theirs: dict[str, set[int]] = {}
    for number, (layer, group) in enumerate(pairs):
        for above in paths_above(layer.path):
            ours.setdefault(above, set()).add(number)
        for above in paths_above(group.path):
            theirs.setdefault(above, set()).add(number)
    by_pairs: dict[frozenset, list[str]] = {}
    for above, numbers in theirs.items():
        by_pairs.setdefault(frozenset(numbers), []).append(above)
    everything = frozenset(range(len(pairs)))
    linked: dict[str, set[str]] = {}
    for above, numbers in ours.items():
        if frozenset(numbers) != everything:
            for other in by_pairs.get(frozenset(numbers), ()):
                linked.setdefault(above, set()).add(other)
    around = {group: set(paths_above(group.path)) for group in groups}
    found: dict[tuple[Layer, Group], frozenset] = {}
    for layer in layers:
        mine = [(above, linked[above]) for above in paths_above(layer.path) if above in linked]
        for group in groups if mine else ():
            both = [("at", above) for above, others in mine if others & around[group]]
            if both:
                found[layer, group] = frozenset(both)
    return found


# Ways that a reference run may choose among


def find_ways(component: Component) -> Iterator[Pairs]:
    """Yields all ways of an ambiguous component, uniform treatments of stacked layers first."""
    for apart, others_apart in itertools.product((False, True), repeat=2):
        ours = _by_words(component.layers, apart)
        theirs = _by_words(component.groups, others_apart)
        fitting = {
            own: [o for o, groups in theirs.items() if _fit_loosely(component, layers, groups)]
            for own, layers in ours.items()
        }
        for way in filter(None, find_matchings(fitting)) if all(fitting.values()) else ():
            yield [p for own, other in way.items() for p in zip(ours[own], theirs[other])]
    in_order = sorted(component.groups, key=lambda group: group.name.numbers)
    if all(map(component.fits, component.layers, in_order)):
        yield list(zip(component.layers, in_order))
    options = {
        index: [n for n, group in enumerate(component.groups) if component.fits(layer, group)]
        for index, layer in enumerate(component.layers)
    }
    for way in filter(None, find_matchings(options)):
        yield [(component.layers[a], component.groups[b]) for a, b in way.items()]
