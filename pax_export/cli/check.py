"""``pax-export inspect``, ``diff``, ``validate`` and ``certify``: what an export is and does."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pax_export._foundations.errors import ValidationError
from pax_export.cli._command import (
    DONE,
    REFUSED,
    Commands,
    add_command,
    call_factory,
    fail,
    parse_methods,
    print_result,
)
from pax_export.export.artifact.report import Report, quantized_lines
from pax_export.export.artifact.saved_models import describe, is_foreign


def add(commands: Commands) -> None:
    """Adds the commands to the subparsers of the command line."""
    parser = add_command(
        commands, "inspect", _run_inspect, "describe an export",
        "Shows signatures, variables, sizes, versions and the oldest TensorFlow of an export, "
        "without loading it.  Third-party SavedModels are supported, too.",
        shared=("path", "--json"),
    )  # fmt: skip
    parser.add_argument(
        "--flops",
        action="store_true",
        help="print the table of pax.inspect instead, with the FLOPs of a call; requires jax",
    )
    parser = add_command(
        commands, "diff", _run_diff, "compare two exports",
        "Prints which arrays of two exports were added, dropped, reshaped, retyped or changed in "
        "value.  Neither is loaded.",
    )  # fmt: skip
    parser.add_argument("first", metavar="DIR", help="the path of an export, a directory or a file")
    parser.add_argument("second", metavar="DIR", help="the path of another one")
    compared = ("path", "--against", "--method", "--trusted", "--json")
    parser = add_command(
        commands, "validate", _run_validate, "validate an export",
        "Loads an export in a fresh process without jax, calls all of its signatures at several "
        "sizes with random inputs, and checks that names, shapes and dtypes of the outputs are "
        "those of the report, and that the outputs are finite.",
        """\
  pax-export validate served/1
  pax-export validate served/1 --against train:make_model
""",
        shared=compared,
    )  # fmt: skip
    parser.add_argument(
        "--not-finite", action="store_true", help="accept NaN and infinity in outputs"
    )
    parser = add_command(
        commands, "certify", _run_certify, "run an export in all installed runtimes",
        "Calls an export at several sizes with random inputs in its own runtime and, "
        "of an ONNX file, in OpenVINO, IREE and onnxruntime-web (in Node.js) where they are "
        "installed, each in a process of its own.  Compares the results with the model in jax "
        "(--against), or with those of its own runtime, and writes them into the report and the "
        "card of the export.",
        """\
  pax-export certify net.onnx
  pax-export certify net.onnx --runtime openvino --runtime web --against train:make_model

The report and the card of the export have another line for each runtime then: its version, the
machine, the number of calls, and the largest difference.  --no-write changes nothing.
""",
        shared=compared,
    )  # fmt: skip
    parser.add_argument(
        "--runtime", action="append", default=[], metavar="NAME",
        help="a required runtime: openvino, iree or web; default: all that are installed",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="the time limit of a runtime; default: 600"
    )
    parser.add_argument(
        "--no-write", action="store_true", help="print the results, and change nothing"
    )


def _run_diff(options: argparse.Namespace) -> int:
    from pax_export import inspection

    found = inspection.diff(options.first, options.second)
    print_result(options, lambda: dataclasses.asdict(found), found)
    return DONE


def _run_inspect(options: argparse.Namespace) -> int:
    if options.flops:
        from pax_export.inspection import inspect  # which imports jax

        table = inspect(options.path)
        print_result(options, table.to_dict, table)
        return DONE
    path = Path(options.path)
    found = describe(path) if is_foreign(path) else Report.read(path)
    lines = [str(found)]
    for variable in found.variables:
        shape = ", ".join(map(str, variable.shape))
        mark = " trainable" if variable.trainable else ""
        lines.append(f"    {variable.name}: {variable.dtype}[{shape}]{mark}")
    print_result(options, found.as_dict, "\n".join(lines))
    return DONE


def _run_validate(options: argparse.Namespace) -> int:
    from pax_export.export.validation.recheck import Rechecked

    model, methods = call_factory(options.against), parse_methods(options.method)
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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 is expected, not {text}")
    return seconds


def _run_certify(options: argparse.Namespace) -> int:
    from pax_export.export.validation.certify import certify

    results = certify(
        Path(options.path),
        call_factory(options.against),
        parse_methods(options.method),
        runtimes=options.runtime,
        seconds=options.seconds,
        write=not options.no_write,
        trusted=options.trusted,
    )
    print_result(
        options,
        lambda: {"runtimes": [dataclasses.asdict(each) for each in results]},
        "\n".join(map(str, results)),
    )
    bad = [
        each
        for each in results
        if each.differs or (each.problem and each.runtime in options.runtime)
    ]
    for each in bad[:1]:
        what = f"{len(bad)} of {len(results)} runtimes do not run this export right."
        fail(ValidationError(what, where=each.runtime, got=each.problem[:500]))
    return REFUSED if bad else DONE
