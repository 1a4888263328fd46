"""TensorFlow functions around a model: before it, after it, and what they hold.

A preprocessor or postprocessor is a `tf.function`, a plain Python function of
TensorFlow operations, or an object that can be called (a `tf.Module`, a Keras
layer).  Nothing here knows what the model in the middle is.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export._optional import require

Function = Callable[..., Any]


def compose(
    model: Function,
    preprocess: Function | None = None,
    postprocess: Function | None = None,
    passthrough: bool = False,
) -> Function:
    """One function of the three.

    Args:
        model: takes what the preprocessor gives, as one value.
        preprocess: takes the outer arguments; without it the model is given the
            only argument, or the tuple of all of them.
        postprocess: takes what the model gives.
        passthrough: the preprocessor gives two values, of which the second goes
            past the model, as a second argument of the postprocessor.

    Example:
        >>> compose(lambda x: x + 1, lambda a, b: a * b, lambda y: {"y": y})(2, 3)
        {'y': 7}
    """
    if passthrough and not (preprocess and postprocess):
        raise InvalidArgumentError(
            "Only with a preprocessor and a postprocessor can a value pass by the model.",
            write="both of them",
        )

    def whole(*args: Any, **kwargs: Any) -> Any:
        if preprocess is not None:
            given = preprocess(*args, **kwargs)
        else:
            given = args[0] if len(args) == 1 else args
        beside = ()
        if passthrough:
            given, *beside = _two(given)
        output = model(given)
        return output if postprocess is None else postprocess(output, *beside)

    return whole


def _two(given: Any) -> tuple:
    if not (isinstance(given, tuple) and len(given) == 2):
        raise InvalidArgumentError(
            "A value is to pass by the model, requiring the preprocessor output to be a tuple of "
            "two elements.",
            got=f"{type(given).__name__}"
            + (f" of {len(given)}" if hasattr(given, "__len__") else ""),
            write="return inputs_of_the_model, what_passes_by",
        )
    return given


def as_function(processor: Function) -> Any:
    """The processor as a `tf.function`; Python's ``if`` and ``for`` on tensors work in it."""
    tf = require("tensorflow", "tensorflow", "processors of an export")
    if isinstance(processor, tf.types.experimental.PolymorphicFunction):
        return processor
    call = _method(processor)
    if isinstance(call, tf.types.experimental.PolymorphicFunction):
        return call
    if not inspect.isroutine(processor):  # a Keras layer does more in its call than `call`
        return tf.function(lambda *args, **kwargs: processor(*args, **kwargs), autograph=False)
    return tf.function(processor)


def _method(processor: Function) -> Any:
    """What runs when an object is called; a function itself."""
    return processor if inspect.isroutine(processor) else getattr(processor, "__call__", processor)  # noqa: B004


def python_function(processor: Function) -> Function:
    """The Python function whose parameters are those of the processor."""
    if hasattr(processor, "build"):  # a Keras layer
        return getattr(processor, "call", processor)
    call = _method(processor)
    return getattr(call, "python_function", call)


def input_signature(processor: Function) -> tuple | None:
    """The ``input_signature`` of a `tf.function`, or of an object's ``__call__``."""
    for function in (processor, _method(processor)):
        found = getattr(function, "input_signature", None)
        if found is not None:
            return tuple(found)
    return None


def trackables(*processors: Any) -> list[Any]:
    """The objects of TensorFlow that functions hold: variables, tables, modules.

    A SavedModel keeps what hangs on its root.  What a function closes over, or
    finds among its globals, its defaults and the attributes of its object, does
    not hang there by itself.
    """
    tf = require("tensorflow", "tensorflow", "processors of an export")
    kind = tf.__internal__.tracking.Trackable
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    waiting = list(processors)
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value  # keeps the id alive
        is_function = hasattr(value, "python_function")
        if isinstance(value, kind) and not is_function:
            found[id(value)] = value
        elif not isinstance(value, (str, bytes, int, float, type, tf.Tensor)):
            waiting.extend(_held(value))
    return list(found.values())


def _held(value: Any) -> Iterator[Any]:
    """What a value reaches in one step."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif hasattr(value, "python_function"):
        yield value.python_function
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        yield from _held_by_function(value)
    elif callable(value) and not inspect.isbuiltin(value):
        yield from getattr(value, "__dict__", {}).values()
        yield type(value).__call__


def _held_by_function(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if not inspect.ismodule(value):
            yield value


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function inside of the function
            yield from _global_names(constant)
