"""Errors that explain themselves, as messages and exit codes."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from pax_export._errors import PaxError

#: What a script sees: 0 done, 1 refused with a message, 2 (argparse's) wrong usage.
REFUSED = 1

Command = Callable[[argparse.Namespace], int]


def told(command: Command) -> Command:
    """Makes a command print an error of this package to stderr, without its traceback."""

    @functools.wraps(command)
    def call(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except PaxError as error:
            print(f"pax-export: {error}", file=sys.stderr)
            return REFUSED

    return call
