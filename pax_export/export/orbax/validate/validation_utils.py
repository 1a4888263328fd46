"""Statistics and JSON for the reports of validations."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_export._types import PyTree
from pax_export.export.orbax._tensorflow import tf

Status = enum.Enum("Status", ["Pass", "Fail"])


def is_floating(value: PyTree) -> bool:
    """Whether a value is compared with a tolerance: floats and complex numbers."""
    dtype = value.dtype.as_numpy_dtype if isinstance(value, tf.Tensor) else np.asarray(value).dtype
    return bool(jax.numpy.issubdtype(dtype, np.inexact))


def get_latency_stat(latencies: Sequence[float]) -> tuple[int, float, float, float]:
    """Returns the number of latencies (in seconds), and their mean and percentiles in ms."""
    milliseconds = np.asarray(latencies) * 1000
    p90, p99 = np.percentile(milliseconds, [90, 99])
    return len(latencies), float(np.average(milliseconds)), float(p90), float(p99)


class EnhancedJSONEncoder(json.JSONEncoder):
    """Writes arrays, tensors, enums, bytes and dataclasses as JSON."""

    def default(self, o: PyTree) -> Any:
        """Converts a value that JSON does not support."""
        if isinstance(o, enum.Enum):
            return o.name
        if hasattr(o, "numpy"):
            o = o.numpy()
        if hasattr(o, "tolist"):
            return o.tolist()
        if isinstance(o, bytes):
            return o.decode("utf-8", errors="backslashreplace")
        if dataclasses.is_dataclass(o) and not isinstance(o, type):
            return {field.name: getattr(o, field.name) for field in dataclasses.fields(o)}
        return super().default(o)


class Jsonable:
    """A dataclass that is written as a dict or JSON, with names that orbax's have."""

    def to_dict(self, encode_json: bool = False) -> dict[str, Any]:
        """The fields as plain data."""
        del encode_json
        return json.loads(self.to_json())

    def to_json(self, **kwargs: PyTree) -> str:
        """The fields as JSON; arguments as of `json.dumps`."""
        kwargs.setdefault("cls", EnhancedJSONEncoder)
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return json.dumps({field.name: getattr(self, field.name) for field in fields}, **kwargs)
