"""Checks of modules: shared arrays, arrays that static data hides, differing structures."""

from __future__ import annotations

import functools
import gc
import sysconfig
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import HiddenArrayError, SharedNodeError, StructureMismatchError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import PyTree
from pax_export.core._containers import is_dict, is_sequence
from pax_export.core._declared import require_declared
from pax_export.core._scopes import is_constructing
from pax_export.core._static import globals_read, recipe_of, static_key
from pax_export.core._traversal import (
    join_path,
    modules_and_leaves,
    named_leaves,
    named_modules,
    one_level,
    path_name,
)
from pax_export.core._tree import (
    EmptyNode,
    Node,
    attributes_of,
    flatten,
    is_array,
    is_iterator,
    is_node_or_empty,
    leaves_of_attribute,
)


def check_modules(tree: Node) -> None:
    """Checks every module of a net for hidden and shared nodes, in the order that PAX checks."""
    modules, leaves = modules_and_leaves(tree, once=True)
    one_of_each: list[Node] = list({type(each): each for each in modules}.values())  # type: ignore
    for module in one_of_each:
        _check_slots(type(module))
    _refuse_sharing(tree, modules, leaves)
    for module in one_of_each:
        _check_class_attributes(module)


def check_new(module: Node) -> None:
    """Checks a module after its constructor; its submodules were checked after theirs."""
    _check_slots(type(module))
    check_sharing(module)
    refuse_hidden(module)
    _check_class_attributes(module)
    require_declared(module)


def check_sharing(tree: Node) -> list[Any]:
    """Checks that no module and no array occurs twice in a tree; returns its modules."""
    modules, leaves = modules_and_leaves(tree, once=True)
    _refuse_sharing(tree, modules, leaves)
    return modules


def _refuse_sharing(tree: Node, modules: list[Node], leaves: list[Any]) -> None:
    if len(set(map(id, modules))) != len(modules):
        way_out = (
            "keep it at one place and call it from there; for two equal modules, module.copy() "
            "with new arrays"
        )
        _raise_shared("module", named_modules(tree), repr, way_out)
    arrays = [] if len(set(map(id, leaves))) == len(leaves) else list(filter(is_array, leaves))
    if len(set(map(id, arrays))) != len(arrays):
        named = [(path, leaf) for path, leaf in named_leaves(tree) if is_array(leaf)]
        way_out = (
            "keep a tied weight at one place and use it from there; for two equal arrays, jnp.copy"
        )
        _raise_shared("array", named, partial(describe_array, with_value=True), way_out)


def _raise_shared(
    kind: str, named: list[tuple[str, Any]], describe: Callable[[Any], str], way_out: str
) -> None:
    """Raises the error about the first value that has several names."""
    count = Counter(id(value) for _, value in named)
    shared = next(value for _, value in named if count[id(value)] > 1)
    raise SharedNodeError(
        f"The {kind} is at two paths of the tree; each path would get its own copy, and the "
        "copies would drift apart.",
        where=" and ".join(path or "(the root)" for path, value in named if value is shared),
        got=describe(shared),
        write=way_out,
    )


def describe_array(array: Any, with_value: bool = False) -> str:
    """An array, its aval or its spec in a few words, e.g. ``float32[2,3]``."""
    shape = ",".join(str(size) for size in getattr(array, "shape", ()))
    text = f"{getattr(array, 'dtype', type(array).__name__)}[{shape}]"
    if with_value and not is_tracer(array) and array.size <= 16:
        text += f" = {array}"
    return text


def _check_slots(cls: type) -> None:
    for base in cls.__mro__:
        if base.__module__.startswith("pax_export.core.") or base is object:
            continue
        # Abstract bases have empty `__slots__`, which hide nothing; on a module they would suggest
        # that there are no attributes.
        slots = vars(base).get("__slots__")
        if slots or (slots is not None and issubclass(base, Node)):
            raise HiddenArrayError(
                "A module class must not define __slots__: jax would not see their values.",
                where=base.__qualname__,
                got=f"__slots__ = {vars(base)['__slots__']!r}",
                write="plain attributes, set in __init__",
            )


def _check_class_attributes(module: Node) -> None:
    attributes = attributes_of(module)
    for base in type(module).__mro__:
        if base is object or base is Node or base.__module__.startswith("pax_export.core."):
            continue
        for name, value in vars(base).items():
            # Every edit passes here, and for most of a class the type alone decides.
            if type(value) in _PLAIN or name in attributes or name in _OF_PYTHON:
                continue
            if hasattr(value, "__get__") and not isinstance(value, Node):
                continue  # a descriptor
            leaves = leaves_of_attribute(value)
            if any(is_array(leaf) or isinstance(leaf, Node) for leaf in leaves):
                raise HiddenArrayError(
                    "A class attribute holds an array or a module; it would be a "
                    "constant that no transformation sees.",
                    where=f"{base.__qualname__}.{name}",
                    got=type(value).__name__,
                    write=f"self.{name} = ... in __init__",
                )


_PLAIN = frozenset({
    str, bytes, int, float, complex, bool, type(None), type, property, classmethod, staticmethod,
    types.FunctionType,
})  # fmt: skip
#: Names and annotations that Python itself writes into a class.
_OF_PYTHON = frozenset({"__annotations__", "__static_attributes__", "__type_params__"})


# --- structure of two trees -----------------------------------------------------


def assert_structure_equal(a: PyTree, b: PyTree) -> bool:
    """Raises unless two pytrees have the same structure; the error names the differences.

    Args:
        a: a pytree, usually a module.
        b: another.

    Returns:
        True.

    Raises:
        StructureMismatchError: (an AssertionError and a ValueError) the treedefs
            differ.  The message lists the innermost differences with their
            paths.

    Example:
        >>> import pax_export as pax
        >>> pax.assert_structure_equal(pax.Linear(2, 3), pax.Linear(2, 3))
        True
    """
    if jax.tree_util.tree_structure(a) == jax.tree_util.tree_structure(b):
        return True
    differences = structure_differences(a, b) or ["the treedefs differ"]
    raise StructureMismatchError(
        "Two trees that must have the same structure differ:\n"
        + "\n".join(f"  - {line}" for line in differences),
        write="build both by one recipe, in one mode (train or eval)",
    )


def structure_differences(a: PyTree, b: PyTree, path: str = "") -> list[str]:
    """Lists the innermost differences of two trees."""
    here = path or "(the root)"
    if isinstance(a, Node) and isinstance(b, Node) and type(a) is type(b):
        return _module_differences(a, b, path)
    if isinstance(a, (Node, EmptyNode)) or isinstance(b, (Node, EmptyNode)):
        same = isinstance(a, EmptyNode) and isinstance(b, EmptyNode)
        return [] if same else [f"{here}: {_describe_kind(a)} against {_describe_kind(b)}"]
    (items_a, def_a), (items_b, def_b) = one_level(a), one_level(b)
    if is_dict(a) and is_dict(b) and a.keys() != b.keys():
        return _key_differences(a, b, path)
    if def_a != def_b:
        return [f"{here}: {_describe_kind(a)} against {_describe_kind(b)}"]
    if len(items_a) == 1 and items_a[0][1] is a:
        return []  # a leaf
    lines: list[str] = []
    for (key, x), (_, y) in zip(items_a, items_b):
        lines += structure_differences(x, y, join_path(path, path_name(key)))
    return lines


def _key_differences(a: dict[Any, Any], b: dict[Any, Any], path: str) -> list[str]:
    lines: list[str] = []
    for key in dict.fromkeys([*a, *b]):
        child_path = join_path(path, str(key))
        if key in a and key in b:
            lines += structure_differences(a[key], b[key], child_path)
        else:
            lines.append(f"{child_path}: missing in the {'second' if key in a else 'first'} tree")
    return lines


def _module_differences(a: Node, b: Node, path: str) -> list[str]:
    (children_a, moduledef_a), (children_b, moduledef_b) = flatten(a), flatten(b)
    static_a, static_b = ({"_frozen": None, **each.static} for each in (moduledef_a, moduledef_b))
    values_a = static_a | dict(zip(moduledef_a.names, children_a))
    values_b = static_b | dict(zip(moduledef_b.names, children_b))
    lines: list[str] = []
    for name in dict.fromkeys([*values_a, *values_b]):
        child_path = join_path(path, name.removeprefix("_") if name in _OWN_FIELDS else name)
        if name not in values_a or name not in values_b:
            side = "second" if name in values_a else "first"
            lines.append(f"{child_path}: missing in the {side} tree")
        elif name in static_a and name in static_b:
            if static_key(values_a[name]) != static_key(values_b[name]):
                lines.append(f"{child_path}: {values_a[name]!r} against {values_b[name]!r}")
        elif name in moduledef_a.names and name in moduledef_b.names:
            lines += structure_differences(values_a[name], values_b[name], child_path)
        else:
            x, y = _describe_kind(values_a[name]), _describe_kind(values_b[name])
            lines.append(f"{child_path}: {x} against {y}")
    return lines


_OWN_FIELDS = ("_name", "_training", "_frozen")


def _describe_kind(value: object) -> str:
    if is_array(value):
        return "an array"
    if isinstance(value, (Node, EmptyNode)):
        recipe = [n if v is True else f"{n}={v!r:.60}" for n, v in recipe_of(type(value))]
        return type(value).__name__ + (f" ({', '.join(recipe)})" if recipe else "")
    size = f" of {len(value)}" if is_sequence(value) or is_dict(value) else ""
    return f"{type(value).__name__}{size}"


# --- arrays and modules where no transformation sees them: in functions, odd objects --
# There they would be constants, neither trained nor saved, so no module may have them. One
# exception is how programs write constants: a numpy array that a function uses.


#: Types without parts, of most static values.
_WITHOUT_PARTS = frozenset({
    type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType,
    types.ModuleType,
})  # fmt: skip
#: Iterators that may make layers when they are used.
_LAZY = (types.GeneratorType, map, filter)
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: Installed code has no layers of a user in its global variables.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


def refuse_hidden(module: Node) -> None:
    """Raises if static data of a module, not of its submodules, contains an array or a module.

    Raises:
        HiddenArrayError: it names the attribute, and what to write instead.
    """
    _, moduledef = flatten(module)
    for name, value in moduledef.static.items():
        if type(value) not in _WITHOUT_PARTS:
            _refuse_in(module, name, value)
    for name in moduledef.names[moduledef.array_count :]:
        mixed = attributes_of(module)[name]
        for leaf in jax.tree_util.tree_leaves(mixed, is_leaf=is_node_or_empty):
            if not is_array(leaf) and not is_node_or_empty(leaf):
                _refuse_in(module, name, leaf)


def _refuse_in(module: Node, name: str, value: object) -> None:
    for found in _find(value, False, {id(value)}):
        raise HiddenArrayError(
            "An attribute hides a module or an array in static data, which is neither trained "
            "nor saved.",
            where=f"{type(module).__qualname__}.{name}",
            got=f"{_describe(found)} in {_describe(value)}",
            write="an attribute of its own, also in lists, tuples, dicts with strings as keys and "
            "modules, and a method that uses it; a numpy array for a constant of a function",
        )


def _find(value: object, used: bool, seen: set[int]) -> Iterator[Any]:
    """Yields what is hidden in a value; `used` is true inside of functions."""
    if isinstance(value, Node):
        # A function that is made in a constructor may refer to the module that is not made yet.
        if is_constructing(value) or any(map(is_array, jax.tree_util.tree_leaves(value))):
            yield value
    elif is_array(value):
        if not (used and isinstance(value, np.ndarray)):
            yield value
    elif isinstance(value, _LAZY):
        yield value
    else:
        used = used or (callable(value) and not isinstance(value, type))
        for part in _parts(value):
            if type(part) not in _WITHOUT_PARTS and id(part) not in seen:
                seen.add(id(part))
                yield from _find(part, used, seen)


def _parts(value: Any) -> Iterable[Any]:
    """Returns what a function uses, a container contains or an object has."""
    if isinstance(value, types.FunctionType):
        return _used_by(value)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, type) or getattr(value, "_pax_is_constant", False):
        return ()
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.hasobject else ()  # type: ignore
    if is_iterator(value):
        return gc.get_referents(value)
    kind = type(value)  # type: ignore  # of anything
    parts: list[Any] = []
    if hasattr(value, "__wrapped__"):
        parts.append(value.__wrapped__)
    if issubclass(kind, Mapping):
        parts += value.values()
    elif issubclass(kind, _CONTAINERS):
        parts += value
    if callable(value) and isinstance(kind.__call__, types.FunctionType):
        parts.append(kind.__call__)
    slots = [name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ())]
    parts += [getattr(value, name, None) for name in slots]
    return [*parts, *getattr(value, "__dict__", {}).values()]


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    code, variables = function.__code__, function.__globals__
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            pass
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    if not code.co_filename.startswith((*_LIBRARIES, "<frozen")):
        yield from (variables[name] for name in globals_read(code)[0] if name in variables)


def _describe(value: object) -> str:
    if is_array(value):
        return "an array"
    name = getattr(value, "__qualname__", "")
    return f"{type(value).__qualname__} {name}".rstrip()
