"""`to_stablehlo`: exports a model as a StableHLO bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import jax

from pax_export._foundations.check import checked_choice, checked_integer
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.files import checksums
from pax_export._foundations.types import PyTree
from pax_export.export.artifact.formats import PLATFORMS
from pax_export.export.artifact.options import (
    ExportOptions,
    Request,
    checked_platforms,
    takes_options,
)
from pax_export.export.artifact.report import REPORT_FILE, Report, package_versions
from pax_export.export.formats.stablehlo import STABLEHLO, files, functions
from pax_export.export.formats.stablehlo.exported import (
    Exported,
    oldest_stablehlo,
    read_checks,
    runs_on_all,
)
from pax_export.export.pipeline.format_exporter import Contents, FormatExporter
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.names import legal_names
from pax_export.export.tracing.programs import Program
from pax_export.export.validation.cases import cases_in_turns, named_examples
from pax_export.export.validation.integers import in_float32
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case


@takes_options
def to_stablehlo(
    model: object,
    path: str | os.PathLike[str],
    inputs: PyTree = None,
    *,
    vjp_order: int = 0,
    weights: Literal["arguments", "constants"] = "arguments",
    platforms: Sequence[str] = PLATFORMS,
    disabled_checks: Sequence[Any] = (),
    **options: Unpack[ExportOptions],
) -> Report:
    """Writes a model as a folder that jax runs without the code of the model.

    The folder has jax's own bytes (`jax.export`), portable StableHLO for other compilers, the
    weights as safetensors, and a hash of every file.

    Args:
        model: as for `to_saved_model`; or a `jax.export.Exported`, or a dict of them by signature,
            with their own inputs, platforms and checks.
        path: the folder to create.
        inputs: as for `to_saved_model`.  Arrays, or `jax.ShapeDtypeStruct`,
            with a sharding over several devices result in a sharded export; so do such weights.
        vjp_order: the number of times that the loaded functions can be differentiated.
        weights: ``"arguments"`` of the functions, stored separately, readable and replaceable; or
            ``"constants"`` in them.
        platforms: the platforms to lower for.
        disabled_checks: as in `jax.export.export`.
        **options: those of every writer, `ExportOptions`.

    Returns:
        The report, which can be printed, and is stored in the folder as
        ``pax_export.json``.

    Raises:
        PaxError: a subclass for each error, as for `to_saved_model`.

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
    request = Request.of(to_stablehlo, model, path, inputs, **options)
    checked_choice(weights, ("arguments", "constants"), "weights")
    checked_integer(vjp_order, "vjp_order", 0, what="vjp_order", write="vjp_order=1")
    if request.state == "update" and weights == "constants":
        raise InvalidArgumentError(
            "Weights that are constants cannot take new state.",
            got='state="update", weights="constants"',
            write='weights="arguments"',
        )
    keys = list(model) if isinstance(model, dict) else request.keys
    exporter = _BundleExporter(
        update=request.state == "update",
        order=vjp_order,
        weights=weights,
        platforms=platforms,
        disabled_checks=disabled_checks,
        examples=request.calls(keys, len(keys) > 1),
    )
    return run_export(exporter, request)


@dataclass(frozen=True)
class _BundleExporter(FormatExporter):
    format = STABLEHLO
    tests_reported = True
    one_by_one = True
    updates_state = True

    update: bool
    order: int
    weights: str
    platforms: Sequence[str]
    disabled_checks: Sequence[Any]
    examples: Mapping[str, Sequence[Any]]

    def other_platforms(self, request: Request) -> Sequence[str]:
        by_key = _exports_by_key(request.model, request.inputs, request.methods)
        found = list(by_key.values()) if by_key else []
        checks = [check for each in found for check in each.disabled_safety_checks]
        if runs_on_all([*checks, *read_checks(self.disabled_checks)]):
            return ()
        platforms = found[0].platforms if found else checked_platforms(self.platforms)
        return () if jax.export.default_export_platform() in platforms else platforms

    def make(self, run: ExportRun, request: Request) -> Contents:
        by_key = _exports_by_key(request.model, request.inputs, request.methods)
        if by_key is None:
            return super().make(run, request)
        name = ", ".join(dict.fromkeys(each.fun_name for each in by_key.values()))
        with run.phase("lower"):
            created = [functions.of_exported(k, each, self.order) for k, each in by_key.items()]
            return _BundleContents(name, (), self, _by_file(created), {}, {})

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> _BundleContents:
        constant = self.weights == "constants"
        created, store = functions.lower(
            model,
            programs,
            update=self.update,
            order=self.order,
            constant=constant,
            platforms=checked_platforms(self.platforms),
            disabled_checks=self.disabled_checks,
        )
        values = {} if constant else {each.name: each.value for each in store.variables}
        calls = {
            each.key: named_examples(each.inputs, self.examples.get(each.key, ()), each.key)
            for each in programs
        }
        variables = () if constant else store.infos()
        return _BundleContents(model.name, variables, self, _by_file(created), values, calls)

    def partial(self) -> None:
        """Always None: jax runs the whole model itself, and only gradients or state can differ."""


@dataclass(frozen=True)
class _BundleContents(Contents):
    exporter: _BundleExporter
    functions: Mapping[str, functions.Function]  # by the names of their files
    weights: Mapping[str, Any]
    calls: Mapping[str, list[Arrays]]  # the examples of each signature

    def write(self, path: Path) -> dict[str, str]:
        """Writes all files but report and card, and returns their hashes."""
        for file, each in self.functions.items():
            files.write_function(path, file, each.exported, self.exporter.order, each.modules)
        files.write_weights(path, self.weights)
        return checksums.write(path)

    def stored(self) -> Mapping[str, Any]:
        return self.weights

    def cases(self, budget: Budget) -> Iterator[Case]:
        created = self.functions.values()
        parts = (part for each in created for part in each.cases(self.calls.get(each.key, ())))
        return cases_in_turns(parts, budget)

    def report_fields(self, path: Path, written: Any, run: ExportRun) -> dict[str, Any]:
        created = self.functions
        exported = [each.exported for each in created.values()]
        apart = {files.WEIGHTS, REPORT_FILE, checksums.FILE}
        rest = [file for file in path.iterdir() if file.name not in apart]
        platforms, versions = tuple(exported[0].platforms), package_versions()
        return {
            "signatures": {each.key: each.info for each in created.values()},
            "graph_bytes": sum(file.stat().st_size for file in rest),
            "platforms": platforms,
            "stablehlo": oldest_stablehlo(
                [module for each in created.values() for module in each.modules]
            ),
            "calling_convention": max(each.calling_convention_version for each in exported),
            "versions": versions,
            "details": {
                "vjp_order": self.exporter.order,
                "weights": self.exporter.weights,
                "functions": {each.key: each.details(file) for file, each in created.items()},
                "runs_in": f"jax {versions['jax']}, on {', '.join(platforms)}",
                **in_float32(self.stored()),
            },
        }

    def write_report(self, report: Report, path: Path, written: Mapping[str, str]) -> None:
        super().write_report(report, path, written)
        checksums.write(path, written)


def _by_file(created: Sequence[functions.Function]) -> dict[str, functions.Function]:
    return dict(zip(legal_names(each.key for each in created), created))


def _exports_by_key(model: Any, inputs: PyTree, methods: object) -> dict[str, Exported] | None:
    """The given functions of jax.export by signature; None if the model is another."""
    if isinstance(model, Exported):
        model = {"serving_default": model}
    several = isinstance(model, dict) and model
    if not (several and all(isinstance(each, Exported) for each in model.values())):
        return None
    if inputs is not None or methods is not None:
        raise InvalidArgumentError(
            "A jax.export.Exported has its inputs and methods already.",
            write="to_stablehlo(exported, path)",
        )
    return model
