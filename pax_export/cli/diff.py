"""``pax-export diff``: prints the differences of two exports."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from pax_export.cli._command import (
    DONE,
    add_command,
    add_shared_options,
    escape_controls,
    print_result,
)


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "diff", _run_diff, "compare two exports",
        "Prints which arrays of two exports were added, dropped, reshaped, retyped or changed in "
        "value.  Neither is loaded.",
    )  # fmt: skip
    parser.add_argument("first", metavar="DIR", help="the path of an export, a directory or a file")
    parser.add_argument("second", metavar="DIR", help="the path of another one")
    add_shared_options(parser, "json")


def _run_diff(options: argparse.Namespace) -> int:
    from pax_export import inspection

    found = inspection.diff(options.first, options.second)
    print_result(options, lambda: asdict(found), escape_controls(str(found)))
    return DONE
