"""``pax-export run``: runs a program that was written for `pax`."""

from __future__ import annotations

import argparse
from typing import Any

from pax_export.compat import run

_USAGE = "pax-export run program.py [argument ...]\n       pax-export run -m module [argument ...]"


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "run",
        help="run a program that says `import pax`, unchanged",
        description="Runs a program as `python` would, but `pax` and `opax` are pax_export.",
        usage=_USAGE,
        # Whatever begins with a dash belongs to the program.
        prefix_chars="\0",
        add_help=False,
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what would stand behind python")
    parser.set_defaults(call=_call, parser=parser)


def _call(options: argparse.Namespace) -> int:
    arguments = options.program
    if arguments[:1] in (["-h"], ["--help"]):
        options.parser.print_help()
        return 0
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        options.parser.error("a program is expected: a file, or -m and a module")
    return run(arguments)
