"""Reads tokenizers: folders of transformers with ``tokenizer.json``, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pax_export._foundations.errors import PaxError, TokenizerError, a_few, errors_in, named_line
from pax_export._foundations.files.own_files import some_names
from pax_export._foundations.files.system import read_small_file
from pax_export._foundations.optional import require

if TYPE_CHECKING:
    import tokenizers

#: What `json.loads` returns.
JSON = dict[str, Any] | list[Any] | str | float | bool | None

_PURPOSE = "Tokenizer"
_LARGEST = 1 << 28  # bytes of a tokenizer.json
#: The names of special tokens in ``tokenizer_config.json``.
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@contextmanager
def _reading_tokenizer(where: str | Path) -> Iterator[None]:
    """Context manager for files and entries of other programs: what is wrong in them is named."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # the package raises no other kind; a mistake of ours is quoted, too
        raise TokenizerError(
            "The tokenizer cannot be read.",
            where=str(where),
            got=named_line(error, 600),
            write="the files as transformers or llama.cpp wrote them; for another vocabulary a "
            "folder with tokenizer.json beside the weights",
        ) from None


def _of_json(content: bytes, where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a ``tokenizer.json``."""
    library = require("tokenizers", "tokenizers", _PURPOSE)
    with _reading_tokenizer(where):
        found = library.Tokenizer.from_buffer(content)
    found.no_truncation()  # the file's setting for training batches
    found.no_padding()
    return found


def of_folder(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer of a transformers folder, its special tokens and its chat templates by name."""
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    described = folder / "tokenizer_config.json"
    content, config = _read_text(file), _optional_json(described)
    inner = _of_json(_with_prefix_space(content, config), str(file))
    named = {**_optional_json(folder / "special_tokens_map.json"), **config}
    special = {name: _token_text(named[name]) for name in SPECIAL if named.get(name) is not None}
    extra = named.get("extra_special_tokens", named.get("additional_special_tokens"))
    if isinstance(extra, dict):  # which a chat template may name
        special |= {name: _token_text(token) for name, token in extra.items()}
        extra = None
    with errors_in(described):
        _add_tokens(inner, config.get("added_tokens_decoder") or {})
        with _reading_tokenizer("additional_special_tokens"):
            _mark_special(inner, special.values(), map(_token_text, extra or ()))
        inner.encode_special_tokens = bool(config.get("split_special_tokens"))
        templates = _named_templates(config.get("chat_template"))
    return inner, special, templates | _templates_beside(folder)


def _read_text(file: Path) -> bytes:
    try:
        return read_small_file(file, _LARGEST)
    except OSError as error:
        got, folder = named_line(error), file.parent
        if isinstance(error, FileNotFoundError):
            is_named = file.name == "tokenizer.json" and folder.is_dir()
            got = f"a folder with {some_names(folder)}" if is_named else "no file and no folder"
        raise TokenizerError(
            "The file of the tokenizer cannot be read.",
            where=str(file),
            got=got,
            write="Tokenizer.from_gguf(path) for a GGUF file; a folder of transformers with older "
            "files after AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        ) from None


def _optional_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    with _reading_tokenizer(str(file)):
        found = json.loads(_read_text(file))
        if not isinstance(found, dict):
            raise TypeError(f"a JSON object was expected, not {found!r:.200}")
        return found


#: Classes of transformers that make the part of ``tokenizer.json`` anew which adds a space.
_SPACED = {"GPT2", "Qwen2", "CodeGen", "Cohere", "GPTNeoX", "Roberta", "Llama"}


def _with_prefix_space(content: bytes, config: Mapping[str, Any]) -> bytes:
    """The content of ``tokenizer.json`` with the `add_prefix_space` of its configuration."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    is_added = config.get("add_prefix_space")
    if not isinstance(is_added, bool) or kind not in _SPACED:
        return content
    try:
        described = json.loads(content)
        cutter = described.get("pre_tokenizer") or {}
        for each in cutter.get("pretokenizers", [cutter]):
            if each.get("type") == "ByteLevel" and kind != "Llama":
                each["add_prefix_space"] = is_added
            if each.get("type") == "Metaspace" and kind == "Llama" and not is_added:
                each["prepend_scheme"] = "never"
                after = described["decoder"]["decoders"]
                after[:] = [each for each in after if each["type"] != "Strip"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):  # which is refused
        return content
    return json.dumps(described).encode()


def _token_text(value: JSON) -> str:
    """A special token, which some files describe in a mapping."""
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)


def _add_tokens(inner: tokenizers.Tokenizer, described: Mapping[str, Any]) -> None:
    """Adds the tokens of ``tokenizer_config.json`` that ``tokenizer.json`` lacks, by their ids."""
    make = require("tokenizers", "tokenizers", _PURPOSE).AddedToken
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    with _reading_tokenizer("added_tokens_decoder"):
        ordered = sorted(described.items(), key=lambda each: int(each[0]))
        tokens = [
            make(token["content"], **{name: token[name] for name in flags if name in token})
            for _, token in ordered
        ]
    inner.add_tokens(tokens)


def _mark_special(inner: tokenizers.Tokenizer, named: Iterable[str], extra: Iterable[str]) -> None:
    """Marks special tokens, so that they are recognized in texts and omitted from them.

    Those without a name may be new in the vocabulary.
    """
    marked = {each.content for each in inner.get_added_tokens_decoder().values()}
    known = [token for token in named if inner.token_to_id(token) is not None]
    new = [token for token in (*known, *extra) if token not in marked]
    inner.add_special_tokens(list(dict.fromkeys(new)))


def _named_templates(templates: list[dict[str, str]] | str | None) -> dict[str, str]:
    """The templates of a configuration: one, or a list with names."""
    if templates is None or isinstance(templates, str):
        return {} if templates is None else {"default": templates}
    with _reading_tokenizer("chat_template"):
        return {str(each["name"]): str(each["template"]) for each in templates}


def _templates_beside(folder: Path) -> dict[str, str]:
    """The templates of files of their own."""
    older = folder / "chat_template.json"
    with errors_in(older):
        found = _named_templates(_optional_json(older).get("chat_template"))
    own = {"default": folder / "chat_template.jinja"}
    own |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    for name, file in own.items():
        if file.exists():
            with _reading_tokenizer(str(file)):
                found[name] = _read_text(file).decode()
    return found


# --- GGUF files ---------------------------------------------------------------------------------

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


def of_gguf(
    metadata: Mapping[str, Any], where: str
) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer of a GGUF file, its special tokens by name, and its chat templates."""
    start = "tokenizer.ggml."
    fields = {key.removeprefix(start): metadata[key] for key in metadata if key.startswith(start)}
    with _reading_tokenizer(where):
        words = fields["tokens"]
        kinds = list(map(int, fields.get("token_type", [1] * len(words))))
        if len(set(words)) != len(words) or len(kinds) != len(words):
            raise ValueError(f"a token twice, or {len(kinds)} kinds of {len(words)} tokens")
        make = {"gpt2": _byte_level, "llama": _sentence_pieces}.get(fields["model"])
        if make is None:
            raise ValueError(f"{start}model: {fields['model']!r:.80}")
        tokenizer, begins = make(words, fields)
        _add_special_tokens(tokenizer, words, kinds)
        special = {
            name: words[token]
            for name, key in _IDS.items()
            if (token := fields.get(f"{key}_token_id")) in range(len(words))
        }
        ends = bool(fields.get("add_eos_token", False))
        begins = bool(fields.get("add_bos_token", begins))
        _add_template(tokenizer, special if begins else {}, special if ends else {})
    return tokenizer, special, _templates_of_gguf(metadata)


_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "eot_token": "eot",
    "eom_token": "eom",
}


def _templates_of_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        start, _, name = key.partition("tokenizer.chat_template")
        if not start and isinstance(value, str) and (name == "" or name[0] == "."):
            found[name[1:] or "default"] = value
    return found


def _byte_level(
    words: Sequence[str], fields: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a vocabulary of bytes, merged within the parts of a text."""
    library = require("tokenizers", "tokenizers", _PURPOSE)
    cut = (CUTS | _NAMED_CUTS).get(fields.get("pre", ""))
    if cut is None:
        known = a_few(sorted(CUTS | _NAMED_CUTS), 40)
        raise ValueError(f"tokenizer.ggml.pre: {fields.get('pre')!r:.80}, where {known} are known")
    ids = {word: number for number, word in enumerate(words)}
    merges = [tuple(each.split(" ", 1)) for each in fields.get("merges", [])]
    tokenizer = library.Tokenizer(library.models.BPE(ids, merges, ignore_merges=cut.whole))
    cutters, before = [], library.pre_tokenizers
    if cut.digits:
        cutters.append(before.Digits(True))
    if cut.pattern is not None:
        cutters.append(before.Split(library.Regex(cut.pattern), "isolated"))
    cutters.append(before.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = before.Sequence(cutters)
    tokenizer.decoder = library.decoders.ByteLevel()
    if cut.normal:
        tokenizer.normalizer = library.normalizers.NFC()
    return tokenizer, cut.begins


def _sentence_pieces(
    words: Sequence[str], fields: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a vocabulary of characters, merged to the best pieces; bytes for others."""
    library = require("tokenizers", "tokenizers", _PURPOSE)
    scores = fields["scores"]
    ids = {word: number for number, word in enumerate(words)}
    options: dict[str, Any] = {
        "fuse_unk": True,
        "byte_fallback": _BYTE in fields.get("token_type", ()),
    }
    unknown = fields.get("unknown_token_id", 0)
    if unknown in range(len(words)):
        options["unk_token"] = words[unknown]
    tokenizer = library.Tokenizer(library.models.BPE(ids, _merges(ids, scores), **options))
    normal, decoders = library.normalizers, library.decoders
    spaces = [normal.Replace(" ", "▁")]
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
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


def _add_special_tokens(
    tokenizer: tokenizers.Tokenizer, words: Sequence[str], kinds: Sequence[int]
) -> None:
    """Tells which tokens are found in a text before it is cut."""
    token = require("tokenizers", "tokenizers", _PURPOSE).AddedToken
    for kind in (_CONTROL, _USER_DEFINED):
        found = [word for word, own in zip(words, kinds) if own == kind and word]
        tokenizer.add_tokens([token(w, special=kind == _CONTROL, normalized=False) for w in found])


def _add_template(
    tokenizer: tokenizers.Tokenizer, begin: Mapping[str, str], end: Mapping[str, str]
) -> None:
    first, last = begin.get("bos_token"), end.get("eos_token")
    used = [token for token in (first, last) if token is not None]
    if used:
        processors = require("tokenizers.processors", "tokenizers", _PURPOSE)
        parts = [*([first] if first else []), "$A", *([last] if last else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(each, tokenizer.token_to_id(each)) for each in used]
        )
