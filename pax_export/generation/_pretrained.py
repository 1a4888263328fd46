"""`from_pretrained` and `save_pretrained`: folders of transformers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentTypeError, MissingWeightsFileError
from pax_export._foundations.types import PyTree
from pax_export.export import Report
from pax_export.generation._job import Job, Runtime, generation_file, json_file, tokenizer_files
from pax_export.generation._proof import Prompts
from pax_export.generation._runtimes import export_for_runtime
from pax_export.generation._tokenizer import Tokenizer, check_fits
from pax_export.nets import (
    Decoder,
    WrittenTensor,
    config_of_hf,
    file_tensors,
    hf_config,
    hf_pieces,
)
from pax_export.quantization import QuantizedArray
from pax_export.weights import local_path

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


def from_pretrained(
    path: str | os.PathLike[str], *, revision: str | None = None, **options: PyTree
) -> tuple[Decoder, Tokenizer]:
    """Loads a language model and its tokenizer.

    Stop tokens come from the net's files or, if these have none, from the tokenizer.

    Args:
        path: a folder of transformers with ``tokenizer.json``, or a GGUF file; or a model of the
            Hugging Face Hub (extra ``[hub]``), ``"HuggingFaceTB/SmolLM2-135M-Instruct"``, or a file
            of it, ``"organization/name/model.gguf"``.
        revision: a branch, tag or commit on the Hub.
        **options: arguments of `Decoder.from_pretrained` or `Decoder.from_gguf`: ``layers``,
            ``dtype``, ``config``.

    Returns:
        A `Decoder` and a `Tokenizer`.

    Raises:
        MissingWeightsFileError: the path does not exist.
        TokenizerError: no tokenizer, or one with more tokens than the net.
        PaxError: any error of `Decoder.from_pretrained` or `Decoder.from_gguf`.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         lm, tokenizer = pax.generation.from_pretrained(folder)
        ...     except pax.errors.TokenizerError as error:
        ...         print(error.what)
        The file of the tokenizer cannot be read.
    """
    where = local_path(path, revision)
    if not where.exists():
        raise MissingWeightsFileError(
            "The path is not a language model.",
            where=str(path),
            got="no file and no folder",
            write="a folder of transformers with tokenizer.json, or a GGUF file",
        )
    if where.is_file():
        tokenizer, lm = Tokenizer.from_gguf(where), Decoder.from_gguf(where, **options)
    else:
        tokenizer, lm = Tokenizer.from_pretrained(where), Decoder.from_pretrained(where, **options)
    check_fits(tokenizer, lm.config.vocab_size, "from_pretrained")
    defaults = lm.config.generation
    if not defaults.stop and tokenizer.stop:
        ends = replace(defaults, stop=tokenizer.stop)
        lm = lm.set_attribute("config", replace(lm.config, generation=ends))
    return lm, tokenizer


def save_pretrained(
    lm: Decoder,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    prompts: Prompts | None = None,
    validate: bool = True,
    overwrite: bool = False,
) -> Report:
    """Writes a folder for ``AutoModelForCausalLM.from_pretrained(folder)`` of transformers.

    `from_pretrained` reads it, too.  Arrays are written one by one.

    Args:
        lm: a net of one of the families that `Decoder` loads.
        folder: where to write ``config.json``, ``generation_config.json``, ``model.safetensors``
            and the files of the tokenizer.
        tokenizer: a `Tokenizer`, or its folder, ``tokenizer.json`` or GGUF file.
        prompts: strings or lists of ids; transformers must continue them as jax does.
        validate: whether to run this test; without transformers and torch it is skipped with a
            warning.
        overwrite: replace a folder that this function wrote; other folders are never replaced.

    Returns:
        The report, which is also in the folder as ``pax_export.json``.

    Raises:
        InvalidArgumentError: transformers has no equivalent net.
        TokenizerError: the tokenizer has another vocabulary.
        ValidationError: transformers' tokens differ from jax's, and logits are not nearly equal.

    Example:
        >>> import tempfile, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=50, dim=8, num_layers=1, num_heads=2, hidden_dim=16)
        >>> lm = pax.nets.Decoder(config)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = pax.generation.save_pretrained(lm, folder + "/lm", validate=False)
        ...     pax.nets.Decoder.from_pretrained(folder + "/lm").config.dim
        8

    """
    return export_for_runtime(
        TRANSFORMERS, lm, folder, tokenizer=tokenizer, max_length=None, prompts=prompts,
        validate=validate, overwrite=overwrite, where="save_pretrained",
    )  # fmt: skip


def _check(job: Job) -> None:
    parts = jax.tree.leaves(job.lm, is_leaf=lambda each: isinstance(each, QuantizedArray))
    if any(isinstance(each, QuantizedArray) for each in parts):
        raise InvalidArgumentTypeError(
            "transformers does not support quantized weights.",
            where=f"{job.where}: lm",
            got="quantized weights",
            write='pax.quantization.dequantize(lm), or generation.export(format="gguf")',
        )
    hf_config(job.lm.config, job.where)
    _tensors(job)


def _tensors(job: Job) -> list[WrittenTensor]:
    config = job.lm.config
    shift = config.norm_offset - config_of_hf(config).norm_offset
    return file_tensors(job.lm, hf_pieces(config), shift, f"{job.where}: lm")


def _write(job: Job, folder: Path) -> dict[str, Any]:
    config = job.lm.config
    own = {"dtype": job.lm.embed.weight.dtype.name} | job.ids  # the classes have ids of their own
    files = {
        "config.json": json_file(hf_config(config, job.where) | own),
        "generation_config.json": generation_file(job),
        **tokenizer_files(job),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    _write_safetensors(_tensors(job), folder / "model.safetensors")
    return {}


def _write_safetensors(tensors: Sequence[WrittenTensor], file: Path) -> None:
    """Writes tensors one by one; safetensors' own writer needs all of them in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        begin, end = end, end + int(np.prod(each.shape)) * each.dtype.itemsize
        code = _CODES[each.dtype.name]
        header[each.name] = {"dtype": code, "shape": each.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for each in tensors:
            out.write(
                each.read().data.cast("B") if each.dtype.kind == "f" else each.read().tobytes()
            )


TRANSFORMERS = Runtime(
    "transformers", "transformers", ("transformers", "torch"), "transformers", _check, _write
)
