"""DecoderConfig: what kind of language model a `Decoder` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.nets._decoder_gguf import fields_of_gguf
from pax_export.nets._decoder_hf import fields_of_hf
from pax_export.nets._generation_defaults import GenerationDefaults
from pax_export.nets._layer_kind import LayerKind
from pax_export.nn import PAIRINGS, RotaryScaling, check_frequencies, choice, integer

_POSITIONS = ("rotary", "learned", "sinusoidal", "alibi", "none")
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes and choices of a `Decoder`; static data, equal for equal values.

    Make one with `llama`, or of a file of others with `from_hf` and `from_gguf`, and change
    fields with `dataclasses.replace`.

    Attributes:
        vocab_size: how many tokens there are.
        dim: the size of a hidden vector.
        num_layers: how many layers.
        num_heads: how many query heads.
        num_kv_heads: how many key and value heads.
        head_size: the size of a head.
        hidden_dim: how wide the dense block is inside.
        max_positions: the longest sequence it was made for; with learned positions a limit.
        norm: ``"rms"`` or ``"layer"``.
        norm_eps: of all norms.
        norm_offset: added to the scales of RMS norms (1 for Gemma).
        post_norms: whether what each block gives is normalised too, before it is added (Gemma).
        query_key_norm: whether query and key heads are normalised (Qwen 3, Gemma 3).
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        gated: whether the dense block is gated.
        projection_bias: whether query, key and value projections have a bias.
        output_bias: whether the output projection has one.
        dense_bias: whether the dense block has.
        positions: ``"rotary"``, ``"learned"``, ``"sinusoidal"``, ``"alibi"`` or ``"none"``.
        rotary_base: of the rotary embedding (theta).
        rotary_size: how many channels of a head turn; None for all.
        rotary_pairing: ``"halves"`` or ``"neighbours"``, see `Rotary`.
        rotary_scaling: a `RotaryScaling`, or None.
        kinds: a `LayerKind` for each of the first layers; the pattern repeats.
        attention_scale: of the logits of attention; None for ``1 / sqrt(head_size)``.
        attention_softcap: of the logits of attention.
        logit_softcap: of the logits of tokens.
        embed_scale: by what the embedding is multiplied.
        tied: whether the embedding is the head too.
        implementation: of attention, see `dot_product_attention`.
        family: what model it is, so by which names a file keeps its weights; says nothing to
            the net.
        generation: what `generate` takes where a caller says nothing; likewise.

    Raises:
        InvalidArgumentError: a size is less than one, an unknown word, or a rotary embedding of
            which there are no frequencies.
        InvalidArgumentTypeError: a size is no integer.

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
    post_norms: bool = False
    query_key_norm: bool = False
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
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    tied: bool = False
    implementation: str | None = None
    family: str = "llama"
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def __post_init__(self) -> None:
        for name in _SIZES:
            integer(getattr(self, name), f"DecoderConfig.{name}", least=1)
        choice(self.norm, ("rms", "layer"), "DecoderConfig.norm")
        choice(self.activation, _ACTIVATIONS, "DecoderConfig.activation")
        choice(self.positions, _POSITIONS, "DecoderConfig.positions")
        choice(self.rotary_pairing, PAIRINGS, "DecoderConfig.rotary_pairing")
        if self.rotary_size is not None:
            integer(self.rotary_size, "DecoderConfig.rotary_size", least=2)
        turned = self.head_size if self.rotary_size is None else self.rotary_size
        if self.positions == "rotary" and (turned % 2 or turned > self.head_size):
            raise InvalidArgumentError(
                "Channels of a head turn in pairs.",
                where="DecoderConfig.rotary_size",
                got=f"{turned} of a head of {self.head_size}",
                write=f"an even number up to {self.head_size}, or positions= of another kind",
            )
        if self.positions == "rotary":
            for own, scaled in {(kind.rotary_base, kind.scaled) for kind in self.kinds}:
                base = self.rotary_base if own is None else own
                if base != 0:  # which turns nothing
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
        **others: Any,
    ) -> DecoderConfig:
        """A net of the Llama family: RMS norms, rotary embedding, SwiGLU, no biases.

        Args:
            vocab_size: how many tokens there are.
            dim: the size of a hidden vector.
            num_layers: how many layers.
            num_heads: how many query heads.
            hidden_dim: how wide the dense block is inside.
            num_kv_heads: how many key and value heads; as many as query heads by default.
            **others: any field of the class.
        """
        sizes = {"head_size": dim // num_heads, **others}
        return cls(
            vocab_size=vocab_size, dim=dim, num_layers=num_layers, num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            hidden_dim=hidden_dim, **sizes,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """The configuration that a ``config.json`` of transformers describes.

        A missing key has the default of the configuration class of transformers.  A key that is
        not known, or a value that a `Decoder` does not compute by, is refused by name.

        Args:
            config: its content: of Llama, Mistral, SmolLM2, Qwen 2 and 3, Gemma 1, 2 and 3 (text,
                alone or as the ``text_config`` of a model of images) or GPT-2; also as older
                versions wrote it.

        Raises:
            InvalidArgumentError: another ``model_type``, a choice that a `Decoder` has not, a
                key that is not known, a size that is null, or a value of another kind.
        """
        return cls(**fields_of_hf(config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> DecoderConfig:
        """The configuration that the metadata of a GGUF file describes.

        Args:
            metadata: its keys and values; architectures ``llama``, ``qwen2``, ``qwen3``,
                ``gemma``, ``gemma2``, ``gemma3`` and ``gpt2``.  What is missing is as llama.cpp
                has it.

        Raises:
            InvalidArgumentError: another ``general.architecture``, a key of the architecture that
                is not known, or one that says a size is missing.
        """
        return cls(**fields_of_gguf(metadata))

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer by its number."""
        return self.kinds[layer % len(self.kinds)]

    @property
    def is_windowed(self) -> bool:
        """Whether any layer has a window."""
        return any(kind.window is not None for kind in self.kinds)


_SIZES = (
    "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_dim",
    "max_positions",
)  # fmt: skip
