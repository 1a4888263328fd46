"""``pax-export validate``: validates an export without jax, or against its model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pax_export._foundations.errors import ValidationError
from pax_export.cli import _factory
from pax_export.cli._command import (
    DONE,
    REFUSED,
    Commands,
    add_command,
    add_shared_options,
    fail,
    print_result,
)

_EXAMPLES = """\
  pax-export validate served/1
  pax-export validate served/1 --against train:make_model
"""


def add(commands: Commands) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "validate", _run_validate, "validate an export",
        "Loads an export in a fresh process without jax, calls all of its signatures at several "
        "sizes with random inputs, and checks that names, shapes and dtypes of the outputs are "
        "those of the report, and that the outputs are finite.",
        _EXAMPLES,
    )  # fmt: skip
    parser.add_argument("path", metavar="DIR", help="the path of the export, a directory or a file")
    _factory.add_against(parser, "also compare with the model")
    parser.add_argument(
        "--not-finite", action="store_true", help="accept NaN and infinity in outputs"
    )
    add_shared_options(parser, "trusted", "json")


def _run_validate(options: argparse.Namespace) -> int:
    from pax_export.export.artifact.report import quantized_lines
    from pax_export.export.validation.recheck import Rechecked

    model = _factory.call_factory(options.against) if options.against else None
    methods = _factory.parse_methods(options.method)
    finite, trusted = not options.not_finite, options.trusted
    found = Rechecked(Path(options.path), model, methods, finite, trusted)
    checks = found.checks
    failed = [check for check in checks if check.problem]
    valid = bool(checks) and not failed
    quantized = found.report.details.get("quantized")
    print_result(
        options,
        lambda: {
            "valid": valid,
            "checks": [dataclasses.asdict(each) for each in checks],
            **({"quantized": quantized} if quantized else {}),
        },
        "\n".join([*map(str, checks), *quantized_lines(found.report)]),
    )
    if not checks:
        got = "a report without signatures, so nothing could be called"
        fail(ValidationError("The export is not valid.", where=options.path, got=got))
    elif failed:
        got = f"{len(failed)} of {len(checks)} calls failed; the first: {failed[0]}"
        fail(ValidationError("The export is not valid.", where=options.path, got=got[:500]))
    return DONE if valid else REFUSED
