"""Writes a SavedModel: portable modules as TensorFlow functions over variables.

The only file that builds TensorFlow graphs.  One signature is one concrete
function with one `XlaCallModule` operation, the operation that jax2tf writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._optional import require
from pax_export.export._canonical import canonicalize
from pax_export.export._lowering import Lowered
from pax_export.export._signature import Signature
from pax_export.export._variables import Store, Variable


def tensorflow(purpose: str) -> Any:
    """TensorFlow, or an error that names the extra which brings it."""
    return require("tensorflow", "tensorflow", purpose)


def write(directory: Path, store: Store, signatures: Sequence[Signature]) -> None:
    """Writes the variables and signatures into a new directory."""
    tf = tensorflow("to_saved_model")
    variables = [_variable(tf, variable) for variable in store.variables]
    root = _root(tf, store.variables, variables)
    functions = {each.key: _concrete(tf, each, variables) for each in signatures}
    options = tf.saved_model.SaveOptions(
        experimental_custom_gradients=any(each.gradient for each in signatures)
    )
    tf.saved_model.save(root, str(directory), signatures=functions, options=options)
    canonicalize(directory)


def _variable(tf: Any, variable: Variable) -> Any:
    # A jax array on the CPU is taken over without a copy of our own.
    return tf.Variable(variable.value, trainable=variable.trainable, name=variable.name)


def _root(tf: Any, plan: Sequence[Variable], variables: Sequence[Any]) -> Any:
    """What is saved: the attributes that reusable SavedModels have, and the names.

    `variables` and `trainable_variables` are methods of `tf.Module`, which a
    SavedModel would lose; as lists they are there after loading.
    """

    class Root(tf.Module):
        variables: Sequence[Any] = ()
        trainable_variables: Sequence[Any] = ()

    root = Root()
    root.leaves = {each.name: variable for each, variable in zip(plan, variables)}
    root.variables = list(variables)
    root.trainable_variables = [variable for variable in variables if variable.trainable]
    return root


def _concrete(tf: Any, signature: Signature, variables: Sequence[Any]) -> Any:
    specs = [
        tf.TensorSpec(_shape(struct), _dtype(tf, struct), name=name)
        for name, struct in zip(signature.input_names, signature.input_structs)
    ]

    def function(*inputs: Any) -> dict[str, Any]:
        results = _run(tf, signature, variables, inputs)
        count = len(signature.output_names)
        for place, value in zip(signature.assigned, results[count:]):
            variables[place].assign(value)
        return dict(zip(signature.output_names, results[:count]))

    # A place for XLA to compile is chosen by whoever calls, so no jit_compile.
    return tf.function(function, input_signature=specs, autograph=False).get_concrete_function()


def _run(tf: Any, signature: Signature, variables: Sequence[Any], inputs: tuple) -> list[Any]:
    forward, gradient = signature.forward, signature.gradient
    used = set(forward.lowered.kept) | set(gradient.call.lowered.kept if gradient else ())
    operands = [
        variables[place].read_value() if index in used else None
        for index, place in enumerate(forward.variables)
    ]
    operands.extend(inputs)
    constants = [variables[place].read_value() for place in forward.constants]
    if gradient is None:
        return _call(tf, forward.lowered, operands + constants)

    # Integer results pass beside the custom gradient: a saved one cannot be
    # called with results that have no cotangent.
    results: list[Any] = []

    def differentiable(*chosen: Any) -> tuple[list[Any], Callable]:
        given = list(operands)
        for index, value in zip(gradient.wrt, chosen):
            given[index] = value
        results.extend(_call(tf, forward.lowered, given + constants))

        def pull_back(*cotangents: Any) -> list[Any]:
            extra = [variables[place].read_value() for place in gradient.call.constants]
            return _call(tf, gradient.call.lowered, [*given, *constants, *cotangents, *extra])

        return [results[index] for index in gradient.of], pull_back

    chosen = tf.custom_gradient(differentiable)(*(operands[index] for index in gradient.wrt))
    for index, value in zip(gradient.of, chosen):
        results[index] = value
    return results


def _call(tf: Any, lowered: Lowered, operands: Sequence[Any]) -> list[Any]:
    """One XlaCallModule operation."""
    # TensorFlow exports no public name for the operation that it made for jax.
    xla = require("tensorflow.compiler.tf2xla.python.xla", "tensorflow", "to_saved_model")
    results = xla.call_module(
        [operands[index] for index in lowered.kept],
        version=lowered.calling_convention,
        module=lowered.portable.module,
        Tout=[_dtype(tf, struct) for struct in lowered.results],
        Sout=[_shape(struct) for struct in lowered.results],
        # Several platforms mean a module that is told on which of them it runs.
        platforms=[name.upper() for name in lowered.platforms[: 1 if lowered.neutral else None]],
        disabled_checks=["platform"] if lowered.neutral and len(lowered.platforms) > 1 else [],
        function_list=(),
        has_token_input_output=False,
    )
    return list(results)


def _shape(struct: Any) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in struct.shape]


def _dtype(tf: Any, struct: Any) -> Any:
    return tf.as_dtype(np.dtype(struct.dtype).name)
