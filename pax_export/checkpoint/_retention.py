"""Retention of checkpoints: the last ones, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError


@dataclass(frozen=True)
class Retention:
    """A retention policy."""

    last: int | None  # how many of the last ones; None for all
    best: str | None  # the metric by which the best one stays
    mode: Literal["min", "max"]  # whether the smallest or the largest is the best

    def __post_init__(self) -> None:
        last = self.last
        number = isinstance(last, int) and not isinstance(last, bool) and last >= 1
        if not (last is None or number):
            raise InvalidArgumentError(
                "At least one checkpoint must be kept.",
                got=f"keep={last!r}",
                write="keep=3, or keep=None for all",
            )
        if not (self.best is None or isinstance(self.best, str)):
            raise InvalidArgumentError(
                "The best checkpoint must be chosen by the name of a metric.",
                got=f"best={self.best!r}",
                write='best="loss", and save(step, metrics={"loss": loss}, ...)',
            )
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(
                'The best value of a metric must be "min" or "max".',
                got=f"mode={self.mode!r}",
                write='mode="min" or mode="max"',
            )

    def checked(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        """Returns the metrics as numbers; raises if the metric of `best` is missing."""
        numbers = {}
        for name, value in (metrics or {}).items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError) as error:
                raise InvalidArgumentTypeError(
                    "A metric must be one number.",
                    where=f"metrics[{name!r}]",
                    got=f"{type(value).__name__}: {value!r}"[:200],
                    write=f"metrics={{{name!r}: float(loss)}}",
                ) from error
        if self.best is not None and self.best not in numbers:
            raise InvalidArgumentError(
                "The checkpoint lacks the metric by which the best one is kept.",
                where=f"best={self.best!r}",
                got=f"metrics with {', '.join(numbers) or 'nothing'}",
                write=f"save(step, metrics={{{self.best!r}: ...}}, ...)",
            )
        return numbers

    def best_of(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """Returns the best step, the latest of equal ones, ignoring missing metrics and NaN."""
        if self.best is None:
            return None
        sign = -1 if self.mode == "min" else 1
        values = {step: each.get(self.best, math.nan) for step, each in metrics.items()}
        rated = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
        return max(rated)[1] if rated else None

    def steps(self, metrics: Mapping[int, Mapping[str, float]]) -> Sequence[int]:
        """Returns the steps to keep."""
        ordered = sorted(metrics)
        kept = ordered if self.last is None else ordered[-self.last :]
        best = self.best_of(metrics)
        return kept if best is None or best in kept else [best, *kept]
