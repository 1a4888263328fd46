"""`from_pretrained`: loads a language model and its tokenizer."""

from __future__ import annotations

import os
from dataclasses import replace

from pax_export._foundations.errors import MissingWeightsFileError, TokenizerError
from pax_export._foundations.types import PyTree
from pax_export.generation._tokenizer import Tokenizer
from pax_export.nets import Decoder
from pax_export.weights import local_path


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
    said = lm.config.generation
    if not said.stop and tokenizer.stop:
        ends = replace(said, stop=tokenizer.stop)
        lm = lm.set_attribute("config", replace(lm.config, generation=ends))
    return lm, tokenizer


def check_fits(tokenizer: Tokenizer, size: int, where: str) -> None:
    """Refuses a tokenizer of another vocabulary; a net may have more tokens, as padding."""
    if tokenizer.vocab_size > size:
        last = tokenizer.id_to_token(tokenizer.vocab_size - 1)
        raise TokenizerError(
            "The tokenizer belongs to another net.",
            where=f"{where}: tokenizer",
            got=f"ids up to {tokenizer.vocab_size - 1} ({last!r:.40}), where the net has {size}",
            write="the tokenizer of the folder or file that the weights are from",
        )
