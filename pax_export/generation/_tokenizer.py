"""Tokenizer: converts texts and conversations to token ids and back."""

from __future__ import annotations

import datetime
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from pax_export._foundations.check import as_named
from pax_export._foundations.errors import (
    ExportPathError,
    InvalidArgumentTypeError,
    PaxError,
    TokenizerError,
    a_few,
    errors_in,
)
from pax_export._foundations.files import atomic, system
from pax_export._foundations.optional import require
from pax_export.generation._foreign_keywords import TEMPLATE_KEYWORDS
from pax_export.generation._tokenizer_files import JSON, SPECIAL, of_folder, of_gguf
from pax_export.weights import local_path, open_source

if TYPE_CHECKING:
    import jinja2
    import jinja2.parser
    import tokenizers

#: The replacement for a character with missing bytes.
BROKEN = "\N{REPLACEMENT CHARACTER}"
#: Files of a folder that say otherwise than ``tokenizer_config.json``, or add to it.
_OVERRIDING = {"chat_template.jinja", "chat_template.json", "special_tokens_map.json"}


class Tokenizer:
    """Converts texts and conversations to token ids, and back.

    It wraps the package tokenizers, and adds named special tokens and the chat template.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        special_tokens: such as ``{"eos_token": "</s>"}``.
        chat_template: a jinja template; or several by name, of which ``"default"`` is used, and
            ``"tool_use"`` for calls with tools.

    Attributes:
        special_tokens: as above.
        chat_templates: the templates by name.

    Raises:
        TokenizerError: a special token is not in the vocabulary.

    Example:
        >>> import tokenizers, pax_export as pax
        >>> words = tokenizers.models.WordLevel({"<e>": 0, "a": 1, "b": 2}, unk_token="<e>")
        >>> bare = tokenizers.Tokenizer(words)
        >>> bare.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        >>> _ = bare.add_special_tokens(["<e>"])
        >>> template = "{% for each in messages %}{{ each.content }} {{ eos_token }}{% endfor %}"
        >>> tokenizer = pax.generation.Tokenizer(bare, {"eos_token": "<e>"}, template)
        >>> tokenizer.encode("a b"), tokenizer.decode([2, 1]), tokenizer.stop
        ([1, 2], 'b a', (0,))
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "b"}])
        [2, 0]
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ):
        if not all(callable(getattr(tokenizer, each, None)) for each in ("encode", "token_to_id")):
            raise InvalidArgumentTypeError(
                "Tokenizer needs a tokenizers.Tokenizer.",
                where="Tokenizer",
                got=type(tokenizer).__name__,
                write="Tokenizer.from_pretrained(folder), or Tokenizer.from_gguf(path)",
            )
        self._inner = tokenizer
        if isinstance(chat_template, str):
            chat_template = {"default": chat_template}
        what, write = "Special tokens and templates are texts by name.", '{"eos_token": "</s>"}'
        self.special_tokens = as_named("special_tokens", special_tokens or {}, what, write)
        self.chat_templates = as_named("chat_template", chat_template or {}, what, write)
        for name, token in self.special_tokens.items():
            if tokenizer.token_to_id(token) is None:
                raise TokenizerError(
                    "A special token is not in the vocabulary.",
                    where=f"Tokenizer: {name}",
                    got=repr(token),
                    write="the files of one model: tokenizer.json and tokenizer_config.json",
                )

    # --- of a file ------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, revision: str | None = None
    ) -> Tokenizer:
        """Loads the tokenizer of a transformers folder, or a file ``tokenizer.json``.

        Args:
            path: the folder with ``tokenizer.json``, or a model of the Hub; special tokens and chat
                templates are read from ``tokenizer_config.json``, ``special_tokens_map.json`` and
                ``chat_template.jinja`` next to it, if these exist.
            revision: a branch, tag or commit on the Hub.

        Raises:
            TokenizerError: ``tokenizer.json`` is missing or unreadable.
            MissingPackageError: tokenizers is not installed.
        """
        path = local_path(path, revision)
        found = of_folder(path)
        with errors_in(path if path.is_dir() else path.parent):
            return cls(*found)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Loads the tokenizer and the chat template of a GGUF file.

        Args:
            path: the file; its vocabulary is of bytes (``gpt2``, pre-tokenized as in GPT-2, Llama
                3, GPT-4o, Mistral's Tekken, Qwen 2 or SmolLM, by any of llama.cpp's names of
                these) or of sentence pieces (``llama``).

        Raises:
            TokenizerError: an unsupported vocabulary.
            WeightsFileError: not a GGUF file, or a damaged one.
            MissingPackageError: tokenizers is not installed.
        """
        with open_source(path) as source:
            found = of_gguf(source.metadata, source.where)
            with errors_in(source.where):
                return cls(*found)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        `from_pretrained` reads them, and so do transformers and its relatives.  Files of an
        older tokenizer that would override these are removed; others remain.

        Raises:
            ExportPathError: (an OSError) the path is a file, or cannot be written.
        """
        folder = atomic.absolute(folder)
        atomic.sweep(folder)
        files = self.files()
        try:
            with atomic.temporary_sibling(folder / "tokenizer.json") as temporary:
                for name, content in files.items():
                    (temporary / name).write_bytes(content)
                system.sync_all(temporary)
                for file in sorted(temporary.iterdir()):
                    file.replace(folder / file.name)
            for name in _OVERRIDING - files.keys():
                (folder / name).unlink(missing_ok=True)
        except ExportPathError:
            raise
        except OSError as error:
            raise atomic.unwritable_error(folder, error) from error

    def files(self) -> dict[str, bytes]:
        """The files that `save` writes, by name."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: token for name, token in self.special_tokens.items() if name in SPECIAL},
        }
        others = {k: v for k, v in self.special_tokens.items() if k not in SPECIAL}
        if others:
            config["extra_special_tokens"] = others
        if self._inner.encode_special_tokens:
            config["split_special_tokens"] = True
        files = {"tokenizer.json": self.json()}
        templates = self.chat_templates
        if set(templates) == {"default"}:
            files["chat_template.jinja"] = templates["default"].encode()
        elif templates:
            config["chat_template"] = [{"name": k, "template": v} for k, v in templates.items()]
        config_file = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {**files, "tokenizer_config.json": config_file.encode()}

    def json(self) -> bytes:
        """The content of ``tokenizer.json``."""
        return self._inner.to_str(pretty=False).encode()

    # --- properties -----------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The number of ids: the largest id plus 1."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def stop(self) -> tuple[int, ...]:
        """The ids of the tokens that end a text or a turn, for ``stop=`` of `generate`."""
        ends = map(self.special_tokens.get, ("eos_token", "eot_token", "eom_token"))
        ids = [self._inner.token_to_id(each) for each in ends if each is not None]
        return tuple(sorted({each for each in ids if each is not None}))

    @property
    def chat_template(self) -> str | None:
        """The default chat template."""
        return self.chat_templates.get("default")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None if it is none of the vocabulary."""
        return self._inner.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        """The token of an id."""
        return self._inner.id_to_token(id)

    def __repr__(self) -> str:
        templates = sorted(self.chat_templates)
        return f"Tokenizer(vocab_size={self.vocab_size}, {self.special_tokens}, {templates=})"

    # --- texts ----------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Converts a text to ids.

        Args:
            text: the text; special tokens in it are recognized.
            add_special_tokens: whether to add the special tokens around a text.
        """
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises an error that names `encode`, for those who know transformers."""
        raise InvalidArgumentTypeError(
            "A Tokenizer is not called.", where="Tokenizer", write="tokenizer.encode(text)"
        )

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = False) -> str:
        """Converts ids to a text.

        Args:
            ids: integers; a list, or an array of one axis.
            skip_special_tokens: whether to omit special tokens.
        """
        numbers = list(map(operator.index, ids))
        return self._inner.decode(numbers, skip_special_tokens=skip_special_tokens)

    def stream(
        self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True
    ) -> Iterator[str]:
        """Converts a stream of ids to pieces of text.

        A piece has no incomplete characters; together the pieces are the whole text. (In a
        vocabulary of sentence pieces, invalid bytes at the end of a run of bytes also change the
        earlier characters of that run in `decode`.)

        Args:
            ids: an iterable of ids.
            skip_special_tokens: whether to omit special tokens.

        Example:
            >>> import tokenizers, pax_export as pax
            >>> letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
            >>> ids = {letter: number for number, letter in enumerate(sorted(letters))}
            >>> bare = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
            >>> bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            >>> bare.decoder = tokenizers.decoders.ByteLevel()
            >>> tokenizer = pax.generation.Tokenizer(bare)
            >>> list(tokenizer.stream(tokenizer.encode("né€")))
            ['n', 'é', '€']
        """
        window: list[int] = []  # tokens before those that are not shown yet, and these
        shown = 0  # number of characters returned so far
        for token in ids:
            window.append(operator.index(token))
            text = self.decode(window, skip_special_tokens)
            before = self.decode(window[:shown], skip_special_tokens)
            if len(text) > len(before) and not text.endswith(BROKEN):
                yield text[len(before) :]
                window, shown = window[shown:], len(window) - shown
        rest = self.decode(window, skip_special_tokens)
        before = self.decode(window[:shown], skip_special_tokens)
        if len(rest) > len(before):
            yield rest[len(before) :]

    # --- conversations --------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, JSON]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, JSON]] | None = None,
        **variables: JSON,
    ) -> Any:  # list[int] | str, by `tokenize`
        """Formats a conversation with the chat template.

        Args:
            messages: such as ``{"role": "user", "content": "Hello"}``.
            add_generation_prompt: whether to append the beginning of an answer.
            tokenize: whether to return ids instead of a text.
            tools: as JSON schemas.
            **variables: other variables of the template.

        Returns:
            A list of ids, or a text.

        Raises:
            TokenizerError: no template, or it fails.
            InvalidArgumentTypeError: (a TypeError) messages are not JSON, or a keyword of
                transformers; the error names the alternative.
        """
        where = "Tokenizer.apply_chat_template"
        for foreign in TEMPLATE_KEYWORDS.keys() & variables.keys():
            raise InvalidArgumentTypeError(
                f"apply_chat_template has no argument `{foreign}`.",
                where=where,
                got=f"{foreign}={variables[foreign]!r:.80}",
                write=TEMPLATE_KEYWORDS[foreign],
            )
        for name, value in (("messages", messages), ("tools", () if tools is None else tools)):
            is_list = isinstance(value, Sequence)
            if not is_list or not all(isinstance(each, Mapping) for each in value):
                raise InvalidArgumentTypeError(
                    "apply_chat_template takes one conversation, and tools as JSON schemas.",
                    where=f"{where}: {name}",
                    got=f"{type(value).__name__}: {value!r:.80}",
                    write='[{"role": "user", "content": "Hello"}], a call for each conversation',
                )
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            raise TokenizerError(
                "The tokenizer has no chat template.",
                where=where,
                got=f"templates {a_few(sorted(self.chat_templates), 6) or '(none)'}",
                write="Tokenizer(tokenizer, special_tokens, chat_template=...), or encode(text)",
            )
        filled = {
            **self.special_tokens,
            **variables,
            # A template asks whether a key is there; some clients write null.
            "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
            "tools": tools,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _render(self.chat_templates[name], filled, where)
        return self.encode(text, add_special_tokens=False) if tokenize else text


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


# --- chat templates -----------------------------------------------------------------------------

# A template is a program of the model's author, so it runs in jinja2's sandbox with JSON data only.
_TEMPLATES = "Tokenizer.apply_chat_template"


def _render(template: str, variables: Mapping[str, object], where: str) -> str:
    """Renders a chat template.

    Raises:
        TokenizerError: the template is wrong, or raises an error itself.
        InvalidArgumentTypeError: a variable is not JSON.
    """
    plain = {name: _plain(value, f"{where}: {name}") for name, value in variables.items()}
    try:
        return _compiled(template).render(**plain)
    except PaxError:
        raise
    except Exception as error:  # any exception of the template
        raise TokenizerError(
            "The chat template fails.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:300],
            write="messages as its author meant them, or Tokenizer(..., chat_template=another)",
        ) from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = require("jinja2.sandbox", "tokenizers", _TEMPLATES).ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(template)


def _generation() -> Any:
    """The block ``{% generation %}``, which marks answers for training: its content."""
    extension = require("jinja2.ext", "tokenizers", _TEMPLATES).Extension

    def parse(self: object, parser: jinja2.parser.Parser) -> list[Any]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return type("Generation", (extension,), {"tags": {"generation"}, "parse": parse})


def _to_json(
    value: JSON, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    # That of jinja is for pages of HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise require("jinja2", "tokenizers", _TEMPLATES).TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _plain(value: object, where: str) -> JSON:
    # The sandbox does not know what methods of objects do.
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(
            "A chat template takes JSON: texts, numbers, lists and dicts.",
            where=where,
            got=str(error),
            write='[{"role": "user", "content": "Hello"}]',
        ) from None
