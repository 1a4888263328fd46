"""``pax-export diff``: prints the differences of two exports."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from pax_export.cli._failure import DONE, EXIT_CODES, printable, told


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "diff",
        help="show what differs between two exports",
        description="Compares the arrays of two exports: what was added, dropped, reshaped, "
        "retyped, changed in value.  Neither is loaded.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", metavar="DIR", help="of an export: a directory, or a file")
    parser.add_argument("second", metavar="DIR", help="of another one")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.set_defaults(call=_call)


@told
def _call(options: argparse.Namespace) -> int:
    from pax_export import inspection

    found = inspection.diff(options.first, options.second)
    print(json.dumps(asdict(found), indent=1) if options.json else printable(str(found)))
    return DONE
