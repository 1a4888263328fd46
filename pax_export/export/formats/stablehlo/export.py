"""`to_stablehlo`: a model in, a folder that jax calls, and a report out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._files import checksums
from pax_export.export.artifact import report as _manifest
from pax_export.export.artifact.report import Report, VariableInfo
from pax_export.export.formats.stablehlo import functions as _bundle_functions
from pax_export.export.formats.stablehlo import write
from pax_export.export.formats.stablehlo.exported import Exported, oldest
from pax_export.export.formats.stablehlo.functions import Function
from pax_export.export.pipeline import infos
from pax_export.export.pipeline.export_run import PLATFORMS, Making, check_choice, checked_platforms
from pax_export.export.tracing.structure import legal_names
from pax_export.export.validation import validate as _validate


def to_stablehlo(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    methods: Mapping[str, Any] | None = None,
    constraints: Sequence[str] = (),
    state: Literal["frozen", "update"] = "frozen",
    vjp_order: int = 0,
    weights: Literal["arguments", "constants"] = "arguments",
    platforms: Sequence[str] = PLATFORMS,
    disabled_checks: Sequence[Any] = (),
    validate: bool | Literal["process"] = True,
    overwrite: bool = False,
) -> Report:
    """Writes a model as a folder that jax calls without the code of the model.

    The folder holds jax's own bytes (`jax.export`), portable StableHLO for
    other compilers, the weights as safetensors, and a hash of every file.

    Args:
        model: as for `to_saved_model`; or a `jax.export.Exported`, or a dict of
            them by signature, which bring inputs, platforms and checks with
            them.
        path: the folder to make.
        inputs: as for `to_saved_model`.  Arrays, or `jax.ShapeDtypeStruct`,
            with a sharding over several devices make a sharded export; so do
            such weights.
        kwargs: as for `to_saved_model`.
        methods: as for `to_saved_model`.
        constraints: as for `to_saved_model`.
        state: ``"frozen"`` refuses a model whose calls change what later calls
            read; with ``"update"`` the loaded bundle's ``purecall`` gives a new
            bundle with the new state.
        vjp_order: how many times the loaded functions can be differentiated.
        weights: ``"arguments"`` of the functions, stored apart, readable and
            replaceable; or ``"constants"`` inside of them.
        platforms: the machines to lower for.
        disabled_checks: what `jax.export.export` takes under this name.
        validate: load what was written, make calls at several sizes and compare
            with the model; ``"process"`` does it in a fresh process.
        overwrite: replace a folder that is there.

    Returns:
        The report, which can be printed, and lies in the folder as
        ``pax_export.json``.

    Raises:
        PaxError: of a class for each mistake, as for `to_saved_model`.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp
        >>> from pax_export.export import load, spec, to_stablehlo
        >>> scale = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = to_stablehlo(scale, folder + "/scale", spec("n, 3"), vjp_order=1)
        ...     scaled = load(folder + "/scale")
        >>> jax.grad(lambda x: scaled(x).sum())(jnp.ones((1, 3))).tolist()
        [[2.0, 2.0, 2.0]]
    """
    check_choice("state", state, ("frozen", "update"))
    check_choice("weights", weights, ("arguments", "constants"))
    if isinstance(vjp_order, bool) or not isinstance(vjp_order, int) or vjp_order < 0:
        raise InvalidArgumentError(
            "vjp_order counts how many times a function can be differentiated.",
            got=f"vjp_order={vjp_order!r}",
            write="vjp_order=1",
        )
    if state == "update" and weights == "constants":
        raise InvalidArgumentError(
            "Weights that are constants cannot take new state.",
            got='state="update", weights="constants"',
            write='weights="arguments"',
        )
    with Making(path, validate=validate, overwrite=overwrite, phases=4) as making:
        given = _exporteds(model, inputs, methods)
        if given is not None:
            name, variables, values = _name(given), (), {}
            with making.phase("lower"):
                functions = [
                    _bundle_functions.of_exported(key, exported, vjp_order)
                    for key, exported in given.items()
                ]
        else:
            chosen, programs = making.trace(model, methods, inputs, kwargs, constraints)
            with making.phase("lower"):
                lowered = _bundle_functions.lower(
                    chosen,
                    programs,
                    _bundle_functions.given_shardings(
                        inputs, kwargs, programs, methods is not None
                    ),
                    update=state == "update",
                    order=vjp_order,
                    constant=weights == "constants",
                    platforms=checked_platforms(platforms),
                    disabled_checks=disabled_checks,
                )
            functions, name, values = lowered.functions, chosen.name, lowered.weights
            variables = () if weights == "constants" else infos.of_variables(lowered.store)
        with making.directory(_needed(functions, variables)) as directory:
            with making.phase("write"):
                names = legal_names(function.key for function in functions)
                for file, function in zip(names, functions):
                    write.write_function(
                        directory, file, function.exported, vjp_order, function.modules
                    )
                write.write_weights(directory, values)
            details = {
                "vjp_order": vjp_order,
                "weights": weights,
                "functions": {
                    function.key: function.details(file) for file, function in zip(names, functions)
                },
            }
            report = _report(name, functions, variables, details, directory, making, {})
            _manifest.write(report, directory)
            sums = checksums.write(directory)
            errors = making.validate(lambda separate: _test(directory, functions, separate))
            report = _report(name, functions, variables, details, directory, making, errors)
            _manifest.write(report, directory)
            checksums.write(directory, {k: v for k, v in sums.items() if k != _manifest.FILE})
    return report


def _exporteds(model: Any, inputs: Any, methods: Any) -> dict[str, Exported] | None:
    """The given functions of jax.export by signature; None if the model is another."""
    if isinstance(model, Exported):
        model = {"serving_default": model}
    several = isinstance(model, dict) and model
    if not (several and all(isinstance(each, Exported) for each in model.values())):
        if inputs is None:
            raise InvalidArgumentTypeError(
                "The inputs of this model must be described.",
                got="inputs=None",
                write='to_stablehlo(model, path, spec("batch, 3"))',
            )
        return None
    if inputs is not None or methods is not None:
        raise InvalidArgumentError(
            "A jax.export.Exported has its inputs and methods already.",
            write="to_stablehlo(exported, path)",
        )
    return model


def _needed(functions: Sequence[Function], variables: Sequence[VariableInfo]) -> int:
    """About so many bytes will be written."""
    modules = sum(len(each.exported.mlir_module_serialized) for each in functions)
    portable = sum(len(module.portable.module) for each in functions for module in each.modules)
    return modules + portable + sum(variable.bytes for variable in variables)


def _name(given: Mapping[str, Exported]) -> str:
    return ", ".join(dict.fromkeys(each.fun_name for each in given.values()))


def _test(directory: Path, functions: Sequence[Function], separate: bool) -> dict[str, float]:
    cases = [case for function in functions for case in function.cases()]
    return _validate.validate(directory, cases, separate, "stablehlo")


def _report(
    name: str,
    functions: Sequence[Function],
    variables: tuple[VariableInfo, ...],
    details: dict[str, Any],
    directory: Path,
    making: Making,
    errors: dict[str, float],
) -> Report:
    exported = [function.exported for function in functions]
    platforms = exported[0].platforms
    apart = {write.WEIGHTS, _manifest.FILE, checksums.FILE}
    files = [file for file in directory.iterdir() if file.name not in apart]
    modules = [module for function in functions for module in function.modules]
    versions = _manifest.versions()
    return Report(
        model=name,
        signatures={function.key: function.info for function in functions},
        variables=variables,
        variable_bytes=sum(variable.bytes for variable in variables),
        graph_bytes=sum(file.stat().st_size for file in files),
        platforms=tuple(platforms),
        oldest_tensorflow="",
        stablehlo=oldest(modules),
        calling_convention=max(each.calling_convention_version for each in exported),
        versions=versions,
        validated=making.validated,
        largest_error=errors,
        seconds=making.seconds,
        target="stablehlo",
        details=details | {"runs_in": f"jax {versions['jax']}, on {', '.join(platforms)}"},
    )
