"""A pickle interpreter that calls nothing.

Names in the pickle are looked up in a table of functions of ours; other names and unused
opcodes raise errors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from pax_export._errors import WeightsFileError

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

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Global) or function.build is None:
            got = function.name if isinstance(function, Global) else type(function).__name__
            raise ValueError(f"a call of {got} in a pickle")
        return self._counted(function.build(*_require_kind(arguments, tuple)))

    @staticmethod
    def _build(made: Any, state: Any) -> None:
        if hasattr(made, "take_state"):
            made.take_state(state)
        elif not isinstance(made, dict):  # the attributes of a dict are not weights
            raise ValueError(f"a state for {type(made).__name__} in a pickle")


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
