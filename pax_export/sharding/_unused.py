"""Rules that are for no leaf: most often a misspelt path, so they are errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pax_export._errors import ShardingError
from pax_export.sharding._places import Place
from pax_export.sharding._rules import ClassRule, Match, PathRule, Rules, Sizes

Matched = Sequence[tuple[Place, Match | None]]


def require_used(rules: Rules, sizes: Sizes, matched: Matched) -> None:
    """Raises unless every rule gave some leaf its spec.

    A rule for leaves all of which declare their own spec is used as well: the
    rules may be meant for many models.

    Args:
        rules: the rules.
        sizes: the axes of the mesh.
        matched: what was found for each leaf.

    Raises:
        ShardingError: a rule is for no leaf, or comes after others that are for
            all its leaves.
    """
    used = {id(rule) for _, match in matched if match is not None for rule in match.rules}
    for rule in rules.parts():
        if not rule.must_match or id(rule) in used:
            continue
        own = [pair for pair in matched if rule.match(pair[0], sizes, ()) is not None]
        if not own:
            raise _for_no_leaf(rule, [place for place, _ in matched])
        shadows = [(place, match) for place, match in own if match is not None and match.rules]
        if shadows:
            raise _too_late(rule, *shadows[0])


def _for_no_leaf(rule: Rules, leaves: list[Place]) -> ShardingError:
    names = [place.name for place in leaves]
    got, write = f"{len(names)} leaves", "{MyLayer: {'weight': P(None, 'model')}}"
    if isinstance(rule, PathRule):
        close = difflib.get_close_matches(rule.pattern, names, 1, cutoff=0) or names[:1]
        got += f", such as {close[0]}" if close else ""
        write = "a pattern of the whole path ('*.weight'), or of paths in the model and then "
        write += "pax.sharding.following(model, rules) for what belongs to it"
    if isinstance(rule, ClassRule):
        got, write = _below(rule, leaves)
    return ShardingError("A rule is for no leaf.", where=str(rule), got=got, write=write)


def _below(rule: ClassRule, leaves: list[Place]) -> tuple[str, str]:
    """What there is instead of a leaf of a class."""
    owners = [(place, owner) for place in leaves for owner in place.owners]
    own = {
        place.name_in(owner): None for place, owner in owners if isinstance(owner.module, rule.cls)
    }
    if own:
        name = rule.cls.__qualname__
        return f"the leaves {', '.join(own)}", f"{{{name}: {{{next(iter(own))!r}: P(...)}}}}"
    classes = {type(owner.module).__qualname__: None for _, owner in owners}
    return f"modules of {', '.join(classes) or 'no class'}", "a class of which there are modules"


def _too_late(rule: Rules, place: Place, match: Match) -> ShardingError:
    return ShardingError(
        "A rule comes too late: others are for all its leaves, and the first one counts.",
        where=str(rule),
        got=f"{' & '.join(map(str, match.rules))} for {place.name}",
        write=f"{rule} before it",
    )
