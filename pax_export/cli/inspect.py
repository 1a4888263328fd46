"""``pax-export inspect``: describes an export without loading it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pax_export.cli._failure import DONE, EXIT_CODES, printable, told


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "inspect",
        help="show what an export is",
        description="Shows signatures, variables, sizes, versions and the oldest TensorFlow of "
        "an export, without loading it.  SavedModels that others wrote are read as well.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="DIR", help="of the export: a directory, or a file")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument(
        "--flops",
        action="store_true",
        help="print the table of pax.inspect instead, with the operations of a call; needs jax",
    )
    parser.set_defaults(call=_call)


@told
def _call(options: argparse.Namespace) -> int:
    if options.flops:
        from pax_export.inspection import inspect  # which imports jax

        table = inspect(options.path)
        text = json.dumps(table.to_dict(), indent=1) if options.json else printable(str(table))
        print(text)
        return DONE
    found = _read(Path(options.path))
    print(json.dumps(found.as_dict(), indent=1) if options.json else _text(found))
    return DONE


def _read(path: Path) -> Any:
    from pax_export import export
    from pax_export.export.artifact import inspect

    if inspect.is_foreign(path):
        return inspect.describe(path)
    return export.Report.read(path)


def _text(found: Any) -> str:
    """The report, and a line for each variable."""
    lines = [str(found)]
    for variable in found.variables:
        shape = ", ".join(map(str, variable.shape))
        mark = " trainable" if variable.trainable else ""
        lines.append(f"    {variable.name}: {variable.dtype}[{shape}]{mark}")
    return printable("\n".join(lines))
