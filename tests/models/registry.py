"""The models of the battery by name, each with its framework, its inputs and how it is called.

A model is a function without arguments, decorated with `model`, that gives what an exporter is
given: a pax module, or a pair of parameters and a function of these and the inputs.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

#: The files of models, by field.
FIELDS = (
    "vision", "segments", "text", "decoding", "recurrent", "audio", "generative", "statistics",
    "science", "graphs", "numbers", "attention", "places", "learners",
)  # fmt: skip
FRAMEWORKS = ("jax", "nnx", "linen", "haiku", "equinox", "pax")

#: What the symbolic dimensions are; `sizes=` of a model says others.  With the first two the calls
#: are normal ones, with the last odd ones; the first are those of a static export.
_BATCHES = (2, 1, 5)
_OTHERS = (6, 9, 4)

#: Kinds of calls beside the normal ones.
ODD = ("ties", "nan", "extreme", "empty")


@dataclasses.dataclass(frozen=True)
class Input:
    """An input: its shape with names for symbolic sizes, and how an example of it is drawn."""

    shape: str
    dtype: str
    draw: Callable[[np.random.Generator, tuple[int, ...], Mapping[str, int]], np.ndarray]

    def struct(self, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims(self.shape, sizes), np.dtype(self.dtype))

    def array(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> np.ndarray:
        return np.asarray(self.draw(rng, dims(self.shape, sizes), sizes), np.dtype(self.dtype))


def real(shape: str, dtype: str = "float32", scale: float = 1.0, shift: float = 0.0) -> Input:
    """Normal numbers."""
    return Input(shape, dtype, lambda rng, size, _: rng.normal(shift, scale, size))


def between(low: float, high: float, shape: str, dtype: str = "float32") -> Input:
    """Numbers of an interval."""
    return Input(shape, dtype, lambda rng, size, _: rng.uniform(low, high, size))


def ints(below: int, shape: str, dtype: str = "int32") -> Input:
    """Numbers of tokens, classes, or nodes."""
    return Input(shape, dtype, lambda rng, size, _: rng.integers(0, below, size))


def lengths(of: str, shape: str = "batch") -> Input:
    """How much of each row of a dimension is filled, the first one whole."""

    def draw(rng: np.random.Generator, size: tuple[int, ...], sizes: Mapping[str, int]) -> Any:
        longest = dims(of, sizes)[0]
        drawn = rng.integers(1, longest + 1, size)
        return np.where(np.arange(drawn.size).reshape(size) == 0, longest, drawn)

    return Input(shape, "int32", draw)


def yes_or_no(shape: str) -> Input:
    """Masks; the first column is always true."""

    def draw(rng: np.random.Generator, size: tuple[int, ...], _: Any) -> Any:
        drawn = rng.random(size) < 0.7
        drawn[..., :1] = True
        return drawn

    return Input(shape, "bool", draw)


def dims(shape: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of ``"batch, 2*n, 3"``."""
    parts = [part for part in shape.split(",") if part.strip()]
    return tuple(int(eval(part, {"__builtins__": {}}, dict(sizes))) for part in parts)


def names_in(shape: str) -> list[str]:
    """The symbolic dimensions of a shape."""
    return re.findall(r"[A-Za-z_]\w*", shape)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: see `model` for what its fields mean."""

    name: str
    field: str
    build: Callable[[], Any]
    framework: str
    inputs: tuple[Input, ...]
    differentiable: bool
    odd: tuple[str, ...]
    sizes: tuple[Mapping[str, int], ...]
    constraints: tuple[str, ...]
    rtol: float

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of its symbolic dimensions."""
        return tuple(dict.fromkeys(n for each in self.inputs for n in names_in(each.shape)))

    def calls(self, static: bool = False) -> list[tuple[str, tuple[np.ndarray, ...]]]:
        """What it is called with, and what is odd about it.

        Args:
            static: all at the sizes of the first call, for an export with fixed sizes.
        """
        sizes = [self.sizes[0]] * len(self.sizes) if static else self.sizes
        normal = [
            (f"call {index}", self._arrays(np.random.default_rng(index), each))
            for index, each in enumerate(sizes[:2])
        ]
        rng = np.random.default_rng(99)
        for kind in self.odd:
            size = sizes[-1]
            if kind == "empty":
                if static or "batch" not in self.symbols:
                    continue
                size = {**size, "batch": 0}
            arrays = self._arrays(rng, size)
            normal.append((kind, tuple(np.asarray(_ODD[kind](array)) for array in arrays)))
        return normal

    def _arrays(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> tuple[np.ndarray, ...]:
        return tuple(each.array(rng, sizes) for each in self.inputs)


def _is_real(array: np.ndarray) -> bool:
    return array.dtype.kind not in "iub"


def _tied(array: np.ndarray) -> np.ndarray:
    return np.round(array.astype("float32")).astype(array.dtype) if _is_real(array) else array


def _with_nan(array: np.ndarray) -> np.ndarray:
    if not _is_real(array) or not array.size:
        return array
    array = array.copy()
    array.reshape(-1)[:: max(array.size // 3, 1)] = np.nan
    return array


def _extreme(array: np.ndarray) -> np.ndarray:
    return array * np.asarray(1e4, array.dtype) if _is_real(array) else array


_ODD = {"ties": _tied, "nan": _with_nan, "extreme": _extreme, "empty": lambda array: array}

MODELS: dict[str, Model] = {}


def model(
    framework: str,
    *inputs: Input | str,
    differentiable: bool = False,
    odd: Sequence[str] = ("ties", "empty"),
    sizes: Sequence[Mapping[str, int]] | None = None,
    constraints: Sequence[str] = (),
    rtol: float = 1e-4,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a model.

    Args:
        framework: what it is written with.
        inputs: of a call; a string is the shape of normal float32 numbers.
        differentiable: its gradients with respect to parameters and float inputs mean something.
        odd: what it is called with beside normal inputs.
        sizes: the symbolic dimensions of two normal calls, and of the odd ones.
        constraints: what may be assumed of them.
        rtol: how far it may be from jax, as a part of the largest number of an output.
    """
    taken = tuple(real(each) if isinstance(each, str) else each for each in inputs)
    symbols = {name for each in taken for name in names_in(each.shape)}
    numbers = sizes or [
        {name: batch if name == "batch" else other for name in symbols}
        for batch, other in zip(_BATCHES, _OTHERS)
    ]

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        name = build.__name__
        if name in MODELS:
            raise ValueError(f"there are two models {name}")
        MODELS[name] = Model(
            name=name,
            field=build.__module__.rpartition(".")[2],
            build=build,
            framework=framework,
            inputs=taken,
            differentiable=differentiable,
            odd=tuple(odd),
            sizes=tuple(numbers),
            constraints=tuple(constraints),
            rtol=rtol,
        )
        return build

    return register


def all_models() -> dict[str, Model]:
    """Every model, by name."""
    for field in FIELDS:
        importlib.import_module(f"tests.models.{field}")
    return MODELS


def weights(seed: int = 0) -> Callable[..., jax.Array]:
    """Draws weights, scaled by the number of inputs of a layer: its last size but one."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float | None = None) -> jax.Array:
        fan_in = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
        size = scale if scale is not None else fan_in**-0.5
        return jax.numpy.asarray(rng.normal(0.0, size, shape).astype(np.float32))

    return draw
