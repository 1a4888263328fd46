"""DecoderConfig: the configuration of a `Decoder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pax_export._foundations.check import checked_choice, checked_integer, checked_positive
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.nets.decoder._fields import LayerKind
from pax_export.nets.decoder._generation import GenerationDefaults
from pax_export.nets.decoder._gguf import fields_of_gguf
from pax_export.nets.decoder._hf import fields_of_hf
from pax_export.nn import IMPLEMENTATIONS, RotaryScaling, check_frequencies, checked_pairing

_POSITIONS = ("rotary", "learned", "sinusoidal", "alibi", "none")
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of a `Decoder`; static, and compared by value.

    Create one with `llama`, or from a file with `from_hf` or `from_gguf`, and change fields with
    `dataclasses.replace`.

    Attributes:
        vocab_size: the number of tokens.
        dim: the size of hidden vectors.
        num_layers: the number of layers.
        num_heads: the number of query heads.
        num_kv_heads: the number of key and value heads.
        head_size: the size of a head.
        hidden_dim: the hidden size of the MLP.
        max_positions: the longest trained sequence; a hard limit with learned positions.
        norm: ``"rms"`` or ``"layer"``.
        norm_eps: the epsilon of all norms.
        norm_offset: added to the scales of RMS norms (1 for Gemma).
        pre_norms: normalize the input of each block (not in OLMo 2).
        post_norms: normalize the output of each block before the residual sum (Gemma, OLMo 2).
        residual_scale: a factor of the output of each block (Granite).
        query_key_norm: normalize query and key heads (Qwen 3, Gemma 3, OLMo 2).
        norm_per_head: normalize each of these heads on its own; False: all together (OLMo 2).
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        gated: whether the MLP is gated.
        projection_bias: whether query, key and value projections have a bias.
        output_bias: whether the output projection has a bias.
        dense_bias: whether the MLP has biases.
        positions: ``"rotary"``, ``"learned"``, ``"sinusoidal"``, ``"alibi"`` or ``"none"``.
        rotary_base: the base of the rotary embedding (theta).
        rotary_size: the number of rotated channels of a head; None for all.
        rotary_pairing: ``"halves"`` or ``"neighbors"``, see `Rotary`.
        rotary_scaling: a `RotaryScaling`, or None.
        kinds: a `LayerKind` for each of the first layers, which is repeated.
        attention_scale: the scale of attention logits; None for ``1 / sqrt(head_size)``.
        attention_softcap: the soft cap of attention logits.
        logit_scale: a factor of token logits (Granite).
        logit_softcap: the soft cap of token logits.
        embed_scale: a factor of the embedding.
        tied: whether the head shares the weight of the embedding.
        implementation: of attention, see `dot_product_attention`.
        family: the model family, which sets the names of weights in files; not used by the net.
        generation: the default arguments of `generate`; not used by the net.

    Raises:
        InvalidArgumentError: a size is less than one, a choice is unknown, a soft cap or scale is
            not positive, or the rotary embedding has no frequencies.
        InvalidArgumentTypeError: a size is not an integer, or a kind not a `LayerKind`.

    Example:
        >>> import pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32)
        >>> config.head_size, config.tied
        (4, False)
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_dim: int
    max_positions: int = 2048
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    residual_scale: float = 1.0
    query_key_norm: bool = False
    norm_per_head: bool = True
    activation: str = "silu"
    gated: bool = True
    projection_bias: bool = False
    output_bias: bool = False
    dense_bias: bool = False
    positions: str = "rotary"
    rotary_base: float = 10000.0
    rotary_size: int | None = None
    rotary_pairing: str = "halves"
    rotary_scaling: RotaryScaling | None = None
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    tied: bool = False
    implementation: str | None = None
    family: str = "llama"
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def __post_init__(self) -> None:
        for name in _SIZES:
            checked_integer(getattr(self, name), f"DecoderConfig.{name}", least=1)
        checked_choice(self.norm, ("rms", "layer"), "DecoderConfig.norm")
        checked_choice(self.activation, _ACTIVATIONS, "DecoderConfig.activation")
        checked_choice(self.positions, _POSITIONS, "DecoderConfig.positions")
        if self.implementation is not None:
            checked_choice(self.implementation, IMPLEMENTATIONS, "DecoderConfig.implementation")
        for name in ("attention_softcap", "logit_softcap", "residual_scale", "logit_scale"):
            if getattr(self, name) is not None:
                checked_positive(getattr(self, name), f"DecoderConfig.{name}")
        for kind in self.kinds:
            if not isinstance(kind, LayerKind):
                raise InvalidArgumentTypeError(
                    "The kinds of layers must be LayerKind.",
                    where="DecoderConfig.kinds",
                    got=f"{type(kind).__name__}: {kind!r:.80}",
                    write="kinds=(LayerKind(window=...), LayerKind()) for a pattern of two",
                )
        pairing = checked_pairing(self.rotary_pairing, "DecoderConfig.rotary_pairing")
        object.__setattr__(self, "rotary_pairing", pairing)
        if self.rotary_size is not None:
            checked_integer(self.rotary_size, "DecoderConfig.rotary_size", least=2)
        turned = self.head_size if self.rotary_size is None else self.rotary_size
        if self.positions == "rotary" and (turned % 2 or turned > self.head_size):
            raise InvalidArgumentError(
                "A rotary embedding rotates an even number of channels.",
                where="DecoderConfig.rotary_size",
                got=f"{turned} of a head of {self.head_size}",
                write=f"an even number up to {self.head_size}, or positions= of another kind",
            )
        if self.positions == "rotary":
            for own, scaled in {(kind.rotary_base, kind.scaled) for kind in self.kinds}:
                base = self.rotary_base if own is None else own
                if base != 0:  # a rotation by zero
                    scaling = self.rotary_scaling if scaled else None
                    check_frequencies(turned, base, scaling, "DecoderConfig.rotary_base")
        if not 1 <= len(self.kinds) <= self.num_layers:
            raise InvalidArgumentError(
                "There must be a kind for each of the first layers.",
                where="DecoderConfig.kinds",
                got=f"{len(self.kinds)} for {self.num_layers} layers",
                write="kinds=(LayerKind(window=...), LayerKind()) for a pattern of two",
            )

    @classmethod
    def llama(
        cls,
        *,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        num_kv_heads: int | None = None,
        **others: object,
    ) -> DecoderConfig:
        """Returns the configuration of a Llama: RMS norms, rotary embedding, SwiGLU, no biases.

        Args:
            vocab_size: the number of tokens.
            dim: the size of hidden vectors.
            num_layers: the number of layers.
            num_heads: the number of query heads.
            hidden_dim: the hidden size of the MLP.
            num_kv_heads: the number of key and value heads; that of query heads by default.
            **others: other fields of the class.
        """
        sizes = {"head_size": dim // num_heads, **others}
        return cls(
            vocab_size=vocab_size, dim=dim, num_layers=num_layers, num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            hidden_dim=hidden_dim, **sizes,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Returns the configuration for a ``config.json`` of transformers.

        Missing keys have the defaults of transformers.  Unknown keys, and values that a `Decoder`
        does not support, raise errors that name them.

        Args:
            config: the content of the file, of Llama, Mistral, SmolLM 2 and 3, Qwen 2 and 3,
                Gemma 1, 2 and 3, Phi-3 and Phi-4-mini, Granite, OLMo 2 and 3, StarCoder 2,
                Ministral, Seed-OSS, ERNIE 4.5, Helium, EXAONE 4 or GPT-2, or the ``text_config``
                of the image models of Gemma 3 and Mistral Small 3, from any version of
                transformers.

        Raises:
            InvalidArgumentError: the ``model_type``, a key or a value is unsupported, or a size
                is null.
        """
        return cls(**fields_of_hf(config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> DecoderConfig:
        """Returns the configuration for the metadata of a GGUF file.

        Args:
            metadata: keys and values, for the architectures ``llama``, ``qwen2``, ``qwen3``,
                ``gemma``, ``gemma2``, ``gemma3``, ``phi3``, ``smollm3``, ``granite``, ``olmo2``,
                ``starcoder2`` and ``gpt2``.  Missing keys have the defaults of llama.cpp.

        Raises:
            InvalidArgumentError: the ``general.architecture`` or a key is unsupported, or a size
                is missing.
        """
        return cls(**fields_of_gguf(metadata))

    def kind_of(self, layer: int) -> LayerKind:
        """Returns the kind of a layer by its number."""
        return self.kinds[layer % len(self.kinds)]


_SIZES = (
    "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_dim",
    "max_positions",
)  # fmt: skip
