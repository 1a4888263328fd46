"""Groups the arrays of a file by layer, and detects the framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pax_export.weights.adoption._layers import Layer
from pax_export.weights.adoption._name_parsing import (
    BIAS,
    COUNT,
    WEIGHT,
    Name,
    name_of_words,
    number_first,
    parse_array_name,
)
from pax_export.weights.adoption._parametrized import NOTES, no_weights
from pax_export.weights.adoption._pieces import Piece
from pax_export.weights.sources import Source


@dataclass(frozen=True, eq=False)
class Group:
    """Arrays that seem to belong to one layer."""

    path: str  # the layer's name in the file
    parts: dict[str, Piece]  # role -> array
    name: Name
    raw: tuple[str, ...]  # words as written; for a part, those of the whole
    index: int  # index of its first array in the file
    sure: bool = True  # whether the names determine the roles
    within: str | None = None  # path of the module in which the user wants it
    around: int = 0  # number of leading words that all groups share
    settings: tuple[tuple[str, Any], ...] | None = None  # attributes of its ONNX operator
    lacks: str = ""  # why torch cannot compute a weight from the arrays

    @cached_property
    def own_words(self) -> frozenset[str]:
        """The words without the prefix of all names, such as ``model``."""
        return name_of_words(self.raw[self.around :]).meaning

    @cached_property
    def is_in_list(self) -> bool:
        """Whether all its numbers are steps of their own below a name: ``h.3.fc``."""
        steps = re.split(r"[./]", self.path)
        return not steps[0].isdigit() and all(
            step.isdigit() or not any(letter.isdigit() for letter in step) for step in steps
        )

    @cached_property
    def meaning(self) -> frozenset[str]:
        return self.name.meaning

    def may_fill(self, layer: Layer) -> bool:
        """Whether names and parameterizations allow the layer; shapes are not compared."""
        ends = {re.split(r"[./]", piece.source)[-1] for piece in self.parts.values()}
        return (
            not self.lacks
            or self.within is not None
            or any(leaf.path.rpartition(".")[2] in ends for leaf in layer.leaves.values())
        )

    @property
    def arrays(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.source for piece in self.parts.values()))

    @cached_property
    def signature(self) -> tuple:
        """Equal for groups that could fill the same layers."""
        parts = [(role, p.shape, p.split, str(p.take)) for role, p in sorted(self.parts.items())]
        flags = tuple(word in self.raw for word in ("matmul", "gemm"))
        return (tuple(parts), flags, is_conv1d_of_transformers(self), self.settings)


#: Whether a group can fill a layer.
Fits = Callable[[Layer, Group], bool]


def is_conv1d_of_transformers(group: Group) -> bool:
    """Returns whether the name is that of GPT-2's Conv1D, whose weights are in x out in torch."""
    return group.raw[-2:] in (("c", "attn"), ("c", "fc"), ("c", "proj"))


def group_arrays(
    source: Source, names: Iterable[str], hints: Mapping[str, tuple[str, str]], alone: bool = False
) -> tuple[list[Group], list[str]]:
    """The groups of some arrays, or with `alone` one of each, and the names of counters.

    `hints` maps arrays to a name to use instead, and to the path of the module that may have them.
    """
    groups: dict[Any, Group] = {}
    counters: list[str] = []
    order = {name: index for index, name in enumerate(source.entries)}
    cells = _of_cells(names := list(names))
    first = number_first(names) | _of_operators(source, names) | cells
    for name in names:
        known_as, within = hints.get(name, (first[name], None))
        found = parse_array_name(known_as)
        if known_as != name and found.role is None:  # a whole name for the path of a layer
            found = replace(found, role=parse_array_name(name).role)
        if name in cells:  # the only bias; torch has two
            found = replace(found, role=BIAS)
        if found.role == COUNT:
            counters.append(name)
            continue
        sure, role = found.role is not None, found.role or WEIGHT
        key: Any = (found.words, within) if sure and not alone else name
        if key in groups and role in groups[key].parts:  # two of one kind are separate groups
            key = name
        if key not in groups:
            words = (*found.words, role) if sure and alone else found.words
            groups[key] = Group(
                found.layer, {}, name_of_words(words), words, order[name], sure, within
            )
        entry = source.entries[name]
        says = entry.note if entry.note in NOTES else ""
        groups[key].parts[role] = Piece(name, entry.shape, says=says)
    lone = no_weights(names)
    around = _count_shared_words([group.raw for group in groups.values()])
    found_groups = [
        replace(group, around=around, settings=_operator_settings(source, group.arrays),
                lacks=next((lone[name] for name in group.arrays if name in lone), ""))
        for group in groups.values()
    ]  # fmt: skip
    return sorted(found_groups, key=lambda group: group.index), counters


def _of_cells(names: Sequence[str]) -> dict[str, str]:
    """Names of torch for the bias of a recurrent cell of Equinox, ``bias`` beside ``weight_ih``."""
    known, found = set(names), {}
    for name in names:
        cell = name.removesuffix("bias")
        if cell != name and {f"{cell}weight_ih", f"{cell}weight_hh"} <= known:
            found[name] = f"{cell}bias_ih"
    return found


_RECURRENT = {"LSTM", "GRU", "RNN"}
_INPUTS = {1: "kernel", 2: "recurrent_kernel", 3: "bias"}


def _of_operators(source: Source, names: Sequence[str]) -> dict[str, str]:
    """Names for the inputs of recurrent ONNX operators, which exporters call ``onnx::LSTM_209``."""
    found: dict[str, str] = {}
    used_by = source.metadata.get("used_by", {}) if source.kind == "onnx" else {}
    for name in names:
        for operator, index, node in used_by.get(name, ()):
            if operator in _RECURRENT and index in _INPUTS:
                found.setdefault(name, f"{node or operator}/{_INPUTS[index]}")
    return found


def _operator_settings(source: Source, arrays: Iterable[str]) -> tuple[tuple[str, Any], ...] | None:
    known = source.metadata.get("settings", {}) if source.kind == "onnx" else {}
    found = {setting for name in arrays for setting in known.get(name, ())}
    return next(iter(found)) if len(found) == 1 else None


def _count_shared_words(several: list[tuple[str, ...]]) -> int:
    """Counts the words with which all names begin, without the last word of a name."""
    count = 0
    for words in zip(*[raw[:-1] for raw in several if raw]):
        if len(set(words)) > 1 or words[0].isdigit():
            break
        count += 1
    shortest = min((len([w for w in raw if not w.isdigit()]) for raw in several), default=1)
    return min(count, max(shortest - 1, 0))


def possible_origins(source: Source, origin: str | None, module: bool) -> list[str]:
    """The frameworks whose conventions the arrays may follow, by format and distinctive names."""
    if origin is not None:
        return _OF_WORD[origin]
    if module:
        return ["pax"]
    kind = source.kind
    if kind == "safetensors":
        if (written := source.metadata.get(WRITTEN_AS)) in _EVERYONE:
            return [str(written)]
        form = str(source.metadata.get("format", ""))
        if form in _FORMATS:
            return _FORMATS[form]
        if any("pax_export" in str(key) for key in source.metadata):
            return ["pax"]
    if source.origin:
        return _OF_WORD.get(source.origin, [source.origin])
    found = _by_names(source.entries)
    if kind == "orbax":
        found = [one for one in found if one in ("flax", "flax, transposed", "pax")]
    return found


#: Metadata entry in which `save_as` stores the origin of the arrays.
WRITTEN_AS = "written_as"
_EVERYONE = ("torch", "torch, Conv1D", "keras", "flax", "flax, transposed", "onnx", "pax", "mlx",
             "tflite")  # fmt: skip
#: Values of ``origin=``, and their meaning.
_OF_WORD = {
    "torch": ["torch", "torch, Conv1D"], "keras": ["keras"], "tensorflow": ["keras"],
    "flax": ["flax", "flax, transposed"], "onnx": ["onnx"], "pax": ["pax"], "mlx": ["mlx"],
}  # fmt: skip
ORIGINS = tuple(_OF_WORD)
_FORMATS = {"pt": _OF_WORD["torch"], "flax": _OF_WORD["flax"], "tf": ["keras"], "mlx": ["mlx"]}

_TORCH, _KERAS, _FLAX = tuple(_OF_WORD["torch"]), ("keras",), tuple(_OF_WORD["flax"])
# How an array is called, and who calls one so.
_SIGNS = {
    "weight": (*_TORCH, "pax", "mlx"), "kernel": (*_KERAS, *_FLAX), "moving_mean": _KERAS,
    "moving_variance": _KERAS, "recurrent_kernel": _KERAS, "embeddings": _KERAS,
    "gamma": (*_KERAS, *_TORCH), "beta": (*_KERAS, *_TORCH), "scale": (*_FLAX, "pax"),
    "mean": _FLAX, "var": _FLAX, "offset": (*_FLAX, "pax"), "averages": ("pax",),
    "running_mean": (*_TORCH, "mlx"), "running_var": (*_TORCH, "mlx"),
    "num_batches_tracked": _TORCH, "in_proj_weight": _TORCH, "in_proj_bias": _TORCH,
    "weight_ih": _TORCH, "weight_hh": _TORCH,
}  # fmt: skip


def _by_names(names: Iterable[str]) -> list[str]:
    """Returns the frameworks that use all of the names; all frameworks if none does."""
    everyone = [*_TORCH, *_KERAS, *_FLAX, "pax", "mlx"]
    left = everyone
    for name in names:
        tail = name.removesuffix(":0").replace("/", ".").rpartition(".")[2]
        who = _SIGNS.get(tail) or _SIGNS.get(tail.partition("_l")[0], everyone)
        left = [one for one in left if one in who]
    return left or everyone
