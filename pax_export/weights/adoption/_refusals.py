"""Errors of adoption."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from pax_export._foundations.errors import AdoptionError, AmbiguousWeightsError, near_names
from pax_export.weights.adoption._flatten import SAYS, flattened_channels
from pax_export.weights.adoption._fused import PARTS, is_fused
from pax_export.weights.adoption._groups import Group
from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import BIAS, OF_CELL, RECURRENT, WEIGHT, split_words
from pax_export.weights.adoption._pieces import Piece, Recipe, Shape
from pax_export.weights.adoption._plan import Hypothesis, Study
from pax_export.weights.adoption._recurrent import explain_other_function
from pax_export.weights.sources import Source

_MOST = 40
_FUSED = '; queries, keys and values in one: fused="blocks" or "by head" says in which order'


def _shape_text(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"


def _shorten_lines(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = [f"  ... and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return "\n".join([*lines[:_MOST], *more])


def _layer_text(layer: Layer) -> str:
    leaves = ", ".join(f"{leaf.says}{_shape_text(leaf.shape)}" for leaf in layer.leaves.values())
    return f"{leaves} ({layer.kind})" if layer.kind != "free" else leaves


def _group_text(group: Group) -> str:
    return ", ".join(f"{piece.source}{_shape_text(piece.shape)}" for piece in group.parts.values())


def impossible_error(study: Study) -> AdoptionError:
    """The error of a study without a possible hypothesis."""
    best = min(
        study.impossible, key=lambda each: len(each.outcome.missing) + len(each.outcome.left)
    )
    outcome = best.outcome
    lines, rest = [], list(outcome.left)
    missing: list[str] = []
    for layer in outcome.missing:
        group = _present_half(layer, rest)
        gone = [leaf for role, leaf in layer.leaves.items() if not group or role not in group.parts]
        missing += [leaf.path for leaf in gone]
        if group:  # only a part of the layer is not there
            rest.remove(group)
            lines += [f"  - no array for {leaf.says}{_shape_text(leaf.shape)}, beside {group.path}"
                      for leaf in gone]  # fmt: skip
        else:
            near = near_names(layer.path, [group.path for group in rest])
            why = _explain_layer(layer, best) or "".join(f"; near: {path}" for path in near if path)
            lines.append(f"  - no array for {_layer_text(layer)}{why}")
    for group in rest:
        lines.append(f"  - no place for {_group_text(group)}{_explain_group(group)}")
    for component in outcome.unbalanced:
        if len(component.layers) > 1 or len(component.groups) > 1:
            lines.append(
                f"  - {len(component.groups)} of these shapes in the source, "
                f"{len(component.layers)} in the module: "
                + ", ".join(group.path for group in component.groups[:8])
                + " for " + ", ".join(layer.path for layer in component.layers[:8])
            )  # fmt: skip
    error = AdoptionError(
        "The arrays of the source do not match the module:\n" + _shorten_lines(lines),
        where=study.source.where,
        got=f"{len(study.source.entries)} arrays, read as {best.origin} keeps them",
        write=_what_to_write(missing, rest),
    )
    error.missing = tuple(dict.fromkeys(missing))
    error.left = tuple(name for group in rest for name in group.arrays)
    return error


def _what_to_write(missing: Sequence[str], left: Sequence[Group]) -> str:
    if missing and left:
        return ("a module of the sizes of the file; keep= and ignore= with patterns for what has "
                'no counterpart; rename={"name.in.the.file": "path.in.the.module"}')  # fmt: skip
    if left:
        return f'ignore=["{left[0].arrays[0]}"] for what is not wanted'
    if not missing:
        return "a file with arrays"
    keep = f'keep=["{missing[0]}"] for what stays as it is'
    if not all(path.rpartition(".")[2] == "bias" for path in missing):
        return keep
    paths = "**.bias" if len(missing) > 1 else missing[0]
    return f'zeros="{paths}" for layers that have no bias in the net of the file; {keep}'


def _present_half(layer: Layer, left: Sequence[Group]) -> Group | None:
    """Returns the group with some arrays of a layer whose others are missing."""
    found = [
        group for group in left
        if set(group.parts) < set(layer.leaves) and group.sure and layer.meaning & group.meaning
        and layer.name.numbers == group.name.numbers[-len(layer.name.numbers) or len(group.raw) :]
        and all(
            sorted(piece.part_shape) == sorted(layer.leaves[role].shape)
            for role, piece in group.parts.items()
        )
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _explain_group(group: Group) -> str:
    if group.lacks:
        return f"; {group.lacks}"
    if {"weight_ih", "weight_hh"} == set(group.parts):
        return '; a cell without biases: zeros="**.bias", and no forget_gate_bias in the module'
    if {"weight_ih", "weight_hh"} <= set(group.parts):
        rows, *columns = group.parts["weight_hh"].shape
        if columns != [rows / 3]:
            return ""
        if BIAS in group.parts:
            return "; no layer takes a GRU of Equinox, whose last gate has a bias of its own"
        return "; a GRU of torch fills a pax.GRU with reset_after=True"
    shapes = {role: piece.shape for role, piece in group.parts.items()}
    if RECURRENT in shapes and shapes.get(BIAS) == (2, 3 * shapes[RECURRENT][0]):
        return "; a GRU of Keras with reset_after=True fills a pax.GRU with reset_after=True"
    if {WEIGHT, RECURRENT} <= set(group.parts) and (why := explain_other_function(group)):
        return why
    return _FUSED if is_fused(group.raw) else ""


def _explain_layer(layer: Layer, hypothesis: Hypothesis) -> str:
    called = {word for group in hypothesis.outcome.left for word in group.meaning}
    if not is_fused(split_words(layer.path)) or called.isdisjoint(PARTS):
        return ""
    if layer.heads is None and hypothesis.fused == "by head":
        return '; fused="by head" needs the number of heads: num_heads of the module around it'
    return _FUSED


def ambiguity_error(study: Study, agreeing: int = 0) -> AmbiguousWeightsError:
    """Returns the error for several possible ways: every array with its candidates."""
    found: dict[str, dict[str, None]] = {}
    patterns: dict[str, str] = {}
    for component in [each for one in study.possible for each in one.outcome.open]:
        for group in component.groups:
            fitting = [la.path for la in component.layers if component.fits(la, group)]
            for name in group.arrays:
                found.setdefault(name, {}).update(dict.fromkeys(fitting))
                beginning = group.path if name.startswith(group.path) else ""
                patterns.setdefault(name, beginning or OF_CELL.sub("*", name))
    # The targets of arrays are more helpful than the conversions of each way.
    moved, layouts = _differences(study.possible, found)
    candidates = {name: list(paths) for name, paths in {**found, **moved}.items()}
    lines = [f"  - {name}: {' or '.join(paths[:8])}" for name, paths in candidates.items()]
    lines += [f"  - {name}: {' or '.join(says)}" for name, says in layouts.items()]
    hints = []
    if candidates:
        name, paths = next(iter(candidates.items()))
        pattern = patterns.get(name, name)
        hints.append(f'rename={{"{pattern}": "{paths[0]}", ...}}, with * for numbers')
    if layouts:
        hints.append(_hint_for_layouts(study, layouts))
    hints.append("reference=(inputs, outputs) of the net that wrote it")
    error = AmbiguousWeightsError(
        "The targets or layouts of these arrays are ambiguous:\n" + _shorten_lines(lines),
        where=study.source.where,
        got=f"{agreeing} ways that agree with the reference" if agreeing else None,
        write="; or ".join(hints),
    )
    error.candidates = {name: tuple(paths) for name, paths in {**candidates, **layouts}.items()}
    return error


def _differences(
    hypotheses: Sequence[Hypothesis], known: Container[str]
) -> tuple[dict[str, dict[str, None]], dict[str, list[str]]]:
    """The arrays of decided pairs that go to several places, and those read in several ways."""
    moved: dict[str, dict[str, None]] = {}
    layouts: dict[str, list[str]] = {}
    ways: dict[str, dict[object, str]] = {}
    places: dict[str, dict[str, None]] = {}
    for hypothesis in hypotheses:
        for layer, group in hypothesis.outcome.pairs:
            for name in group.arrays:
                places.setdefault(name, {})[layer.path] = None
            for recipe in hypothesis.recipes[layer, group]:
                for name, (key, says) in _by_source(recipe).items():
                    order = f", {hypothesis.fused}" if "part" in says else ""
                    label = f"{says or 'as it is'} ({hypothesis.origin}{order})"
                    ways.setdefault(name, {}).setdefault((layer.path, key), label)
    for name, found in ways.items():
        if name in known:
            continue
        targets = {
            tuple(layer.path for layer, group in each.outcome.pairs if name in group.arrays)
            for each in hypotheses
        }
        if len(targets) > 1:  # another layer under another hypothesis
            moved[name] = places[name]
        elif len(found) > len(places[name]):
            layouts[name] = list(dict.fromkeys(found.values()))
    return moved, layouts


def _by_source(recipe: Recipe) -> dict[str, tuple[object, str]]:
    """Returns the conversions of each array, to compare, and as text."""
    found: dict[str, list[tuple[str, Piece]]] = {}
    for path, pieces in recipe.items():
        for piece in pieces:
            found.setdefault(piece.source, []).append((path, piece))
    return {
        name: (
            tuple((path, piece.key()) for path, piece in several),
            ", ".join(dict.fromkeys(piece.says for _, piece in several if piece.says)),
        )
        for name, several in found.items()
    }


def _hint_for_layouts(study: Study, layouts: Mapping[str, list[str]]) -> str:
    hints = []
    origins = sorted({hypothesis.origin.partition(",")[0] for hypothesis in study.possible})
    if len(origins) > 1:
        hints.append(" or ".join(f'origin="{one}"' for one in origins))
    if len({hypothesis.fused for hypothesis in study.possible}) > 1:
        hints.append('fused="blocks" or fused="by head"')
    flat = {
        layer.path: count
        for hypothesis in reversed(study.possible)
        for layer, group in hypothesis.outcome.pairs
        for recipe in reversed(hypothesis.recipes[layer, group])
        if (count := flattened_channels(recipe)) is not None
    }
    if flat:
        sizes = ", ".join(f'"{path}": {count}' for path, count in flat.items())
        hints.append(f'flatten={{{sizes}}}, the channels of the image that is flattened there, or '
                     'flatten="as it is"')  # fmt: skip
    if not flat or any(SAYS not in "".join(ways) for ways in layouts.values()):
        hints.append('axes={"path.in.the.module": (1, 0)}')
    return "; or ".join(hints)


def no_agreement_error(source: Source, tried: int, nearest: float, most: int) -> AdoptionError:
    """Returns the error if no possible way reproduces the outputs of the reference."""
    more = tried >= most
    return AdoptionError(
        "No assignment of these arrays reproduces the outputs of the reference.",
        where=source.where,
        got=f"{tried} ways tried; the nearest is off by {nearest:.3g} of the largest output"
        + (", and there are more" if more else ""),
        write=("rename= for some of them, to reduce the possible assignments" if more else
               "the module, eval mode and eps of norms of the reference, or the matching file"),
    )  # fmt: skip
