"""The proof of an export for a runtime: it continues prompts, with the tokens of jax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.errors import (
    InvalidArgumentError,
    MissingPackageError,
    ValidationError,
)
from pax_export._foundations.files import atomic
from pax_export._foundations.types import Array
from pax_export.generation import _runtime_calls, samplers
from pax_export.generation._generate import generate
from pax_export.generation._job import Job, Runtime
from pax_export.generation._prompt import checked_prompt
from pax_export.generation._tokenizer import BROKEN
from pax_export.nets import Decoder

#: Default prompts, and the number of tokens that follow each.
_TEXTS = (
    "The capital of France is",
    "Once upon a time there was a king who had three daughters, and the youngest of them",
    "def mean(numbers):\n    total = 0\n    for each in numbers:\n",
)
_STEPS = 24
#: Seconds that a runtime has to continue the prompts, and more for each GiB of weights; many,
#: because threads of several programs wait for each other.
_SECONDS, _SECONDS_PER_GIB = 1800, 1800

#: A text, texts, or ids of one length or several.
Prompts = str | Sequence[str | Sequence[int]] | Array


def proof_prompts(runtime: Runtime, job: Job, prompts: Prompts | None) -> list[list[int]]:
    """Returns the test prompts as ids: of several lengths, and one longer than a window."""
    tokenizer, texts = job.tokenizer, prompts
    if prompts is not None:
        texts = [prompts] if isinstance(prompts, str) else prompts
        if tokenizer is not None and isinstance(texts, Sequence):
            texts = [tokenizer.encode(x) if isinstance(x, str) else x for x in texts]
        tokens, lengths = checked_prompt(job.lm, texts, None, f"{job.where}: prompts")
        asked = [row[:size].tolist() for row, size in zip(np.asarray(tokens), lengths)]
    else:
        asked = [tokenizer.encode(each) for each in _TEXTS] if tokenizer else []
        asked = [each for each in asked if len(each) > 1] or [[1 % job.lm.config.vocab_size] * 3]
        longest = max(asked, key=len)
        most = job.room - min(_STEPS, job.room // 2)
        windows = [kind.window for kind in job.lm.config.kinds if kind.window is not None]
        if windows and windows[0] < most:
            asked.append((longest * (windows[0] // len(longest) + 2))[: min(windows[0] + 5, most)])
        asked = [each[:most] for each in asked]
    longest = max(map(len, asked))
    if longest >= job.room:
        raise InvalidArgumentError(
            "A prompt of the validation must have room after it.",
            where=f"{job.where}: prompts",
            got=f"{len(asked)} prompts of up to {longest} tokens, and max_length={job.room}",
            write="prompts=[...] of texts or lists of ids",
        )
    if not runtime.reads_texts or tokenizer is None:
        return asked
    read = [tokenizer.encode(text) for text in _texts(job, asked)]
    wrong = [row for row, ids in enumerate(read) if ids != asked[row]]
    if wrong and prompts is not None:
        raise InvalidArgumentError(
            f"{runtime.title} takes texts, and no text has the ids of this prompt.",
            where=f"{job.where}: prompts, row {wrong[0]}",
            got=str(asked[wrong[0]])[:80],
            write="prompts=[...] of strings, or of ids of tokenizer.encode(text)",
        )
    return read


def _texts(job: Job, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The texts of prompts, without the token that a runtime puts before each."""
    own = [x[1:] if job.begins and x[0] == job.begin else x for x in prompts]
    return [job.required_tokenizer.decode(each) for each in own]


def prove_continuations(
    runtime: Runtime, job: Job, written: Path, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compares the runtime's continuations with jax's; returns report entries and broken ties.

    Raises:
        ValidationError: its tokens differ from jax's, and logits are not nearly equal; or its
            tokenizer or chat template has other results.
    """
    steps = min(_STEPS, job.room - max(map(len, prompts)))
    calls = {"prompts": prompts, "steps": steps, "room": job.room, "stop": job.stop}
    if job.tokenizer is not None:
        calls["texts"] = _texts(job, prompts)
        begin = job.tokenizer.special_tokens["bos_token"] if job.begins else ""
        calls |= {"messages": HELLO if job.tokenizer.chat_template else None, "begin": begin}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(job.lm))
    seconds = _SECONDS + _SECONDS_PER_GIB * size / 2**30
    if runtime.run:
        theirs = runtime.run(job, written, calls, seconds)
    else:
        theirs = run_runtime(runtime, written, calls, seconds)
    for text, ids in zip(calls.get("texts", ()), theirs.get("texts", ())):
        own = job.required_tokenizer.encode(text, add_special_tokens=False)
        check_results(job, "tokenizer", runtime.title, own, ids)
    if "conversation" in theirs:
        own = chat_prompt(job).removeprefix(calls["begin"] if runtime.begins_texts else "")
        check_results(job, "chat template", runtime.title, own, theirs["conversation"])
    job = replace(job, lm=job.in_context())
    prompts = [*prompts] * (len(theirs["prompts"]) // len(prompts))
    return compare_tokens(runtime.title, job, prompts, theirs["prompts"], steps)


def prove_beside(
    runtime: Runtime, job: Job, written: Path, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Compares the other runtimes of the files; also returns which of them are missing."""
    details, ties, left_out = {}, [], []
    for other in runtime.beside:
        try:
            if other.find:
                other.find()
        except MissingPackageError as error:
            left_out.append(f"{other.title}: {error.got}; {error.write}")
            continue
        result, differs = prove_continuations(other, job, written, prompts)
        details[other.title] = result["tokens"]
        ties += [f"{other.title}, {each}" for each in differs]
    return details, tuple(ties), tuple(left_out)


#: A conversation that a runtime writes down with the template.
HELLO = [{"role": "user", "content": "Hello, who are you?"}]


def chat_prompt(job: Job) -> str:
    """The text of `HELLO`, and of the beginning of an answer."""
    return job.required_tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, tokenize=False
    )


def check_results(job: Job, what: str, runtime: str, own: object, theirs: object) -> None:
    """Refuses a runtime whose tokenizer or chat template has other results."""
    if own != theirs:
        raise ValidationError(
            f"The {what} has other results in {runtime} than in Python.",
            where=f"{job.where}: tokenizer",
            got=f"{theirs!r:.300} where Python says {own!r:.300}",
            write="validate=False to write the folder all the same, and ids as Python makes them "
            "in place of texts",
        )


def run_runtime(
    runtime: Runtime, written: Path, calls: Mapping[str, Any], seconds: float
) -> Mapping[str, Any]:
    """Runs the runtime in a process of its own; returns its answers, as `_runtime_calls` does.

    Raises:
        ValidationError: it fails, or exceeds the time limit.
    """
    with atomic.scratch() as folder:
        asked, results = folder / "calls.json", folder / "results.json"
        asked.write_text(json.dumps(calls), encoding="utf-8")
        program = runtime.program or (sys.executable, str(_runtime_calls.__file__), runtime.name)
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [*program, str(written), str(asked), str(results)], capture_output=True, text=True,
                errors="replace", env=quiet, timeout=seconds,
            )  # fmt: skip
            got = (done.stderr or done.stdout or f"exit code {done.returncode}")[-1500:]
        except subprocess.TimeoutExpired:
            got = f"no answer to {len(calls['prompts'])} prompts within {seconds:.0f} seconds"
            done = None
        if done is None or done.returncode:
            raise ValidationError(
                f"{runtime.title} does not run the export.",
                where=str(written),
                got=got,
                write="shorter prompts=[...]; validate=False to look at the export all the same",
            )
        return json.loads(results.read_text(encoding="utf-8"))


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
    decode = job.required_tokenizer.decode
    if text.rstrip(BROKEN) == decode(own).rstrip(BROKEN):  # the last letter may be incomplete
        return own
    count = len(own)
    while not text.startswith(begin := decode(own[:count])):
        count -= 1
    rest = text[len(begin) :]
    return [*own[:count], *_encoded(job, rest)]


def _encoded(job: Job, text: str) -> list[int]:
    return job.required_tokenizer.encode(text, add_special_tokens=False)
