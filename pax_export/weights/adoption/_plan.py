"""The plan of an adoption: evaluates every hypothesis about the source."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pax_export._foundations.types import PyTree
from pax_export.core import Node, is_at
from pax_export.weights._metadata import is_inexact
from pax_export.weights.adoption._assign import Component, Outcome, Pairs, assign_groups, find_ways
from pax_export.weights.adoption._flatten import Flatten, with_flattened
from pax_export.weights.adoption._groups import (
    Group,
    group_arrays,
    is_fused,
    one_of_three,
    parts_of_fused,
    possible_origins,
    says_order,
)
from pax_export.weights.adoption._layers import Layer, Wanted, as_pax_keeps_them, find_layers
from pax_export.weights.adoption._layouts import Recipe, find_recipes, join_recipes, recipe_key
from pax_export.weights.adoption._missing import without_strangers
from pax_export.weights.adoption._name_parsing import Name
from pax_export.weights.adoption._options import Options
from pax_export.weights.adoption._parametrized import file_names, source_versions
from pax_export.weights.adoption._split_fused import (
    PARTS,
    FusedOrder,
    find_arrangements,
    may_be_fused,
    sizes_of_module,
    unfold_stack,
)
from pax_export.weights.sources import Entry, Source

#: Arrays that are not parameters, in files of torch.
_BOOKKEEPING = ("position_ids",)
#: What torch's optimizers keep for the parameter of a number, in any checkpoint.
_OPTIMIZER = re.compile(
    r"(^|\.)state\.\d+\.(momentum_buffer|exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|square_avg"
    r"|grad_avg|acc_delta|sum|step|step_size|prev|mu|eta|ax|mu_product)$"
)
#: Source types that contain a graph, with all constants of its computation.
_GRAPHS = ("onnx", "tflite")
#: Notes of readers for arrays that belong to no net.
_NO_NET = ("optimizer", "metric")


@dataclass
class Hypothesis:
    """The conventions of a framework, and the assignment that follows from them."""

    origin: str
    fused: str
    outcome: Outcome
    options: dict[tuple[Layer, Group], list[Recipe]]
    ways_of: Callable[[Layer, Group], list[Recipe]]

    @property
    def decided(self) -> bool:
        """Whether nothing is ambiguous."""
        return not self.outcome.open and all(
            len(self.options[pair]) == 1 for pair in self.outcome.pairs
        )


@dataclass
class Choice:
    """One whole way to fill a module."""

    recipe: Recipe
    pairs: Pairs
    why: dict[Layer, str]
    origin: str

    def key(self) -> tuple:
        """A key that is equal for ways with equal results."""
        return recipe_key(self.recipe)


@dataclass
class Study:
    """The hypotheses about a module and a source."""

    wanted: Wanted
    ignored: list[str]  # arrays that the user excludes
    counters: list[str]  # arrays that count steps
    tied: dict[str, str]  # arrays that repeat others
    constants: list[str] = field(default_factory=list)  # of a graph, or optimizer state
    possible: list[Hypothesis] = field(default_factory=list)  # they leave no array over
    impossible: list[Hypothesis] = field(default_factory=list)


def best_study(
    net: PyTree, origin: object, source: Source, options: Options
) -> tuple[Study, Source]:
    """Returns the study of a source, in the version that leaves a possible way if any does."""
    found = []
    for version in source_versions(source):
        study = _study_source(net, origin, version, options)
        if study.possible:
            return study, version
        found.append((study, version))
    return found[0]


def _study_source(net: PyTree, origin_of_file: object, source: Source, options: Options) -> Study:
    """Tries every hypothesis about a source."""
    study, names = _begin_study(net, source, options)
    hints = options.renamed(source, _places_to_name(study.wanted, options))
    study.constants = [
        name for name in _find_constants(study.wanted, source, names) if name not in hints
    ]
    names = [name for name in names if name not in set(study.constants)]
    axes = options.by_path("axes", options.axes, _leaf_paths(study.wanted))
    flatten = options.flatten
    if isinstance(flatten, Mapping):
        flatten = options.by_path("flatten", flatten, [each.path for each in study.wanted.layers])
    found = possible_origins(source, options.origin, isinstance(origin_of_file, Node))
    tied = {name: first for name, first in source.tied.items() if name in names and first in names}
    # Naming the target of a weight does not name that of its bias.
    by_leaf = not {within for _, within in hints.values()}.isdisjoint(_leaf_paths(study.wanted))
    for without_tied, alone in itertools.product(
        (False, True) if tied else (False,), (False, True)
    ):
        used = [name for name in names if not (without_tied and name in tied)]
        hints_here = hints if alone else _whole_layers(hints, study.wanted)
        groups, counters = group_arrays(source, used, hints_here, alone)
        if alone and not by_leaf and all(group.sure for group in groups):
            continue
        for origin in found:
            layers = study.wanted.layers
            layers = as_pax_keeps_them(layers) if origin == "pax" else layers
            layers = _each_alone(layers) if alone else layers
            for order in _fused_orders(layers, groups, options):
                conventions = _Conventions(layers, groups, origin, order, axes)
                tried = list(conventions.hypotheses(flatten))
                study.possible += [each for each in tried if each.outcome.possible]
                study.impossible += [each for each in tried if not each.outcome.possible]
        study.counters = counters
        if study.possible:
            study.tied = tied if without_tied else {}
            break
    return study


def _whole_layers(
    hints: Mapping[str, tuple[str, str]], found: Wanted
) -> dict[str, tuple[str, str]]:
    """Applies what is given for every leaf of a layer to the layer."""
    within = {target for _, target in hints.values()}
    whole = {
        leaf.path: layer.path
        for layer in found.layers
        if layer.kind in ("linear", "conv", "conv_transpose", "norm")
        and layer.path
        and within.issuperset(leaf.path for leaf in layer.leaves.values())
        for leaf in layer.leaves.values()
    }
    return {
        name: (known_as, whole.get(target, target)) for name, (known_as, target) in hints.items()
    }


def is_bookkeeping(name: str) -> bool:
    """Whether an array is no weight: positions in order, or the state of an optimizer."""
    return name.rpartition(".")[2] in _BOOKKEEPING or _OPTIMIZER.search(name) is not None


def _begin_study(net: PyTree, source: Source, options: Options) -> tuple[Study, list[str]]:
    found = find_layers(net)
    paths = _leaf_paths(found)
    unchanged = options.match("keep", options.keep, paths)
    zeros = options.match("zeros", options.zeros, paths) - unchanged
    layers = []
    for layer in found.layers:
        found.zeros |= {leaf.path: leaf for leaf in layer.leaves.values() if leaf.path in zeros}
        rest = {r: leaf for r, leaf in layer.leaves.items() if leaf.path not in unchanged | zeros}
        if rest:
            layers.append(layer if rest == layer.leaves else replace(layer, leaves=rest))
    found.counters = {path: leaf for path, leaf in found.counters.items() if path not in unchanged}
    found.layers = layers
    known = {each: name for name in source.entries for each in (*file_names(source, name), name)}
    ignored = {known[name] for name in options.match("ignore", options.ignore, known, "source")}
    names = [name for name in source.entries if name not in ignored]
    passed = [name for name in names if is_bookkeeping(name)]
    study = Study(found, sorted([*ignored, *passed]), [], {})
    return study, [name for name in names if name not in passed]


def _find_constants(found: Wanted, source: Source, names: Sequence[str]) -> list[str]:
    """Arrays of graph constants and optimizer state: integers and scalars that fit no leaf."""
    leaves = [leaf for layer in found.layers for leaf in layer.leaves.values()]
    whole = any(not is_inexact(leaf.dtype) for leaf in leaves)
    ranks = {len(leaf.shape) for leaf in leaves if math.prod(leaf.shape) == 1}
    graph = source.kind in _GRAPHS

    def is_constant(entry: Entry) -> bool:
        size = math.prod(entry.shape)
        if size == 0 or entry.note in _NO_NET:
            return True
        if not graph:
            return False
        if not is_inexact(entry.dtype):
            return not whole
        return size == 1 and (not ranks or (entry.shape == () and 0 not in ranks))

    return [name for name in names if is_constant(source.entries[name])]


def _leaf_paths(found: Wanted) -> list[str]:
    paths = [leaf.path for layer in found.layers for leaf in layer.leaves.values()]
    return [*paths, *found.counters]


def _places_to_name(found: Wanted, options: Options) -> list[str]:
    """Returns the paths that a user may name: leaves, and the layers that contain them."""
    places = dict.fromkeys(_leaf_paths(found))
    for layer in found.layers if options.rename else ():
        for way in range(len(layer.stack.roots) if layer.stack else 0):
            places |= dict.fromkeys(
                leaf.says for one in unfold_stack(layer, way) for leaf in one.leaves.values()
            )
        if layer.kind in ("linear", "free"):
            places |= dict.fromkeys(f"{layer.path}.{word}" for word in PARTS)
    return list(places)


def _each_alone(layers: Sequence[Layer]) -> list[Layer]:
    """Returns layers of one leaf each, for a file whose names do not show layers."""
    return [
        layer
        if layer.kind in ("lstm", "gru", "rnn")
        else replace(
            layer, path=leaf.path, leaves={role: leaf},
            name=Name((*layer.name.words, role), layer.name.numbers),
        )
        for layer in layers
        for role, leaf in layer.leaves.items()
    ]  # fmt: skip


def _fused_orders(
    layers: Sequence[Layer], groups: Sequence[Group], options: Options
) -> tuple[FusedOrder, ...]:
    if options.fused is not None:
        return (FusedOrder(options.fused, chosen=True),)
    blocks, heads = FusedOrder("blocks", chosen=False), FusedOrder("by head", chosen=False)
    unsure = any(is_fused(group.raw) and not says_order(group.raw) for group in groups) or any(
        may_be_fused(layer, blocks) for layer in layers
    )
    return (blocks, heads) if unsure else (blocks,)


@dataclass(eq=False)
class _Conventions:
    """The layers and groups under the conventions of a framework."""

    layers: Sequence[Layer]
    groups: Sequence[Group]
    origin: str
    order: FusedOrder
    axes: Mapping[str, tuple[int, ...]]
    known: dict[Any, bool] = field(default_factory=dict)  # what `fits` has found

    def ways_of(self, layer: Layer, group: Group) -> list[Recipe]:
        """All recipes by which a group can fill a layer."""
        return find_recipes(layer, group, self.origin, self.axes)

    def fits(self, layer: Layer, group: Group) -> bool:
        """Whether there is such a recipe, and names and options allow it."""
        if group.within is not None and not _is_within(layer, group.within):
            return False
        if not group.may_fill(layer):
            return False
        hints = tuple(self.axes.get(leaf.path) for leaf in layer.leaves.values())
        key = (layer.signature, group.signature, group.raw[-1:], hints)
        if key not in self.known:
            self.known[key] = bool(self.ways_of(layer, group))
        return self.known[key]

    def hypotheses(self, flatten: Flatten) -> Iterator[Hypothesis]:
        """The assignments, one for each arrangement of stacked and fused layers."""
        fused = [group for group in self.groups if is_fused(group.raw)]
        parts = [part for group in fused for part in self._split_group(group, self.layers)]
        every = [*self.groups, *parts]
        for alike in find_arrangements(self.layers, every, self.fits, self.order):
            found = [self._hypothesis(arranged, flatten) for arranged in alike]
            # The same parts with their numbers in another place: those count that decide something.
            decided = [each for each in found if each.outcome.possible and not each.outcome.open]
            yield from decided or found

    def _hypothesis(self, layers: Sequence[Layer], flatten: Flatten) -> Hypothesis:
        groups: list[Group] = []
        for group in self.groups:
            whole = not is_fused(group.raw) or any(self.fits(layer, group) for layer in layers)
            groups += [group] if whole else self._split_group(group, layers) or [group]
        graph = self.origin in _GRAPHS
        fits = self.fits if graph else without_strangers(layers, groups, self.fits)
        outcome = assign_groups(layers, groups, fits)
        pairs = [*outcome.pairs]
        for component in outcome.open:
            both = itertools.product(component.layers, component.groups)
            pairs += [pair for pair in both if self.fits(*pair)]
        options = {pair: self.ways_of(*pair) for pair in pairs}
        options = with_flattened(options, layers, self.origin, flatten)
        return Hypothesis(self.origin, self.order.says, outcome, options, self.ways_of)

    def _split_group(self, group: Group, layers: Sequence[Layer]) -> list[Group]:
        """The queries, keys and values of a group that is all in one."""
        heads = {layer.heads for layer in layers if layer.kind in ("linear", "free")} - {None}
        count = next(iter(heads)) if len(heads) == 1 else None
        sizes = sizes_of_module(layers, group)
        if says_order(group.raw):
            return parts_of_fused(group, self.origin, "blocks", None, sizes)
        if not self.order.chosen:  # the result of the other order is required
            uneven = [three for three in sizes.values() if len(set(three)) > 1]
            if count is None or not all(one_of_three(each, 0, "by head", count) for each in uneven):
                return []
        return parts_of_fused(group, self.origin, self.order.says, count, sizes)


def _is_within(layer: Layer, path: str) -> bool:
    if is_at(layer.path, path):
        return True
    return all(is_at(leaf.path, path) or is_at(leaf.says, path) for leaf in layer.leaves.values())


def find_choices(hypotheses: Sequence[Hypothesis], reopened: bool = False) -> Iterator[Choice]:
    """Yields complete assignments, likely ones first; with `reopened`, norms may swap."""
    for hypothesis in hypotheses:
        outcome = hypothesis.outcome
        again = outcome.by_order if reopened else []
        done = {layer for component in again for layer in component.layers}
        decided = [pair for pair in outcome.pairs if pair[0] not in done]
        for found in _all_ways([*outcome.open, *again]):
            pairs = [*decided, *found]
            several = [hypothesis.options.get(p) or hypothesis.ways_of(*p) for p in pairs]
            why = {layer: says for layer, says in outcome.why.items() if layer not in done}
            for recipes in itertools.product(*several):
                yield Choice(join_recipes(recipes), pairs, why, hypothesis.origin)


def _all_ways(components: Sequence[Component]) -> Iterator[Pairs]:
    if not components:
        yield []
    for way in find_ways(components[0]) if components else ():
        for others in _all_ways(components[1:]):
            yield [*way, *others]
