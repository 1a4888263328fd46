"""Compares the signatures of a SavedModel with the jax functions behind them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree
from pax_export.export.orbax._signatures import flatten_output, is_flat
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.jax_module import JaxModule
from pax_export.export.orbax.serving_config import ServingConfig
from pax_export.export.orbax.utils import remove_signature_defaults
from pax_export.export.orbax.validate.validation_job import ValidationJob, ValidationSingleJobResult
from pax_export.export.orbax.validate.validation_report import (
    ValidationReport,
    ValidationReportOption,
)

_logger = logging.getLogger(__name__)


class ValidationManager:
    """Validates a SavedModel against its `JaxModule`.

    Args:
        module: the module, or its jax functions by method key.
        serving_configs: those of the export.
        model_inputs: batches for all signatures, or by signature key. A batch is a tensor, a
            sequence of positional arguments, or a dict of named ones.

    Example:
        >>> ValidationManager(module, configs, [batch]).validate(loaded)  # doctest: +SKIP
    """

    def __init__(
        self,
        module: JaxModule | Mapping[str, Callable[[Any], Any]],
        serving_configs: Sequence[ServingConfig],
        model_inputs: Sequence[Any] | Mapping[str, Sequence[Any]],
    ):
        self._jax_methods = module.jax_methods if isinstance(module, JaxModule) else module
        self._serving_configs = serving_configs
        self._model_inputs = model_inputs

    def validate(
        self,
        loaded_model: object,
        with_xprof: bool = False,
        report_option: ValidationReportOption | None = None,
    ) -> Mapping[str, ValidationReport]:
        """Runs every signature on every batch; returns a report by signature key.

        Args:
            loaded_model: the result of `tf.saved_model.load`.
            with_xprof: not used.
            report_option: the tolerances.

        Raises:
            InvalidArgumentError: a signature has no batches, or outputs of another structure.
        """
        option = report_option or ValidationReportOption()
        return {
            key: self._validate_signature(config, key, loaded_model, with_xprof, option)
            for config in self._serving_configs
            for key in config.get_signature_keys()
        }

    def _validate_signature(
        self,
        config: ServingConfig,
        key: str,
        loaded_model: PyTree,
        with_xprof: bool,
        option: ValidationReportOption,
    ) -> ValidationReport:
        function = config.bind(self._jax_methods)[key]
        signature = config.get_input_signature(required=False) or ()
        specs = list(remove_signature_defaults(signature))

        def baseline(batch: PyTree) -> Any:
            positional = _positional_arguments(batch, specs)
            return function(batch) if positional is None else function(*positional)

        candidate = _candidate_function(loaded_model.signatures[key], specs)
        job = ValidationJob(baseline, candidate, self._batches_of(key), with_xprof)
        expected, got = job.calc_baseline_result(), job.calc_candidate_result()
        expected.maybe_convert_result_to_dict()
        got.maybe_convert_result_to_dict()
        expected.outputs = list(map(flatten_output, expected.outputs))
        self.check_output(expected, got)
        return ValidationReport(expected, got, option)

    def _batches_of(self, key: str) -> Sequence[Any]:
        if not isinstance(self._model_inputs, Mapping):
            return self._model_inputs
        if key not in self._model_inputs:
            raise InvalidArgumentError(
                f"No input for the signature {key!r}.",
                got=f"model_inputs for {sorted(self._model_inputs)}",
            )
        return self._model_inputs[key]

    @classmethod
    def check_input(cls, inputs: PyTree, batch_mode: bool = True) -> None:
        """Warns of inputs that a signature may not accept.

        Args:
            inputs: a batch, or a list of batches.
            batch_mode: whether it is the list.

        Raises:
            InvalidArgumentError: it is not a list in batch mode.
        """
        if batch_mode and not isinstance(inputs, Sequence):
            raise InvalidArgumentError(
                "Batch inputs should be a python list.", got=type(inputs).__name__
            )
        first = inputs[0] if batch_mode else inputs
        if not (isinstance(first, (Mapping, list, tuple)) and is_flat(first)):
            _logger.warning("A signature takes a flat dict or list of tensors; got %s", type(first))

    @classmethod
    def check_output(
        cls, baseline_result: ValidationSingleJobResult, candidate_result: ValidationSingleJobResult
    ) -> None:
        """Refuses outputs that cannot be compared one by one.

        Raises:
            InvalidArgumentError: they are no flat dicts, or not as many.
        """
        first = baseline_result.outputs[0]
        if not (isinstance(first, Mapping) and is_flat(first)):
            raise InvalidArgumentError(
                # With two spaces, as in orbax's message, which programs match.
                "Currently ValidationReport only accept  flat dict outputs.  But we got "
                f"{type(first)}",
                write="a tf_postprocessor that returns a dict of tensors",
            )
        expected = len(jax.tree_util.tree_leaves(baseline_result.outputs))
        got = len(jax.tree_util.tree_leaves(candidate_result.outputs))
        if expected != got:
            raise InvalidArgumentError(
                "baseline and candidate has different output length."
                f"len(baseline) = {expected},len(candidate) = {got}."
            )


def _positional_arguments(batch: PyTree, specs: list[Any]) -> list[Any] | None:
    """The batch as positional arguments of a signature of single tensors, if it is that."""
    if not specs or not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return None
    names = [spec.name for spec in specs]
    if isinstance(batch, Mapping) and set(batch) == set(names):
        return [batch[name] for name in names]
    if isinstance(batch, (list, tuple)) and len(batch) == len(specs):
        return list(batch)
    return None


def _candidate_function(signature: PyTree, specs: list[Any]) -> Callable[[Any], Any]:
    def inference_fn(batch: Any) -> Any:
        batch = jax.tree_util.tree_map(tf.convert_to_tensor, batch)
        ValidationManager.check_input(batch, batch_mode=False)
        positional = _positional_arguments(batch, specs)
        if isinstance(batch, Mapping):
            output = signature(**batch)
        elif positional is not None and all(spec.name for spec in specs):
            output = signature(**{spec.name: each for spec, each in zip(specs, positional)})
        else:
            output = signature(*(batch if isinstance(batch, (list, tuple)) else [batch]))
        return {name: value.numpy() for name, value in output.items()}

    return inference_fn
