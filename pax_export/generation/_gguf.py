"""``"gguf"``: a file that llama.cpp reads, with the vocabulary and the chat template."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, TokenizerError, ValidationError
from pax_export._foundations.optional import find, require
from pax_export.generation._job import Job, Runtime
from pax_export.generation._tokenizer import Tokenizer
from pax_export.generation._tokenizer_files import CUTS, of_gguf
from pax_export.nets import (
    WrittenTensor,
    config_of_gguf,
    file_tensors,
    gguf_metadata,
    pieces_of_gguf,
    rotary_tensors,
)
from pax_export.precision.quantized import GROUP, unpacked

_PURPOSE = 'generation.export(format="gguf")'
_MARK = "pax_export.version"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
#: Texts that distinguish tokenizers: numbers, cases, punctuation, spaces, lines, letters.
_PROBES = (
    "Hello World! It's 2024, isn't it? I'LL pay $1,234.56 for 7 items.",
    "  two  spaces\t\ttabs \n\n\nlines \r\n  end  ",
    "naïve café, Ångström, Привет мир, 你好世界 1٢٣, e\u0301, 😀🏽 it’s",
    "def f(x): return x**2 # camelCase snake_case HTTPServer 0x1F >>= <= !== ...///\n",
    " leading", "trailing ", "", "a", " ", "\n",
)  # fmt: skip
#: Texts that distinguish how these are cut: all of four letters of these kinds.
_CUT_PROBES = tuple(map("".join, itertools.product(" \naS1٢.'/\u0301你", repeat=4)))


#: The kinds of blocks of 32 integers with a float16 scale, by bits and scheme; names of files have
#: `MOSTLY_` in front.
_BLOCKS = {(8, "symmetric"): "Q8_0", (4, "symmetric"): "Q4_0", (4, "asymmetric"): "Q4_1"}


def _check(job: Job) -> None:
    find("gguf", "adopt", _PURPOSE)
    if len(job.stop) > len(_ENDS):
        raise InvalidArgumentError(
            f"llama.cpp supports at most {len(_ENDS)} stop tokens.",
            where=f"{job.where}: lm.config.generation.stop",
            got=str(job.stop),
            write="a net with fewer of them, by dataclasses.replace",
        )
    gguf_metadata(config_of_gguf(job.lm.config), job.where)
    for tensor in _tensors(job):
        if tensor.form is not None and (tensor.form.group, tensor.form.axis) != (GROUP, -1):
            fits = tensor.shape[-1] % GROUP == 0
            raise InvalidArgumentError(
                f"llama.cpp has one float16 scale for each {GROUP} integers of a row.",
                where=f"{job.where}: lm, {tensor.name} of the file",
                got=f"{tensor.form.bits} bits, group={tensor.form.group}, rows of "
                f"{tensor.shape[-1]}",
                write="pax.quantize(lm, bits=4), or pax.quantize(lm, bits=8, group=32)"
                if fits
                else 'pax.quantize(lm, at=...) of other weights, or format="genai"',
            )
    _vocabulary(job)


def _tensors(job: Job) -> list[WrittenTensor]:
    pieces = pieces_of_gguf(config_of_gguf(job.lm.config))
    return file_tensors(job.lm, pieces, job.lm.config.norm_offset, f"{job.where}: lm")


def _write(job: Job, path: Path) -> dict[str, Any]:
    gguf: Any = require("gguf", "adopt", _PURPOSE)
    config = config_of_gguf(job.lm.config)
    metadata = gguf_metadata(config, job.where) | _vocabulary(job)
    if config.positions != "learned":  # whose table has a row for each
        # The context that is offered; the positions of the training may be more.
        metadata[f"{config.family}.context_length"] = job.room
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_string(_MARK, "1")
    for name, value in metadata.items():
        if name != "general.architecture":
            _add_key(writer, name, value)
    tensors = _tensors(job)
    extra = rotary_tensors(config)
    for name, array in extra.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    kinds = {(each.form.bits, each.form.scheme) for each in tensors if each.form is not None}
    if kinds:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{_BLOCKS[max(kinds)]}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    stored = [_GgufTensor.of(gguf, each) for each in tensors]
    for each, form in zip(tensors, stored):
        writer.add_tensor_info(each.name, form.shape, form.dtype, form.bytes, form.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in extra.values():
        writer.write_tensor_data(array)
    for each, form in zip(tensors, stored):
        array = _blocks(each) if each.form else each.read().astype(form.dtype, copy=False)
        writer.write_tensor_data(array)
    writer.close()
    fields: dict[str, Any] = {"architecture": config.family}
    if not kinds:
        return fields
    _compare(gguf, job, tensors, path)
    count = sum(each.form is not None for each in tensors)
    return fields | {"quantized": {"weights": count, "bits": sorted({bits for bits, _ in kinds})}}


class _GgufTensor(NamedTuple):
    """The stored form of a tensor; one-dimensional ones are float32, as llama.cpp requires."""

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Any = None

    @classmethod
    def of(cls, gguf: Any, tensor: WrittenTensor) -> _GgufTensor:
        if tensor.form is not None:
            kind = gguf.GGMLQuantizationType[_BLOCKS[tensor.form.bits, tensor.form.scheme]]
            each, size = gguf.GGML_QUANT_SIZES[kind]
            shape = (*tensor.shape[:-1], tensor.shape[-1] // each * size)
            return cls(shape, np.dtype("uint8"), kind)
        if len(tensor.shape) == 1 or tensor.dtype.name not in ("float16", "bfloat16"):
            return cls(tensor.shape, np.dtype("float32"))
        is_half = tensor.dtype.name == "float16"
        return cls(tensor.shape, tensor.dtype, None if is_half else gguf.GGMLQuantizationType.BF16)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _blocks(tensor: WrittenTensor) -> np.ndarray:
    """Returns the rows of a quantized tensor as blocks of scale, minimum and integers.

    4-bit integers are packed as in llama.cpp, whose range starts at 0 where ours starts at -8.
    """
    assert tensor.form is not None and tensor.scales is not None
    integers, scales = tensor.read().view(np.uint8), tensor.scales().astype(np.float16, copy=False)
    if tensor.form.bits == 4:
        integers = integers ^ np.uint8(0x88)
    halves = [scales] if tensor.zeros is None else [scales, _minima(tensor, scales)]
    parts = [each[..., None].view(np.uint8) for each in halves]
    parts.append(integers.reshape(*scales.shape, -1))
    return np.concatenate(parts, -1).reshape(*scales.shape[:-1], -1)


def _minima(tensor: WrittenTensor, scales: np.ndarray) -> np.ndarray:
    """Returns the minima that llama.cpp adds to ``integer * scale``, for integers from 0."""
    if tensor.zeros is None:
        return np.zeros_like(scales)
    return ((-8.0 - tensor.zeros()) * scales.astype(np.float32)).astype(np.float16)


def _compare(gguf: Any, job: Job, tensors: Iterable[WrittenTensor], path: Path) -> None:
    """Reads the file with the package gguf, and compares the integers and scales of its blocks.

    Raises:
        ValidationError: the file has different ones.
    """
    found = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for each in tensors:
        if each.form is None:
            continue
        assert each.scales is not None
        stored, integers, scales = found[each.name], each.read(), each.scales()
        numbers = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if each.form.bits == 4:
            integers = unpacked(np.asarray(integers), -1)
        apart = numbers.reshape(*scales.shape, -1) - _minima(each, scales)[..., None]
        read = apart / scales.astype(np.float32)[..., None]
        if each.zeros is not None:  # counted from 0
            read = np.rint(read) - 8
        if not np.array_equal(read.reshape(integers.shape), integers):
            raise ValidationError(
                "The file does not hold the integers of a quantized weight.",
                where=f"{job.where}: {each.name} of the file",
                got=f"{np.count_nonzero(read.reshape(integers.shape) != integers)} others",
                write="please report it",
            )


def _add_key(writer: Any, name: str, value: Any) -> None:
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
    tokenizer, tried = job.required_tokenizer, []
    special = "".join(tokenizer.special_tokens.values())
    expected = _ids(tokenizer, special)
    for candidate in _candidates(job, tokenizer):
        try:
            found = Tokenizer(*of_gguf(candidate, "a GGUF file"))
        except TokenizerError as error:
            tried.append(error.got)
            continue
        # Equal ids of some texts do not show where others are cut.
        if _ids(found, special) == expected and _cut_alike(tokenizer, found):
            return candidate
    kind = json.loads(tokenizer.json())["model"]["type"]
    raise TokenizerError(
        "llama.cpp has no equivalent of this tokenizer.",
        where=f"{job.where}: tokenizer",
        got=f"a model of the kind {kind}" + (f"; {tried[0]}" if tried else ""),
        write="a vocabulary of bytes as GPT-2, GPT-4o, Llama 3, Qwen 2, Mistral's Tekken or SmolLM "
        'cut texts, or of sentence pieces; or format="genai"',
    )


def _ids(tokenizer: Tokenizer, special: str) -> list[list[int]]:
    texts = [*_PROBES, special, f"a{special}b"]
    return [tokenizer.encode(text, added) for text in texts for added in (True, False)]


def _cut_alike(tokenizer: Tokenizer, found: Tokenizer) -> bool:
    """Whether both merge tokens within the same parts of texts, or `found` cuts no texts."""
    cut, other = (
        getattr(each._inner.pre_tokenizer, "pre_tokenize_str", None) for each in (tokenizer, found)
    )
    if cut is None or other is None:
        return other is None
    return all(cut(text) == other(text) for text in _CUT_PROBES)


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
        kinds.append(_UNUSED if word is None else _kind_of_token(word, special, unknown, model))
        words.append(f"[PAD{number}]" if word is None else word)
    fields: dict[str, Any] = {"tokens": words, "token_type": kinds}
    ids = {"bos": job.begin, **_ends(job), "padding": job.pad}
    ids["unknown"] = None if unknown is None else tokenizer.token_to_id(unknown)
    fields |= {f"{name}_token_id": value for name, value in ids.items() if value is not None}
    plain, added = tokenizer.encode("a", False), tokenizer.encode("a")
    fields["add_bos_token"] = len(added) > len(plain) and added[0] == job.begin
    fields["add_eos_token"] = len(added) > len(plain) and added[-1] in job.stop
    template = {f"tokenizer.chat_template{'' if name == 'default' else f'.{name}'}": text
                for name, text in tokenizer.chat_templates.items() if text}  # fmt: skip
    of_bytes = {"model": "gpt2", "merges": [" ".join(pair) for pair in merges]}
    for pre in CUTS:
        yield _tokenizer_keys({**fields, **of_bytes, "pre": pre}) | template
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks[word]) if word in ranks else -1e6 for word in words]
    for prefix in (True, False):
        own = {"model": "llama", "scores": scores, "add_space_prefix": prefix}
        yield _tokenizer_keys({**fields, **own}) | template


#: The ids at which llama.cpp ends a text.
_ENDS = ("eos", "eot", "eom")


def _ends(job: Job) -> dict[str, int]:
    """The stop tokens by the tokenizer's names: templates write `eos_token`."""
    named = {each: job.special(f"{each}_token") for each in _ENDS}
    ends = {each: token for each, token in named.items() if token in job.stop}
    others = [token for token in job.stop if token not in ends.values()]
    return ends | dict(zip([each for each in _ENDS if each not in ends], others))


def _tokenizer_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def _kind_of_token(word: str, special: Mapping[str, bool], unknown: str | None, model: Any) -> int:
    if word in special:
        return _CONTROL if special[word] else _USER
    if word == unknown:
        return _UNKNOWN
    is_byte = len(word) == 6 and word.startswith("<0x") and word.endswith(">")
    return _BYTE if is_byte and model.get("byte_fallback") else _NORMAL


GGUF = Runtime(
    "gguf", "llama.cpp", ("xllamacpp",), "llamacpp", _check, _write, _MARK.encode(),
    begins_texts=True, ends_at_eos=True,
)  # fmt: skip
