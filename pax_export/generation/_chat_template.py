"""Chat templates: convert conversations to prompts.

A template is a program of the model's author, so it runs in jinja2's sandbox with JSON data only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pax_export._foundations.errors import InvalidArgumentTypeError, PaxError, TokenizerError
from pax_export._foundations.optional import require

if TYPE_CHECKING:
    import jinja2
    import jinja2.parser

#: What `json.loads` returns.
JSON = dict[str, Any] | list[Any] | str | float | bool | None

_PURPOSE = "Tokenizer.apply_chat_template"


def render(template: str, variables: Mapping[str, object], where: str) -> str:
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
    environment = require("jinja2.sandbox", "tokenizers", _PURPOSE).ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(template)


def _generation() -> Any:
    """The block ``{% generation %}``, which marks answers for training: its content."""
    extension = require("jinja2.ext", "tokenizers", _PURPOSE).Extension

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
    raise require("jinja2", "tokenizers", _PURPOSE).TemplateError(message)


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
