"""The command ``pax-export``: one file for each of its commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pax_export.cli import export, inspect, run

_COMMANDS = (export, inspect, run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
        arguments: what stands behind ``pax-export``; None takes `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="pax-export", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    return options.call(options)
