"""PEFT's file format: names and layouts of arrays, and adapter_config.json.

torch layouts have the outputs first, and the rank first in ``A``; for convolutions both arrays are
kernels, that of ``B`` of size one.  Embeddings have other names.  (As of PEFT 0.21.)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from pax_export._foundations.errors import WeightsFileError
from pax_export._foundations.types import Array, PRNGKey
from pax_export.adapters._lora import LoRA, is_table, kernel_rank, sizes_of
from pax_export.core import (
    DeclaredArray,
    Module,
    adaptable_arrays,
    declared_in,
    join_path,
    named_leaves,
    named_modules,
)
from pax_export.weights import LoadReport, describe_array, mismatch_error

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model"
MAGNITUDE = "lora_magnitude_vector"

#: Options of PEFT that `LoRA` does not support.
_OTHER_METHODS = (
    "alora_invocation_tokens arrow_config kasa_config layer_replication lora_bias megatron_config "
    "monteclora_config target_parameters trainable_token_indices use_bdlora use_qalora "
    "velora_config"
).split()
#: Initializations that change the base weight; PEFT records here if it converted them.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


# --- arrays -------------------------------------------------------------------------


def array_suffixes(adapted: DeclaredArray) -> tuple[str, str]:
    """Returns the suffixes of the names of ``a`` and ``b`` after the path of a layer."""
    if is_table(adapted):
        return "lora_embedding_A", "lora_embedding_B"
    return "lora_A.weight", "lora_B.weight"


#: Suffixes of adapter array names.
SUFFIXES = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", MAGNITUDE)


def peft_shapes(adapted: DeclaredArray, where: str, rank: int) -> tuple[tuple, tuple, tuple]:
    """Returns the shapes of ``a``, ``b`` and the magnitude in PEFT's layout."""
    sizes = sizes_of(adapted, where)
    *kernel, inputs = sizes.inputs
    ones = (1,) * len(kernel)
    b = (*sizes.stacked, sizes.outputs, rank, *ones)
    magnitude = (*sizes.stacked, 1, sizes.outputs, *ones) if ones else (*b[:-1],)
    return (*sizes.stacked, rank, inputs, *kernel), b, magnitude


def rank_of(adapted: DeclaredArray, b: tuple[int, ...]) -> int:
    """Returns the rank from the shape of PEFT's ``b``; 0 for other arrays."""
    kernel = kernel_rank(adapted)
    return b[-1 - kernel] if len(b) > kernel + 1 else 0


def to_peft(adapted: DeclaredArray, adapter: LoRA) -> dict[str, np.ndarray]:
    """Returns the arrays of an adapter by name suffix, in PEFT's layout."""
    kernel = kernel_rank(adapted)
    a, b = np.asarray(adapter.lora_a), np.swapaxes(np.asarray(adapter.lora_b), -1, -2)
    a = _features_first(a, kernel)
    a_name, b_name = array_suffixes(adapted)
    found = {a_name: a, b_name: b.reshape(*b.shape, *[1] * kernel)}
    if adapter.magnitude is not None:
        m = np.asarray(adapter.magnitude)
        found[MAGNITUDE] = (
            m[..., None, :].reshape(*m.shape[:-1], 1, -1, *[1] * kernel) if kernel else m
        )
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def from_peft(
    adapted: DeclaredArray, a: np.ndarray, b: np.ndarray, magnitude: np.ndarray | None
) -> tuple[Any, Any, Any]:
    """Converts arrays in PEFT's layout, with checked shapes, to those of `LoRA`."""
    kernel = kernel_rank(adapted)
    b = b.reshape(b.shape[: b.ndim - kernel])
    if magnitude is not None and kernel:
        stacked = b.ndim - 2
        magnitude = magnitude.reshape(*b.shape[:stacked], -1)
    return _features_last(a, kernel), np.swapaxes(b, -1, -2), magnitude


def _features_first(array: np.ndarray, kernel: int) -> Any:
    """Transposes ``[..., *kernel, in, out]`` to ``[..., out, in, *kernel]``."""
    return np.moveaxis(array, (-1, -2), (-2 - kernel, -1 - kernel))


def _features_last(array: np.ndarray, kernel: int) -> Any:
    return np.moveaxis(array, (-2 - kernel, -1 - kernel), (-1, -2))


def whole_to_torch(module: Module, attribute: str, array: Array) -> np.ndarray:
    """Converts an array of a fully trained module to torch's layout."""
    array = np.asarray(array)
    if _is_turned(module, attribute):
        array = _features_first(array, array.ndim - 2)
    return np.ascontiguousarray(array)


def whole_from_torch(module: Module, attribute: str, array: np.ndarray) -> Any:
    """The inverse of `whole_to_torch`."""
    if _is_turned(module, attribute) and array.ndim >= 2:
        return _features_last(array, array.ndim - 2)
    return array


def _is_turned(module: Module, attribute: str) -> bool:
    """Whether an array has its inputs before its outputs, which torch has the other way."""
    found = declared_in(module).get(attribute)
    return found is not None and found.axes[-2:] == ("in", "out")


# --- names --------------------------------------------------------------------------


def rename_path(path: str, rename: Mapping[str, str]) -> str:
    """Maps the path of a module by patterns of paths or of their prefixes.

    Example:
        >>> rename_path("layers.3.attention.query", {"layers.*.attention": "model.h.*.attn"})
        'model.h.3.attn.query'
    """
    pattern = pattern_of(path, rename)
    if pattern is None:
        return path
    parts, wanted = path.split("."), pattern.split(".")
    stars = iter([p for w, p in zip(wanted, parts) if w == "*"])
    new = [next(stars, "*") if part == "*" else part for part in rename[pattern].split(".")]
    return ".".join([part for part in new + parts[len(wanted) :] if part])


def pattern_of(path: str, rename: Mapping[str, str]) -> str | None:
    """Returns the longest pattern that matches the path of a module or its beginning, or None."""
    parts = path.split(".")

    def matches(wanted: list[str]) -> bool:
        fits = all(w in ("*", p) for w, p in zip(wanted, parts))
        return len(wanted) <= len(parts) and fits

    found = [each for each in rename if matches(each.split("."))]
    return max(found, key=lambda each: len(each.split(".")), default=None)


# --- adapter_config.json ------------------------------------------------------------


def config_of(adapters: Mapping[str, LoRA], whole: list[str]) -> dict[str, Any]:
    """Returns PEFT's configuration for adapters by layer path, and for fully saved modules."""
    rslora = all(each.rslora for each in adapters.values())
    alphas = {p: _alpha_in_file(each, rslora) for p, each in adapters.items()}
    ranks = {p: each.rank for p, each in adapters.items()}
    rank, alpha = _most_common(ranks), _most_common(alphas)
    rates = {p: each.dropout.dropout_rate if each.dropout else 0.0 for p, each in adapters.items()}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": _most_common(rates),
        "target_modules": list(adapters),
        "rank_pattern": {_pattern_of_path(p, adapters): n for p, n in ranks.items() if n != rank},
        "alpha_pattern": {
            _pattern_of_path(p, adapters): n for p, n in alphas.items() if n != alpha
        },
        "use_rslora": rslora,
        "use_dora": any(each.magnitude is not None for each in adapters.values()),
        "modules_to_save": whole or None,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _alpha_in_file(adapter: LoRA, rslora: bool) -> float | int:
    alpha = adapter.alpha
    if adapter.rslora and not rslora:  # a file has one value for all layers
        alpha = adapter.scale * adapter.rank
    return int(alpha) if alpha == int(alpha) else alpha


def _most_common(values: Mapping[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]


def _pattern_of_path(path: str, paths: Mapping[str, Any]) -> str:
    """Returns a PEFT pattern, which matches the ends of paths, for exactly one path."""
    ends_others = any(other.endswith(f".{path}") for other in paths)
    return f"^{re.escape(path)}" if ends_others else re.escape(path)


def check_config(config: object, where: str) -> None:
    """Raises a WeightsFileError for unsupported adapter types and options."""
    fields = config if isinstance(config, dict) else {}
    other = [name for name in _OTHER_METHODS if fields.get(name)]
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        other.append("init_lora_weights")
    if fields.get("peft_type") != "LORA":
        other = ["peft_type"]
    if other:
        raise WeightsFileError(
            "The adapter is not LoRA or DoRA alone, or needs other weights of the base model.",
            where=where,
            got=", ".join(f"{name}={fields.get(name)!r}" for name in other)[:200],
            write="an adapter that PEFT saved as plain LoRA or DoRA; for pissa and the like with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _at_path(config: Mapping[str, Any], pattern: str, name: str, path: str) -> Any:
    """Returns the value of a path of the file, by the first pattern that matches its end."""
    for each, value in dict(config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({each})$", path):
            return value
    return config[name]


def alpha_and_rate(config: Mapping[str, Any], path: str, where: str) -> tuple[float, float]:
    """Returns alpha and dropout of the layer at a path of the file."""
    try:
        alpha = float(_at_path(config, "alpha_pattern", "lora_alpha", path))
        rate = float(config.get("lora_dropout") or 0.0)
        if not (math.isfinite(alpha) and 0 <= rate < 1):
            raise ValueError(f"lora_alpha {alpha}, lora_dropout {rate}")
    except (KeyError, TypeError, ValueError, OverflowError, re.error) as error:
        raise WeightsFileError(
            "The file adapter_config.json has no valid scale.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            write='numbers for "lora_alpha" and "lora_dropout", and an object "alpha_pattern"',
        ) from error
    return alpha, rate


def full_name(path: str, suffix: str) -> str:
    """Returns the name of an array in an adapter file."""
    return join_path(PREFIX, join_path(path, suffix))


# --- the arrays of a file, matched with a net -----------------------------------------


#: The name that PEFT gives to a wrapped layer.
_AROUND = ".base_layer"
#: What loads adapters of a head that is tied.
UNTIED = 'adapters.load(lm.untied(), ..., rename={..., "head": "lm_head"})'


def own_leaves(module: Module) -> list[tuple[str, Any]]:
    """Returns a module's own arrays, without those of submodules, by name."""
    inner = [each for path, each in named_modules(module) if path]
    below = {id(leaf) for each in inner for _, leaf in named_leaves(each)}
    return [(name, leaf) for name, leaf in named_leaves(module) if id(leaf) not in below]


@dataclass
class FoundAdapter:
    """The arrays of one adapter in a file."""

    own_path: str  # path of the layer, or of its array, in the file
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # by name suffix

    def adapter(
        self, adapted: DeclaredArray, alpha: float, rate: float, rslora: bool, key: PRNGKey | None
    ) -> LoRA:
        """Returns the adapter, in at least float32."""
        a_name, b_name = array_suffixes(adapted)
        wide = jnp.promote_types(self.arrays[a_name].dtype, jnp.float32)
        stored = (self.arrays[a_name], self.arrays[b_name], self.arrays.get(MAGNITUDE))
        a, b, magnitude = from_peft(adapted, *stored)
        magnitude = None if magnitude is None else jnp.asarray(magnitude, wide)
        a, b = jnp.asarray(a, wide), jnp.asarray(b, wide)
        return LoRA(a, b, alpha=alpha, dropout=rate, rslora=rslora, magnitude=magnitude, key=key)


class Reading:
    """The match of an adapter file with a net."""

    has_tied_head = False  # whether a head of the net is the weight of another layer

    def __init__(self, net: Module, rename: Mapping[str, str], arrays: Mapping[str, np.ndarray]):
        self._modules = dict(named_modules(net))
        #: What can be adapted, by the path of its layer, and of several arrays by their own.
        self.adaptable = {
            join_path(path, array): adapted
            for path, module in self._modules.items()
            for array, adapted in adaptable_arrays(module).items()
        }
        # Several paths for one of the file: its outputs are theirs, in the order of `rename`.
        patterns = [None, *rename]
        self._paths: dict[str, list[str]] = {}
        every = {**self._modules, **self.adaptable}
        for path in sorted(every, key=lambda x: patterns.index(pattern_of(x, rename))):
            self._paths.setdefault(rename_path(path, rename), []).append(path)
        self.adapters: dict[str, FoundAdapter] = {}
        self.trained: list[str] = []
        self._whole: dict[str, np.ndarray] = {}
        self._loaded: list[str] = []
        self._unexpected: list[str] = []
        self._missing: list[str] = []
        self._mismatched: dict[str, str] = {}
        for name, array in arrays.items():
            stem = name.removeprefix(f"{PREFIX}.")
            if not (self._take_adapter(stem, array) or self._take_whole(name, stem, array)):
                self._unexpected.append(name)
        for path, found in self.adapters.items():
            self._check(path, found)

    def _take_adapter(self, stem: str, array: np.ndarray) -> bool:
        own, suffix = _split_name(stem)
        paths = self._paths.get(own, [])
        adaptable = [self.adaptable[path] for path in paths if path in self.adaptable]
        is_fused = len(paths) > 1
        if len(adaptable) < len(paths):
            return False
        for each in adaptable:
            if is_fused and each.axes != ("in", "out"):
                return False
            if suffix not in (*array_suffixes(each), MAGNITUDE):
                return False
        parts = [array] * len(paths)
        axis = -1 if suffix == MAGNITUDE else -2
        has_outputs = is_fused and suffix != array_suffixes(adaptable[0])[0]
        if has_outputs and array.ndim >= -axis:
            parts = np.split(
                array,
                np.cumsum([sizes_of(each, own).outputs for each in adaptable[:-1]]),
                axis,
            )
        for path, part in zip(paths, parts):
            self.adapters.setdefault(path, FoundAdapter(own)).arrays[suffix] = part
        return bool(paths)

    def _take_whole(self, name: str, stem: str, array: np.ndarray) -> bool:
        parts = stem.replace(_AROUND, "").split(".")
        for count in reversed(range(len(parts))):
            paths, leaf = self._paths.get(".".join(parts[:count]), []), ".".join(parts[count:])
            module = self._modules.get(paths[0]) if len(paths) == 1 else None
            own = dict(own_leaves(module)).get(leaf) if module is not None else None
            if own is None:
                continue
            path = paths[0]
            turned = whole_from_torch(self._modules[path], leaf, array)
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
        adapted = self.adaptable[path]
        a_name, b_name = array_suffixes(adapted)
        names = {s: full_name(found.own_path, s) for s in (a_name, b_name, MAGNITUDE)}
        missing = [names[each] for each in (a_name, b_name) if each not in found.arrays]
        self._missing += missing
        if b_name not in found.arrays:
            return  # its shape gives the rank
        rank = rank_of(adapted, found.arrays[b_name].shape)
        wanted = dict(zip(names, peft_shapes(adapted, path, rank)))
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
                    found.append(f"{full_name(name, '*')}, which {key} names")
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
        return "the net that they were trained for, or rename={path: path in the file}"

    def with_whole(self, net: Module) -> Any:
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
    for suffix in SUFFIXES:
        if stem == suffix or stem.endswith(f".{suffix}"):
            return stem[: -len(suffix) - 1] if stem != suffix else "", suffix
    return stem, ""
