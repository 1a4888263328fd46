"""Layers of the module, each with the roles of its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.jax import is_key
from pax_export.core import DeclaredArray, Module, declared_at, is_at, named_modules
from pax_export.transforms import Scan, Vmap
from pax_export.weights._save_load import leaves_by_name
from pax_export.weights.adoption._name_parsing import (
    BIAS,
    MEAN,
    VAR,
    WEIGHT,
    Name,
    name_of,
    role_of,
)
from pax_export.weights.adoption._pieces import LeafPart, Shape


@dataclass(frozen=True)
class Leaf:
    """A leaf of the module, or a slice of one that is filled like a leaf."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    slot: LeafPart | None = None  # the slice; None for a whole leaf
    part: str = ""  # the name of the slice

    @property
    def says(self) -> str:
        """The leaf's path, or the name of a part of a leaf."""
        return self.part or self.path


class CellSizes(NamedTuple):
    """The sizes of a recurrent cell, and what it adds to its forget gate."""

    inputs: int
    hidden: int
    forget_bias: float


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with its leaves, or a leaf that is filled by itself."""

    path: str
    #: linear, conv, conv_transpose, kernel, embed, norm, batch_norm, lstm, gru, rnn or free
    kind: str
    leaves: dict[str, Leaf]  # role -> leaf
    name: Name
    also: frozenset[str] = frozenset()  # words of the names given to modules
    axes: str = "*IO"  # of its kernel: I inputs, O outputs, * the spatial ones
    groups: int = 1  # of a convolution
    cell: CellSizes | None = None
    alone: bool = False  # an array whose name gives no role
    heads: int | None = None  # heads of the enclosing attention, if known
    stack: Stack | None = None  # the layers that its leaves stack; `kind` is that of one layer

    @cached_property
    def meaning(self) -> frozenset[str]:
        """The words of its possible names."""
        return self.name.meaning | self.also

    @cached_property
    def signature(self) -> tuple:
        """Equal for layers that the same arrays would fit."""
        shapes = tuple((role, leaf.shape) for role, leaf in sorted(self.leaves.items()))
        sizes = () if self.stack is None else self.stack.sizes
        return (self.kind, shapes, self.axes, self.groups, self.cell, self.alone, self.heads, sizes)


def is_norm(layer: Layer) -> bool:
    """Whether a layer is a norm, of this library or called so."""
    free = layer.kind == "free" and all(len(leaf.shape) == 1 for leaf in layer.leaves.values())
    return layer.kind in ("norm", "batch_norm") or (free and "norm" in layer.name.words)


@dataclass
class Wanted:
    """The leaves of a module that a source fills or leaves."""

    layers: list[Layer] = field(default_factory=list)
    counters: dict[str, Leaf] = field(default_factory=dict)  # set to 1
    zeros: dict[str, Leaf] = field(default_factory=dict)  # set to zeros for the user

    def without(self, kept: set[str], zeros: set[str]) -> Wanted:
        """The leaves at other paths than the kept ones, those at some paths to be zeros."""
        layers = []
        for layer in self.layers:
            rest = {r: leaf for r, leaf in layer.leaves.items() if leaf.path not in kept | zeros}
            if rest:
                layers.append(layer if rest == layer.leaves else replace(layer, leaves=rest))
        every = [leaf for layer in self.layers for leaf in layer.leaves.values()]
        return Wanted(
            layers,
            {path: leaf for path, leaf in self.counters.items() if path not in kept},
            {leaf.path: leaf for leaf in every if leaf.path in zeros},
        )


#: Modules with their paths, the outermost first.
Around = list[tuple[str, Any]]

#: Roles by the words of declarations; other arrays have no role in files.
_ROLES = {
    "kernel": WEIGHT, "table": WEIGHT, "scale": WEIGHT, "bias": BIAS, "mean": MEAN, "variance": VAR,
}  # fmt: skip
#: Paths below a recurrent cell, and the roles of the leaves there.
_CELLS = {
    "lstm": {"fc.weight": WEIGHT, "fc.bias": BIAS},
    "rnn": {"fc.weight": WEIGHT, "fc.bias": BIAS},
    "gru": {
        "xh_zr_fc.weight": "zr_weight", "xh_zr_fc.bias": "zr_bias",
        "xh_h_fc.weight": "h_weight", "xh_h_fc.bias": "h_bias",
        "x_h_fc.weight": "x_weight", "x_h_fc.bias": "x_bias",
        "h_h_fc.weight": "s_weight", "h_h_fc.bias": "s_bias",
    },
}  # fmt: skip
SPATIAL = frozenset({"depth", "height", "width"})


def _kind_of(module: Module) -> str:
    """The kind of a layer, by the arrays that its class declares; empty if it has none."""
    cell = getattr(type(module), "recurrence", "")
    if cell:
        return cell
    found = declared_at(module)
    roles = {each.declared.role for each in found.values()}
    kernels = [each for each in found.values() if each.declared.role == "kernel"]
    if len(kernels) == 1:
        if kernels[0].declared.transposed:
            return "conv_transpose"
        *kernel, before, last = kernels[0].axes
        if (before, last) == ("in", "out") and SPATIAL.issuperset(kernel):
            return "conv" if kernel else "linear"
    if kernels:
        return "kernel"
    if "table" in roles:
        return "embed"
    return "batch_norm" if "mean" in roles else "norm" if "scale" in roles else ""


def find_layers(net: Module) -> Wanted:
    """Splits a module into layers; in another pytree every leaf is a layer."""
    leaves = {
        path: Leaf(path, tuple(leaf.shape), leaf.dtype)
        for path, leaf in leaves_by_name(net).items()
    }
    found, done = Wanted(), set()
    modules = named_modules(net)
    for path, module in modules:
        for layer in _layers_at(path, module, leaves, done, _modules_around(path, modules)):
            found.layers.append(layer)
            done |= {leaf.path for leaf in layer.leaves.values()}
        _set_apart(path, module, leaves, done, found)
    _free_leaves(leaves, done, found, modules)
    order = {path: number for number, path in enumerate(leaves)}
    found.layers.sort(key=lambda each: min(order[leaf.path] for leaf in each.leaves.values()))
    return found


def _modules_around(path: str, modules: list[tuple[str, Any]]) -> Around:
    return [(other, module) for other, module in modules if is_at(path, other)]


def _layers_at(
    path: str, module: Module, leaves: dict[str, Leaf], done: set[str], around: Around
) -> Iterator[Layer]:
    kind = _kind_of(module)
    below = _CELLS.get(kind) or {
        name: role
        for name, each in declared_at(module).items()
        if (role := _ROLES.get(each.declared.role)) is not None
    }
    together = {role: name for name, role in below.items()}
    if len(together) < len(below):  # several kernels: each by itself
        for name, each in declared_at(module).items():
            if each.declared.role == "kernel":
                yield from _layer_of(path, kind, {name: WEIGHT}, module, leaves, done, around)
        below = {name: role for name, role in below.items() if role != WEIGHT}
    if kind:
        yield from _layer_of(path, kind, below, module, leaves, done, around)


def _layer_of(
    path: str, kind: str, below: dict[str, str], module: Module, leaves: dict[str, Leaf],
    done: set[str], around: Around,
) -> Iterator[Layer]:  # fmt: skip
    """The layer of the arrays at these names, if it has any that is not taken."""
    declared = declared_at(module)
    roles: dict[str, Leaf] = {}
    more: set[int] = set()
    for name, role in below.items():
        leaf = leaves.get(f"{path}.{name}" if path else name)
        if leaf is not None and leaf.path not in done:
            roles[role] = leaf
            if role.endswith(WEIGHT):
                more.add(len(leaf.shape) - (len(declared[name].axes) if name in declared else 2))
    stack = None
    if more - {0}:
        count = max(more) if len(more) == 1 else 0
        shapes = [leaf.shape for leaf in roles.values()]
        stack = stack_at(path, around, shapes, count, leaves) if count > 0 else None
        if stack is None:
            return  # a replaced weight: its leaves are separate
    if roles:
        alone = next(iter(below)) if kind == "kernel" and set(roles) == {WEIGHT} else ""
        own = f"{path}.{alone}".strip(".") if len(declared) > 1 and alone else path
        yield Layer(
            own, kind, roles, name_of(own), _words_of_name(around),
            _kernel_axes(kind, [declared[name] for name in below if name in declared]),
            getattr(module, "feature_group_count", 1) if kind == "conv" else 1,
            _cell_of(module) if kind in _CELLS else None,
            heads=_count_heads(around), stack=stack,
        )  # fmt: skip


def as_pax_keeps_them(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the layers with the arrays of our own files: a GRU has those of dense layers."""
    found = []
    for layer in layers:
        if layer.kind != "gru":
            found.append(layer)
            continue
        for part, below in (("zr", "xh_zr"), ("h", "xh_h"), ("x", "x_h"), ("s", "h_h")):
            leaves = {
                role: layer.leaves[f"{part}_{role}"]
                for role in (WEIGHT, BIAS)
                if f"{part}_{role}" in layer.leaves
            }
            path = f"{layer.path}.{below}_fc".lstrip(".")
            if leaves:
                found.append(replace(layer, path=path, kind="linear", leaves=leaves,
                                     name=name_of(path), cell=None))  # fmt: skip
    return found


def _words_of_name(around: Around) -> frozenset[str]:
    """The words of the names that the module itself was given."""
    name = getattr(around[-1][1], "name", None) if around else None
    return name_of(name).meaning if isinstance(name, str) else frozenset()


def _kernel_axes(kind: str, arrays: list[DeclaredArray]) -> str:
    kernels = [each for each in arrays if each.declared.role == "kernel"]
    if kind != "kernel" or not kernels:
        return "*OI" if kind == "conv_transpose" else "*IO"
    outputs = kernels[0].declared.outputs
    return "".join(
        ["O" if axis in outputs else "*" if axis in SPATIAL else "I" for axis in kernels[0].axes]
    )


def _cell_of(module: Any) -> CellSizes:
    return CellSizes(module.input_dim, module.hidden_dim, getattr(module, "forget_gate_bias", 0.0))


def _count_heads(around: Around) -> int | None:
    for _, module in reversed(around):
        for attribute in ("num_heads", "heads", "n_heads", "n_head"):
            count = getattr(module, attribute, None)
            if isinstance(count, int):
                return count
    return None


def _set_apart(
    path: str, module: Module, leaves: dict[str, Leaf], done: set[str], found: Wanted
) -> None:
    """Sets random keys and counters apart, which no file of another framework has."""
    for name, each in declared_at(module).items():
        path_of_array, role = f"{path}.{name}" if path else name, each.declared.role
        if role in ("key", "counter") and path_of_array in leaves and path_of_array not in done:
            done.add(path_of_array)
            if role == "counter":
                found.counters[path_of_array] = leaves[path_of_array]


def _free_leaves(
    leaves: dict[str, Leaf], done: set[str], found: Wanted, modules: list[tuple[str, Any]]
) -> None:
    """Arrays of classes that are not ours: weight and bias together, others each alone."""

    def add(path: str, roles: dict[str, Leaf], around: Around, **more: Any) -> None:
        stack = stack_at(path, around, [leaf.shape for leaf in roles.values()], None, leaves)
        first = next(iter(roles.values())).path
        found.layers.append(
            Layer(path or first, "free", roles, name_of(path), heads=_count_heads(around),
                  stack=stack, **more)
        )  # fmt: skip

    together: dict[str, dict[str, Leaf]] = {}
    for path, leaf in leaves.items():
        if path in done or is_key(leaf.dtype):
            continue
        parent, _, attribute = path.rpartition(".")
        role = role_of(attribute)
        if role is None or role in together.get(parent, {}):
            add(path, {WEIGHT: leaf}, _modules_around(parent, modules), alone=True)
        else:
            together.setdefault(parent, {})[role] = leaf
    for parent, roles in together.items():
        around = _modules_around(parent, modules)
        is_module = around and isinstance(around[-1][1], Module)
        add(parent, roles, around, also=_words_of_name(around) if is_module else frozenset())


# --- stacked layers: the modules whose leaves have an axis of layers ------------------
# `Scan` and `Vmap` are known by class. Others (`stack_layers`, `jax.vmap` of a constructor) are
# recognized by shapes, and several positions in the path may have the layer's number.


@dataclass(eq=False)
class Stack:
    """The leading axes of leaves that stack several layers."""

    sizes: Shape  # the number of layers along each axis
    path: str  # of the layer
    around: Sequence[str]  # the paths of the modules around it, the outermost first
    leaves: Mapping[str, Any]  # all leaves of the net by path
    known: Sequence[str] = ()  # the paths of stacking modules, if known by class

    @cached_property
    def roots(self) -> tuple[tuple[str, ...], ...]:
        """Every choice of paths that the layers' numbers may follow, one path for each axis.

        Without `known`, it is the outermost module whose leaves are all stacked, and ones below.
        """
        if self.known:
            return (tuple(self.known),)
        found: dict[int, str] = {}
        for at in [*self.around, self.path]:
            count = len(name_of(at).numbers)
            if count not in found and self._holds(at):
                found[count] = at
        return tuple([(root,) * len(self.sizes) for root in (found.values() or (self.path,))])

    def _holds(self, at: str) -> bool:
        """Whether everything below a path is stacked."""
        return all(
            tuple(leaf.shape[: len(self.sizes)]) == self.sizes
            for path, leaf in self.leaves.items()
            if is_at(path, at)
        )


def stack_at(
    path: str,
    around: Sequence[tuple[str, Any]],
    shapes: Sequence[Shape],
    count: int | None,
    leaves: Mapping[str, Any],
) -> Stack | None:
    """The stack of a layer, or None; `count` is its number of axes, or None if unknown."""
    lifted = [(at, module) for at, module in around if isinstance(module, (Scan, Vmap))]
    axes = [axis for _, m in lifted for axis in dict(m.options)["state_axes"].values()]
    if any(axis not in (0, None) for axis in axes):
        return None
    wanted = count if count is not None else len(lifted) or 1
    sizes = {shape[:wanted] for shape in shapes}
    if len(sizes) != 1 or len(size := next(iter(sizes))) != wanted:
        return None
    known = [f"{at}.{module._attribute}".lstrip(".") for at, module in lifted]
    known = known if len(lifted) == wanted else []
    return Stack(size, path, [at for at, _ in around], leaves, known)


def _deepest_first(places: Sequence[int]) -> list[int]:
    return sorted(range(len(places)), key=lambda axis: (places[axis], axis), reverse=True)


def insert_numbers(path: str, roots: Sequence[str], numbers: Sequence[int]) -> str:
    """A path with the numbers of layers behind their roots.

    Example:
        >>> insert_numbers("layers.scan_module.fc", ["layers.scan_module"], [3])
        'layers.scan_module.3.fc'
        >>> insert_numbers("fc", ["", "fc"], [1, 2])
        '1.fc.2'
    """
    steps = path.split(".") if path else []
    places = [len(root.split(".")) if root else 0 for root in roots]
    for axis in _deepest_first(places):
        steps.insert(places[axis], str(numbers[axis]))
    return ".".join(steps)


def _insert_numbers_in_name(name: Name, roots: Sequence[str], numbers: Sequence[int]) -> Name:
    """The name of a path with these numbers in it."""
    words, found = list(name.words), list(name.numbers)
    before = [name_of(root) for root in roots]
    for axis in _deepest_first([len(each.words) for each in before]):
        words.insert(len(before[axis].words), "#")
        found.insert(len(before[axis].numbers), numbers[axis])
    return Name(tuple(words), tuple(found))


def unfold_stack(layer: Layer, way: int = 0) -> list[Layer]:
    """The stacked layers; `way` indexes `Stack.roots`."""
    stack = layer.stack
    assert stack is not None
    roots = stack.roots[min(way, len(stack.roots) - 1)]
    says = f"{' x '.join(map(str, stack.sizes))} stacked by their numbers"
    found = []
    for numbers in np.ndindex(*stack.sizes):
        index = tuple([slice(number, number + 1) for number in numbers])
        leaves = {
            role: replace(
                leaf,
                shape=leaf.shape[len(index) :],
                slot=LeafPart(
                    leaf.shape, index + (slice(None),) * (len(leaf.shape) - len(index)), (), says
                ),
                part=insert_numbers(leaf.path, roots, numbers),
            )
            for role, leaf in layer.leaves.items()
        }
        path = insert_numbers(layer.path, roots, numbers)
        name = _insert_numbers_in_name(layer.name, roots, numbers)
        found.append(replace(layer, path=path, name=name, leaves=leaves, stack=None))
    return found
