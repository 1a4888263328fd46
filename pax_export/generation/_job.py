"""A language model on its way into a runtime's file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from pax_export.generation._tokenizer import Tokenizer
from pax_export.nets import Decoder


@dataclass(frozen=True)
class Job:
    """A language model to export.

    Attributes:
        lm: the net, in eval mode.
        tokenizer: with its chat template.
        room: the maximum number of tokens.
        where: for messages.
        accuracy_level: the accuracy of quantized products, as for `to_tflite`.
        ends_at_eos: whether the tokenizer's end of a text is a stop in any case.
    """

    lm: Decoder
    tokenizer: Tokenizer | None
    room: int
    where: str
    accuracy_level: Literal[1, 4] = 4
    ends_at_eos: bool = False

    def in_context(self) -> Decoder:
        """Returns the net with the rotary embedding of contexts of `room` tokens."""
        config = self.lm.config
        if config.rotary_scaling is None:
            return self.lm
        scaling = config.rotary_scaling.for_length(self.room)
        return self.lm.set_attribute("config", replace(config, rotary_scaling=scaling))

    def listed(self) -> Decoder:
        """Like `in_context`, with a list of layers, whose arrays are views without copies."""
        return jax.tree.map(np.asarray, self.in_context()).listed()

    @property
    def stop(self) -> tuple[int, ...]:
        """The stop ids of the net, or else of the tokenizer."""
        own = self.lm.config.generation.stop
        own = own or (() if self.tokenizer is None else self.tokenizer.stop)
        eos = self.special("eos_token") if self.ends_at_eos else None
        return own if eos is None or eos in own else (*own, eos)

    @property
    def begin(self) -> int | None:
        """The id of the token that begins a text, if the tokenizer names one."""
        return self.special("bos_token")

    @property
    def begins(self) -> bool:
        """Whether the tokenizer puts that token before each text."""
        return self.tokenizer is not None and self.tokenizer.encode("a")[:1] == [self.begin]

    @property
    def pad(self) -> int | None:
        """The id of the padding token, or None."""
        own = self.lm.config.generation.pad
        return self.special("pad_token") if own is None else own

    def special(self, name: str) -> int | None:
        """The id of a special token of the tokenizer."""
        token = None if self.tokenizer is None else self.tokenizer.special_tokens.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)  # pyright: ignore
