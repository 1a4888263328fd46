"""Variables: each array once, under a legal unique name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pax_export._foundations.types import ArrayLike, DTypeLike
from pax_export.checkpoint import StoredArray, on_host
from pax_export.export.artifact.report import VariableInfo
from pax_export.export.portable.for_xla import numbers_of
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import ExportLeaf
from pax_export.export.tracing.names import legal_names
from pax_export.precision.quantized import Form, dequantized


@dataclass
class Variable:
    name: str
    value: Any  # as stored outside of jax
    trainable: bool  # in the runtime
    parameter: bool = False  # of the model
    leaves: list[str] = field(default_factory=list)  # their paths; none for a closed-over array
    #: The places of the integers, scales and zero points that it is computed from when an export is
    #: loaded, and their format; None for a stored variable.
    computed_from: tuple[tuple[int, ...], Form] | None = None


class Store:
    """All variables of an export, and the variable of each leaf and constant.

    Leaves that are one array (tied weights) are one variable, and so is an array in the closures of
    several methods and gradients. A leaf that calls change is always a separate variable.

    With `defer`, leaves on several devices or on disk are read on demand.
    """

    def __init__(
        self,
        leaves: Sequence[ExportLeaf],
        changed: Iterable[int],
        trainable: bool,
        defer: bool = False,
    ):
        self._defer = defer
        self._sources: list[Any] = []  # keeps the ids below alive
        self._by_id: dict[int, int] = {}
        self._by_content: dict[tuple, int] = {}  # of constants of numpy
        self._names = legal_names(leaf.name for leaf in leaves)
        self.variables: list[Variable] = []
        self.of_leaf: list[int] = []
        changed = set(changed)
        for index, leaf in enumerate(leaves):
            number = None if index in changed else self._by_id.get(id(leaf.value))
            if number is None:
                name = self._names[index]
                value = leaf.value
                if not hasattr(value, "shape"):  # a Python number has no dtype
                    value = np.asarray(value, leaf.struct.dtype)
                number = self._add(value, name, trainable and leaf.trainable, leaf.parameter)
            self.variables[number].leaves.append(leaf.path)
            self.of_leaf.append(number)

    def _add(
        self, value: ArrayLike | StoredArray, name: str, trainable: bool, parameter: bool = False
    ) -> int:
        number = len(self.variables)
        self.variables.append(Variable(name, stored_leaf(value, self._defer), trainable, parameter))
        self._by_id.setdefault(id(value), number)
        self._sources.append(value)
        return number

    @property
    def stored(self) -> list[Variable]:
        """The stored variables, without those computed at loading."""
        return [each for each in self.variables if each.computed_from is None]

    @property
    def computed(self) -> list[int]:
        """The places of the others."""
        return [at for at, each in enumerate(self.variables) if each.computed_from is not None]

    def of_numbers(self, numbers: tuple[int, ...], form: Form) -> int:
        """Returns the variable for dequantized values of others, starting with integers."""
        of = numbers, form
        for number, variable in enumerate(self.variables):
            if variable.computed_from == of:
                return number
        arrays = [self.variables[number] for number in numbers]
        integers = arrays[0]

        def read() -> np.ndarray:
            return np.asarray(dequantized(*(np.asarray(x.value) for x in arrays), form=form))

        name = f"{integers.name.removesuffix('.integers')}.numbers"
        name = legal_names([*(each.name for each in self.variables), name])[-1]
        value = Deferred(numbers_of(integers.value, form), read)
        self.variables.append(Variable(name, value, trainable=False, computed_from=of))
        return len(self.variables) - 1

    def gather(self) -> None:
        """Reads everything that was deferred."""
        for variable in self.stored:
            if isinstance(variable.value, Deferred):
                variable.value = np.asarray(variable.value)

    def replace(self, number: int, value: ArrayLike | StoredArray) -> None:
        """Holds another value of the same shape and dtype; the old one is let go."""
        self._by_id = {key: each for key, each in self._by_id.items() if each != number}
        self._by_id[id(value)] = number
        self._sources[number] = value
        self.variables[number].value = stored_leaf(value, self._defer)

    def infos(self) -> tuple[VariableInfo, ...]:
        return tuple(
            VariableInfo(
                name=variable.name,
                shape=tuple(np.shape(variable.value)),
                dtype=np.dtype(variable.value.dtype).name,
                bytes=int(variable.value.size * variable.value.dtype.itemsize),
                trainable=variable.trainable,
                leaves=tuple(variable.leaves),
                parameter=variable.parameter,
            )
            for variable in self.stored
        )

    def of_constant(self, value: ArrayLike) -> int:
        """Returns the variable of an array in a method's closure."""
        value = getattr(value, "val", value)  # jax wraps numpy arrays again in every trace
        number = self._by_id.get(id(value))
        if number is None and isinstance(value, np.ndarray):  # ... and sometimes copies them
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)  # a copy only if it must
            content = (value.dtype, value.shape, hashlib.sha256(flat.data).digest())
            number = self._by_content.setdefault(content, len(self.variables))
            number = number if number < len(self.variables) else None
        if number is None:
            count = len(self.stored) - len(set(self.of_leaf))
            name = legal_names([*self._names, f"constants.{count}"])[-1]
            number = self._add(value, name, trainable=False)
        return number


class Deferred:
    """A stored array that is computed again whenever numpy reads it.

    An export of a model on many devices, or on disk, has one such array in memory at a time.
    """

    def __init__(self, struct: jax.ShapeDtypeStruct, read: Callable[[], np.ndarray]):
        self.shape: tuple[int, ...] = struct.shape
        self.dtype = np.dtype(struct.dtype)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._read = read

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)


def stored_leaf(value: ArrayLike | StoredArray, defer: bool) -> Any:
    """Returns a leaf as stored outside of jax.

    With `defer`, one that is not entirely in this machine's memory is not copied.
    """
    on_disk = isinstance(value, StoredArray)
    spread = defer and isinstance(value, jax.Array) and len(value.sharding.device_set) > 1
    if not (on_disk or spread):
        return dtypes.store(value)

    def read() -> np.ndarray:
        return on_host(dtypes.store(value.read() if isinstance(value, StoredArray) else value))

    deferred = Deferred(dtypes.stored(dtypes.struct_of(value)), read)  # type: ignore  # no number
    return deferred if defer else np.asarray(deferred)
