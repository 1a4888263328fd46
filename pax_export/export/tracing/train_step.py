"""A step of training as the user describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pax_export._errors import InvalidArgumentError

_WRITE = "train_step=step, optimizer=optimizer, train_inputs=(images, labels)"


@dataclass(frozen=True)
class TrainStep:
    """A step of training, to be a signature of its own."""

    function: Callable[..., Any]
    optimizer: Any
    inputs: Any

    key: ClassVar[str] = "train_step"

    @classmethod
    def of(
        cls, function: Any, optimizer: Any, inputs: Any, keys: Sequence[str]
    ) -> TrainStep | None:
        """Reads the arguments; None if there is no step."""
        if function is None:
            if optimizer is not None or inputs is not None:
                raise InvalidArgumentError(
                    "An optimizer and inputs for training are of use to a step of training.",
                    got="train_step=None",
                    write=_WRITE,
                )
            return None
        if not callable(function):
            raise InvalidArgumentError(
                "A step of training is a function (model, optimizer, *batch) -> (model, "
                "optimizer, metrics).",
                got=f"train_step={function!r}",
                write=_WRITE,
            )
        if inputs is None:
            raise InvalidArgumentError(
                "The batch that a step of training takes must be described.",
                got="train_inputs=None",
                write=_WRITE,
            )
        if cls.key in keys:
            raise InvalidArgumentError(
                f"The step of training is called {cls.key!r} itself.",
                where=f"methods[{cls.key!r}]",
                write="another key",
            )
        return cls(function, optimizer, inputs)
