"""`to_onnx`: a model in, a file for onnxruntime and its like, and a report out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pax_export._errors import InvalidArgumentError, UnsupportedOperationError
from pax_export._files import bytes_text
from pax_export._optional import require
from pax_export.export.artifact import embedded
from pax_export.export.artifact import report as _manifest
from pax_export.export.artifact.report import Report
from pax_export.export.formats.onnx import write
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline import infos
from pax_export.export.pipeline.export_run import Making
from pax_export.export.tracing import programs
from pax_export.export.tracing.programs import Program
from pax_export.export.validation import forward_cases
from pax_export.export.validation import validate as _validate

OPSET = 21


def to_onnx(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    methods: Mapping[str, Any] | None = None,
    constraints: Sequence[str] = (),
    opset: int = OPSET,
    validate: bool | Literal["process"] = True,
    overwrite: bool = False,
) -> Report:
    """Writes a model as an ONNX file, which onnxruntime and many others run.

    jax2onnx converts it.  The weights are initializers with the names of the
    leaves.

    Args:
        model: as for `to_saved_model`.
        path: the file to make, usually ``*.onnx``.
        inputs: as for `to_saved_model`; symbolic dimensions keep their names.
        kwargs: as for `to_saved_model`.
        methods: as for `to_saved_model`, but one only: an ONNX file holds one
            function.
        constraints: as for `to_saved_model`.
        opset: the version of ONNX's operators to write.
        validate: load what was written, make calls at several sizes with
            onnxruntime and compare with jax; ``"process"`` does it in a fresh
            process without jax.
        overwrite: replace a file that is there.

    Returns:
        The report, which can be printed, and lies in the file as the entry
        ``pax_export.json`` of its metadata.

    Raises:
        UnsupportedOperationError: ONNX has no such operation; it is named, with
            the layer and line that use it.
        PaxError: of a class for each mistake, as for `to_saved_model`.

    Example:
        >>> import importlib.util, tempfile, jax.numpy as jnp
        >>> from pax_export.export import spec, to_onnx
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> if importlib.util.find_spec("jax2onnx"):  # pip install "pax-export[onnx]"
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         report = to_onnx(double, folder + "/double.onnx", spec("batch, 3"))
    """
    if isinstance(opset, bool) or not isinstance(opset, int) or opset < 1:
        raise InvalidArgumentError(
            "An opset is a number.", got=f"opset={opset!r}", write=f"opset={OPSET}"
        )
    if methods is not None and len(methods) != 1:
        raise InvalidArgumentError(
            "An ONNX file holds one function.",
            got=f"methods={sorted(methods)}",
            write="a file for each method",
        )
    with Making(path, validate=validate, overwrite=overwrite, phases=5, file=True) as making:
        with making.phase("load jax2onnx"):
            require("jax2onnx", "onnx", "to_onnx")
            if validate:
                write.onnxruntime("to_onnx")
        chosen, (program,) = making.trace(model, methods, inputs, kwargs, constraints)
        with making.phase("lower"):
            programs.refuse_changes(program, chosen.leaves, set(program.read))
            store = Store(chosen.leaves, (), trainable=True)
            places = [*store.of_leaf, *map(store.of_constant, program.traced.constants)]
            names = [store.variables[place].name for place in places]
            weights = {each.name: each.value for each in store.variables}
            needed = _checked_size(store)
        with making.file(needed) as file:
            with making.phase("write"):
                write.write(file, program, names, weights, opset)
            errors = making.validate(
                lambda separate: _validate.validate(
                    file, forward_cases.cases(program, store), separate, "onnx"
                )
            )
            report = _report(chosen.name, program, store, file, opset, errors, making)
            embedded.append_field(file, _manifest.text(report))
    return report


def _checked_size(store: Store) -> int:
    """How many bytes the weights are.

    Raises:
        UnsupportedOperationError: more than a file holds.
    """
    size = sum(each.bytes for each in infos.of_variables(store))
    if size > write.LARGEST:
        raise UnsupportedOperationError(
            "An ONNX file holds 2 GiB at most.",
            got=bytes_text(size),
            write="fewer bits, e.g. bfloat16 weights, or another target, e.g. to_stablehlo",
        )
    return size


def _report(
    name: str,
    program: Program,
    store: Store,
    file: Path,
    opset: int,
    errors: dict[str, float],
    making: Making,
) -> Report:
    variables = infos.of_variables(store)
    return Report(
        model=name,
        signatures={program.key: infos.of_signature(program)},
        variables=variables,
        variable_bytes=sum(variable.bytes for variable in variables),
        graph_bytes=file.stat().st_size,
        platforms=("cpu", "cuda", "rocm"),
        oldest_tensorflow="",
        stablehlo="",
        calling_convention=0,
        versions=_manifest.versions("jax2onnx", "onnx"),
        validated=making.validated,
        largest_error=errors,
        seconds=making.seconds,
        target="onnx",
        details={"opset": opset, "runs_in": f"onnxruntime, and what reads opset {opset}"},
    )
