"""Converts a DecoderConfig to settings in files: the inverse of `from_hf` and `from_gguf`."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, a_few
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._families import keys_of_hf
from pax_export.nets.decoder._fields import BIASES, OPTIONAL
from pax_export.nets.decoder._gguf import (
    GGUF,
    GGUF_NAMES,
    LAYER_NORM_GGUF_NAMES,
    LAYER_NORMS,
    ROTARY_TENSORS,
)
from pax_export.nets.decoder._hf import FAMILIES, YARN_BETAS
from pax_export.nn import RotaryScaling, rotary_frequencies


def config_of_hf(config: DecoderConfig) -> DecoderConfig:
    """The configuration of the net in a folder of transformers; Gemma's norms are 1 + scale."""
    offset = 1.0 if config.family.startswith("gemma") else 0.0
    return replace(config, norm_offset=offset)


def hf_config(config: DecoderConfig, where: str) -> dict[str, Any]:
    """Returns the content of ``config.json``.

    Raises:
        InvalidArgumentError: transformers has no such architecture.
    """
    target = config_of_hf(config)
    fields = keys_of_hf(target) if target.family in FAMILIES else {}
    try:
        back = DecoderConfig.from_hf(fields)
    except InvalidArgumentError as error:
        raise _no_such_net_error(config, "transformers", where, str(error.got)) from error
    _check_same(target, back, "transformers", where)
    return fields


# --- GGUF ---------------------------------------------------------------------------------

#: The architectures of llama.cpp, by our families where another one has the same net.
_ARCHITECTURES = {"mistral": "llama"}
_TITLE = "llama.cpp"


def _lacks(config: DecoderConfig) -> list[str]:
    """Returns the settings that llama.cpp lacks, of those that the metadata does not mention."""
    family, biased = config.family, config.family in LAYER_NORMS
    may_be_biased = biased or family in ("llama", "granite")
    own = config.rotary_scaling
    scaling, result = ("", 1.0) if own is None else (own.kind, own.result_factor)
    betas = None if own is None else (own.low, own.high)
    is_square = config.num_heads * config.head_size == config.dim
    turned = config.rotary_size or config.head_size
    lacking = {
        "projection_bias=True": config.projection_bias and family == "olmo2",
        "output_bias=True": config.output_bias and not may_be_biased,
        "dense_bias=True": config.dense_bias and not may_be_biased,
        "output_bias=False": not config.output_bias and biased,
        "dense_bias=False": not config.dense_bias and biased,
        "num_heads * head_size is not dim": not is_square
        and family in ("qwen2", "phi3", "olmo2", "starcoder2", "gpt2"),
        "tied=False": not config.tied and family in ("gemma", "gemma2"),
        "tied=True, see lm.untied()": config.tied and family == "olmo2",
        "a table of rotary factors": scaling == "table"
        and (result != 1.0 or family not in ("llama", "granite")),
        f"yarn with beta_slow and beta_fast {betas}": scaling == "yarn" and betas != YARN_BETAS,
        "rotary_scaling of the kind longrope": scaling == "longrope" and family != "phi3",
        f"rotary_size={turned}": turned != config.head_size and family != "phi3",
    }
    return [name for name, is_lacking in lacking.items() if is_lacking]


def config_of_gguf(config: DecoderConfig) -> DecoderConfig:
    """The configuration of the net in a GGUF file: rotary factors as a table, norms without 1 +."""
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind == "llama3":
        size = config.rotary_size or config.head_size
        plain = rotary_frequencies(size, config.rotary_base)
        factors = plain / rotary_frequencies(size, config.rotary_base, scaling)
        scaling = RotaryScaling("table", table=tuple(factors.astype("float32").tolist()))
    family = _ARCHITECTURES.get(config.family, config.family)
    return replace(config, family=family, norm_offset=0.0, rotary_scaling=scaling)


def gguf_metadata(config: DecoderConfig, where: str) -> dict[str, Any]:
    """Returns the architecture's keys for a GGUF file.

    Raises:
        InvalidArgumentError: llama.cpp has no such architecture.
    """
    if config.family not in GGUF:
        raise _no_such_net_error(config, _TITLE, where, "")
    keys = {f"{config.family}.{name}": value for name, value in _written_keys(config).items()}
    metadata = {"general.architecture": config.family, **keys}
    try:
        back = DecoderConfig.from_gguf(metadata)
    except InvalidArgumentError as error:
        raise _no_such_net_error(config, _TITLE, where, str(error.got)) from error
    if lacking := _lacks(config):
        raise _no_such_net_error(config, _TITLE, where, ", ".join(lacking))
    in_tensors = ["tied", "vocab_size", *BIASES]
    in_tensors += ["rotary_scaling"] if rotary_tensors(config) else []
    back = replace(back, **{name: getattr(config, name) for name in in_tensors})
    _check_same(config, back, _TITLE, where)
    return metadata


def rotary_tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the tensors of a GGUF file with divisors of rotary frequencies."""
    scaling = config.rotary_scaling
    if scaling is None:
        return {}
    tables = np.asarray(scaling.table, np.float32), np.asarray(scaling.long_table, np.float32)
    return dict(zip(ROTARY_TENSORS.get(scaling.kind, ()), tables))


def _written_keys(config: DecoderConfig) -> dict[str, Any]:
    gpt2 = config.family == "gpt2"
    names = LAYER_NORM_GGUF_NAMES if config.family in LAYER_NORMS else GGUF_NAMES
    fields: dict[str, Any] = {"vocab_size": config.vocab_size}
    fields |= {
        key: getattr(config, n) for n, key in names.items() if not (gpt2 and key in OPTIONAL)
    }
    fields[names["norm_eps"]] = float(config.norm_eps)
    if gpt2:
        return fields
    fields |= {
        "attention.value_length": config.head_size,
        "rope.dimension_count": config.rotary_size or config.head_size,
        "rope.freq_base": float(config.rotary_base),
    }
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind in ("longrope", "yarn"):
        fields["rope.scaling.original_context_length"] = scaling.original_length
    if scaling is not None and scaling.kind == "longrope":
        fields["rope.scaling.attn_factor"] = float(scaling.result_factor)
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if config.family == "granite":
        fields |= {
            "embedding_scale": float(config.embed_scale), "logit_scale": 1.0 / config.logit_scale,
            "attention.scale": float(config.attention_scale or config.head_size**-0.5),
            "residual_scale": float(config.residual_scale),
        }  # fmt: skip
    windows = [kind for kind in config.kinds if kind.window is not None]
    if windows and config.family in ("gemma2", "gemma3"):
        fields["attention.sliding_window"] = windows[0].window
        if config.family == "gemma3":
            fields["rope.freq_base_swa"] = float(windows[0].rotary_base or config.rotary_base)
    caps = {"attn": config.attention_softcap, "final": config.logit_softcap}
    return fields | {f"{k}_logit_softcapping": float(v) for k, v in caps.items() if v is not None}


# --- is it the same net? ------------------------------------------------------------------

#: Fields that do not change the function; layer kinds are compared layer by layer.
_UNSEEN = ("generation", "implementation", "family", "kinds")


def _check_same(meant: DecoderConfig, back: DecoderConfig, title: str, where: str) -> None:
    """Refuses a configuration that does not survive the conversion and back."""
    lost = [
        each.name
        for each in fields(meant)
        if each.name not in _UNSEEN
        and not _nearly_equal(*(_field_as_computed(config, each.name) for config in (meant, back)))
    ]
    for number in range(meant.num_layers):
        if _kind_as_computed(meant, number) != _kind_as_computed(back, number):
            lost.append(f"the kind of layer {number}")
    if lost:
        shown = [f"{each}={getattr(meant, each, '')!r:.60}".removesuffix("=''") for each in lost]
        raise _no_such_net_error(meant, title, where, a_few(shown, 4))


def _kind_as_computed(config: DecoderConfig, number: int) -> tuple:
    kind = config.kind_of(number)
    base = config.rotary_base if kind.rotary_base is None else kind.rotary_base
    if config.positions != "rotary" or base == 0:
        return kind.window, 0
    return kind.window, base, config.rotary_scaling if kind.scaled else None


def _field_as_computed(config: DecoderConfig, name: str) -> object:
    """Returns the effective value of a field."""
    if config.positions != "rotary" and name.startswith("rotary"):
        return None
    own = {"attention_scale": config.head_size**-0.5, "rotary_size": config.head_size}
    value = getattr(config, name)
    return own.get(name) if value is None else value


def _nearly_equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _no_such_net_error(
    config: DecoderConfig, title: str, where: str, got: str
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{title} has no equivalent of this net.",
        where=f"{where}: lm.config",
        got=f"family={config.family!r}; {got}"[:300],
        write=f"a net of the families {', '.join(sorted(FAMILIES))} as their files describe them, "
        'or format="genai", which holds any Decoder',
    )
