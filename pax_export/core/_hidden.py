"""Arrays and modules where no transformation sees them: in functions, odd containers, objects.

There they would be constants, neither trained nor saved, so no module may have them. One exception
is how programs write constants: a numpy array that a function uses.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import gc
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import HiddenArrayError
from pax_export.core._mutable import is_constructing
from pax_export.core._traversal import join_path
from pax_export.core._tree import (
    Node,
    attributes_of,
    flatten,
    is_array,
    is_iterator,
    is_node_or_empty,
)

#: Types without parts, of most static values.
_PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType,
    types.ModuleType,
})  # fmt: skip
#: Iterators that may make layers when they are used.
_LAZY = (types.GeneratorType, map, filter)
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: Installed code has no layers of a user in its global variables.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


@dataclasses.dataclass(frozen=True)
class _Hidden:
    path: str  # from the attribute
    value: Any
    holder: Any  # the function, container or object around it


def refuse_hidden(module: Node) -> None:
    """Raises if static data of a module, not of its submodules, contains an array or a module.

    Raises:
        HiddenArrayError: it names the attribute, and what to write instead.
    """
    _, moduledef = flatten(module)
    for name, value in moduledef.static.items():
        if type(value) not in _PLAIN:
            _refuse_in(module, name, value)
    for name in moduledef.names[moduledef.array_count :]:
        mixed = attributes_of(module)[name]
        for leaf in jax.tree_util.tree_leaves(mixed, is_leaf=is_node_or_empty):
            if not is_array(leaf) and not is_node_or_empty(leaf):
                _refuse_in(module, name, leaf)


def _refuse_in(module: Node, name: str, value: object) -> None:
    for found in _find(value, "", value, False, {id(value)}):
        raise HiddenArrayError(
            "An attribute hides a module or an array in static data, which is neither trained "
            "nor saved.",
            where=f"{type(module).__qualname__}.{name}",
            got=f"{_describe(found.value)} in {_describe(value)}"
            + (f", as {found.path}" if found.path else ""),
            write=_way_out(name, found),
        )


def _find(
    value: object, path: str, holder: object, used: bool, seen: set[int]
) -> Iterator[_Hidden]:
    """Yields what is hidden in a value; `used` is true inside of functions."""
    if isinstance(value, Node):
        # A function that is made in a constructor may refer to the module that is not made yet.
        if is_constructing(value) or any(map(is_array, jax.tree_util.tree_leaves(value))):
            yield _Hidden(path, value, holder)
    elif is_array(value):
        if not (used and isinstance(value, np.ndarray)):
            yield _Hidden(path, value, holder)
    elif isinstance(value, _LAZY):
        yield _Hidden(path, value, value)
    else:
        used = used or (callable(value) and not isinstance(value, type))
        for name, part in _parts(value):
            if type(part) not in _PLAIN and id(part) not in seen:
                seen.add(id(part))
                yield from _find(part, join_path(path, str(name)), value, used, seen)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns what a function uses, a container contains or an object has, by name."""
    if isinstance(value, types.FunctionType):
        return _used_by(value)
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, type) or getattr(value, "_pax_is_constant", False):
        return ()
    if isinstance(value, np.ndarray):
        return enumerate(value.ravel().tolist()) if value.dtype.hasobject else ()
    if is_iterator(value):
        return enumerate(gc.get_referents(value))
    parts: list[tuple[Any, Any]] = []
    if hasattr(value, "__wrapped__"):  # first: functools.wraps copies the attributes of a module
        parts.append(("__wrapped__", value.__wrapped__))
    if isinstance(value, Mapping):
        parts += value.items()
    elif isinstance(value, _CONTAINERS):
        parts += enumerate(value)
    if callable(value) and isinstance(type(value).__call__, types.FunctionType):
        parts.append(("__call__", type(value).__call__))
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    parts += [(name, getattr(value, name, None)) for name in slots]
    return [*parts, *getattr(value, "__dict__", {}).items()]


def _used_by(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    code, variables = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            pass
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults)
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()
    if not code.co_filename.startswith((*_LIBRARIES, "<frozen")):
        yield from ((name, variables[name]) for name in _globals_of(code) if name in variables)


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """Returns the names of global variables that code reads, also in functions inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_GLOBAL")}
    return frozenset(own).union(*map(_globals_of, inner))


def _describe(value: object) -> str:
    if is_array(value):
        return "an array"
    if isinstance(value, Node):
        return type(value).__qualname__
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"the function {value.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__qualname__} {name}" if name else f"a {type(value).__qualname__}"


def _way_out(name: str, found: _Hidden) -> str:
    holder, kind = found.holder, type(found.holder).__qualname__
    if is_iterator(holder):
        return f"self.{name} = list(...)"
    if isinstance(holder, (Mapping, *_CONTAINERS)):
        return f"self.{name} = a list, a tuple, or a dict whose keys are all strings"
    if not callable(holder) or dataclasses.is_dataclass(holder):
        return f"class {kind}(pax.Module), or jax.tree_util.register_dataclass({kind})"
    if isinstance(found.value, Node):
        return (
            "the layer itself as an attribute, and a method that calls it; "
            "pax.transforms.remat(layer) and vmap(layer) are layers"
        )
    return "the array as an attribute, and a method that uses it; a numpy array for a constant"
