"""The one-line calls: a model in, a directory and a report out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pax_export._errors import InvalidArgumentError
from pax_export.export import _consumers, _directory, _manifest, _plan, _validate
from pax_export.export._exportable import exportable
from pax_export.export._manifest import Report
from pax_export.export._progress import Progress
from pax_export.export.writers import saved_model

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_PHASES = 5


def to_saved_model(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    methods: Mapping[str, Any] | None = None,
    constraints: Sequence[str] = (),
    state: Literal["frozen", "update"] = "frozen",
    trainable: bool = False,
    platforms: Sequence[str] = _PLATFORMS,
    consumer: str | None = None,
    validate: bool | Literal["process"] = True,
    overwrite: bool = False,
) -> Report:
    """Writes a model as a SavedModel that TensorFlow serves without jax.

    Args:
        model: a `Module`, exported in eval mode, or a pair ``(params,
            function)`` of any pytree and a function of it and the inputs.
        path: the directory to make.
        inputs: what the model is called with: a `spec`, an array, a
            `jax.ShapeDtypeStruct`, or a pytree of them.  A tuple is several
            positional arguments.
        kwargs: the keyword arguments of the call, likewise.
        methods: a signature for each key: the name of a method, or a function
            that takes the model first.  `inputs` and `kwargs` are then dicts
            with the same keys.  All signatures share the variables.
        constraints: what may be assumed of symbolic dimensions, e.g.
            ``("length <= 512",)``.
        state: ``"frozen"`` refuses a model whose calls change what later calls
            read; ``"update"`` assigns the new state to the variables in every
            call of the exported model.
        trainable: make the parameters trainable variables, and keep first-order
            gradients with respect to them and to floating-point inputs.
        platforms: the machines to lower for.
        consumer: the oldest TensorFlow that must run it, e.g.
            ``"tensorflow>=2.17"``; refused if the model needs a newer one.
            The export is always made for the oldest that it can be.
        validate: load what was written, make calls at several sizes and compare
            with jax; ``"process"`` does it in a fresh process without jax.
        overwrite: replace a directory that is there.

    Returns:
        The report, which can be printed, and lies beside the model as
        ``pax_export.json``.

    Raises:
        PaxError: of a class for each mistake; see the guide on exporting.
            Nothing is written then, and what was there is still there.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from pax_export.export import spec, to_saved_model
        >>> def scale(params, x):
        ...     return {"y": params["w"] * x}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = to_saved_model(
        ...         ({"w": jnp.ones(3)}, scale), folder + "/scale", spec("batch, 3")
        ...     )
        >>> print(report.signatures["serving_default"].inputs[0])
        x: float32[batch, 3]
    """
    path = Path(path)
    platforms = _checked_platforms(platforms)
    _check_choice("state", state, ("frozen", "update"))
    _check_choice("validate", validate, (True, False, "process"))
    _consumers.requested(consumer)
    _directory.check(path, overwrite)
    with Progress(_PHASES) as progress:
        with progress.phase("load TensorFlow"):
            saved_model.tensorflow("to_saved_model")
        with progress.phase("trace"):
            chosen = exportable(model, methods)
            traced = _plan.trace(chosen, inputs, kwargs, constraints, methods is not None)
        with progress.phase("lower"):
            plan = _plan.lower(chosen, traced, state, trainable, platforms)
            for signature in plan.signatures:
                _consumers.check(consumer, plan.oldest_tensorflow, signature.key)
        with _directory.replaced(path, overwrite) as directory:
            with progress.phase("write"):
                saved_model.write(directory, plan.store, plan.signatures)
            errors: dict[str, float] = {}
            if validate:
                with progress.phase("validate"):
                    errors = _validate.validate(directory, plan.cases(), validate == "process")
            mode = "process" if validate == "process" else "here" if validate else None
            report = _report(plan, directory, errors, mode, progress.seconds)
            _manifest.write(report, directory)
    return report


def _checked_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [name for name in platforms if name not in _PLATFORMS]
    if unknown or not platforms:
        raise InvalidArgumentError(
            "The platforms to lower for are cpu, cuda, rocm and tpu.",
            got=f"platforms={platforms}",
            write='platforms=("cpu", "cuda")',
        )
    return platforms


def _check_choice(name: str, value: Any, choices: tuple) -> None:
    if not any(value is choice or (value == choice and value != 1) for choice in choices):
        raise InvalidArgumentError(
            f"{name} has a value that means nothing.",
            got=f"{name}={value!r}",
            write=" or ".join(f"{name}={choice!r}" for choice in choices),
        )


def _report(
    plan: _plan.Plan,
    directory: Path,
    errors: dict[str, float],
    validated: str | None,
    seconds: Mapping[str, float],
) -> Report:
    variables = plan.variable_infos()
    return Report(
        model=plan.model.name,
        signatures=plan.signature_infos(),
        variables=variables,
        variable_bytes=sum(variable.bytes for variable in variables),
        graph_bytes=(directory / "saved_model.pb").stat().st_size,
        platforms=plan.platforms,
        oldest_tensorflow=_consumers.text(plan.oldest_tensorflow),
        stablehlo=_consumers.text(plan.stablehlo),
        calling_convention=plan.calling_convention,
        versions=_manifest.versions(),
        validated=validated,
        largest_error=errors,
        seconds={name: round(value, 4) for name, value in seconds.items()},
    )
