"""The command line: exports of JAX models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pax_export.cli import check, export, run
from pax_export.cli._command import EXIT_CODES, run_command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
        arguments: the words after ``pax-export``; None takes `sys.argv`.
    """
    # TensorFlow's log while it is imported is no part of the result.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    parser = argparse.ArgumentParser(
        prog="pax-export",
        description=__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = sys.modules["pax_export"].__version__
    parser.add_argument("--version", action="version", version=f"pax-export {version}")
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    for module in (export, check, run):
        module.add(commands)
    return run_command(parser.parse_args(arguments))
