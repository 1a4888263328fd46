"""PEFT's file format: names and layouts of arrays, and adapter_config.json.

torch layouts have the outputs first, and the rank first in ``A``; for convolutions both arrays are
kernels, that of ``B`` of size one.  Embeddings have other names.  (As of PEFT 0.21.)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pax_export._errors import WeightsFileError
from pax_export._types import Array, PyTree
from pax_export.adapters import _kernels as kernels
from pax_export.adapters._lora import LoRA
from pax_export.core import join_path, kernel_of

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


def array_suffixes(layer: PyTree) -> tuple[str, str]:
    """Returns the suffixes of the names of ``a`` and ``b`` after the path of a layer."""
    if kernels.is_table(layer):
        return "lora_embedding_A", "lora_embedding_B"
    return "lora_A.weight", "lora_B.weight"


#: Suffixes of adapter array names.
SUFFIXES = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", MAGNITUDE)


def peft_shapes(layer: PyTree, where: str, rank: int) -> tuple[tuple, tuple, tuple]:
    """Returns the shapes of ``a``, ``b`` and the magnitude in PEFT's layout."""
    sizes = kernels.sizes_of(layer, where)
    *kernel, inputs = sizes.inputs
    ones = (1,) * len(kernel)
    b = (*sizes.stacked, sizes.outputs, rank, *ones)
    magnitude = (*sizes.stacked, 1, sizes.outputs, *ones) if ones else (*b[:-1],)
    return (*sizes.stacked, rank, inputs, *kernel), b, magnitude


def rank_of(layer: PyTree, b: Any) -> int:
    """Returns the rank from the shape of PEFT's ``b``; 0 for other arrays."""
    kernel = kernels.kernel_rank(layer)
    return b[-1 - kernel] if len(b) > kernel + 1 else 0


def to_peft(layer: PyTree, adapter: LoRA) -> dict[str, np.ndarray]:
    """Returns the arrays of an adapter by name suffix, in PEFT's layout."""
    kernel = kernels.kernel_rank(layer)
    a, b = np.asarray(adapter.lora_a), np.swapaxes(np.asarray(adapter.lora_b), -1, -2)
    a = _features_first(a, kernel)
    a_name, b_name = array_suffixes(layer)
    found = {a_name: a, b_name: b.reshape(*b.shape, *[1] * kernel)}
    if adapter.magnitude is not None:
        m = np.asarray(adapter.magnitude)
        found[MAGNITUDE] = (
            m[..., None, :].reshape(*m.shape[:-1], 1, -1, *[1] * kernel) if kernel else m
        )
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def from_peft(layer: PyTree, a: Array, b: Any, magnitude: PyTree) -> tuple[Any, Any, Any]:
    """Converts arrays in PEFT's layout, with checked shapes, to those of `LoRA`."""
    kernel = kernels.kernel_rank(layer)
    b = b.reshape(b.shape[: b.ndim - kernel])
    if magnitude is not None and kernel:
        stacked = b.ndim - 2
        magnitude = magnitude.reshape(*b.shape[:stacked], -1)
    return _features_last(a, kernel), np.swapaxes(b, -1, -2), magnitude


def _features_first(array: Any, kernel: int) -> Any:
    """Transposes ``[..., *kernel, in, out]`` to ``[..., out, in, *kernel]``."""
    return np.moveaxis(array, (-1, -2), (-2 - kernel, -1 - kernel))


def _features_last(array: Any, kernel: int) -> Any:
    return np.moveaxis(array, (-2 - kernel, -1 - kernel), (-1, -2))


def whole_to_torch(module: PyTree, attribute: str, array: Array) -> np.ndarray:
    """Converts an array of a fully trained module to torch's layout."""
    array = np.asarray(array)
    if _is_turned(module, attribute):
        array = _features_first(array, kernels.kernel_rank(module))
    return np.ascontiguousarray(array)


def whole_from_torch(module: PyTree, attribute: str, array: Array) -> Any:
    """The inverse of `whole_to_torch`."""
    if _is_turned(module, attribute) and array.ndim >= 2:
        return _features_last(array, kernels.kernel_rank(module))
    return array


def _is_turned(module: PyTree, attribute: str) -> bool:
    """Whether an array has its inputs before its outputs, which torch has the other way."""
    found = kernel_of(module)
    return found is not None and found.name == attribute and found.axes[-2:] == ("in", "out")


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
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise WeightsFileError(
            "The adapter is not a LoRA adapter.",
            where=where,
            got=f"peft_type {kind!r}",
            write='an adapter whose adapter_config.json says "peft_type": "LORA"',
        )
    other = [name for name in _OTHER_METHODS if config.get(name)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        other.append("init_lora_weights")
    if other:
        shown = ", ".join(f"{name}={config[name]!r}" for name in other)
        raise WeightsFileError(
            "The adapter uses an unsupported method, or needs other weights of the base model.",
            where=where,
            got=shown[:200],
            write="an adapter that PEFT saved as plain LoRA or DoRA; for pissa and the like with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


#: Regular expressions that may take exponential time: repeated groups, or many repetitions.
_SLOW_PATTERN = re.compile(r"\)[*+{]|([*+}][^*+}]*){4}")


def _at_path(config: Mapping[str, Any], pattern: str, name: str, path: str) -> Any:
    """Returns the value of a path of the file, by the first pattern that matches its end."""
    for each, value in dict(config.get(pattern) or {}).items():
        if _SLOW_PATTERN.search(each):
            raise ValueError(f"{pattern} with many repetitions: {each:.80}")
        if re.match(rf"(.*\.)?({each})$", path):
            return value
    return config[name]


def alpha_and_rate(
    config: Mapping[str, Any], path: str, rank: int, where: str
) -> tuple[float, float]:
    """Returns alpha and dropout of the layer at a path of the file, whose arrays have a rank."""
    try:
        alpha = float(_at_path(config, "alpha_pattern", "lora_alpha", path))
        rate = float(config.get("lora_dropout") or 0.0)
        if not (math.isfinite(alpha) and 0 <= rate < 1):
            raise ValueError(f"lora_alpha {alpha}, lora_dropout {rate}")
        said = _at_path({"r": rank, **config}, "rank_pattern", "r", path)
        if said != rank:
            raise ValueError(f"r {said!r:.80}, where the arrays of {path} have rank {rank}")
        if config.get("use_rslora") not in (None, True, False):
            raise ValueError(f"use_rslora {config['use_rslora']!r:.80}")
    except (KeyError, TypeError, ValueError, OverflowError, re.error) as error:
        raise WeightsFileError(
            "The file adapter_config.json has no valid scale.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            write='numbers for "lora_alpha" and "lora_dropout", the ranks of the arrays for "r" '
            'and "rank_pattern", and an object "alpha_pattern"',
        ) from error
    return alpha, rate


def full_name(path: str, suffix: str) -> str:
    """Returns the name of an array in an adapter file."""
    return join_path(PREFIX, join_path(path, suffix))
