"""Signatures as TensorFlow functions over variables.

The only file that builds TensorFlow graphs. A writer creates the variables once, and then any
number of functions over them:

    variables = make_variables(store)
    functions = {each.key: make_function(each, variables) for each in signatures}

One call of a signature is one `XlaCallModule` operation, as in jax2tf, or a graph of TensorFlow's
own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from pax_export._foundations.optional import require
from pax_export._foundations.types import PyTree
from pax_export.export.lowering.lower import CALLING_CONVENTION, Gradient, Lowered, Signature
from pax_export.export.lowering.variables import Store
from pax_export.export.tracing import dtypes


def tensorflow(purpose: str) -> Any:
    """TensorFlow, or an error that names the extra which brings it."""
    return require("tensorflow", "tensorflow", purpose)


def make_variables(store: Store) -> list[Any]:
    tf = tensorflow("to_saved_model")
    # A jax array on the CPU is taken over without a copy of our own.
    return [
        tf.Variable(each.value, trainable=each.trainable, name=each.name)
        for each in store.variables
    ]


def make_function(signature: Signature, variables: Sequence[Any], gradient: object = None) -> Any:
    """Returns a `tf.function` from the signature's inputs, by position, to outputs by name.

    Its `get_concrete_function()` needs no arguments. It is without the TensorFlow functions around
    the signature.
    """

    def function(*inputs: PyTree) -> dict[str, Any]:
        return call_signature(signature, variables, inputs, gradient)

    tf = tensorflow("to_saved_model")
    # The caller chooses where XLA compiles, so no jit_compile.
    return tf.function(function, input_signature=input_specs(signature), autograph=False)


def make_stages(
    signature: Signature, variables: Sequence[Any], gradient: object = None
) -> dict[str, Any]:
    """Returns the model and its processors, each as a `tf.function`.

    ``model`` takes inputs by position and returns outputs by name; ``preprocess`` returns these
    inputs, and ``postprocess`` takes these outputs by position.
    """
    around = signature.processing
    assert around is not None
    model = make_function(signature, variables, gradient)
    stages = {"preprocess": around.preprocess, "model": model, "postprocess": around.postprocess}
    return {name: stage for name, stage in stages.items() if stage is not None}


def make_whole(signature: Signature, stages: Mapping[str, Any]) -> Any:
    tf = tensorflow("to_saved_model")
    around = signature.processing
    assert around is not None
    first = around.preprocess
    specs = input_specs(signature) if first is None else list(first.input_signature)

    def function(*inputs: PyTree) -> dict[str, Any]:
        if "preprocess" in stages:
            inputs = stages["preprocess"](*inputs)
        outputs = stages["model"](*inputs)
        if "postprocess" not in stages:
            return outputs
        return stages["postprocess"](*(outputs[name] for name in signature.output_names))

    return tf.function(function, input_signature=specs, autograph=False)


def input_specs(signature: Signature) -> list[Any]:
    return list(map(tensor_spec, signature.input_names, signature.input_structs))


def output_specs(signature: Signature) -> list[Any]:
    return list(map(tensor_spec, signature.output_names, signature.forward.lowered.results))


def tensor_spec(name: str | None, struct: Any) -> Any:
    tf = tensorflow("to_saved_model")
    shape = [size if isinstance(size, int) else None for size in struct.shape]
    return tf.TensorSpec(shape, tf.as_dtype(dtypes.name_of(struct.dtype)), name=name)


def call_signature(
    signature: Signature, variables: Sequence[Any], inputs: Sequence[Any], gradient: object = None
) -> dict[str, Any]:
    """Calls a signature inside of a TensorFlow function; returns the outputs by name.

    New state is assigned to the variables, which are those of the whole store. `gradient` is the
    result of `make_gradient`, if it is attached to the saved root.
    """
    results = _run(tensorflow("to_saved_model"), signature, variables, tuple(inputs), gradient)
    count = len(signature.output_names)
    for place, value in zip(signature.assigned, results[count:]):
        variables[place].assign(value)
    return dict(zip(signature.output_names, results[:count]))


def _run(
    tf: ModuleType,
    signature: Signature,
    variables: Sequence[Any],
    inputs: tuple,
    signature_gradient: Any,
) -> list[Any]:
    forward, gradient = signature.forward, signature.gradient
    used = set(forward.lowered.kept).union(
        *(each.call.lowered.kept for each in signature.gradients), gradient.wrt if gradient else ()
    )
    operands = [
        variables[place].read_value() if index in used else None
        for index, place in enumerate(forward.variables)
    ]
    operands.extend(inputs)
    constants = [variables[place].read_value() for place in forward.constants]
    if gradient is None:
        return _call_module(tf, forward.lowered, operands + constants)
    saved = signature_gradient or make_gradient(signature)

    def pull_back(given: list[Any], cotangents: tuple) -> list[Any]:
        extra = [variables[place].read_value() for place in gradient.call.constants]
        every = [*given, *constants, *cotangents, *extra]
        if gradient.next is None:
            return _call_module(tf, gradient.call.lowered, every)
        every += [variables[place].read_value() for place in gradient.next.call.constants]
        return saved(*(every[index] for index in _needed_operands(gradient, gradient.next)))

    def run(given: list[Any]) -> list[Any]:
        return _call_module(tf, forward.lowered, given + constants)

    return _make_differentiable(tf, run, pull_back, operands, gradient)


def _make_differentiable(
    tf: ModuleType, run: Callable, pull_back: Callable, operands: Sequence[Any], gradient: Gradient
) -> list[Any]:
    """Returns the results of a call; those in `of` have the gradient of `pull_back`.

    Integer results bypass the custom gradient, because a saved one cannot be called with results
    that have no cotangent.
    """
    results: list[Any] = []

    def differentiable(*chosen: object) -> tuple[list[Any], Callable]:
        given = list(operands)
        for index, value in zip(gradient.wrt, chosen):
            given[index] = value
        results[:] = run(given)
        return [results[index] for index in gradient.of], lambda *each: pull_back(given, each)

    chosen = tf.custom_gradient(differentiable)(*(operands[index] for index in gradient.wrt))
    for index, value in zip(gradient.of, chosen):
        results[index] = value
    return results


def make_gradient(signature: Signature) -> Any:
    """Returns the gradient of a signature as a `tf.function` that has a gradient itself, or None.

    A SavedModel keeps the gradients of functions attached to its root, but not those of gradients:
    a function to be differentiated twice must be attached there.
    """
    first = signature.gradient
    if first is None or first.next is None:
        return None
    tf, second, count = tensorflow("to_saved_model"), first.next, len(first.structs)
    extra = second.structs[count + len(second.of) :]
    structs, needed = [*first.structs, *extra], _needed_operands(first, second)

    def gradient(*given: object) -> list[Any]:
        every: list[Any] = [None] * len(structs)
        for index, value in zip(needed, given):
            every[index] = value

        def pull_back(operands: list[Any], cotangents: tuple) -> list[Any]:
            values = [*operands[:count], *cotangents, *operands[count:]]
            return _call_module(tf, second.call.lowered, values)

        def run(operands: list[Any]) -> list[Any]:
            return _call_module(tf, first.call.lowered, operands)

        results = _make_differentiable(tf, run, pull_back, every, second)
        return [results[index] for index in second.of]

    specs = [tensor_spec(f"operand_{index}", structs[index]) for index in needed]
    return tf.function(gradient, input_signature=specs, autograph=False)


def _needed_operands(first: Gradient, second: Gradient) -> list[int]:
    """Returns operands of a gradient, and constants of its gradient, that either of them uses."""
    count, cotangents = len(first.structs), len(second.of)
    used = {*first.call.lowered.kept, *second.wrt}
    for index in second.call.lowered.kept:
        if index < count:
            used.add(index)
        elif index >= count + cotangents:
            used.add(index - cotangents)
    return sorted(used)


def _call_module(tf: ModuleType, lowered: Lowered, operands: Sequence[Any]) -> list[Any]:
    if lowered.graph is not None:
        return lowered.graph.imported([operands[index] for index in lowered.kept], tf)
    # TensorFlow exports no public name for the operation that it made for jax.
    xla = require("tensorflow.compiler.tf2xla.python.xla", "tensorflow", "to_saved_model")
    given = [operands[index] for index in lowered.kept]
    attributes = module_attributes(lowered, [tensor_spec(None, each) for each in lowered.results])
    return list(
        xla.call_module(given, **attributes, function_list=(), has_token_input_output=False)
    )


def module_attributes(lowered: Lowered, results: Sequence[Any]) -> dict[str, Any]:
    # A module for several platforms takes the index of the current one.
    platforms = lowered.platforms[: 1 if lowered.neutral else None]
    unchecked = lowered.neutral and len(lowered.platforms) > 1
    return {
        "version": CALLING_CONVENTION,
        "module": lowered.portable.module,
        "Tout": [spec.dtype for spec in results],
        "Sout": [spec.shape for spec in results],
        "platforms": [name.upper().encode() for name in platforms],
        "disabled_checks": [b"platform"] if unchecked else [],
    }
