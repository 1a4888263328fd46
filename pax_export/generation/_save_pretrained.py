"""`save_pretrained`: a folder that transformers reads."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export.generation._runtimes import (
    Job,
    Prompts,
    Report,
    Runtime,
    check_floats,
    export_for_runtime,
    generation_file,
    json_file,
    tokenizer_files,
)
from pax_export.generation._tokenizer import Tokenizer
from pax_export.nets import (
    Decoder,
    WrittenTensor,
    config_of_hf,
    file_tensors,
    hf_config,
    hf_pieces,
)

_TITLE = "transformers"
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


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
    check_floats(job, _TITLE)
    hf_config(job.lm.config, job.where)
    _tensors(job)


def _tensors(job: Job) -> list[WrittenTensor]:
    config = job.lm.config
    shift = config.norm_offset - config_of_hf(config).norm_offset
    return file_tensors(job.lm, hf_pieces(config), shift, f"{job.where}: lm")


def _write(job: Job, place: Path) -> dict[str, Any]:
    config = job.lm.config
    own = {"dtype": job.lm.embed.weight.dtype.name} | job.ids  # the classes have ids of their own
    files = {
        "config.json": json_file(hf_config(config, job.where) | own),
        "generation_config.json": generation_file(job),
        **tokenizer_files(job),
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
    _write_safetensors(_tensors(job), place / "model.safetensors")
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
    "transformers", _TITLE, ("transformers", "torch"), "transformers", _check, _write
)
