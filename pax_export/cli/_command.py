"""A command: its parser, shared options, exit codes, and errors as one line."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

from pax_export._foundations.errors import PaxError

#: Exit codes: 0 done, 1 refused or failed, 2 (argparse's) wrong usage.
DONE, REFUSED = 0, 1

#: The end of the help of every command.
EXIT_CODES = """\
exit codes:
  0  done    1  refused or failed, the reason is one line on stderr    2  wrong usage
"""

#: Options of several commands.
_SHARED: dict[str, dict[str, Any]] = {
    "trusted": {
        "action": "store_true",
        "help": "run an export whose operations may do more than compute",
    },
    "overwrite": {"action": "store_true", "help": "replace an existing export"},
    "json": {"action": "store_true", "help": "print the result as JSON"},
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
    commands: Commands, name: str, command: Command, help: str, description: str, examples: str = ""
) -> argparse.ArgumentParser:
    """Adds a command to the subparsers of the command line; returns its parser."""
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, 80),
        epilog=help_epilog(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(call=report_errors(command))
    return parser


def add_shared_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds ``--json``, ``--trusted`` and their like."""
    for name in names:
        parser.add_argument(f"--{name}", **_SHARED[name])


def help_epilog(examples: str) -> str:
    """Returns the end of a help page: examples, if any, and the exit codes."""
    return f"examples:\n{examples}\n{EXIT_CODES}" if examples else EXIT_CODES


def print_result(options: argparse.Namespace, data: Callable[[], Any], text: object) -> None:
    """Prints a text, or the data as JSON with ``--json``."""
    print(json.dumps(data(), indent=1) if options.json else text)


def report_errors(command: Command) -> Command:
    """Makes a command print an error of this package as one line, without its traceback."""

    @functools.wraps(command)
    def call(options: argparse.Namespace) -> int:
        try:
            code = command(options)
            sys.stdout.flush()
            return code
        except PaxError as error:
            fail(error)
            return REFUSED
        except BrokenPipeError:
            # Whoever read it has enough.  Python would complain again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return REFUSED
        except Exception as error:  # of a factory, of a model's code, or a mistake of ours
            traceback.print_exc()
            got = f"{type(error).__name__}: {error}"
            fail(PaxError("The command failed unexpectedly; see the traceback.", got=got))
            return REFUSED

    return call


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
