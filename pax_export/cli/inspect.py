"""``pax-export inspect``: says what an export is, without loading it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pax_export.cli._failure import told


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "inspect",
        help="show what an export is",
        description="Shows signatures, variables, sizes, versions and the oldest TensorFlow of "
        "an export.  TensorFlow is not needed.  Exit codes: 0 shown, 1 no export, 2 wrong usage.",
    )
    parser.add_argument("directory", metavar="DIR", help="of the export")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.set_defaults(call=_call)


@told
def _call(options: argparse.Namespace) -> int:
    from pax_export import export

    report = export.Report.read(options.directory)
    print(json.dumps(report.as_dict(), indent=1) if options.json else _text(report))
    return 0


def _text(report: Any) -> str:
    """The report, and a line for each variable."""
    lines = [str(report)]
    for variable in report.variables:
        shape = ", ".join(map(str, variable.shape))
        mark = " trainable" if variable.trainable else ""
        lines.append(f"    {variable.name}: {variable.dtype}[{shape}]{mark}")
    return "\n".join(lines)
