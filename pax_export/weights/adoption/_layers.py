"""Layers of the module, each with the roles of its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pax_export.core import Module, is_at, named_modules
from pax_export.nn import (
    EMA,
    GRU,
    LSTM,
    BatchNorm1D,
    BatchNorm2D,
    Conv1DTranspose,
    Conv2DTranspose,
    Convolution,
    Dropout,
    Embed,
    GroupNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    RngSeq,
    VanillaRNN,
)
from pax_export.weights._dtypes import is_key
from pax_export.weights._leaves import leaves_by_name
from pax_export.weights.adoption._array_transforms import LeafPart
from pax_export.weights.adoption._name_parsing import (
    BIAS,
    MEAN,
    VAR,
    WEIGHT,
    Name,
    name_of,
    role_of,
)
from pax_export.weights.adoption._stacks import Stack, stack_at


@dataclass(frozen=True)
class Leaf:
    """A leaf of the module, or a slice of one that is filled like a leaf."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    place: LeafPart | None = None  # the slice; None for a whole leaf
    part: str = ""  # the name of the slice

    @property
    def says(self) -> str:
        """The leaf's path, or the name of a part of a leaf."""
        return self.part or self.path


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with its leaves, or a leaf that is filled by itself."""

    path: str
    kind: str  # linear, conv, conv_transpose, embed, norm, batch_norm, lstm, gru, rnn or free
    leaves: dict[str, Leaf]  # role -> leaf
    name: Name
    also: frozenset[str] = frozenset()  # words of the names given to modules
    options: tuple = ()  # other options of its recipes
    heads: int | None = None  # heads of the enclosing attention, if known
    stack: Stack | None = None  # the layers that its leaves stack; `kind` is that of one layer

    @cached_property
    def said(self) -> frozenset[str]:
        """The words of its possible names."""
        return self.name.said | self.also

    @cached_property
    def signature(self) -> tuple:
        """Equal for layers that the same arrays would fit."""
        shapes = tuple((role, leaf.shape) for role, leaf in sorted(self.leaves.items()))
        sizes = () if self.stack is None else self.stack.sizes
        return (self.kind, shapes, self.options, self.heads, sizes)


@dataclass
class Wanted:
    """The leaves of a module that a source fills or leaves."""

    layers: list[Layer] = field(default_factory=list)
    counters: dict[str, Leaf] = field(default_factory=dict)  # set to 1
    zeros: dict[str, Leaf] = field(default_factory=dict)  # set to zeros for the user


#: Modules with their paths, the outermost first.
Around = list[tuple[str, Any]]

_KINDS = (
    (LSTM, "lstm"), (GRU, "gru"), (VanillaRNN, "rnn"), ((BatchNorm1D, BatchNorm2D), "batch_norm"),
    (Linear, "linear"), (Embed, "embed"), ((Conv1DTranspose, Conv2DTranspose), "conv_transpose"),
    (Convolution, "conv"), ((LayerNorm, GroupNorm, RMSNorm), "norm"),
)  # fmt: skip

# Paths below each kind of layer, and the roles of the leaves there.
_LINEAR = {"weight": WEIGHT, "bias": BIAS}
_NORM = {"scale": WEIGHT, "offset": BIAS}
_ROLES = {
    "lstm": {"fc.weight": WEIGHT, "fc.bias": BIAS},
    "rnn": {"fc.weight": WEIGHT, "fc.bias": BIAS},
    "gru": {
        "xh_zr_fc.weight": "zr_weight", "xh_zr_fc.bias": "zr_bias",
        "xh_h_fc.weight": "h_weight", "xh_h_fc.bias": "h_bias",
    },
    "batch_norm": {**_NORM, "ema_mean.averages": MEAN, "ema_var.averages": VAR},
    "linear": _LINEAR, "embed": {"weight": WEIGHT}, "conv": _LINEAR, "conv_transpose": _LINEAR,
    "norm": _NORM,
}  # fmt: skip


def _rank_of_weight(kind: str, module: Module) -> int:
    """Returns the number of axes of the weight of such a layer, without stacking."""
    if kind in ("conv", "conv_transpose"):
        return len(module.kernel_shape) + 2
    if kind == "batch_norm":
        return len(module.data_format)
    return 1 if kind == "norm" else 2


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
    order = {path: place for place, path in enumerate(leaves)}
    found.layers.sort(key=lambda each: min(order[leaf.path] for leaf in each.leaves.values()))
    return found


def _modules_around(path: str, modules: list[tuple[str, Any]]) -> Around:
    """The modules around a path and at it with their paths, the outermost first."""
    return [(other, module) for other, module in modules if is_at(path, other)]


def _layers_at(
    path: str, module: Module, leaves: dict[str, Leaf], done: set[str], around: Around
) -> Iterator[Layer]:
    kind = next((kind for cls, kind in _KINDS if isinstance(module, cls)), None)
    if kind is None:
        return
    roles: dict[str, Leaf] = {}
    for below, role in _ROLES[kind].items():
        leaf = leaves.get(f"{path}.{below}" if path else below)
        if leaf is not None and leaf.path not in done:
            roles[role] = leaf
    weights = [leaf for role, leaf in roles.items() if role.endswith(WEIGHT)]
    more = {len(leaf.shape) - _rank_of_weight(kind, module) for leaf in weights} or {0}
    stack = None
    if more != {0}:
        count = max(more) if len(more) == 1 else 0
        shapes = [leaf.shape for leaf in roles.values()]
        stack = stack_at(path, around, shapes, count, leaves) if count > 0 else None
        if stack is None:
            return  # a replaced weight: its leaves are separate
    if roles:
        options = _layer_options(kind, module)
        yield Layer(path, kind, roles, name_of(path), _given_words(around), options,
                    _count_heads(around), stack)  # fmt: skip


def as_pax_keeps_them(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the layers with the arrays of our own files: a GRU has those of two dense layers."""
    found = []
    for layer in layers:
        if layer.kind != "gru":
            found.append(layer)
            continue
        for part in ("zr", "h"):
            leaves = {
                role: layer.leaves[f"{part}_{role}"]
                for role in (WEIGHT, BIAS)
                if f"{part}_{role}" in layer.leaves
            }
            path = f"{layer.path}.xh_{part}_fc".lstrip(".")
            if leaves:
                found.append(replace(layer, path=path, kind="linear", leaves=leaves,
                                     name=name_of(path), options=()))  # fmt: skip
    return found


def _given_words(around: Around) -> frozenset[str]:
    """The words of the names that the module itself was given."""
    given = getattr(around[-1][1], "name", None) if around else None
    return name_of(given).said if isinstance(given, str) else frozenset()


def _layer_options(kind: str, module: Module) -> tuple:
    if kind in ("lstm", "gru", "rnn"):
        return (module.input_dim, module.hidden_dim, getattr(module, "forget_gate_bias", 0.0))
    if kind == "conv":
        return (getattr(module, "feature_group_count", 1),)
    return ()


def _count_heads(around: Around) -> int | None:
    """Returns the number of heads of the enclosing attention, if it has that attribute."""
    for _, module in reversed(around):
        for attribute in ("num_heads", "heads", "n_heads", "n_head"):
            count = getattr(module, attribute, None)
            if isinstance(count, int):
                return count
    return None


#: Leaves that no file of another framework has: random keys, and whether an average has begun.
_APART = ((RngSeq, "_rng_key"), (Dropout, "rng_key"), (EMA, "debias"))


def _set_apart(
    path: str, module: Module, leaves: dict[str, Leaf], done: set[str], found: Wanted
) -> None:
    for cls, attribute in _APART:
        place = f"{path}.{attribute}" if path else attribute
        if isinstance(module, cls) and place in leaves and place not in done:
            done.add(place)
            found.counters |= {place: leaves[place]} if cls is EMA else {}


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
            add(path, {WEIGHT: leaf}, _modules_around(parent, modules), options=("alone",))
        else:
            together.setdefault(parent, {})[role] = leaf
    for parent, roles in together.items():
        around = _modules_around(parent, modules)
        is_module = around and isinstance(around[-1][1], Module)
        add(parent, roles, around, also=_given_words(around) if is_module else frozenset())
