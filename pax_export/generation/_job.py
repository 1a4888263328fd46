"""A language model on its way into a runtime's file, and its tokens there compared with jax's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.errors import ValidationError
from pax_export.generation import samplers
from pax_export.generation._generate import generate
from pax_export.generation._tokenizer import BROKEN, Tokenizer
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

    @property
    def ids(self) -> dict[str, Any]:
        """The ids of these tokens, as configurations of transformers name them; None: no such."""
        ids = {"bos_token_id": self.begin, "eos_token_id": list(self.stop) or None}
        return ids | {"pad_token_id": self.pad}

    def special(self, name: str) -> int | None:
        """The id of a special token of the tokenizer."""
        token = None if self.tokenizer is None else self.tokenizer.special_tokens.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)  # pyright: ignore


# --- Compares the tokens of runtimes with the choices of jax -------------------------------------

#: By how much of the largest logit two may differ that a runtime takes for equal; in float32, and
#: where numbers have fewer bits.
_TIE, _COARSE_TIE = 1e-3, 3e-2
_MOST_TIES = 4


def compare_tokens(
    title: str, job: Job, prompts: Sequence[Sequence[int]], theirs: Sequence[Any], steps: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compares continuations, ids or texts, with jax's greedy choices after the same tokens."""
    choose = _make_chooser(job, max(map(len, prompts)), steps)
    ours: list[list[int]] = []
    ties: list[str] = []
    equal = total = 0
    for row, (prompt, answer) in enumerate(zip(prompts, theirs)):
        text, answer = (
            (answer, _encoded(job, answer)) if isinstance(answer, str) else (None, answer)
        )
        choices = choose(prompt, answer[:steps])
        if text is not None and not all(each.is_theirs for each in choices):
            # A text may be of other ids than the tokenizer makes of it.
            ours = ours or _greedy_tokens(job, prompts, steps)
            answer = _ids_of(job, ours[row], text)
            choices = choose(prompt, answer[:steps])
        past = [at for at, each in enumerate(answer[: steps - 1]) if each in job.stop]
        if past and past[0] + 1 < len(answer):
            raise ValidationError(
                f"{title} continues a text behind a stop token.",
                where=f"{job.where}: prompt {row}, token {past[0]}",
                got=f"{answer[past[0] : past[0] + 4]}, where {job.stop} are stops",
                write="validate=False to look at the export all the same, and please report it",
            )
        others = [at for at, each in enumerate(choices) if not each.is_theirs]
        for at in others:
            distance, largest = choices[at].distance, choices[at].largest
            bound = (_TIE if _is_wide(job) else _COARSE_TIE) * max(1.0, largest)
            if not distance <= bound or len(others) > _MOST_TIES:
                own = [each.token for each in choices[at : at + 4]]
                raise ValidationError(
                    f"{title} continues a prompt differently from jax.",
                    where=f"{job.where}: prompt {row}, token {at}",
                    got=f"{answer[at : at + 4]}, jax: {own}; the logits differ by {distance:.3g}, "
                    f"of {largest:.3g}",
                    write="validate=False to look at the export all the same, and please report it",
                )
            ties.append(
                f"prompt {row}, token {at}: another token, where logits of {largest:.3g} differ "
                f"by {distance:.2g}"
            )
        total += len(choices)
        equal += len(choices) - len(others)
    counted = f"{equal} of {total} greedy tokens of {len(prompts)} prompts are jax's"
    return {"tokens": counted}, tuple(ties)


class _ComparedToken(NamedTuple):
    """A token of a runtime, beside jax's after the same tokens.

    Attributes:
        token: jax's.
        is_theirs: whether it is the runtime's, too, or both end.
        distance: the difference of the largest logit from that of the runtime's token.
        largest: the largest absolute value of a logit.
    """

    token: int
    is_theirs: bool
    distance: float
    largest: float


def _make_chooser(
    job: Job, longest: int, steps: int
) -> Callable[[Sequence[int], Sequence[int]], list[_ComparedToken]]:
    """Returns ``choose(prompt, said)``; the net is compiled once, for the longest of all rows."""
    stop = np.array(job.stop, np.int32)

    @jax.jit
    def read(lm: Decoder, tokens: jax.Array, following: jax.Array) -> tuple[jax.Array, ...]:
        logits = lm(tokens[None])[0].astype(jnp.float32)
        theirs = jnp.take_along_axis(logits, following[:, None], 1)[:, 0]
        ends = logits[:, stop].max(1, initial=-jnp.inf)
        return logits.argmax(1), logits.max(1), jnp.abs(logits).max(1), theirs, ends

    def choose(prompt: Sequence[int], answer: Sequence[int]) -> list[_ComparedToken]:
        tokens = np.zeros(longest + steps + 1, np.int32)
        tokens[: len(prompt) + len(answer)] = [*prompt, *answer]
        columns = (np.asarray(each) for each in read(job.lm, tokens[:-1], tokens[1:]))
        rows = list(zip(*(each[len(prompt) - 1 :].tolist() for each in columns)))
        compared = [
            _ComparedToken(token, token == each, most - theirs, largest)
            for each, (token, most, largest, theirs, _) in zip(answer, rows)
        ]
        if len(answer) < steps and not np.isin(answer[-1:], stop).any():  # a stop may be left out
            token, most, largest, _, ends = rows[len(answer)]
            compared.append(_ComparedToken(token, token in stop, most - ends, largest))
        return compared

    return choose


def _is_wide(job: Job) -> bool:
    return all(leaf.dtype.name in ("float32", "float64") for leaf in jax.tree.leaves(job.lm))


def _greedy_tokens(job: Job, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    stop = list(job.stop)
    options = {"max_new_tokens": steps, "stop": stop or None, "pad": 0}
    rows = [list(each) for each in prompts]
    tokens = np.asarray(generate(job.lm, rows, sampler=samplers.greedy(), **options))
    return [up_to_stop(row.tolist(), stop) for row in tokens]


def up_to_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens of a sequence, without padding behind its end."""
    ends = [at for at, each in enumerate(tokens) if each in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def _ids_of(job: Job, own: list[int], text: str) -> list[int]:
    """Returns the ids of a runtime's text: jax's own, as far as they decode to that text."""
    assert job.tokenizer is not None
    decode = job.tokenizer.decode
    if text.rstrip(BROKEN) == decode(own).rstrip(BROKEN):  # the last letter may be incomplete
        return own
    count = len(own)
    while not text.startswith(begin := decode(own[:count])):
        count -= 1
    rest = text[len(begin) :]
    return [*own[:count], *_encoded(job, rest)]


def _encoded(job: Job, text: str) -> list[int]:
    assert job.tokenizer is not None
    return job.tokenizer.encode(text, add_special_tokens=False)
