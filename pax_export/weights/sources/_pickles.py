"""A pickle interpreter that calls nothing.

Names in the pickle are looked up in a table of functions of ours, for PyTorch's and numpy's;
other names and unused opcodes raise errors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from pax_export._foundations.errors import WeightsFileError
from pax_export._foundations.types import PyTree
from pax_export.weights._metadata import NUMPY_NAMES

#: More than any file of weights needs, and less than fills a memory.
_MOST_STEPS, _MOST_CONTAINERS = 20_000_000, 4_000_000
_KEYS = (str, int, float, bool, bytes, type(None))

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING "
    "SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8".split()
)
_NOTHING = frozenset(("PROTO", "FRAME"))
_PUT = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_GET = frozenset(("GET", "BINGET", "LONG_BINGET"))
_MARK = object()


@dataclass(eq=False, slots=True)
class Global:
    """A global name of a pickle: one of our functions, or None."""

    name: str
    build: Callable[..., Any] | None = None
    value: Any = None


class Instance(dict):
    """An object of a class that is nowhere imported: its attributes by name."""

    def take_state(self, state: object) -> None:
        """Takes the state of a pickle over, as other objects do that have this method."""
        fill_dict(self, state.items() if isinstance(state, dict) else [("state", state)])


class PickleMachine:
    """Reads pickles with a table of known names, and storages by their persistent ids."""

    def __init__(
        self, where: str, known: Callable[[str, str], Global | None], persistent: Callable[..., Any]
    ):
        self._where, self._known, self._persistent = where, known, persistent
        self._steps = self._containers = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self, stream: IO[bytes]) -> Any:
        """Reads the next pickle of a stream."""
        self._stack, self._memo = [], {}
        for code, argument, _ in pickletools.genops(stream):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise ValueError(f"a pickle of more than {_MOST_STEPS} steps")
            if code.name == "STOP":
                return self._popped(1)[0]
            self._step(code.name, argument)
        raise ValueError("a pickle without an end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _PUT:
            self._memo[argument] = self._top()
        elif name in _GET:
            stack.append(self._memo[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _MADE:
            count, make = _MADE[name]
            stack.append(self._counted(make(self._popped(count))))
        elif name in _ADDED:
            count, kind, add = _ADDED[name]
            values = self._popped(count)
            add(_require_kind(self._top(), kind), values)
        elif name not in _NOTHING:
            self._step_by_name(name, argument)

    def _step_by_name(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "GLOBAL":
                module, _, own = argument.partition(" ")
                stack.append(self._look_up(module, own))
            case "STACK_GLOBAL":
                stack.append(self._look_up(*[_require_kind(each, str) for each in self._popped(2)]))
            case "REDUCE" | "NEWOBJ":
                stack.append(self._call(*self._popped(2)))
            case "BUILD":
                (state,) = self._popped(1)
                self._build(self._top(), state)
            case "BINPERSID":
                stack.append(self._persistent(*self._popped(1)))
            case _:
                raise ValueError(f"the step {name} in a pickle")

    def _counted(self, container: Any) -> Any:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise ValueError(f"a pickle of more than {_MOST_CONTAINERS} containers")
        return container

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark where a pickle needs a value")
        return self._stack[-1]

    def _popped(self, count: int | None) -> list[Any]:
        """Pops the last values; with None all above the last mark, and the mark."""
        stack = self._stack
        if count is None:
            at = len(stack) - 1
            while stack[at] is not _MARK:  # IndexError if the stack is empty
                at -= 1
                if at < 0:
                    raise ValueError("a pickle without a mark")
            values = stack[at + 1 :]
            del stack[at:]
            return values
        begin = len(stack) - count
        values = stack[max(begin, 0) :]
        if begin < 0 or any(value is _MARK for value in values):
            raise ValueError("a pickle that takes more than it has put")
        del stack[begin:]
        return values

    def _look_up(self, module: str, name: str) -> Global:
        known = self._known(module, name)
        if known is None:
            raise WeightsFileError(
                "The pickle refers to an object that is not a tensor; it is not executed.",
                where=self._where,
                got=f"{module}.{name}"[:200],
                write="torch.save(net.state_dict(), path) or safetensors.torch.save_file, where "
                "the file was made; or, if you trust the file's author, open it with PyTorch",
            )
        return known

    def _call(self, function: object, arguments: object) -> Any:
        if not isinstance(function, Global) or function.build is None:
            got = function.name if isinstance(function, Global) else type(function).__name__
            raise ValueError(f"a call of {got} in a pickle")
        return self._counted(function.build(*_require_kind(arguments, tuple)))

    @staticmethod
    def _build(instance: Any, state: Any) -> None:
        if hasattr(instance, "take_state"):
            instance.take_state(state)
        elif not isinstance(instance, dict):  # the attributes of a dict are not weights
            raise ValueError(f"a state for {type(instance).__name__} in a pickle")


def fill_dict(target: dict[Any, Any], pairs: Any) -> dict[Any, Any]:
    """Puts pairs into a dict; a key is a text or a number, which Python hashes without harm."""
    for key, value in pairs:
        _check_keys((key,))
        target[key] = value
    return target


def _check_keys(values: Any) -> Any:
    wrong = [each for each in values if not isinstance(each, _KEYS)]
    if wrong:
        raise ValueError(f"a {type(wrong[0]).__name__} as a key in a pickle")
    return values


def _split_pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value in a pickle")
    return list(zip(values[::2], values[1::2]))


def _require_kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a pickle needs a {kind.__name__}")
    return value


#: Opcodes that build containers, of a number of values or of those above a mark.
_MADE: dict[str, tuple[int | None, Callable[[list[Any]], Any]]] = {
    "EMPTY_LIST": (0, list), "EMPTY_DICT": (0, dict), "EMPTY_SET": (0, set),
    "EMPTY_TUPLE": (0, tuple), "TUPLE1": (1, tuple), "TUPLE2": (2, tuple), "TUPLE3": (3, tuple),
    "TUPLE": (None, tuple), "LIST": (None, list),
    "DICT": (None, lambda values: fill_dict({}, _split_pairs(values))),
    "FROZENSET": (None, lambda values: frozenset(_check_keys(values))),
}  # fmt: skip
#: Values that go into the container below them: how many, its class, and how.
_ADDED: dict[str, tuple[int | None, type, Callable[[Any, list[Any]], Any]]] = {
    "APPEND": (1, list, list.extend), "APPENDS": (None, list, list.extend),
    "SETITEM": (2, dict, lambda target, values: fill_dict(target, _split_pairs(values))),
    "SETITEMS": (None, dict, lambda target, values: fill_dict(target, _split_pairs(values))),
    "ADDITEMS": (None, set, lambda target, values: target.update(_check_keys(values))),
}  # fmt: skip


# --- the global names that PyTorch's pickles may use, numpy's among them --------------


DTYPES = {
    **{name: name for name in (*NUMPY_NAMES.values(), "complex128")},
    "double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32",
    "short": "int16", "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """A storage of numbers: its key in the file, and an offset of `begin` elements."""

    key: str
    dtype: np.dtype
    numel: int
    begin: int = 0
    typed: bool = True


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of a pickle: a window on a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


def known_global(module: str, name: str) -> Global | None:
    """Returns the value of a global name; None if it is not data."""
    full = f"{module}.{name}"
    if module == "__torch__" or module.startswith("__torch__."):
        return Global(full, lambda *_: Instance())  # a class of TorchScript: its attributes
    if module in ("torch", "torch.storage") and name in (*STORAGES, "UntypedStorage"):
        dtype = np.dtype(STORAGES.get(name, "uint8"))
        return Global(full, value=_StorageKind(dtype, typed=name in STORAGES))
    if module == "torch" and name in DTYPES:
        return Global(full, value=np.dtype(DTYPES[name]))
    build = _BUILD.get(full.replace("__builtin__.", "builtins."))
    if build is not None:
        return Global(full, build)
    return Global(full) if full in _TYPES else _known_of_numpy(module, name)


@dataclass(frozen=True)
class _StorageKind:
    dtype: np.dtype
    typed: bool


def storage_of_id(identity: object) -> Storage:
    """The storage that a persistent id names, in a zip archive or behind a legacy pickle."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ValueError("a persistent id that names no storage")
    _, kind, key, _, numel, *view = identity
    if not isinstance(kind, Global) or not isinstance(kind.value, _StorageKind):
        raise ValueError("a storage without a dtype")
    key = key.decode() if isinstance(key, bytes) else key
    begin = 0
    if view and view[0] is not None:
        _, begin, _ = view[0]
    return Storage(key, kind.value.dtype, _check_size(numel), _check_size(begin), kind.value.typed)


def _check_size(value: PyTree) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} as a size, an offset or a stride")
    return value


def _make_tensor(
    of: object, offset: object, shape: PyTree, strides: PyTree, *others: object
) -> TorchTensor:
    if not isinstance(of, Storage):
        raise ValueError(f"a tensor over a {type(of).__name__}")
    dtypes = [each.value for each in others if isinstance(each, Global)]
    dtype = dtypes[0] if dtypes and isinstance(dtypes[0], np.dtype) else of.dtype
    shape, strides = tuple(map(_check_size, shape)), tuple(map(_check_size, strides))
    if len(shape) != len(strides) or len(shape) > 64:
        raise ValueError(f"a tensor of {len(shape)} sizes and {len(strides)} strides")
    if not of.typed and dtype == of.dtype and not dtypes:
        raise ValueError("a tensor without a dtype")
    return TorchTensor(of, _check_size(offset), shape, strides, dtype)


def _of_type(
    function: Callable[..., Any], kind: object, arguments: Sequence[Any], _: object = None
) -> Any:
    """A tensor of a subclass, which is given as the call that makes it."""
    build = function.build if isinstance(function, Global) else None
    if build is None or build not in (_make_tensor, _first_argument):
        raise ValueError("a subclass of tensors that is made by a function of its own")
    if not isinstance(kind, Global) or kind.name not in _TYPES:
        raise ValueError("a tensor of a class that is not torch's own")
    return build(*arguments)


def _first_argument(data: object, *_: object) -> Any:
    return data


def _make_dict(pairs: object = (), *_: object) -> dict[Any, Any]:
    return fill_dict({}, pairs.items() if isinstance(pairs, dict) else pairs)


def _make_list(values: object = ()) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def _make_set(values: PyTree = ()) -> set[Any]:
    return set(fill_dict({}, [(each, None) for each in values]))


#: Classes that a pickle may name, but not call.
_TYPES = frozenset(("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"))
_BUILD: dict[str, Any] = {
    "collections.OrderedDict": _make_dict,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": _make_set,
    "builtins.frozenset": _make_set,
    "builtins.dict": _make_dict,
    "builtins.list": _make_list,
    "builtins.complex": lambda real, imaginary=0.0: complex(float(real), float(imaginary)),
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor,
    "torch._utils._rebuild_parameter": _first_argument,
    "torch._utils._rebuild_parameter_with_state": _first_argument,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _make_list,
    "torch.device": lambda *parts: ":".join(
        str(part)[:50] for part in parts if isinstance(part, (str, int))
    ),
    "torch.jit._pickle.build_intlist": _first_argument,
    "torch.jit._pickle.build_tensorlist": _first_argument,
    "torch.jit._pickle.build_doublelist": _first_argument,
    "torch.jit._pickle.build_boollist": _first_argument,
    "torch.jit._pickle.restore_type_tag": _first_argument,
}


_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
_NUMBERS = "biufc"


def _known_of_numpy(module: str, name: str) -> Global | None:
    """Returns the value of a global name of numpy; None if it is not an array or a number."""
    full = f"{module}.{name}"
    if full == "_codecs.encode":
        return Global(full, _encode_bytes)
    if module not in _MODULES and not module.startswith("numpy.dtypes"):
        return None
    if module.startswith("numpy.dtypes") and name.endswith("DType"):
        return Global(full, lambda: PickledDtype(name.removesuffix("DType").lower()))
    build = {"dtype": PickledDtype, "scalar": _make_scalar, "_reconstruct": PickledArray}.get(name)
    return Global(full, build) if build or name == "ndarray" else None


class PickledDtype:
    """A dtype of numbers; objects, texts and records are none."""

    def __init__(self, name: str, *_: object):
        self.dtype = np.dtype(name if isinstance(name, str) and len(name) < 20 else "O")
        if self.dtype.kind not in _NUMBERS:
            raise ValueError(f"numbers of the dtype {name!r:.50} in a pickle")

    def take_state(self, state: PyTree) -> None:
        """Takes the order of bytes, the only part of the state that a number has."""
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class PickledArray:
    """An array whose shape and data follow later in the pickle."""

    def __init__(self, *_: object):
        self.array: np.ndarray | None = None

    def take_state(self, state: PyTree) -> None:
        """Takes the shape, the dtype and the bytes."""
        _, shape, kind, fortran, content = state
        array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(kind.dtype.newbyteorder("="))


def _make_scalar(kind: PyTree, content: PyTree) -> Any:
    return np.frombuffer(content, kind.dtype, 1)[0].item()


def _encode_bytes(text: str, encoding: object = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError("bytes in a pickle that are written in no known way")
    return text.encode("latin1")
