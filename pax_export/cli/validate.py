"""``pax-export validate``: validates an export without jax, or against its model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from pax_export._errors import ValidationError
from pax_export.cli import _factory
from pax_export.cli._failure import DONE, EXIT_CODES, REFUSED, TRUSTED, VERIFY, fail, told

_EPILOG = f"""\
examples:
  pax-export validate served/1
  pax-export validate served/1 --against train:make_model

{EXIT_CODES}"""


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "validate",
        help="test an export",
        description="Loads an export in a fresh process without jax, calls all of its signatures "
        "at several sizes with random inputs, and checks names, shapes and dtypes of what comes "
        "out against the report, and that it is finite.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="DIR", help="of the export: a directory, or a file")
    _factory.add_against(parser, "also compare with the model")
    parser.add_argument(
        "--not-finite", action="store_true", help="NaN and infinity are no failures"
    )
    parser.add_argument("--trusted", action="store_true", help=TRUSTED)
    parser.add_argument("--verify", metavar="KEY.pub", help=VERIFY)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(call=_call)


@told
def _call(options: argparse.Namespace) -> int:
    from pax_export.export.validation import recheck

    model = _factory.make(options.against) if options.against else None
    methods = _factory.methods(options.method)
    finite, trusted = not options.not_finite, options.trusted
    path, verify = Path(options.path), options.verify
    checks = recheck.recheck(path, model, methods, finite, trusted, verify)
    failed = [check for check in checks if check.problem]
    if options.json:
        described = [dataclasses.asdict(each) for each in checks]
        report = {"valid": bool(checks) and not failed, "checks": described}
        print(json.dumps(report, indent=1))
    else:
        print(*checks, sep="\n")
    if not checks:
        got = "a report without signatures, so nothing could be called"
        fail(ValidationError("The export is not valid.", where=options.path, got=got))
    elif failed:
        got = f"{len(failed)} of {len(checks)} calls failed; the first: {failed[0]}"
        fail(ValidationError("The export is not valid.", where=options.path, got=got[:500]))
    return REFUSED if failed or not checks else DONE
