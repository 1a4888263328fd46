"""The common part of exports to language-model runtimes.

Unsupported models are refused before any work; the runtime runs the export, in a process of its
own, before it gets its final name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from pax_export import export as exporters
from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    MissingPackageError,
    NotValidatedWarning,
    TokenizerError,
    ValidationError,
)
from pax_export._foundations.files import atomic, own_files
from pax_export._foundations.files.system import as_path, read_small_file
from pax_export._foundations.optional import install, is_installed, packages_of
from pax_export._foundations.types import Array
from pax_export.core import enable_eval_mode, named_leaves
from pax_export.export.artifact.report import (
    REPORT_FILE,
    VariableInfo,
    package_versions,
    report_text,
)
from pax_export.generation import _runtime_calls
from pax_export.generation._job import Job, compare_tokens
from pax_export.generation._prompt import LanguageModel, checked_prompt
from pax_export.generation._tokenizer import Tokenizer, check_fits
from pax_export.nets import Decoder, generation_config
from pax_export.quantization import QuantizedArray

Report = exporters.Report

#: Formats for the functions of any net with a cache, and their exporters.
FUNCTION_FORMATS = {
    "saved_model": "to_saved_model",
    "stablehlo": "to_stablehlo",
    "onnx": "to_onnx",
    "tflite": "to_tflite",
}

#: A text, texts, or ids of one length or several.
Prompts = str | Sequence[str | Sequence[int]] | Array

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
_LARGEST_REPORT = 1 << 26


class Runtime(NamedTuple):
    """A language-model runtime.

    Attributes:
        name: the format, and the function of `_runtime_calls`.
        title: its name in sentences.
        packages: packages that a validation imports.
        extra: the extra that installs them.
        check: refuses, before any work, models that the runtime does not support.
        write: writes a folder or a file; returns entries for the report, or a report.
        is_file: whether one file is written.
        mark: bytes near the beginning of such a file of ours.
        suffix: the required suffix of the name, if any.
        find: refuses a validation whose programs are missing.
        run: continues prompts, instead of the function of `_runtime_calls`; once or several times.
        reads_texts: whether it takes strings, and tokenizes them itself.
        level: the default ``accuracy_level`` of quantized products; None if a file has none.
        ends_at_eos: whether it ends texts at the tokenizer's `eos_token`, whatever the net's are.
        program: the command that runs prompts, instead of `_runtime_calls`.
        beside: other runtimes that continue prompts of the same files, where they are installed.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    extra: str
    check: Callable[[Job], None]
    write: Callable[[Job, Path], Report | Mapping[str, Any]]
    is_file: bool = False
    mark: bytes = b""
    suffix: str = ""
    find: Callable[[], None] | None = None
    run: Callable[[Job, Path, Mapping[str, Any], float], list[Any]] | None = None
    reads_texts: bool = False
    level: Literal[1, 4] | None = None
    ends_at_eos: bool = False
    program: tuple[str, ...] = ()
    beside: tuple[Runtime, ...] = ()


def export_for_runtime(
    runtime: Runtime,
    lm: LanguageModel,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | str | os.PathLike[str] | None,
    max_length: int | str | None,
    prompts: Prompts | None = None,
    accuracy_level: Literal[1, 4] | None = None,
    validate: bool = True,
    overwrite: bool = False,
    where: str = "export",
) -> Report:
    """Writes a language model for a runtime, and has the runtime continue texts as jax does."""
    began = time.perf_counter()
    if not str(as_path(path)).endswith(runtime.suffix):
        raise InvalidArgumentError(
            f"{runtime.title} opens files by their suffix.",
            where=f"{where}: path",
            got=str(path),
            write=f"a path that ends with {runtime.suffix}",
        )
    level = (runtime.level or 4) if accuracy_level is None else accuracy_level
    checked_choice(level, (1, 4) if runtime.level else (4,), "accuracy_level")
    checked_choice(overwrite, (True, False), "overwrite")
    job = replace(_job(runtime, lm, tokenizer, max_length, where), accuracy_level=level)
    runtime.check(job)
    asked = _test_prompts(job, prompts)
    if runtime.reads_texts and job.tokenizer is not None:
        ids, asked = asked, [job.tokenizer.encode(text) for text in _prompt_texts(job, asked)]
        wrong = [row for row, both in enumerate(zip(ids, asked)) if list(both[0]) != both[1]]
        if wrong and prompts is not None:
            raise InvalidArgumentError(
                f"{runtime.title} takes texts, and no text has the ids of this prompt.",
                where=f"{where}: prompts, row {wrong[0]}",
                got=str(ids[wrong[0]])[:80],
                write="prompts=[...] of strings, or of ids of tokenizer.encode(text)",
            )
    validate = _is_tested(runtime, validate, path)
    path = atomic.absolute(path)
    writing = atomic.FILE if runtime.is_file else atomic.DIRECTORY
    ours = _recognize_export(runtime) if overwrite else None
    writing.check(path, ours)
    with writing.replace(path, ours) as written:
        result = runtime.write(job, written)
        wrote = time.perf_counter()
        details, ties, left_out = {}, (), ("not validated",)
        if validate:
            details, ties = prove_continuations(runtime, job, written, asked)
            others, more, left_out = _prove_beside(runtime, job, written, asked)
            details, ties = details | others, ties + more
        ended = time.perf_counter()
        report = result if isinstance(result, Report) else _report(job, result)
        report = replace(
            report,
            target=runtime.name,
            graph_bytes=written.stat().st_size if runtime.is_file else report.graph_bytes,
            versions=package_versions(*_distributions(runtime) if validate else ()),
            validated="process" if validate else None,
            left_out=left_out,
            differs=(*_notes(runtime, job), *ties),
            details={**report.details, "runs_in": runtime.title, **details},
            seconds={},
        )
        if not runtime.is_file:
            names = sorted(own_files.files(written))
            report = replace(report, details={**report.details, "files": names})
            (written / REPORT_FILE).write_text(report_text(report), encoding="utf-8")
    seconds = {"write": wrote - began, "validate": ended - wrote}
    return replace(report, seconds={name: round(value, 4) for name, value in seconds.items()})


def _notes(runtime: Runtime, job: Job) -> list[str]:
    """What a runtime does otherwise than the net and its tokenizer say."""
    notes = []
    if runtime.name == "genai" and job.lm.config.generation.min_p:
        notes.append(f"{runtime.title} has no min_p, so it draws unlikely tokens more often")
    if job.tokenizer is None:
        return notes
    if set(job.stop) - set(replace(job, ends_at_eos=False).stop):
        eos = job.tokenizer.special_tokens["eos_token"]
        notes.append(f"{runtime.title} also ends texts at {eos!r}, the tokenizer's eos_token")
    if job.tokenizer.chat_template is None:
        notes.append("a base model, which continues texts: its tokenizer has no chat template")
    return notes


def _report(job: Job, details: Mapping[str, Any]) -> Report:
    parameters = {name for name, _ in named_leaves(job.lm.parameters())}
    variables = tuple(
        VariableInfo(name, leaf.shape, leaf.dtype.name, leaf.nbytes, trainable=False,
                     leaves=(name,), parameter=name in parameters)
        for name, leaf in named_leaves(job.lm)
    )  # fmt: skip
    return Report(
        model=type(job.lm).__name__, signatures={}, variables=variables,
        variable_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(job.lm)), graph_bytes=0,
        platforms=("cpu",), oldest_tensorflow="", stablehlo="", calling_convention=0, versions={},
        validated=None, largest_error={}, seconds={}, details=dict(details),
    )  # fmt: skip


def _distributions(runtime: Runtime) -> list[str]:
    return [each.split(">=")[0] for each in packages_of(runtime.extra)]


# --- refusals ---------------------------------------------------------------------------------


def _job(
    runtime: Runtime,
    net: LanguageModel,
    tokenizer: Tokenizer | str | os.PathLike[str] | None,
    max_length: int | str | None,
    where: str,
) -> Job:
    if not isinstance(net, Decoder):
        raise InvalidArgumentTypeError(
            f"{runtime.title} stores keys and values itself, which are those of a Decoder.",
            where=where,
            got=type(net).__name__,
            write=f"a pax.nets.Decoder, or another format: {', '.join(FUNCTION_FORMATS)}",
        )
    lm = enable_eval_mode(net)
    most = lm.config.max_positions
    room = most if max_length is None else max_length
    if not isinstance(room, int) or not 1 < room <= most:
        raise InvalidArgumentError(
            f"{runtime.title} has room for 2 tokens to lm.config.max_positions, here {most}.",
            where=f"{where}: max_length",
            got=repr(max_length),
            write=f"max_length={most} or less; for more, a config with more max_positions",
        )
    scaling = lm.config.rotary_scaling
    if runtime.name == "transformers" and scaling is not None and scaling.kind == "longrope":
        # Its texts begin with the frequencies of short ones, and change when they become long.
        room = min(room, scaling.original_length or room)
    found = _tokenizer(tokenizer, lm, where)
    return Job(lm, found, room, where, ends_at_eos=runtime.ends_at_eos)


def _tokenizer(
    tokenizer: Tokenizer | str | os.PathLike[str] | None, lm: Decoder, where: str
) -> Tokenizer | None:
    if tokenizer is None:
        if where != "export":
            return None
        raise TokenizerError(
            "A language model is served with its tokenizer.",
            where=f"{where}: tokenizer",
            got="none",
            write="the folder, the tokenizer.json or the GGUF file of the model, or a "
            "pax.generation.Tokenizer",
        )
    found = tokenizer
    if not isinstance(found, Tokenizer):
        path = as_path(found, "tokenizer")
        is_gguf = path.is_file() and path.suffix != ".json"
        found = Tokenizer.from_gguf(path) if is_gguf else Tokenizer.from_pretrained(path)
    check_fits(found, lm.config.vocab_size, where)
    return found


def check_floats(job: Job, title: str) -> None:
    """Refuses weights that are no floating-point numbers."""
    parts = jax.tree.leaves(job.lm, is_leaf=lambda each: isinstance(each, QuantizedArray))
    if any(isinstance(each, QuantizedArray) for each in parts):
        raise InvalidArgumentTypeError(
            f"{title} does not support quantized weights.",
            where=f"{job.where}: lm",
            got="quantized weights",
            write='pax.quantization.dequantize(lm), or generation.export(format="gguf")',
        )


def _is_tested(runtime: Runtime, validate: bool, path: str | os.PathLike[str]) -> bool:
    checked_choice(validate, (True, False), "validate")  # always in a process of the runtime
    if validate and runtime.find:
        runtime.find()
    missing = [each for each in runtime.packages if not is_installed(each)]
    if not validate or not missing:
        return validate
    warning = NotValidatedWarning(
        f"The export is not validated: {runtime.title} is not installed.",
        where=str(path),
        write=f"{install(runtime.extra)}, or validate=False",
    )
    warnings.warn(warning, stacklevel=4)
    return False


def _recognize_export(runtime: Runtime) -> own_files.Recognize:
    def recognized(path: Path) -> own_files.Belongs | None:
        try:
            if path.is_file():
                with path.open("rb") as file:
                    return (lambda _: False) if runtime.mark in file.read(4096) else None
            report = json.loads(read_small_file(path / REPORT_FILE, _LARGEST_REPORT))
            if report["target"] != runtime.name:
                return None
            return {*report["details"]["files"], REPORT_FILE}.__contains__
        except (OSError, ValueError, KeyError, TypeError):
            return None

    return recognized


# --- the proof --------------------------------------------------------------------------------


def _test_prompts(job: Job, prompts: Prompts | None) -> list[list[int]]:
    """Returns the test prompts as ids: of several lengths, and one longer than a window."""
    if prompts is not None:
        texts: Any = [prompts] if isinstance(prompts, str) else prompts
        if job.tokenizer is not None and isinstance(texts, Sequence):
            texts = [job.tokenizer.encode(x) if isinstance(x, str) else x for x in texts]
        tokens, lengths = checked_prompt(job.lm, texts, None, f"{job.where}: prompts")
        asked = [row[:size].tolist() for row, size in zip(np.asarray(tokens), lengths)]
    else:
        texts = _TEXTS if job.tokenizer else ()
        asked = [job.tokenizer.encode(each) for each in texts] if job.tokenizer else []
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
    return asked


def _prompt_texts(job: Job, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The texts of prompts, without the token that a runtime puts before each."""
    assert job.tokenizer is not None
    own = [x[1:] if job.begins and x[0] == job.begin else x for x in prompts]
    return [job.tokenizer.decode(each) for each in own]


def prove_continuations(
    runtime: Runtime, job: Job, written: Path, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compares the runtime's continuations with jax's; returns report entries and broken ties.

    Raises:
        ValidationError: its tokens differ from jax's, and logits are not nearly equal.
    """
    steps = min(_STEPS, job.room - max(map(len, prompts)))
    calls = {"prompts": prompts, "steps": steps, "room": job.room}
    if job.tokenizer is not None:
        calls["texts"] = _prompt_texts(job, prompts)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(job.lm))
    seconds = _SECONDS + _SECONDS_PER_GIB * size / 2**30
    if runtime.run:
        theirs = runtime.run(job, written, calls, seconds)
    else:
        theirs = run_runtime(runtime, written, calls, seconds)
    job = replace(job, lm=job.in_context())
    prompts = [*prompts] * (len(theirs) // len(prompts))
    return compare_tokens(runtime.title, job, prompts, theirs, steps)


def _prove_beside(
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
    assert job.tokenizer is not None
    return job.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)


def check_results(
    job: Job, what: str, runtime: str, own: str | list[int], theirs: str | list[int]
) -> None:
    """Refuses a runtime whose tokenizer or chat template has other results."""
    if own != theirs:
        raise ValidationError(
            f"The {what} has other results in {runtime} than in Python.",
            where=f"{job.where}: tokenizer",
            got=f"{theirs!r:.300} where Python says {own!r:.300}",
            write="validate=False to write the folder all the same, and ids as Python makes them "
            "in place of texts",
        )


def run_runtime(runtime: Runtime, written: Path, calls: Mapping[str, Any], seconds: float) -> Any:
    """Runs the runtime in a process of its own.

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
