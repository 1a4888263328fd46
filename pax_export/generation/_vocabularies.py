"""Loads tokenizers from tokenizer.json and GGUF files."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._foundations.errors import TokenizerError, a_few
from pax_export._foundations.optional import require

_PURPOSE = "Tokenizer"
#: The package writes a vocabulary by counting up to its largest id.
_LARGEST_ID = 1 << 24
#: Characters of a token; the pairs of a longer one take too much time.
_LONGEST = 4096
#: Kinds of tokens in GGUF files.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


@dataclass(frozen=True)
class _Cut:
    """A pre-tokenizer of llama.cpp: how a text is split before merges, by ``tokenizer.ggml.pre``.

    Attributes:
        pattern: a regular expression that matches the parts; None: that of GPT-2.
        digits: whether each digit is a separate part.
        whole: whether a part that is a token is not split.
        begins: the default for adding the token for the beginning of a text.
        normal: whether texts are normalized to NFC.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    begins: bool = False
    normal: bool = False


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SMALL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_LARGE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = "|".join([_SMALL, _LARGE, r"\p{N}", _OTHERS])
_GPT4O = "|".join([_SMALL + _ENDING, _LARGE + _ENDING, r"\p{N}{1,3}", _OTHERS])
CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(digits=True),
    "llama-bpe": _Cut(_LLAMA3, whole=True, begins=True),
    "dbrx": _Cut(_LLAMA3),
    "gpt-4o": _Cut(_GPT4O),
    "qwen2": _Cut(_QWEN2, normal=True),
    "tekken": _Cut(_TEKKEN, whole=True, begins=True),
}
#: Other names of these in llama.cpp.
_SAME_CUTS = {
    "gpt-2": "olmo phi-2 gigachat a.x-4.0 mellum exaone4",
    "smollm": "starcoder refact",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "dbrx": "smaug-bpe",
    "gpt-4o": "llama4",
    "qwen2": "deepseek-r1-qwen kormo megrez f2llmv2",
}
_NAMED_CUTS = {other: CUTS[name] for name, those in _SAME_CUTS.items() for other in those.split()}


def of_json(content: bytes, where: str) -> Any:
    """The tokenizer of a ``tokenizer.json``."""
    tokenizers = require("tokenizers", "tokenizers", _PURPOSE)
    try:
        found = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises no other kind
        raise TokenizerError(
            "The file is not a tokenizer of the package tokenizers.",
            where=where,
            got=str(error)[:200],
            write="the file tokenizer.json, as tokenizers or transformers wrote it",
        ) from None
    vocabulary = found.get_vocab(with_added_tokens=True)
    last = max(vocabulary, key=vocabulary.__getitem__, default="")
    if vocabulary.get(last, 0) > _LARGEST_ID:
        raise TokenizerError(
            "The vocabulary has an id that is too large.",
            where=where,
            got=f"{vocabulary[last]} for {last!r:.40}",
            write="the file tokenizer.json, as tokenizers or transformers wrote it",
        )
    found.no_truncation()  # the file's setting for training batches
    found.no_padding()
    return found


def of_gguf(metadata: Mapping[str, Any], where: str) -> tuple[Any, dict[str, str], dict[str, str]]:
    """The tokenizer of a GGUF file, its special tokens by name, and its chat templates."""
    said = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    for name, (fits, needed) in _VALUES.items():
        if name in said and not fits(said[name]):
            got = f"tokenizer.ggml.{name}: {reprlib.repr(said[name])}"
            raise _unreadable_error(where, got, f"a file with {needed} there")
    words = said.get("tokens")
    if not words:
        raise _unreadable_error(where, "no tokenizer.ggml.tokens", "a file with its vocabulary")
    if len(set(words)) != len(words):
        raise _unreadable_error(where, "a token twice in its vocabulary", "another file")
    kinds = [int(kind) for kind in said.get("token_type", [1] * len(words))]
    if len(kinds) != len(words):
        raise _unreadable_error(where, f"{len(kinds)} kinds of {len(words)} tokens", "another file")
    make = {"gpt2": _byte_level, "llama": _sentence_pieces}.get(said.get("model", ""))
    if make is None:
        got = f"tokenizer.ggml.model: {said.get('model')!r:.80}"
        raise _unreadable_error(where, got, "a folder with tokenizer.json beside the weights")
    tokenizer, begins = make(words, said, where)
    _add_special_tokens(tokenizer, words, kinds)
    special = {}
    for name, key in _IDS.items():
        token = said.get(f"{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(words):
            special[name] = words[token]
    ends = bool(said.get("add_eos_token", False))
    begins = bool(said.get("add_bos_token", begins))
    _add_template(tokenizer, special if begins else {}, special if ends else {})
    return tokenizer, special, _templates(metadata)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str) and len(each) <= _LONGEST for each in value
    )


def _are_numbers(value: Any) -> bool:
    is_list = isinstance(value, list) and all(type(each) in (int, float) for each in value)
    array = np.asarray(value if is_list or isinstance(value, np.ndarray) else None)
    return array.ndim == 1 and array.dtype.kind in "iuf" and bool(np.isfinite(array).all())


#: Values of metadata by name: their check, and what they must be.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_name, "a text"),
    "pre": (_is_name, "a text"),
    "tokens": (_are_texts, "short texts"),
    "merges": (_are_texts, "short texts"),
    "token_type": (_are_numbers, "finite numbers"),
    "scores": (_are_numbers, "finite numbers"),
}
_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "eot_token": "eot",
    "eom_token": "eom",
}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        start, _, name = key.partition("tokenizer.chat_template")
        if not start and isinstance(value, str) and (name == "" or name[0] == "."):
            found[name[1:] or "default"] = value
    return found


def _byte_level(words: Sequence[str], said: Mapping[str, Any], where: str) -> tuple[Any, bool]:
    """Returns a vocabulary of bytes, merged within the parts of a text."""
    tokenizers = require("tokenizers", "tokenizers", _PURPOSE)
    cut = (CUTS | _NAMED_CUTS).get(said.get("pre", ""))
    if cut is None:
        known = a_few(sorted(CUTS | _NAMED_CUTS), 40)
        got = f"tokenizer.ggml.pre: {said.get('pre')!r:.80}, where {known} are known"
        raise _unreadable_error(where, got, "a folder with tokenizer.json beside the weights")
    merges = [_pair(each, where) for each in said.get("merges", [])]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(_model(ids, merges, where, ignore_merges=cut.whole))
    cutters, before = [], tokenizers.pre_tokenizers
    if cut.digits:
        cutters.append(before.Digits(True))
    if cut.pattern is not None:
        cutters.append(before.Split(tokenizers.Regex(cut.pattern), "isolated"))
    cutters.append(before.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = before.Sequence(cutters)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if cut.normal:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    return tokenizer, cut.begins


def _sentence_pieces(words: Sequence[str], said: Mapping[str, Any], where: str) -> tuple[Any, bool]:
    """Returns a vocabulary of characters, merged to the best pieces; bytes for others."""
    tokenizers = require("tokenizers", "tokenizers", _PURPOSE)
    scores = said.get("scores")
    if scores is None or len(scores) != len(words):
        raise _unreadable_error(where, "no score of each token", "a folder with tokenizer.json")
    ids = {word: number for number, word in enumerate(words)}
    options: dict[str, Any] = {
        "fuse_unk": True,
        "byte_fallback": _BYTE in said.get("token_type", ()),
    }
    unknown = said.get("unknown_token_id", 0)
    if isinstance(unknown, int) and 0 <= unknown < len(words):
        options["unk_token"] = words[unknown]
    tokenizer = tokenizers.Tokenizer(_model(ids, _merges(ids, scores), where, **options))
    normal, decoders = tokenizers.normalizers, tokenizers.decoders
    spaces = [normal.Replace(" ", "▁")]
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if said.get("add_space_prefix", True):
        spaces.insert(0, normal.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normal.Sequence(spaces), decoders.Sequence(after)
    return tokenizer, True


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that make each piece; the pairs of better pieces are merged first."""
    found = []
    for word, number in ids.items():
        pairs = [(word[:i], word[i:]) for i in range(1, len(word))]
        own = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        own.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(-float(scores[number]), pair) for pair in own]
    return [pair for _, pair in sorted(found, key=lambda each: each[0])]


def _model(ids: dict[str, int], merges: list, where: str, **options: Any) -> Any:
    models = require("tokenizers.models", "tokenizers", _PURPOSE)
    try:
        return models.BPE(ids, merges, **options)
    except Exception as error:  # the package raises no other kind
        raise _unreadable_error(where, str(error)[:200], "another file") from None


def _pair(merge: Any, where: str) -> tuple[str, str]:
    parts = merge.split(" ", 1) if isinstance(merge, str) else ()
    if len(parts) != 2:
        raise _unreadable_error(where, f"the merge {merge!r:.80}", "another file")
    return parts[0], parts[1]


def _add_special_tokens(tokenizer: Any, words: Sequence[str], kinds: Sequence[int]) -> None:
    """Tells which tokens are found in a text before it is cut."""
    tokenizers = require("tokenizers", "tokenizers", _PURPOSE)
    for kind, add in (
        (_CONTROL, tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.add_tokens),
    ):
        is_special = kind == _CONTROL
        found = [word for word, own in zip(words, kinds) if own == kind and word]
        add([tokenizers.AddedToken(w, special=is_special, normalized=False) for w in found])


def _add_template(tokenizer: Any, begin: Mapping[str, str], end: Mapping[str, str]) -> None:
    first, last = begin.get("bos_token"), end.get("eos_token")
    used = [token for token in (first, last) if token is not None]
    if used:
        processors = require("tokenizers.processors", "tokenizers", _PURPOSE)
        parts = [*([first] if first else []), "$A", *([last] if last else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(each, tokenizer.token_to_id(each)) for each in used]
        )


def _unreadable_error(where: str, got: str, write: str) -> TokenizerError:
    return TokenizerError(
        "The vocabulary of the file has a form that tokenizers cannot read.",
        where=where,
        got=got,
        write=write,
    )
