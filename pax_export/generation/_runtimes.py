"""The common part of exports to language-model runtimes.

Unsupported models are refused before any work; the runtime runs the export, in a process of its
own, before it gets its final name.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotValidatedWarning,
    TokenizerError,
)
from pax_export._foundations.files import own_files
from pax_export._foundations.files.system import as_path, read_small_file
from pax_export._foundations.optional import install, is_installed, packages_of
from pax_export.core import enable_eval_mode, named_leaves
from pax_export.export import Report
from pax_export.export.artifact import embedded
from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.report import (
    REPORT_FILE,
    VariableInfo,
    package_versions,
    report_text,
)
from pax_export.export.pipeline.phases import ExportRun
from pax_export.generation._job import Job, Runtime
from pax_export.generation._prompt import LanguageModel
from pax_export.generation._proof import (
    Prompts,
    proof_prompts,
    prove_beside,
    prove_continuations,
)
from pax_export.generation._tokenizer import Tokenizer, check_fits
from pax_export.nets import Decoder

#: Formats for the functions of any net with a cache.
FUNCTION_FORMATS = ("saved_model", "stablehlo", "onnx", "tflite")


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
    **others: object,
) -> Report:
    """Writes a language model for a runtime, and has the runtime continue texts as jax does."""
    for name, value in others.items():
        raise InvalidArgumentTypeError(
            f"Exports for {runtime.title} have no option `{name}`.",
            where=f"{where}: {name}",
            got=f"{value!r:.80}",
            write="tokenizer, max_length, prompts, accuracy_level, validate and overwrite alone, "
            f"or another format: {', '.join(FUNCTION_FORMATS)}",
        )
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
    job = _job(runtime, lm, tokenizer, max_length, where, level)
    runtime.check(job)
    asked = proof_prompts(runtime, job, prompts)
    validate = _is_tested(runtime, validate, path)
    is_file = bool(runtime.mark)
    run = ExportRun(
        Format(runtime.name, runtime.title, "", "", "", suffix=runtime.name if is_file else ""),
        path, validate=validate, overwrite=overwrite, phases=2, ours=_recognize_export(runtime),
    )  # fmt: skip
    with run, run.place() as written:
        with run.phase("write"):
            result = runtime.write(job, written)
        details, ties, left_out = {}, (), ("not validated",)
        if validate:
            with run.phase("validate"):
                details, ties = prove_continuations(runtime, job, written, asked)
                others, more, left_out = prove_beside(runtime, job, written, asked)
                details, ties = details | others, ties + more
        report = result if isinstance(result, Report) else _report(job, result)
        report = replace(
            report,
            target=runtime.name,
            graph_bytes=written.stat().st_size if is_file else report.graph_bytes,
            versions=package_versions(*_distributions(runtime) if validate else ()),
            validated="process" if validate else None,
            left_out=left_out,
            differs=(*_notes(runtime, job), *ties),
            details={**report.details, "runs_in": runtime.title, **details},
            seconds={},
        )
        if not is_file:
            names = sorted(own_files.files(written))
            report = replace(report, details={**report.details, "files": names})
            (written / REPORT_FILE).write_text(report_text(report), encoding="utf-8")
    return replace(report, seconds=run.wall_time)


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
    level: Literal[1, 4],
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
    return Job(lm, _tokenizer(tokenizer, lm, where), room, where, level, runtime.ends_at_eos)


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
            report = json.loads(read_small_file(path / REPORT_FILE, embedded.BYTES))
            if report["target"] != runtime.name:
                return None
            return {*report["details"]["files"], REPORT_FILE}.__contains__
        except (OSError, ValueError, KeyError, TypeError):
            return None

    return recognized
