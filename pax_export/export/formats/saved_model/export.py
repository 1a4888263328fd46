"""`to_saved_model`: exports a model as a SavedModel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import jax

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    GradientMismatchError,
    InvalidArgumentError,
    PaxError,
    ValidationError,
    named_line,
)
from pax_export._foundations.optional import find
from pax_export._foundations.types import PyTree
from pax_export.export.artifact import saved_models
from pax_export.export.artifact.formats import PLATFORMS
from pax_export.export.artifact.loading import write_sums
from pax_export.export.artifact.options import (
    ExportOptions,
    Request,
    checked_platforms,
    takes_options,
)
from pax_export.export.artifact.report import SERVED, Report, package_versions
from pax_export.export.formats.saved_model import SAVED_MODEL, writer
from pax_export.export.formats.saved_model.operations.program import lower_to_graph
from pax_export.export.formats.saved_model.processing import Processors, add_processors, tensorflow
from pax_export.export.formats.saved_model.run import run as run_saved_model
from pax_export.export.lowering.lower import CALLING_CONVENTION, lower_traced
from pax_export.export.lowering.lowered_model import (
    Lower,
    LoweredModel,
    lower_model,
    vjp_orders,
)
from pax_export.export.pipeline.format_exporter import Contents, FormatExporter
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.training import TrainStep, mark_trainable, with_step
from pax_export.export.validation.cases import named_examples, with_sessions
from pax_export.export.validation.integers import in_float32
from pax_export.export.validation.model_cases import model_cases
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case
from pax_export.export.validation.validate import validate as validated


@takes_options
def to_saved_model(
    model: object,
    path: str | os.PathLike[str],
    inputs: PyTree,
    *,
    trainable: object = False,
    vjp_order: Literal[0, 1, 2] | None = None,
    train_step: Callable[..., Any] | None = None,
    optimizer: object = None,
    train_inputs: object = None,
    preprocess: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    postprocess: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    preprocess_inputs: object = None,
    platforms: Sequence[str] = PLATFORMS,
    operations: Literal["tensorflow", "xla"] | None = None,
    consumer: str | None = None,
    warmup: Sequence[int | Mapping[str, int]] = (),
    **options: Unpack[ExportOptions],
) -> Report:
    """Writes a model as a SavedModel that TensorFlow serves without jax.

    It is written without TensorFlow, which `preprocess`, `postprocess` and `validate` need.  If it
    is not installed, the calls of `validate` are omitted with a `NotValidatedWarning`, and
    ``"full"`` and ``"process"`` raise.

    Args:
        model: a `Module`, exported in eval mode; a function; a pair ``(params, function)`` of any
            pytree and a function of it and the inputs; a bound method or a `functools.partial`; a
            module of Equinox or flax.nnx; a Keras model with the jax backend; ``(module,
            variables)`` of flax.linen; ``(transformed, params)`` of haiku.
        path: the directory to create.
        inputs: the inputs of the model: a `spec`, an array, a `jax.ShapeDtypeStruct`, or a pytree
            of them.  A tuple is several positional arguments, a dict arguments by name.
        trainable: make the parameters trainable variables, with gradients.  True means all that
            are not frozen; paths (``("head", "encoder.*.norm")``), a selection of
            ``net.at(...)``, a filter of `pax_export.transforms`, a function of name and array, or
            a prefix with True and False select some of them.
        vjp_order: 1 includes gradients of the outputs with respect to floating-point inputs and
            trainable variables, 2 also gradients of these, 0 none; raises if the model has none.
            The default includes what the model supports: 1, or 2 with `trainable`.
        train_step: a function ``(model, optimizer, *batch) -> (model, optimizer, metrics)``,
            exported as the signature ``"train_step"``: a call returns the metrics, and assigns
            the new model and optimizer to the shared variables.  The model is in train mode.
        optimizer: the optimizer, any pytree; its arrays become variables named ``optimizer.…``.
        train_inputs: the batch, in the same form as `inputs`.
        preprocess: a TensorFlow function before the model: a `tf.function`, a function of
            TensorFlow operations, or a `tf.Module` or Keras layer.  It returns the arguments of
            the model: a tuple of positional ones, a single one, or a dict of all by name.  With
            `methods`, a dict over some of their keys.
        postprocess: a TensorFlow function of the model's outputs.
        preprocess_inputs: the inputs of the preprocessor, in the same form as `inputs`, including
            text (``spec("batch", "string")``) and `tf.TensorSpec`.  Not needed for a
            `tf.function` with an ``input_signature``.
        platforms: the platforms to lower for.
        operations: ``"tensorflow"`` writes a graph of TensorFlow's own operations, which every
            TensorFlow runs without XLA; raises if it lacks one of the model.  ``"xla"`` writes one
            operation that XLA compiles at each new shape; ``tensorflow_model_server`` runs it if
            started with ``--xla_cpu_compilation_enabled=true`` or
            ``--xla_gpu_compilation_enabled=true``.  None is ``"tensorflow"`` if the whole model
            can be written so and passes the validation, else ``"xla"``; the report says why.
        consumer: the oldest TensorFlow that must run it, e.g. ``"tensorflow>=2.17"``; raises if
            the model needs a newer one.  The export always supports the oldest possible one.
        warmup: the sizes of requests that TensorFlow Serving answers before it serves this
            version, so that no client waits for XLA: ``[1, 8, 64]`` for signatures with one
            symbolic size, ``[{"batch": 1, "length": 128}]`` for more.  The inputs are the first
            example, repeated, or zeros.  The validation makes these calls, too.
        **options: those of every writer, `ExportOptions`.  `validate` calls each signature once
            more in a session, as TensorFlow Serving does.

    Returns:
        The report, which can be printed, and is stored with the model as ``pax_export.json``.

    Raises:
        PaxError: a subclass for each error; see the guide on exporting.  Nothing is written
            then, and existing files do not change.

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
    platforms = checked_platforms(platforms)
    checked_choice(operations, ("tensorflow", "xla", None), "operations")
    if operations == "tensorflow" and platforms == ("tpu",):
        raise InvalidArgumentError(
            "TensorFlow has no kernels for TPUs, which run what XLA compiles.",
            got=f"operations='tensorflow', platforms={platforms}",
            write="operations='xla', or no operations",
        )
    request = Request.of(to_saved_model, model, path, inputs, **options)
    saved_models.parse_consumer(consumer)
    keys, several = request.keys, request.methods is not None
    vjp_orders(vjp_order, trainable is not False)
    step = TrainStep.of(train_step, optimizer, train_inputs, keys)
    keys += [TrainStep.key] if step else []
    around = Processors.of(keys, several, preprocess, postprocess, preprocess_inputs)
    exporter = _SavedModelExporter(
        state=request.state,
        trainable=trainable,
        vjp_order=vjp_order,
        step=step,
        around=around,
        platforms=platforms,
        consumer=consumer,
        examples=request.calls(keys),
        operations=operations,
        warmup=warmup,
    )
    return run_export(exporter, request)


@dataclass(frozen=True)
class _SavedModelExporter(FormatExporter):
    format = SAVED_MODEL
    runtime = "TensorFlow"
    updates_state = True

    state: str
    trainable: Any
    vjp_order: int | None
    step: TrainStep | None
    around: Processors
    platforms: tuple[str, ...]
    consumer: str | None
    examples: Mapping[str, Any]
    warmup: Sequence[int | Mapping[str, int]]
    operations: str | None
    #: Why they are those of XLA, where the user did not choose.
    because: str = ""

    def find(self, request: Request) -> None:
        if self.processes:
            find("tensorflow", "tensorflow", "to_saved_model(..., preprocess=, postprocess=)")

    def other_platforms(self, request: Request) -> Sequence[str]:
        here = {"cpu", jax.export.default_export_platform()}  # TensorFlow always has a CPU
        return self.platforms if here.isdisjoint(self.platforms) else ()

    def load(self, request: Request) -> None:
        tensorflow("to_saved_model")

    @property
    def _lower(self) -> Lower:
        if self.operations != "tensorflow":
            return lower_traced
        return partial(lower_to_graph, trains=self.trainable is not False)

    @property
    def processes(self) -> bool:
        """Whether the model has processors, functions of TensorFlow."""
        return bool(self.around.preprocess or self.around.postprocess)

    def read_model(self, request: Request) -> tuple[Exportable, PyTree]:
        model, _ = super().read_model(request)
        if (step := self.step) is None:
            return model, None
        model = with_step(model, request.model, TrainStep.key, step.function, step.optimizer)
        return model, step.inputs

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> _SavedModelContents:
        def lower_by(exporter: _SavedModelExporter) -> _SavedModelContents:
            return exporter.lower(model, programs, request)

        if self.operations is None:
            if self.platforms == ("tpu",):
                return lower_by(self.by_xla("TPUs run what XLA compiles"))
            try:
                return replace(lower_by(replace(self, operations="tensorflow")), chosen=False)
            except Exception as error:  # of a rule, also a mistake in it: the report has its text
                return lower_by(self.by_xla(_reason(error)))
        learning = self.trainable is not False
        lowered = lower_model(
            mark_trainable(model, self.trainable),
            programs,
            self.state,
            learning,
            self.platforms,
            self.vjp_order,
            defer=True,
            initialize=not self.processes,
            lower=self._lower,
        )
        lowered = self.around.around(lowered, request.constraints)
        for signature in lowered.signatures:
            saved_models.check_consumer(self.consumer, lowered.oldest_tensorflow, signature.key)
        requests = writer.warmup_requests(
            self.warmup, lowered.signature_infos(), self._examples(lowered)
        )
        return _SavedModelContents(
            model.name, lowered.store.infos(), self, lowered, lower_by, requests
        )

    def by_xla(self, because: str) -> _SavedModelExporter:
        """Lets XLA compile the model, where TensorFlow's own operations do not do."""
        return replace(self, operations="xla", because=because)

    def _examples(self, lowered: LoweredModel) -> dict[str, list[Arrays]]:
        """The examples of each signature by input."""
        return {
            key: named_examples(around.inputs if around else program.inputs, examples, key)
            for signature, program in zip(lowered.signatures, lowered.programs)
            for key, around in [(signature.key, signature.processing)]
            if (examples := self.examples.get(key))
        }

    def partial(self) -> FormatExporter:
        return replace(
            self,
            examples={} if self.processes else self.examples,  # they are given to the whole
            around=Processors({}, {}, {}),
            state="frozen",
            trainable=False,
            vjp_order=0,
            warmup=(),
        )


_AS_IT_STARTS = "in tensorflow_model_server as it starts"
_WITH_XLA = (
    "in tensorflow_model_server with --xla_cpu_compilation_enabled=true, on GPUs "
    "--xla_gpu_compilation_enabled=true"
)


def _reason(error: Exception) -> str:
    """An error as the reason in a report: what, and where."""
    if not isinstance(error, PaxError):
        return named_line(error)
    details = (error.where and f"in {error.where}", error.got)
    return ": ".join([error.what.rstrip("."), *(f"{each}" for each in details if each)])


@dataclass(frozen=True)
class _SavedModelContents(Contents):
    exporter: _SavedModelExporter
    lowered: LoweredModel
    lower_by: Callable[[_SavedModelExporter], _SavedModelContents]  # the same model, otherwise
    requests: Mapping[str, writer.Requests]
    chosen: bool = True  # by the user: the operations

    def write(self, path: Path) -> None:
        lowered = self.lowered
        writer.write(path, lowered.store, lowered.signatures, lowered.initializer)
        if self.exporter.processes:
            add_processors(path, lowered.signatures)
        writer.write_requests(path, self.requests)

    def stored(self) -> Mapping[str, Any]:
        return {each.name: each.value for each in self.lowered.store.stored}

    def cases(self, budget: Budget) -> Iterator[Case]:
        cases = model_cases(self.lowered, self.exporter.examples, budget, self.requests)
        # XLA compiles each again.
        return with_sessions(cases, budget, every=self.exporter.operations == "tensorflow")

    def test(self, exporter: FormatExporter, path: Path, run: ExportRun) -> dict[str, float]:
        """Arrays that were deferred are read for good if calls are made."""
        lowered = self.lowered
        if not run.calls:
            writer.compare(path, self.stored())
            return {}
        lowered.store.gather()
        cases, here = self.cases(run.budget), run_saved_model
        # TensorFlow functions may have their own variables, and computed variables are computed
        # when read: in both cases TensorFlow reads all of them.
        if not self.exporter.processes and lowered.initializer is None:
            # The written variables are compared; calls here share the memory of ours.
            writer.compare(path, lowered.weights)
            here = partial(run_saved_model, weights=lowered.weights)
        return validated(exporter.format, path, cases, run.separate, here=here)

    def part(self, exporter: FormatExporter) -> FormatExporter:
        return self.exporter.partial()  # whose operations are decided

    def instead(self, error: ValidationError) -> Contents | None:
        """Leaves out optional gradients that are wrong in TensorFlow, or lets XLA compile it."""
        asked = self.exporter.vjp_order is not None or self.exporter.trainable is not False
        if asked or not isinstance(error, GradientMismatchError):
            if self.chosen:
                return None
            return self.lower_by(self.exporter.by_xla(_reason(error)))
        details = f"{error.where}: {error.got}" if error.where else error.got
        how = "differ from jax's" if error.where else "cannot be computed"
        less = self.lower_by(replace(self.exporter, vjp_order=0))
        reason = f"no gradients: in TensorFlow they {how}: {details}"
        return replace(less, lowered=less.lowered.with_reason(reason), chosen=self.chosen)

    def write_report(self, report: Report, path: Path, written: None) -> None:
        super().write_report(report, path, written)
        write_sums(path)

    def report_fields(self, path: Path, written: None, run: ExportRun) -> dict[str, Any]:
        lowered, uses_tensorflow = self.lowered, run.calls or self.exporter.processes
        is_graph = self.exporter.operations == "tensorflow"
        because = f": {self.exporter.because}" if self.exporter.because else ""
        served = _AS_IT_STARTS if is_graph else _WITH_XLA + because
        return {
            "signatures": lowered.signature_infos(),
            "graph_bytes": (path / "saved_model.pb").stat().st_size,
            "platforms": tuple(p for p in lowered.platforms if p != "tpu" or not is_graph),
            "oldest_tensorflow": saved_models.format_version(lowered.oldest_tensorflow),
            "stablehlo": "" if is_graph else saved_models.format_version(lowered.stablehlo),
            "calling_convention": 0 if is_graph else CALLING_CONVENTION,
            "versions": package_versions(*["tensorflow"] * uses_tensorflow),
            "details": in_float32(self.stored()) | {SERVED: served},
        }
