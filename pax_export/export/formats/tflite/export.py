"""`to_tflite`: a model in, a file for phones and small computers, and a report out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pax_export.export.artifact import embedded
from pax_export.export.artifact import report as _manifest
from pax_export.export.artifact.report import Report
from pax_export.export.formats.saved_model.functions import tensorflow
from pax_export.export.formats.tflite import write
from pax_export.export.lowering import lowered_model
from pax_export.export.pipeline import infos
from pax_export.export.pipeline.export_run import Making, check_choice
from pax_export.export.validation import forward_cases
from pax_export.export.validation import validate as _validate

#: How many bytes of a file a byte of weights is.
_SIZES = {None: 1.0, "float16": 0.5, "dynamic": 0.25}
#: How much farther from jax than rounding the numbers of a quantised model are.
_FACTORS = {None: 1.0, "float16": 50.0, "dynamic": 1000.0}


def to_tflite(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    methods: Mapping[str, Any] | None = None,
    constraints: Sequence[str] = (),
    quantize: Literal["float16", "dynamic"] | None = None,
    validate: bool | Literal["process"] = True,
    overwrite: bool = False,
) -> Report:
    """Writes a model as a TFLite file, which LiteRT runs on phones and small computers.

    TensorFlow's converter makes it, of TFLite's built-in operations only.

    Args:
        model: as for `to_saved_model`.
        path: the file to make, usually ``*.tflite``.
        inputs: as for `to_saved_model`; symbolic dimensions are sizes that may
            change from call to call, at some cost: numbers make a smaller and
            faster model.
        kwargs: as for `to_saved_model`.
        methods: as for `to_saved_model`; one file holds all signatures.
        constraints: as for `to_saved_model`.
        quantize: ``"float16"`` stores the weights with half the bits;
            ``"dynamic"`` stores large ones as int8, and computes with these.
        validate: load what was written, make calls at several sizes with LiteRT
            and compare with jax; ``"process"`` does it in a fresh process
            without jax.
        overwrite: replace a file that is there.

    Returns:
        The report, which can be printed, and lies in the file (``unzip -p
        model.tflite pax_export.json`` prints it).

    Raises:
        UnsupportedOperationError: TFLite has no such operation; it is named.
        PaxError: of a class for each mistake, as for `to_saved_model`.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from pax_export.export import load, spec, to_tflite
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = to_tflite(double, folder + "/double.tflite", spec("2, 3"))
        ...     doubled = load(folder + "/double.tflite")
        ...     doubled([[1, 2, 3], [4, 5, 6]]).tolist()
        [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]
    """
    check_choice("quantize", quantize, (None, "float16", "dynamic"))
    with Making(path, validate=validate, overwrite=overwrite, phases=5, file=True) as making:
        with making.phase("load TensorFlow"):
            tensorflow("to_tflite")
            if validate:
                write.litert("to_tflite")
        chosen, programs = making.trace(model, methods, inputs, kwargs, constraints)
        with making.phase("lower"):
            plan = lowered_model.lower(chosen, programs, "frozen", False, ("cpu",), vjp_order=0)
        stored = sum(variable.bytes for variable in infos.of_variables(plan.store))
        with making.file(int(stored * _SIZES[quantize])) as file:
            with making.phase("write"):
                write.write(file, plan.store, plan.signatures, quantize)
            errors = making.validate(
                lambda separate: _validate.validate(
                    file, _cases(plan), separate, "tflite", _FACTORS[quantize]
                )
            )
            report = _report(plan, file, quantize, errors, making)
            embedded.append_zip(file, _manifest.text(report))
    return report


def _cases(plan: lowered_model.Plan) -> list[_validate.Case]:
    return [each for program in plan.programs for each in forward_cases.cases(program, plan.store)]


def _report(
    plan: lowered_model.Plan,
    file: Path,
    quantize: str | None,
    errors: dict[str, float],
    making: Making,
) -> Report:
    variables = infos.of_variables(plan.store)
    return Report(
        model=plan.model.name,
        signatures=plan.signature_infos(),
        variables=variables,
        variable_bytes=sum(variable.bytes for variable in variables),
        graph_bytes=file.stat().st_size,
        platforms=("cpu",),
        oldest_tensorflow="",
        stablehlo="",
        calling_convention=0,
        versions=_manifest.versions("tensorflow"),
        validated=making.validated,
        largest_error=errors,
        seconds=making.seconds,
        target="tflite",
        details={"runs_in": "LiteRT"} | ({"quantize": quantize} if quantize else {}),
    )
