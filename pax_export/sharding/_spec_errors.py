"""Errors of partition specs and rules."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from pax_export._errors import ShardingError
from pax_export.core import Spec, lost_by_steps, near_names, path_pattern, with_several_steps
from pax_export.sharding._leaf_paths import LeafPath
from pax_export.sharding._mesh import mesh_text, names_in, parts_of
from pax_export.sharding._rules import ClassRule, Match, PathRule, Rules, Sizes


def require_fit(leaf: LeafPath, spec: Spec, source: str, sizes: Sizes) -> None:
    """Raises unless a spec is valid for a leaf on a mesh."""
    given = f"{spec_text(spec)} of {source} for shape {leaf.shape}"
    if len(spec) > len(leaf.shape):
        raise ShardingError(
            "A partition spec has at most one entry for each axis of the array.",
            where=leaf.name,
            got=f"{len(spec)} entries for {len(leaf.shape)} axes: {given}",
            write="a spec of its rank; for the state of an optimizer, "
            "rules=pax.sharding.following(model, rules)",
        )
    seen: set[str] = set()
    for axis, entry in enumerate(spec):
        names = names_in(entry)
        for name in names:
            require_axis(name, sizes, leaf.name, given)
            if name in seen:
                raise ShardingError(
                    "A mesh axis can split only one axis of an array.",
                    where=leaf.name,
                    got=f"{name!r} twice in {given}",
                    write="another mesh axis, or None, in one of the two places",
                )
            seen.add(name)
        parts = parts_of(entry, sizes)
        if leaf.shape[axis] % parts:
            by = mesh_text({name: sizes[name] for name in names})
            by = by if len(names) == 1 else f"{by} (together {parts})"
            raise ShardingError(
                "A mesh axis must divide the axis of the array that it splits.",
                where=leaf.name,
                got=f"size {leaf.shape[axis]} of axis {axis} by {by}: {given}",
                write=f"a size that is a multiple of {parts}, or None for axis {axis}",
            )


def require_axis(name: str, sizes: Sizes, where: str, given: str) -> None:
    """Raises a ShardingError unless a mesh has an axis of this name."""
    if name in sizes:
        return
    close = near_names(name, sizes) or list(sizes)[:1]
    raise ShardingError(
        f"The mesh has no axis {name!r}.",
        where=where,
        got=f"{given}, on a mesh with {mesh_text(sizes)}",
        write=f"{close[0]!r}, or a mesh with an axis {name!r}" if close else None,
    )


def spec_text(spec: Spec) -> str:
    """Formats a spec as in code: ``P(None, 'model')``."""
    return f"P({', '.join(map(repr, PartitionSpec(*spec)))})"


# --- rules that are for no leaf: most often a misspelt path, so they are errors -----------


def require_used(
    rules: Rules, sizes: Sizes, matched: Sequence[tuple[LeafPath, Match | None]]
) -> None:
    """Raises unless every rule matched a leaf, including leaves with declared specs."""
    used = {id(rule) for _, match in matched if match is not None for rule in match.rules}
    for rule in rules.parts():
        _require_steps(rule, [leaf for leaf, _ in matched])
        if not rule.must_match or id(rule) in used:
            continue
        own = [pair for pair in matched if rule.match(pair[0], sizes, ()) is not None]
        if not own:
            raise _for_no_leaf(rule, [leaf for leaf, _ in matched])
        shadows = [(leaf, match) for leaf, match in own if match is not None and match.rules]
        if shadows:
            leaf, match = shadows[0]
            raise ShardingError(
                "A rule has no effect: earlier rules match all its leaves, "
                "and the first one counts.",
                where=str(rule),
                got=f"{' & '.join(map(str, match.rules))} for {leaf.name}",
                write=f"{rule} before it",
            )


def _require_steps(rule: Rules, leaves: Sequence[LeafPath]) -> None:
    """Raises for a path that matched when ``*`` matched several names, and no longer does."""
    if not isinstance(rule, (PathRule, ClassRule)):
        return
    pattern = path_pattern(rule.pattern)
    if isinstance(rule, PathRule):
        names = [".".join(leaf.steps) for leaf in leaves]
    else:
        pairs = [(leaf, owner) for leaf in leaves for owner in leaf.owners]
        names = [leaf.name_in(each) for leaf, each in pairs if isinstance(each.module, rule.cls)]
    lost = lost_by_steps(pattern, names)
    if lost:
        raise ShardingError(
            "In a path, * matches one name or a part of it; this rule may have been meant for "
            "leaves with several names there.",
            where=str(rule),
            got=f"{lost[0]}, which it is not for",
            write=f"{with_several_steps(rule.pattern, lost[0])!r} for these too, or "
            f"{'.' + rule.pattern!r} for one name",
        )


def _for_no_leaf(rule: Rules, leaves: list[LeafPath]) -> ShardingError:
    names = [leaf.name for leaf in leaves]
    got, write = f"{len(names)} leaves", "{MyLayer: {'weight': P(None, 'model')}}"
    if isinstance(rule, PathRule):
        close = near_names(rule.pattern, names) or names[:1]
        got += f", such as {close[0]}" if close else ""
        write = "a pattern of the whole path ('*.weight'), or of paths in the model and then "
        write += "pax.sharding.following(model, rules) for what belongs to it"
    if isinstance(rule, ClassRule):
        got, write = _explain_class(rule, leaves)
    return ShardingError("A rule matches no leaf.", where=str(rule), got=got, write=write)


def _explain_class(rule: ClassRule, leaves: list[LeafPath]) -> tuple[str, str]:
    """Suggests leaves for a class rule without matches."""
    pairs = [(leaf, owner) for leaf in leaves for owner in leaf.owners]
    own = {leaf.name_in(each): None for leaf, each in pairs if isinstance(each.module, rule.cls)}
    if own:
        name = rule.cls.__qualname__
        return f"the leaves {', '.join(own)}", f"{{{name}: {{{next(iter(own))!r}: P(...)}}}}"
    classes = {type(owner.module).__qualname__: None for _, owner in pairs}
    return f"modules of {', '.join(classes) or 'no class'}", "a class of which there are modules"
