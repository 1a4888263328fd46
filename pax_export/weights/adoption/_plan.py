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
from pax_export.weights.adoption._assign import (
    Component,
    Outcome,
    Pairs,
    assign_groups,
    find_ways,
    without_strangers,
)
from pax_export.weights.adoption._flatten import Flatten, with_flattened
from pax_export.weights.adoption._fused import (
    PARTS,
    FusedOrder,
    find_arrangements,
    fused_orders,
    is_fused,
    split_fused_group,
)
from pax_export.weights.adoption._groups import Group, group_arrays, possible_origins
from pax_export.weights.adoption._layers import (
    Layer,
    Wanted,
    as_pax_keeps_them,
    find_layers,
    unfold_stack,
)
from pax_export.weights.adoption._layouts import find_recipes
from pax_export.weights.adoption._name_parsing import Name
from pax_export.weights.adoption._options import Options
from pax_export.weights.adoption._parametrized import file_names, source_versions
from pax_export.weights.adoption._pieces import Recipe, join_recipes, recipe_key
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
    recipes: dict[tuple[Layer, Group], list[Recipe]]
    ways_of: Callable[[Layer, Group], list[Recipe]]

    @property
    def decided(self) -> bool:
        """Whether nothing is ambiguous."""
        return not self.outcome.open and all(
            len(self.recipes[pair]) == 1 for pair in self.outcome.pairs
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

    source: Source  # the version of it that was studied
    wanted: Wanted
    ignored: list[str]  # arrays that the user excludes
    constants: list[str]  # of a graph, or optimizer state
    counters: list[str] = field(default_factory=list)  # arrays that count steps
    tied: dict[str, str] = field(default_factory=dict)  # arrays that repeat others
    possible: list[Hypothesis] = field(default_factory=list)  # they leave no array over
    impossible: list[Hypothesis] = field(default_factory=list)


def best_study(net: PyTree, origin: object, source: Source, options: Options) -> Study:
    """Returns the study of the first version of a source that leaves a possible way, if any."""
    studies: list[Study] = []
    for version in source_versions(source):
        studies.append(_study_source(net, origin, version, options))
        if studies[-1].possible:
            return studies[-1]
    return studies[0]


def _study_source(net: PyTree, origin_of_file: object, source: Source, options: Options) -> Study:
    """Tries every hypothesis about a source."""
    wanted = find_layers(net)
    paths = _leaf_paths(wanted)
    kept = options.match("keep", options.keep, paths)
    wanted = wanted.without(kept, options.match("zeros", options.zeros, paths) - kept)
    names = _without_ignored(source, options)
    study = Study(source, wanted, sorted(source.entries.keys() - names), [])
    hints = options.renamed(source, _paths_to_name(wanted, options))
    study.constants = [name for name in _find_constants(wanted, source, names) if name not in hints]
    names = [name for name in names if name not in set(study.constants)]
    axes = options.by_path("axes", options.axes, _leaf_paths(wanted))
    flatten = options.flatten
    if isinstance(flatten, Mapping):
        flatten = options.by_path("flatten", flatten, [each.path for each in wanted.layers])
    origins = possible_origins(source, options.origin, isinstance(origin_of_file, Node))
    tied = {name: first for name, first in source.tied.items() if {name, first} <= {*names}}
    # Naming the target of a weight does not name that of its bias.
    by_leaf = not {within for _, within in hints.values()}.isdisjoint(_leaf_paths(wanted))
    for without_tied, alone in itertools.product([False, True] if tied else [False], [False, True]):
        used = [name for name in names if not (without_tied and name in tied)]
        hints_here = hints if alone else _whole_layers(hints, wanted)
        groups, study.counters = group_arrays(source, used, hints_here, alone)
        if alone and not by_leaf and all(group.sure for group in groups):
            continue
        for origin in origins:
            layers = as_pax_keeps_them(wanted.layers) if origin == "pax" else wanted.layers
            layers = _each_alone(layers) if alone else layers
            for order in fused_orders(layers, groups, options.fused):
                conventions = _Conventions(layers, groups, origin, order, axes)
                for each in conventions.hypotheses(flatten):
                    (study.possible if each.outcome.possible else study.impossible).append(each)
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


def _without_ignored(source: Source, options: Options) -> list[str]:
    """The arrays that may be weights of the net."""
    known = {each: name for name in source.entries for each in (*file_names(source, name), name)}
    ignored = {known[name] for name in options.match("ignore", options.ignore, known, "source")}
    return [name for name in source.entries if name not in ignored and not is_bookkeeping(name)]


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


def _paths_to_name(found: Wanted, options: Options) -> list[str]:
    """Returns the paths that a user may name: leaves, and the layers that contain them."""
    paths = dict.fromkeys(_leaf_paths(found))
    for layer in found.layers if options.rename else ():
        for way in range(len(layer.stack.roots) if layer.stack else 0):
            paths |= dict.fromkeys(
                leaf.says for one in unfold_stack(layer, way) for leaf in one.leaves.values()
            )
        if layer.kind in ("linear", "free"):
            paths |= dict.fromkeys(f"{layer.path}.{word}" for word in PARTS)
    return list(paths)


def _each_alone(layers: Sequence[Layer]) -> list[Layer]:
    """Returns layers of one leaf each, for a file whose names do not show layers."""
    found = []
    for layer in layers:
        words, numbers = layer.name.words, layer.name.numbers
        found += [layer] if layer.cell is not None else [
            replace(layer, path=leaf.path, leaves={role: leaf}, name=Name((*words, role), numbers))
            for role, leaf in layer.leaves.items()
        ]  # fmt: skip
    return found


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
        every = [*self.groups, *[part for each in fused for part in self._parts(each, self.layers)]]
        for alike in find_arrangements(self.layers, every, self.fits, self.order):
            found = [self._hypothesis(arranged, flatten) for arranged in alike]
            # The same parts with their numbers in another place: those count that decide something.
            decided = [each for each in found if each.outcome.possible and not each.outcome.open]
            yield from decided or found

    def _parts(self, group: Group, layers: Sequence[Layer]) -> list[Group]:
        return split_fused_group(group, layers, self.origin, self.order)

    def _hypothesis(self, layers: Sequence[Layer], flatten: Flatten) -> Hypothesis:
        groups: list[Group] = []
        for group in self.groups:
            whole = not is_fused(group.raw) or any(self.fits(layer, group) for layer in layers)
            groups += [group] if whole else self._parts(group, layers) or [group]
        graph = self.origin in _GRAPHS
        fits = self.fits if graph else without_strangers(layers, groups, self.fits)
        outcome = assign_groups(layers, groups, fits)
        pairs = [*outcome.pairs]
        for component in outcome.open:
            both = itertools.product(component.layers, component.groups)
            pairs += [pair for pair in both if self.fits(*pair)]
        recipes = {pair: self.ways_of(*pair) for pair in pairs}
        recipes = with_flattened(recipes, layers, self.origin, flatten)
        return Hypothesis(self.origin, self.order.says, outcome, recipes, self.ways_of)


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
            several = [hypothesis.recipes.get(p) or hypothesis.ways_of(*p) for p in pairs]
            why = {layer: says for layer, says in outcome.why.items() if layer not in done}
            for recipes in itertools.product(*several):
                yield Choice(join_recipes(recipes), pairs, why, hypothesis.origin)


def _all_ways(components: Sequence[Component]) -> Iterator[Pairs]:
    if not components:
        yield []
    for way in find_ways(components[0]) if components else ():
        for others in _all_ways(components[1:]):
            yield [*way, *others]
