"""``"gguf"``: a file that llama.cpp reads, with the vocabulary and the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import TokenizerError
from pax_export._optional import find, require
from pax_export.generation._runtimes import Job, Runtime, check_floats
from pax_export.generation._tokenizer import Tokenizer
from pax_export.generation._vocabularies import CUTS, of_gguf
from pax_export.nets import config_of_gguf, file_tensors, gguf_metadata, pieces_of_gguf

_PURPOSE = 'generation.export(format="gguf")'
_MARK = "pax_export.version"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
#: Texts by which two tokenizers are told apart: numbers, cases, signs, spaces, lines, letters.
_PROBES = (
    "Hello World! It's 2024, isn't it? I'LL pay $1,234.56 for 7 items.",
    "  two  spaces\t\ttabs \n\n\nlines \r\n  end  ",
    "naïve café, Ångström, Привет мир, 你好世界 1٢٣, e\u0301, 😀🏽 it’s",
    "def f(x): return x**2 # camelCase snake_case HTTPServer 0x1F >>= <= !== ...///\n",
    " leading", "trailing ", "", "a", " ", "\n",
)  # fmt: skip


def _check(job: Job) -> None:
    find("gguf", "adopt", _PURPOSE)
    check_floats(job, "A GGUF file of this library")
    gguf_metadata(config_of_gguf(job.lm.config), job.where)
    _vocabulary(job)


def _write(job: Job, place: Path) -> dict[str, Any]:
    gguf: Any = require("gguf", "adopt", _PURPOSE)
    config = config_of_gguf(job.lm.config)
    metadata = gguf_metadata(config, job.where) | _vocabulary(job)
    # The context that is offered; the positions of the training may be more.
    metadata[f"{config.family}.context_length"] = job.room
    writer = gguf.GGUFWriter(place, config.family)
    writer.add_string(_MARK, "1")
    for name, value in metadata.items():
        if name != "general.architecture":
            _add(gguf, writer, name, value)
    shift = job.lm.config.norm_offset
    tensors = file_tensors(job.lm, pieces_of_gguf(config), shift)
    table = config.rotary_scaling
    extra = np.asarray(table.table, "f") if table is not None and table.kind == "table" else None
    if extra is not None:
        writer.add_tensor_info("rope_freqs.weight", extra.shape, extra.dtype, extra.nbytes)
    for each in tensors:
        dtype, kind = _stored(gguf, each.dtype, len(each.shape))
        size = int(np.prod(each.shape)) * dtype.itemsize
        writer.add_tensor_info(each.name, each.shape, dtype, size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if extra is not None:
        writer.write_tensor_data(extra)
    for each in tensors:
        dtype, _ = _stored(gguf, each.dtype, len(each.shape))
        array = each.read()
        writer.write_tensor_data(array if array.dtype == dtype else array.astype(dtype))
    writer.close()
    return {"architecture": config.family}


def _stored(gguf: Any, dtype: np.dtype, axes: int) -> tuple[np.dtype, Any]:
    """As what a tensor is stored: one axis as float32, which llama.cpp adds and multiplies by."""
    if axes == 1 or dtype.name not in ("float16", "bfloat16"):
        return np.dtype("float32"), None
    if dtype.name == "float16":
        return dtype, None
    return dtype, gguf.GGMLQuantizationType.BF16


def _add(gguf: Any, writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value:
        writer.add_array(name, value)


# --- the vocabulary ---------------------------------------------------------------------------


def _vocabulary(job: Job) -> dict[str, Any]:
    """The keys of the tokenizer that makes the same ids of texts."""
    assert job.tokenizer is not None
    tokenizer, tried = job.tokenizer, []
    special = "".join(tokenizer.special_tokens.values())
    expected = _ids(tokenizer, special)
    for candidate in _candidates(job, tokenizer):
        try:
            found = Tokenizer(*of_gguf(candidate, "a GGUF file"))
        except TokenizerError as error:
            tried.append(error.got)
            continue
        if _ids(found, special) == expected:
            return candidate
    kind = json.loads(tokenizer.json())["model"]["type"]
    raise TokenizerError(
        "llama.cpp has no tokenizer that makes the same ids of texts.",
        where=f"{job.where}: tokenizer",
        got=f"a model of the kind {kind}" + (f"; {tried[0]}" if tried else ""),
        write="a vocabulary of bytes as GPT-2, Llama 3, Qwen 2, Mistral's Tekken or SmolLM cut "
        'texts, or of sentence pieces; or format="genai"',
    )


def _ids(tokenizer: Tokenizer, special: str) -> list[list[int]]:
    texts = [*_PROBES, special, f"a{special}b"]
    return [tokenizer.encode(text, added) for text in texts for added in (True, False)]


def _candidates(job: Job, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    described = json.loads(tokenizer.json())
    model = described["model"]
    if model["type"] != "BPE":
        return
    merges = [each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"]]
    special = {each["content"]: each["special"] for each in described["added_tokens"]}
    unknown = model.get("unk_token") or tokenizer.special_tokens.get("unk_token")
    words, kinds = [], []
    for number in range(job.lm.config.vocab_size):
        word = tokenizer.id_to_token(number)
        kinds.append(_UNUSED if word is None else _kind(word, special, unknown, model))
        words.append(f"[PAD{number}]" if word is None else word)
    made: dict[str, Any] = {"tokens": words, "token_type": kinds}
    ids = {"bos": job.begin, "eos": (job.stop or (None,))[0], "padding": job.pad}
    ids["eot"] = job.special("eot_token")
    ids["unknown"] = None if unknown is None else tokenizer.token_to_id(unknown)
    made |= {f"{name}_token_id": value for name, value in ids.items() if value is not None}
    plain, added = tokenizer.encode("a", False), tokenizer.encode("a")
    made["add_bos_token"] = len(added) > len(plain) and added[0] == job.begin
    made["add_eos_token"] = len(added) > len(plain) and added[-1] in job.stop
    template = {f"tokenizer.chat_template{'' if name == 'default' else f'.{name}'}": text
                for name, text in tokenizer.chat_templates.items() if text}  # fmt: skip
    of_bytes = {"model": "gpt2", "merges": [" ".join(pair) for pair in merges]}
    for pre in CUTS:
        yield _named({**made, **of_bytes, "pre": pre}) | template
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks[word]) if word in ranks else -1e6 for word in words]
    for prefix in (True, False):
        own = {"model": "llama", "scores": scores, "add_space_prefix": prefix}
        yield _named({**made, **own}) | template


def _named(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def _kind(word: str, special: Mapping[str, bool], unknown: str | None, model: Any) -> int:
    if word in special:
        return _CONTROL if special[word] else _USER
    if word == unknown:
        return _UNKNOWN
    is_byte = len(word) == 6 and word.startswith("<0x") and word.endswith(">")
    return _BYTE if is_byte and model.get("byte_fallback") else _NORMAL


GGUF = Runtime(
    "gguf", "llama.cpp", ("xllamacpp",), "llamacpp", _check, _write, True, _MARK.encode()
)
