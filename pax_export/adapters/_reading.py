"""Matches the arrays of an adapter file with a net."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from pax_export._types import PRNGKey, PyTree
from pax_export.adapters import _kernels as kernels
from pax_export.adapters import _peft as peft
from pax_export.adapters._lora import LoRA
from pax_export.core import join_path, named_leaves, named_modules, near_names
from pax_export.weights import LoadReport, describe_array, mismatch_error

#: The name that PEFT gives to a wrapped layer.
_AROUND = ".base_layer"
#: What loads adapters of a head that is tied.
UNTIED = 'adapters.load(lm.untied(), ..., rename={..., "head": "lm_head"})'


def own_leaves(module: PyTree) -> list[tuple[str, Any]]:
    """Returns a module's own arrays, without those of submodules, by name."""
    inner = [each for path, each in named_modules(module) if path]
    below = {id(leaf) for each in inner for _, leaf in named_leaves(each)}
    return [(name, leaf) for name, leaf in named_leaves(module) if id(leaf) not in below]


@dataclass
class FoundAdapter:
    """The arrays of one layer's adapter in a file."""

    own_path: str  # path of the layer in the file
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # by name suffix

    def rank(self, layer: PyTree) -> int:
        """Returns the rank by the arrays."""
        return peft.rank_of(layer, self.arrays[peft.array_suffixes(layer)[1]].shape)

    def adapter(
        self, layer: PyTree, alpha: float, rate: float, rslora: object, key: PRNGKey | None
    ) -> LoRA:
        """Returns the adapter, in at least float32."""
        a_name, b_name = peft.array_suffixes(layer)
        wide = jnp.promote_types(self.arrays[a_name].dtype, jnp.float32)
        given = (self.arrays[a_name], self.arrays[b_name], self.arrays.get(peft.MAGNITUDE))
        a, b, magnitude = [
            None if each is None else jnp.asarray(each, wide)
            for each in peft.from_peft(layer, *given)
        ]
        return LoRA(
            a, b, alpha=alpha, dropout=rate, rslora=bool(rslora), magnitude=magnitude, key=key
        )


class Reading:
    """The match of an adapter file with a net."""

    has_tied_head = False  # whether a head of the net is the weight of another layer

    def __init__(self, net: PyTree, rename: Mapping[str, str], arrays: Mapping[str, np.ndarray]):
        self._modules = dict(named_modules(net))
        # Several paths for one of the file: its outputs are theirs, in the order of `rename`.
        patterns = [None, *rename]
        self._paths: dict[str, list[str]] = {}
        for path in sorted(self._modules, key=lambda x: patterns.index(peft.pattern_of(x, rename))):
            self._paths.setdefault(peft.rename_path(path, rename), []).append(path)
        self.adapters: dict[str, FoundAdapter] = {}
        self.trained: list[str] = []
        self._whole: dict[str, np.ndarray] = {}
        self._loaded: list[str] = []
        self._unexpected: list[str] = []
        self._missing: list[str] = []
        self._mismatched: dict[str, str] = {}
        for name, array in arrays.items():
            stem = name.removeprefix(f"{peft.PREFIX}.")
            if not (self._take_adapter(stem, array) or self._take_whole(name, stem, array)):
                self._unexpected.append(name)
        for path, found in self.adapters.items():
            self._check(path, found)

    def _take_adapter(self, stem: str, array: np.ndarray) -> bool:
        own, suffix = _split_name(stem)
        paths = self._paths.get(own, [])
        layers = [self._modules[path] for path in paths]
        is_fused = len(paths) > 1
        for layer in layers:
            if not kernels.is_adaptable(layer) or (is_fused and not kernels.is_dense(layer)):
                return False
            if suffix not in (*peft.array_suffixes(layer), peft.MAGNITUDE):
                return False
        parts = [array] * len(paths)
        axis = -1 if suffix == peft.MAGNITUDE else -2
        has_outputs = is_fused and suffix != peft.array_suffixes(layers[0])[0]
        if has_outputs and array.ndim >= -axis:
            parts = np.split(
                array,
                np.cumsum([kernels.sizes_of(each, own).outputs for each in layers[:-1]]),
                axis,
            )
        for path, part in zip(paths, parts):
            self.adapters.setdefault(path, FoundAdapter(own)).arrays[suffix] = part
        return bool(paths)

    def _take_whole(self, name: str, stem: str, array: np.ndarray) -> bool:
        parts = stem.replace(_AROUND, "").split(".")
        for count in reversed(range(len(parts))):
            paths, leaf = self._paths.get(".".join(parts[:count]), []), ".".join(parts[count:])
            own = dict(own_leaves(self._modules[paths[0]])).get(leaf) if len(paths) == 1 else None
            if own is None:
                continue
            path = paths[0]
            turned = peft.whole_from_torch(self._modules[path], leaf, array)
            if turned.shape == own.shape:
                self._loaded.append(name)
            else:
                there = f"{describe_array(array)} in the file"
                self._mismatched[name] = f"{there}, {describe_array(own)} in the net"
            self._whole[join_path(path, leaf)] = turned
            if _AROUND not in stem and path not in self.trained:
                self.trained.append(path)
            return True
        return False

    def _check(self, path: str, found: FoundAdapter) -> None:
        """Records missing arrays and wrong shapes of an adapter."""
        layer = self._modules[path]
        a_name, b_name = peft.array_suffixes(layer)
        names = {s: peft.full_name(found.own_path, s) for s in (a_name, b_name, peft.MAGNITUDE)}
        missing = [names[each] for each in (a_name, b_name) if each not in found.arrays]
        self._missing += missing
        if b_name not in found.arrays:
            return  # its shape gives the rank
        rank = peft.rank_of(layer, found.arrays[b_name].shape)
        wanted = dict(zip(names, peft.peft_shapes(layer, path, rank)))
        for suffix, array in found.arrays.items():
            fits = rank > 0 and array.shape == wanted[suffix]
            if fits and jnp.issubdtype(array.dtype, jnp.floating):
                self._loaded.append(names[suffix])
            else:
                form = ",".join(map(str, wanted[suffix]))
                there, layer_name = describe_array(array), path or "itself"
                self._mismatched[names[suffix]] = (
                    f"{there} in the file, [{form}] for the layer {layer_name}"
                )

    def _missing_modules(self, config: Mapping[str, Any]) -> list[str]:
        """Returns the modules of the configuration by their whole path that have no arrays.

        Other entries are ends of paths, and a model need not have all of them.
        """
        if config.get("exclude_modules") or config.get("layers_to_transform"):
            return []
        found = []
        for key, there in (("target_modules", self.adapters), ("modules_to_save", self.trained)):
            entries = config.get(key)
            for name in entries if isinstance(entries, list) else ():
                paths = self._paths.get(name, []) if isinstance(name, str) else []
                if paths and not any(f"{each}.".startswith(f"{paths[0]}.") for each in there):
                    found.append(f"{peft.full_name(name, '*')}, which {key} names")
        return found

    def require_complete(self, config: Mapping[str, Any], where: str) -> None:
        """Raises a WeightsMismatchError unless all arrays match, and all that are named exist."""
        self._missing += self._missing_modules(config)
        report = LoadReport(
            tuple(self._loaded), tuple(self._missing), tuple(self._unexpected), self._mismatched
        )
        if report.complete and self.adapters:
            return
        what = "The adapters of the file are not for this net"
        if report.complete:
            what = "The file has no adapters"
        raise mismatch_error(what, report, where=where, write=self._suggestion())

    def _suggestion(self) -> str:
        if self.has_tied_head and any("head" in each for each in self._unexpected):
            return f"{UNTIED}, which has a head of its own"
        for name in self._unexpected:
            own, suffix = _split_name(name.removeprefix(f"{peft.PREFIX}."))
            near = near_names(own, [path for path in self._paths if path])
            if suffix and near and own not in self._paths:
                return f"the net that they were trained for, or rename={{{near[0]!r}: {own!r}}}"
        return "the net that they were trained for, or rename={path: path in the file}"

    def with_whole(self, net: PyTree) -> Any:
        """Returns the net with the arrays of fully trained modules."""
        leaves, treedef = tree_flatten(net)
        names = [name for name, _ in named_leaves(net)]
        new = [
            jnp.asarray(self._whole[name], leaf.dtype) if name in self._whole else leaf
            for name, leaf in zip(names, leaves)
        ]
        return tree_unflatten(treedef, new)


def _split_name(stem: str) -> tuple[str, str]:
    """Splits the name of an adapter array into layer path and suffix."""
    for suffix in peft.SUFFIXES:
        if stem == suffix or stem.endswith(f".{suffix}"):
            return stem[: -len(suffix) - 1] if stem != suffix else "", suffix
    return stem, ""
