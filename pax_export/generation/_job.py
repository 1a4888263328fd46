"""A language model on its way into a runtime's file, and what a runtime is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from pax_export.export import Report
from pax_export.generation._tokenizer import Tokenizer
from pax_export.nets import Decoder, generation_config


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
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer, where a runtime reads texts."""
        assert self.tokenizer is not None, "a runtime that reads texts is checked for one"
        return self.tokenizer

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

    @property
    def ids(self) -> dict[str, Any]:
        """The ids of these tokens, as configurations of transformers name them; None: no such."""
        ids = {"bos_token_id": self.begin, "eos_token_id": list(self.stop) or None}
        return ids | {"pad_token_id": self.pad}

    def special(self, name: str) -> int | None:
        """The id of a special token of the tokenizer."""
        token = None if self.tokenizer is None else self.tokenizer.special_tokens.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)  # pyright: ignore


class Runtime(NamedTuple):
    """A language-model runtime.

    Attributes:
        name: the format, and the function of `_runtime_calls`.
        title: its name in sentences.
        packages: packages that a validation imports.
        extra: the extra that installs them.
        check: refuses, before any work, models that the runtime does not support.
        write: writes a folder or a file; returns entries for the report, or a report.
        mark: bytes near the beginning of a file of ours; empty for a folder.
        suffix: the required suffix of the name, if any.
        find: refuses a validation whose programs are missing.
        run: continues prompts, instead of the function of `_runtime_calls`; once or several times.
        program: the command that runs prompts, instead of `_runtime_calls`.
        reads_texts: whether it takes strings, and tokenizes them itself.
        begins_texts: whether it puts the token that begins a text before a conversation itself.
        level: the default ``accuracy_level`` of quantized products; None if a file has none.
        ends_at_eos: whether it ends texts at the tokenizer's `eos_token`, whatever the net's are.
        beside: other runtimes that continue prompts of the same files, where they are installed.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    extra: str
    check: Callable[[Job], None]
    write: Callable[[Job, Path], Report | Mapping[str, Any]]
    mark: bytes = b""
    suffix: str = ""
    find: Callable[[], None] | None = None
    run: Callable[[Job, Path, Mapping[str, Any], float], Mapping[str, Any]] | None = None
    program: tuple[str, ...] = ()
    reads_texts: bool = False
    begins_texts: bool = False
    level: Literal[1, 4] | None = None
    ends_at_eos: bool = False
    beside: tuple[Runtime, ...] = ()


# --- files of tokenizer and configuration --------------------------------------------------------


def json_file(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def generation_file(job: Job) -> bytes:
    """The content of ``generation_config.json``."""
    defaults = replace(job.lm.config.generation, stop=job.stop, pad=job.pad)
    return json_file(generation_config(defaults, job.begin))


def tokenizer_files(job: Job) -> dict[str, bytes]:
    """The files of the tokenizer, without an empty template."""
    if job.tokenizer is None:
        return {}
    files = job.tokenizer.files()
    return {name: content for name, content in files.items() if content}
