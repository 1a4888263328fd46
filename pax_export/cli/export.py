"""``pax-export export``, ``quantize`` and ``retarget``: write exports and weights."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.files import atomic
from pax_export.cli._command import (
    DONE,
    Commands,
    InputArguments,
    add_command,
    call_factory,
    parse_methods,
    print_result,
    validate_argument,
)
from pax_export.export.artifact.formats import Format, all_formats, import_function
from pax_export.export.artifact.options import values

_EXAMPLES = """\
  pax-export export train:make_model served/1 --input "batch, 8, 8, 1:float32"
  pax-export export train:make_model served/1 --input "batch, length:int32" \\
      --input "mask=batch, length:bool" --constraint "length <= 512"
  pax-export export train:make_model served/1 --method serving_default=__call__ \\
      --method encode=encode --input "serving_default:batch, 8" --input "encode:batch, 8"
  pax-export export train:make_model net.tflite --target tflite --input "1, 8" \\
      --quantize float16
  pax-export export train:make_model net.onnx --target onnx --input "batch, 8" --bits 8
"""


def add(commands: Commands) -> None:
    """Adds the commands to the subparsers of the command line."""
    _add_export(commands)
    _add_quantize(commands)
    _add_retarget(commands)


def _add_export(commands: Commands) -> None:
    targets = _formats_by_target()
    parser = add_command(
        commands, "export", _run_export, "write a model for the runtime that serves it",
        "Writes the model that a factory returns, as a SavedModel or for another target, and "
        "prints the report.",
        _EXAMPLES,
        shared=("factory", "--method", "--overwrite", "--json"),
    )  # fmt: skip
    parser.add_argument("directory", metavar="DIR", help="where to write")
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="[KEY:][NAME=]SHAPE[:DTYPE]",
        help='an input, e.g. "batch, 8, 8, 1:float32"; those without a name are positional; '
        "with several methods, each begins with the key of its signature",
    )
    parser.add_argument(
        "--target", choices=tuple(targets), default="savedmodel", help="default: savedmodel"
    )
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar='"n >= 2"',
        help="a constraint on symbolic sizes",
    )
    for name, how in _of_formats(targets).items():
        parser.add_argument(_flag(name, how), dest=name, **{k: how[k] for k in how if k != "flag"})
    bits = "quantize the weights, as pax.quantize does, and report the loss"
    parser.add_argument("--bits", type=int, choices=(8, 4), help=bits)
    state = "of state that calls change; default: frozen"
    parser.add_argument("--state", choices=values("state"), help=state)
    outputs = "the dtype of half-precision outputs of a policy; default: float32"
    parser.add_argument("--outputs", choices=values("outputs"), help=outputs)
    parser.add_argument(
        "--validate",
        choices=("here", *values("validate"), "no"),
        default="here",
        help="here: calls in this process, within the time of the export; full: all calls; "
        "process: all calls, in another process; variables: of savedmodel, compare the stored "
        "variables only; default: here",
    )
    cards = parser.add_mutually_exclusive_group()
    cards.add_argument("--no-card", action="store_true", help="omit the HTML card")
    cards.add_argument(
        "--drawing",
        action="store_true",
        help="include a drawing of the model in the card",
    )


def _formats_by_target() -> dict[str, Format]:
    return {each.option or each.name: each for each in all_formats().values()}


def _of_formats(targets: Mapping[str, Format]) -> dict[str, Mapping[str, Any]]:
    return {name: how for each in targets.values() for name, how in each.options.items()}


def _flag(name: str, how: Mapping[str, Any]) -> str:
    return how.get("flag", "--" + name.replace("_", "-"))


def _run_export(options: argparse.Namespace) -> int:
    targets = _formats_by_target()
    methods = parse_methods(options.method)
    arguments = InputArguments(options.input, methods)
    # With jax.export, which other commands do not need.
    write = import_function(targets[options.target].export)
    chosen = _target_options(options, write, targets)
    model = call_factory(options.factory)
    if options.bits:
        from pax_export.quantization import quantize

        model, cost = quantize(model, bits=options.bits)
        print(cost, file=sys.stderr)
        chosen["quantization"] = cost
    if options.drawing:
        chosen["card"] = _draw_model(model, arguments)
    report = write(
        model,
        options.directory,
        arguments.inputs,
        kwargs=arguments.kwargs,
        methods=methods or None,
        validate=validate_argument(options),
        overwrite=options.overwrite,
        **chosen,
    )
    print_result(options, report.as_dict, report)
    return DONE


def _draw_model(model: Any, arguments: InputArguments) -> Any:
    from pax_export import inspection

    if not isinstance(arguments.inputs, tuple):
        raise InvalidArgumentError(
            "Only a call of the model itself can be drawn.",
            got="--drawing with --method",
            write="--drawing without --method, or pax.inspection.draw in Python",
        )
    return inspection.draw(model, *arguments.inputs, kwargs=arguments.kwargs)


def _target_options(
    options: argparse.Namespace, write: Any, targets: Mapping[str, Format]
) -> dict[str, Any]:
    """The options that were given; each must be one of the target's."""
    own = _of_formats(targets)
    values = {name: getattr(options, name) for name in own}
    accepted = inspect.signature(write).parameters
    for name, value in values.items():
        if value is not None and name not in accepted:
            raise InvalidArgumentError(
                "The target does not have this option.",
                got=f"{_flag(name, own[name])} with --target {options.target}",
                write=f"--target {' or '.join(_targets_with(name, targets))}",
            )
    values |= {
        "constraints": options.constraint or None,
        "state": options.state,
        "outputs": options.outputs,
        "card": False if options.no_card else None,
    }
    if options.validate == "variables" and not targets[options.target].has_variables:
        raise InvalidArgumentError(
            "Only a SavedModel has variables to compare.",
            got=f"--validate variables with --target {options.target}",
            write="--validate here, or --validate process",
        )
    return {name: value for name, value in values.items() if value is not None}


def _targets_with(option: str, targets: Mapping[str, Format]) -> list[str]:
    return [
        target
        for target, each in targets.items()
        if option in inspect.signature(import_function(each.export)).parameters
    ]


# --- quantize -------------------------------------------------------------------------------

_QUANTIZE_EXAMPLES = """\
  pax-export quantize train:make_model small.safetensors --batch images.npy
  pax-export quantize train:make_model small.safetensors --bits 4 --rounding gptq \\
      --batch first.npz --batch second.npz
  pax-export quantize train:make_model --bits 4 --batch images.npy        # the report alone
"""


def _add_quantize(commands: Commands) -> None:
    parser = add_command(
        commands, "quantize", _run_quantize, "quantize the weights of a model",
        "Quantizes the weights of the model that a factory returns, prints the report of "
        "`pax_export.quantize`, whose options these are, and writes the integers to a safetensors "
        "file.",
        _QUANTIZE_EXAMPLES,
        shared=("factory", "--overwrite", "--json"),
    )  # fmt: skip
    parser.add_argument(
        "file",
        metavar="FILE.safetensors",
        nargs="?",
        help="the file to write; default: none, only the report",
    )
    parser.add_argument(
        "--batch",
        action="append",
        metavar="FILE",
        help="the inputs of one call: an array in a .npy file, or several in a .npz file, in the "
        "order of the arguments",
    )
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8, help="default: 8")
    parser.add_argument(
        "--scheme", default="symmetric", help="symmetric, asymmetric or float; default: symmetric"
    )
    parser.add_argument(
        "--group", type=int, metavar="32", help="groups with float16 scales for 8 bits, too"
    )
    parser.add_argument("--at", metavar="PATTERN", help='a part of the model, e.g. "layers.*"')
    parser.add_argument(
        "--activations", metavar="METHOD", help="round the inputs of products, too, e.g. static"
    )
    parser.add_argument("--rounding", default="nearest", help="nearest or gptq; default: nearest")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="LOSS",
        help="the allowed loss of the outputs; chooses 8 or 4 bits for each weight",
    )
    parser.add_argument(
        "--runtime",
        action="append",
        choices=tuple(all_formats()),
        default=[],
        help="also measure the differences and the latency in the runtime of this format",
    )


def _run_quantize(options: argparse.Namespace) -> int:
    from pax_export.quantization import quantize
    from pax_export.weights import save_weights

    path = Path(options.file) if options.file else None
    if path is not None:  # before any work; saving looks at the file itself
        atomic.check_file(path, (lambda _: lambda name: True) if options.overwrite else None)
    batches = [_read_batch(file) for file in options.batch or ()]
    if options.runtime and not batches:
        raise InvalidArgumentError(
            "Runtimes are called with batches.", got="--runtime", write="--batch FILE, too"
        )
    net = call_factory(options.factory)
    small, report = quantize(
        net,
        batches or None,
        bits=options.bits,
        group=options.group,
        scheme=options.scheme,
        at=options.at,
        activations=options.activations,
        rounding=options.rounding,
        budget=options.budget,
    )
    runtimes = {name: _run_in(name, net, small, batches) for name in options.runtime}
    report = dataclasses.replace(report, runtimes=runtimes)
    if path is not None:
        save_weights(small, path)
    print_result(options, lambda: dataclasses.asdict(report), report)
    return DONE


def _run_in(name: str, net: Any, small: Any, batches: list[tuple[np.ndarray, ...]]) -> Any:
    """Compares the runtime of a format with jax on the same integers; times both nets."""
    import jax

    from pax_export.export import load
    from pax_export.quantization import compare_runtime

    write = import_function(all_formats()[name].export)
    with atomic.scratch() as folder:
        files = []
        for each in (net, small):
            path = folder / str(len(files))
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batches[0])
            write(each, path, shapes, validate=False, card=False)
            files.append(load(path))
        return compare_runtime(small, files[0], files[1], batches)


def _read_batch(file: str) -> tuple[np.ndarray, ...]:
    try:
        found = np.load(file, allow_pickle=False)
        return (found,) if isinstance(found, np.ndarray) else tuple(found.values())
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(
            "The batch cannot be read.",
            where=file,
            got=str(error),
            write="a .npy or .npz file, as numpy.save and numpy.savez write them",
        ) from error


# --- retarget -------------------------------------------------------------------------------


def _add_retarget(commands: Commands) -> None:
    parser = add_command(
        commands, "retarget", _run_retarget,
        "repair a SavedModel written by jax2tf, orbax-export or Keras",
        "Rewrites the jax programs of a SavedModel for the oldest possible TensorFlow, and prints "
        "a report.  Variables, assets and signatures do not change.",
        """\
  pax-export retarget old --out mended
  pax-export retarget served/1 --overwrite --consumer "tensorflow>=2.15"
""",
        shared=("path", "--overwrite", "--trusted", "--json"),
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", help="the directory to write; default: DIR itself, with --overwrite"
    )
    parser.add_argument(
        "--consumer", metavar='"tensorflow>=2.17"', help="the oldest TensorFlow that must run it"
    )
    parser.add_argument(
        "--validate",
        choices=("here", "process", "no"),
        default="here",
        help="where signatures are called and compared; default: here",
    )


def _run_retarget(options: argparse.Namespace) -> int:
    from pax_export import export

    report = export.retarget(
        options.path,
        options.consumer,
        out=options.out,
        overwrite=options.overwrite,
        validate=validate_argument(options),
        trusted=options.trusted,
    )
    print_result(options, report.as_dict, report)
    return DONE
