"""``pax-export export``: exports the model that a factory returns."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from pax_export._foundations.errors import InvalidArgumentError
from pax_export.cli import _factory
from pax_export.cli._command import DONE, Commands, add_command, add_shared_options, print_result
from pax_export.export.artifact.formats import Format, all_formats, import_function
from pax_export.export.artifact.options import values

_VALIDATE = {"here": True} | {each: each for each in values("validate")} | {"no": False}

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
    """Adds the command to the subparsers of the command line."""
    targets = _formats_by_target()
    parser = add_command(
        commands, "export", _run_export, "write a model for the runtime that serves it",
        "Writes the model that a factory returns, as a SavedModel or for another target, and "
        "prints the report.",
        _EXAMPLES,
    )  # fmt: skip
    parser.add_argument("factory", metavar="module:factory", help=_factory.HELP)
    parser.add_argument("directory", metavar="DIR", help="where to write")
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="[KEY:][NAME=]SHAPE[:DTYPE]",
        help='an input, e.g. "batch, 8, 8, 1:float32"; those without a name are positional; '
        "with several methods, each begins with the key of its signature",
    )
    _factory.add_method(
        parser,
        "a signature, and the method of the model that it calls; default: serving_default=__call__",
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
        choices=tuple(_VALIDATE),
        default="here",
        help="here: calls in this process, within the time of the export; full: all calls; "
        "process: all calls, in another process; variables: of savedmodel, compare the stored "
        "variables only; default: here",
    )
    add_shared_options(parser, "overwrite", "json")
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
    methods = _factory.parse_methods(options.method)
    arguments = _factory.InputArguments(options.input, methods)
    write = import_function(
        targets[options.target].export
    )  # with jax.export, which others do not need
    chosen = _target_options(options, write, targets)
    model = _factory.call_factory(options.factory)
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
        validate=_VALIDATE[options.validate],
        overwrite=options.overwrite,
        **chosen,
    )
    print_result(options, report.as_dict, report)
    return DONE


def _draw_model(model: Any, arguments: _factory.InputArguments) -> Any:
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
