"""What commands share: their parsers, models and inputs by text, results, errors as one line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

from pax_export._foundations.errors import InvalidArgumentError, PaxError

#: Exit codes: 0 done, 1 refused or failed, 2 (argparse's) wrong usage.
DONE, REFUSED = 0, 1

#: The end of the help of every command.
EXIT_CODES = """\
exit codes:
  0  done    1  refused or failed, the reason is one line on stderr    2  wrong usage
"""

_FACTORY = (
    "a function without arguments that returns a model: a module, a pair (params, function) or "
    "another model that to_onnx takes; the current directory is searched for its module"
)

#: Arguments of several commands.
_SHARED: dict[str, dict[str, Any]] = {
    "path": {"metavar": "DIR", "help": "the path of the export, a directory or a file"},
    "factory": {"metavar": "module:factory", "help": _FACTORY},
    "--against": {"metavar": "module:factory", "help": f"compare with the model; {_FACTORY}"},
    "--method": {
        "action": "append",
        "default": [],
        "metavar": "KEY=NAME",
        "help": "a signature, and the method of the model that it calls; default: the one of its "
        "name, or __call__",
    },
    "--trusted": {
        "action": "store_true",
        "help": "run an export whose operations may do more than compute",
    },
    "--overwrite": {"action": "store_true", "help": "replace an existing export"},
    "--json": {"action": "store_true", "help": "print the result as JSON"},
}

#: Python arguments in the advice of errors, and the options of the command line for them.
_OPTIONS = {
    "trusted=True": "--trusted",
    "overwrite=True": "--overwrite",
    'state="update"': "--state update",
    'state="keep"': "--state keep",
    "validate=False": "--validate no",
    'constraints=("length <= 512", "length >= 2")': '--constraint "length <= 512"',
    "constraints=('n >= 2',)": '--constraint "n >= 2"',
}

Command = Callable[[argparse.Namespace], int]
#: What a parser has for the parsers of its commands.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    command: Command,
    help: str,
    description: str,
    examples: str = "",
    *,
    shared: Iterable[str] = ("--json",),
) -> argparse.ArgumentParser:
    """Adds a command with arguments that several have; returns its parser."""
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, 80),
        epilog=(f"examples:\n{examples}\n" if examples else "") + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for argument in shared:
        parser.add_argument(argument, **_SHARED[argument])
    parser.set_defaults(command=command)
    return parser


def run_command(options: argparse.Namespace) -> int:
    """Runs the parsed command, and prints an error of this package as one line."""
    try:
        code = options.command(options)
        sys.stdout.flush()
        return code
    except PaxError as error:
        fail(error)
    except BrokenPipeError:
        # Whoever read it has enough.  Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # of a factory, of a model's code, or a mistake of ours
        traceback.print_exc()
        got = f"{type(error).__name__}: {error}"
        fail(PaxError("The command failed unexpectedly; see the traceback.", got=got))
    return REFUSED


def print_result(options: argparse.Namespace, data: Callable[[], Any], text: object) -> None:
    """Prints a text, or the data as JSON with ``--json``."""
    print(json.dumps(data(), indent=1) if options.json else escape_controls(str(text)))


def fail(error: PaxError) -> None:
    """Prints an error as one line."""
    parts = [f"{label}: {text}" for label, text in error.parts()]
    line = error.what + (f" {'; '.join(parts)}" if parts else "")
    for argument, option in _OPTIONS.items():
        line = line.replace(argument, option)
    print(f"pax-export: error: {escape_controls(' '.join(line.split()))}", file=sys.stderr)


def escape_controls(text: str) -> str:
    """Escapes control characters, because names in a file may contain any."""
    return "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text
    )


# --- models and inputs --------------------------------------------------------------------------


def validate_argument(options: argparse.Namespace) -> Any:
    """The ``validate`` argument of an export, two of which have other names here."""
    return {"here": True, "no": False}.get(options.validate, options.validate)


def call_factory(reference: str | None) -> Any:
    """Imports and calls the factory ``module:function``; None is no model."""
    if reference is None:
        return None
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise InvalidArgumentError(
            "The factory cannot be found.", got=reference, write="package.module:function"
        )
    sys.path.insert(0, "")  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgumentError(
            "The factory cannot be found: the module does not exist.",
            got=module_name,
            write="a module in the current directory, or an installed one",
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InvalidArgumentError(
            "The factory cannot be found: the module does not have this function.",
            where=module_name,
            got=name,
        )
    return factory()


def split_name(text: str) -> tuple[str, str]:
    """Splits ``NAME=VALUE``; the name is empty if there is no ``=``."""
    name, equals, value = text.rpartition("=")
    parts = name.strip().split(".")
    if equals and not all(part.isidentifier() or part.isdigit() for part in parts):
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='"mask=..." with the name of an input'
        )
    return name.strip(), value.strip()


def parse_methods(texts: Iterable[str]) -> dict[str, str]:
    """Reads ``KEY=NAME`` each, a signature and the method that it calls."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, name = (part.strip() for part in text.partition("="))
        if not (equals and key and name.isidentifier()):
            raise InvalidArgumentError(
                "This method cannot be read.", got=text, write="--method encode=encode"
            )
        if key in found:
            raise InvalidArgumentError("Two methods have one signature.", got=text, where=key)
        found[key] = name
    return found


class InputArguments:
    """Inputs on the command line, ``[KEY:][NAME=]SHAPE[:DTYPE]``; `keys` are named signatures."""

    def __init__(self, texts: Iterable[str], keys: Collection[str] = ()):
        self._positional: dict[str, list[Any]] = {key: [] for key in keys or [_ONLY]}
        self._named: dict[str, dict[str, Any]] = {key: {} for key in keys or [_ONLY]}
        for text in texts:
            key, rest = _split_signature(text, keys) if keys else (_ONLY, text)
            name, spec = _input_spec(rest)
            if not name:
                self._positional[key].append(spec)
            elif name in self._named[key]:
                raise InvalidArgumentError("Two inputs have one name.", got=text)
            else:
                self._named[key][name] = spec

    @property
    def inputs(self) -> Any:
        """The ``inputs`` argument of an export."""
        found = {key: tuple(each) for key, each in self._positional.items()}
        return found.get(_ONLY, found)

    @property
    def kwargs(self) -> Any:
        """The ``kwargs`` argument of an export."""
        return self._named.get(_ONLY, self._named)


_ONLY = ""


def _split_signature(text: str, keys: Collection[str]) -> tuple[str, str]:
    key, colon, rest = (part.strip() for part in text.partition(":"))
    if key in keys and colon:
        return key, rest
    if len(keys) == 1:
        return next(iter(keys)), text
    raise InvalidArgumentError(
        "With several methods, an input begins with the signature that takes it.",
        got=text,
        write=" or ".join(f'--input "{key}:{text}"' for key in keys),
    )


def _input_spec(text: str) -> tuple[str, Any]:
    from pax_export.export import spec

    name, rest = split_name(text)
    shape, colon, dtype = rest.rpartition(":")
    if not colon:
        shape, dtype = rest, "float32"
    if name and not name.isidentifier():
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='--input "mask=batch, length:bool"'
        )
    return name, spec(shape.strip(), dtype.strip())
