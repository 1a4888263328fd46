"""TorchModule: arrays under the paths of the leaves, and a method for each program."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pax_export.export.formats.torch.run import from_numpy

if TYPE_CHECKING:
    from pax_export._foundations.types import ArrayLike

_FIXED = frozenset({"static", "none"})


@dataclass(frozen=True)
class TorchMethod:
    """A method of a module: its graph, whose first operands are arrays of the module."""

    key: str
    graph: torch.fx.Graph
    arrays: tuple[str, ...]
    arguments: tuple[str, ...]
    changes: tuple[str, ...] = ()  # arrays that a call assigns: the second result of the graph
    trains: bool = False  # whether it is called in train mode


class _WrittenMethod(NamedTuple):
    function: Callable
    places: list[tuple[Any, str]]
    changes: list[tuple[Any, str]]
    code: str
    call: Callable


class TorchPart(torch.nn.Module):
    """A module of the model, which holds arrays and other parts."""

    def extra_repr(self) -> str:
        arrays = ((name, x) for name, x in self.state_dict().items() if "." not in name)
        return ", ".join(f"{name}={_shape(x)}" for name, x in arrays)


def _shape(array: torch.Tensor) -> str:
    return f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}"


class TorchModule(TorchPart):
    """A model as a module of torch: `as_torch` returns one.

    Its parameters and buffers have the paths of the model's leaves, as in ``state_dict()``; it is
    trained, moved and compiled as any other module.
    """

    def __init__(self) -> None:
        super().__init__()
        self._methods: dict[str, _WrittenMethod] = {}
        self._in_train_mode: str | None = None  # the method that replaces the first one

    @staticmethod
    def of_name(name: str) -> TorchModule:
        """An empty module whose class has a name, and will have the methods."""
        return type(name, (TorchModule,), {})()

    def add_array(self, name: str, value: ArrayLike, parameter: bool, trainable: bool) -> None:
        """Stores an array under its path, unless it is there."""
        owner, last = self._owner(name)
        if hasattr(owner, last):
            return
        array = from_numpy(np.asarray(value))
        if parameter and array.is_floating_point():
            owner.register_parameter(last, torch.nn.Parameter(array, requires_grad=trainable))
        else:
            owner.register_buffer(last, array)

    def array(self, name: str) -> torch.Tensor:
        owner, last = self._owner(name)
        return getattr(owner, last)

    def lay_out(self, name: str, order: Sequence[int]) -> None:
        """Stores an array with its axes in another order in memory; its shape stays."""
        array = self.array(name)
        moved = array.data.permute(*order).contiguous()
        array.data = moved.permute(*(list(order).index(axis) for axis in range(len(order))))

    def _owner(self, name: str) -> tuple[Any, str]:
        """The part that holds an array, and the array's name in it."""
        owner: Any = self
        *path, last = name.split(".")
        for each in path:
            owner = owner._modules.setdefault(each, TorchPart())
        return owner, last

    def add_method(self, method: TorchMethod) -> None:
        code = method.graph.python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, f"<{type(self).__name__}.{method.key}>", "exec"), scope)
        function = scope["forward"]
        places, changes = (
            [self._owner(name) for name in names] for names in (method.arrays, method.changes)
        )
        names = ", ".join(method.arguments)
        source = f"def call(self, {names}):\n    return self._call({method.key!r}, {names})\n"
        exec(source, scope)
        self._methods[method.key] = _WrittenMethod(
            function, places, changes, code.src, scope["call"]
        )
        if method.trains:
            self._in_train_mode = method.key
        elif type(self).forward is torch.nn.Module.forward:
            type(self).forward = scope["call"]
        if not (method.trains or hasattr(self, method.key)):
            setattr(type(self), method.key, scope["call"])

    def _call(self, key: str, *arguments: Any) -> Any:
        if self.training and self._in_train_mode and key == next(iter(self._methods)):
            key = self._in_train_mode
        return self._run(key, *arguments)

    def _run(self, key: str, *arguments: Any) -> Any:
        method = self._methods[key]
        # What is assigned is read as a copy: autograd may need the old numbers.
        arrays = (
            getattr(*attribute).clone() if attribute in method.changes else getattr(*attribute)
            for attribute in method.places
        )
        found = method.function(self, *arrays, *arguments)
        if not method.changes:
            return found
        output, state = found
        for attribute, new in zip(method.changes, state):
            getattr(*attribute).detach().copy_(new.detach())
        return output

    @contextmanager
    def as_forward(self, key: str) -> Iterator[None]:
        """A block in which calls of the module are calls of this method."""
        before = type(self).forward
        type(self).forward = self._methods[key].call
        try:
            yield
        finally:
            type(self).forward = before

    def code(self, key: str | None = None) -> str:
        """The Python code of a method, in calls of torch."""
        return self._methods[key or next(iter(self._methods))].code


def array_names(names: Sequence[str]) -> list[str]:
    """Names of arrays that a module can have, as like the given ones as possible.

    ``modules`` is a method of any module of torch, so that it becomes ``modules_``, and ``a`` does
    beside ``a.b``.
    """
    paths = [[_free(each) for each in name.split(".")] for name in names]
    parts = {tuple(path[:end]) for path in paths for end in range(1, len(path))}
    unique: dict[str, None] = {}
    for path in paths:
        while tuple(path) in parts or ".".join(path) in unique:
            path[-1] += "_"
        unique[".".join(path)] = None
    return list(unique)


def _free(name: str) -> str:
    name = name or "_"
    is_free = not (hasattr(TorchPart, name) or name in _RESERVED or keyword.iskeyword(name))
    return name if is_free else f"{name}_"


#: Attributes of instances of `torch.nn.Module`, and of ours.
_RESERVED = (*vars(torch.nn.Module()), "_methods", "_in_train_mode")


def argument_names(structure: Mapping[str, Any]) -> dict[str, str]:
    """The names of the arguments of a method; Python values are not among them."""
    names: dict[str, str] = {}
    for name, tree in structure.items():
        if tree.keys().isdisjoint(_FIXED):
            is_legal = name.isidentifier() and not keyword.iskeyword(name)
            legal = name if is_legal and name != "self" else f"input_{len(names)}"
            names[name] = legal
    return names
