"""Runs and times two functions on the same batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree
from pax_export.export.orbax.validate.validation_utils import Jsonable


@dataclass
class ValidationSingleJobResult(Jsonable):
    """The outputs of one function for each batch, and its latencies.

    Example:
        >>> result = ValidationSingleJobResult([0.1], [(1, 2)], "N/A", {})
        >>> result.maybe_convert_result_to_dict()
        >>> result.outputs
        [{'output_0': 1, 'output_1': 2}]
    """

    latencies: Sequence[float]  # in seconds
    outputs: Sequence[Any]  # one for each batch
    xprof_url: str  # not used
    metadata: Mapping[str, Any]

    def __post_init__(self):
        if not isinstance(self.outputs, Sequence):
            raise InvalidArgumentError(
                "The output must be list since we take batch inputs.",
                got=type(self.outputs).__name__,
            )

    def maybe_convert_result_to_dict(self) -> None:
        """Names outputs that have no names as a SavedModel does: ``output_0``."""
        self.outputs = [_name_outputs(output) for output in self.outputs]


def _name_outputs(output: PyTree) -> Any:
    if isinstance(output, Mapping):
        return output
    parts = output if isinstance(output, (list, tuple)) else [output]
    return {f"output_{index}": part for index, part in enumerate(parts)}


class ValidationJob:
    """Runs a baseline and a candidate on the same batches.

    Args:
        baseline_inference_fn: the reference.
        candidate_inference_fn: the function to compare with it.
        batch_input: the batches; each is the only argument of a call.
        with_xprof: not used.

    Raises:
        InvalidArgumentError: there are no batches.

    Example:
        >>> job = ValidationJob(lambda x: [2 * x], lambda x: [x + x], [1, 2])
        >>> job.calc_candidate_result().outputs
        [[2], [4]]
    """

    def __init__(
        self,
        baseline_inference_fn: Callable[[Any], Any],
        candidate_inference_fn: Callable[[Any], Any],
        batch_input: Sequence[Any],
        with_xprof: bool = False,
    ):
        if len(batch_input) == 0:
            raise InvalidArgumentError("No batch to validate with.")
        self._baseline_inference_fn = baseline_inference_fn
        self._candidate_inference_fn = candidate_inference_fn
        self._batch_input = batch_input
        del with_xprof

    def calc_baseline_result(self) -> ValidationSingleJobResult:
        """Runs the baseline."""
        return self._run_batches(self._baseline_inference_fn)

    def calc_candidate_result(self) -> ValidationSingleJobResult:
        """Runs the candidate."""
        return self._run_batches(self._candidate_inference_fn)

    def _run_batches(self, function: Callable[[Any], Any]) -> ValidationSingleJobResult:
        function(self._batch_input[0])  # compiles before the timing
        latencies, outputs = [], []
        for batch in self._batch_input:
            start = time.perf_counter()
            # jax returns before it has computed.
            output = jax.block_until_ready(function(batch))
            latencies.append(time.perf_counter() - start)
            outputs.append(output)
        return ValidationSingleJobResult(latencies, outputs, "N/A", {})
