"""PEFT's form of adapters: names and layouts of arrays, and what stands in adapter_config.json.

torch has the outputs first, and the rank first in ``A``; of a convolution both arrays are kernels,
that of ``B`` of size one.  An `Embed` has names of its own there.  (PEFT 0.21 was read for this.)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pax_export._errors import WeightsFileError
from pax_export.adapters import _kinds as kinds
from pax_export.adapters._lora import LoRA
from pax_export.core import join
from pax_export.nn import Convolution, Embed, Linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model"
MAGNITUDE = "lora_magnitude_vector"

#: What changes how PEFT computes an adapter, and is not what `LoRA` does.
_OTHER_METHODS = (
    "alora_invocation_tokens arrow_config kasa_config layer_replication lora_bias megatron_config "
    "monteclora_config target_parameters trainable_token_indices use_bdlora use_qalora "
    "velora_config"
).split()
#: Initial values that come with another base weight; where PEFT converts them, it says so here.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


# --- arrays -------------------------------------------------------------------------


def suffixes(layer: Any) -> tuple[str, str]:
    """What follows the path of a layer in the names of ``a`` and ``b``."""
    if isinstance(layer, Embed):
        return "lora_embedding_A", "lora_embedding_B"
    return "lora_A.weight", "lora_B.weight"


#: What may follow the path of a layer.
SUFFIXES = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", MAGNITUDE)


def shapes(layer: Any, where: str, rank: int) -> tuple[tuple, tuple, tuple]:
    """The shapes in PEFT of ``a``, ``b`` and the magnitude."""
    sizes = kinds.sizes_of(layer, where)
    ones = (1,) * len(sizes.kernel)
    b = (*sizes.stacked, sizes.outputs, rank, *ones)
    magnitude = (*sizes.stacked, 1, sizes.outputs, *ones) if ones else (*b[:-1],)
    return (*sizes.stacked, rank, sizes.inputs, *sizes.kernel), b, magnitude


def rank_of(layer: Any, b: Any) -> int:
    """The rank, of the shape of PEFT's ``b``; 0 of an array that is no such thing."""
    kernel = len(layer.kernel_shape) if isinstance(layer, Convolution) else 0
    return b[-1 - kernel] if len(b) > kernel + 1 else 0


def to_peft(layer: Any, adapter: LoRA) -> dict[str, np.ndarray]:
    """The arrays of an adapter by what follows the path of its layer."""
    kernel = len(layer.kernel_shape) if isinstance(layer, Convolution) else 0
    a, b = np.asarray(adapter.lora_a), np.swapaxes(np.asarray(adapter.lora_b), -1, -2)
    a = _features_first(a, kernel)
    a_name, b_name = suffixes(layer)
    found = {a_name: a, b_name: b.reshape(*b.shape, *[1] * kernel)}
    if adapter.magnitude is not None:
        m = np.asarray(adapter.magnitude)
        found[MAGNITUDE] = (
            m[..., None, :].reshape(*m.shape[:-1], 1, -1, *[1] * kernel) if kernel else m
        )
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def from_peft(layer: Any, a: Any, b: Any, magnitude: Any) -> tuple[Any, Any, Any]:
    """The arrays of `LoRA`, of those of a file, whose shapes fit."""
    kernel = len(layer.kernel_shape) if isinstance(layer, Convolution) else 0
    b = b.reshape(b.shape[: b.ndim - kernel])
    if magnitude is not None and kernel:
        stacked = b.ndim - 2
        magnitude = magnitude.reshape(*b.shape[:stacked], -1)
    return _features_last(a, kernel), np.swapaxes(b, -1, -2), magnitude


def _features_first(array: Any, kernel: int) -> Any:
    """``[..., *kernel, in, out]`` as ``[..., out, in, *kernel]``."""
    return np.moveaxis(array, (-1, -2), (-2 - kernel, -1 - kernel))


def _features_last(array: Any, kernel: int) -> Any:
    return np.moveaxis(array, (-2 - kernel, -1 - kernel), (-1, -2))


def whole_to_torch(module: Any, attribute: str, array: Any) -> np.ndarray:
    """An array of a module that was trained as a whole, laid out as torch has it."""
    array = np.asarray(array)
    if attribute == "weight" and _is_turned(module):
        array = _features_first(array, len(getattr(module, "kernel_shape", ())))
    return np.ascontiguousarray(array)


def whole_from_torch(module: Any, attribute: str, array: Any) -> Any:
    """The same back."""
    if attribute == "weight" and _is_turned(module) and array.ndim >= 2:
        return _features_last(array, len(getattr(module, "kernel_shape", ())))
    return array


def _is_turned(module: Any) -> bool:
    is_convolution = isinstance(module, Convolution) and not kinds.is_transposed(module)
    return isinstance(module, Linear) or is_convolution


# --- names --------------------------------------------------------------------------


def renamed(path: str, rename: Mapping[str, str]) -> str:
    """The path of a module in another model, by patterns of paths or of how they begin.

    Example:
        >>> renamed("layers.3.attention.query", {"layers.*.attention": "model.h.*.attn"})
        'model.h.3.attn.query'
    """
    parts = path.split(".")
    for pattern, other in sorted(rename.items(), key=lambda item: -len(item[0].split("."))):
        wanted = pattern.split(".")
        begin = parts[: len(wanted)]
        if len(begin) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, begin)):
            stars = iter([p for w, p in zip(wanted, begin) if w == "*"])
            new = [next(stars, "*") if part == "*" else part for part in other.split(".")]
            return ".".join([part for part in new + parts[len(wanted) :] if part])
    return path


# --- adapter_config.json ------------------------------------------------------------


def config_of(adapters: Mapping[str, LoRA], whole: list[str]) -> dict[str, Any]:
    """What PEFT writes of adapters, by the paths of their layers, and of modules saved whole."""
    rslora = all(each.rslora for each in adapters.values())
    alphas = {p: _alpha(each, rslora) for p, each in adapters.items()}
    ranks = {p: each.rank for p, each in adapters.items()}
    rank, alpha = _most(ranks), _most(alphas)
    rates = {p: each.dropout.dropout_rate if each.dropout else 0.0 for p, each in adapters.items()}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": _most(rates),
        "target_modules": list(adapters),
        "rank_pattern": {_pattern(p, adapters): n for p, n in ranks.items() if n != rank},
        "alpha_pattern": {_pattern(p, adapters): n for p, n in alphas.items() if n != alpha},
        "use_rslora": rslora,
        "use_dora": any(each.magnitude is not None for each in adapters.values()),
        "modules_to_save": whole or None,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _alpha(adapter: LoRA, rslora: bool) -> float | int:
    alpha = adapter.alpha
    if adapter.rslora and not rslora:  # a file says it once for all layers
        alpha = adapter.scale * adapter.rank
    return int(alpha) if alpha == int(alpha) else alpha


def _most(values: Mapping[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]


def _pattern(path: str, paths: Mapping[str, Any]) -> str:
    """A pattern of PEFT, which looks at the ends of paths, for one path alone."""
    ends_others = any(other.endswith(f".{path}") for other in paths)
    return f"^{re.escape(path)}" if ends_others else re.escape(path)


def check_config(config: Any, where: str) -> None:
    """Refuses, by a WeightsFileError, what is no LoRA, or one that is computed in another way."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise WeightsFileError(
            "This is no LoRA adapter.",
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
            "This adapter is computed in a way that pax_export does not know, or needs other "
            "weights of the base.",
            where=where,
            got=shown[:200],
            write="an adapter that PEFT saved as plain LoRA or DoRA; for pissa and the like with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def alpha_and_rate(config: Mapping[str, Any], path: str, where: str) -> tuple[float, float]:
    """Alpha and dropout of the layer at a path (in the names of the file)."""
    try:
        patterns = dict(config.get("alpha_pattern") or {})
        found = next((p for p in patterns if re.match(rf"(.*\.)?({p})$", path)), None)
        alpha = float(config["lora_alpha"] if found is None else patterns[found])
        rate = float(config.get("lora_dropout") or 0.0)
        if not (math.isfinite(alpha) and 0 <= rate < 1):
            raise ValueError(f"lora_alpha {alpha}, lora_dropout {rate}")
    except (KeyError, TypeError, ValueError, OverflowError, re.error) as error:
        raise WeightsFileError(
            "This adapter_config.json does not say what its adapters are multiplied by.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            write='numbers for "lora_alpha" and "lora_dropout", and an object "alpha_pattern"',
        ) from error
    return alpha, rate


def full_name(path: str, suffix: str) -> str:
    """The name of an array in a file of adapters."""
    return join(PREFIX, join(path, suffix))
