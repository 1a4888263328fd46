"""Writes a SavedModel: the variables, and one concrete function for each signature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.export.formats.saved_model import proto
from pax_export.export.formats.saved_model.canonical import canonicalize
from pax_export.export.formats.tf_functions import (
    make_function,
    make_gradient,
    make_stages,
    make_variables,
    make_whole,
    tensorflow,
)
from pax_export.export.lowering.lower import Signature
from pax_export.export.lowering.variables import Store, Variable


def write(directory: Path, store: Store, signatures: Sequence[Signature]) -> None:
    """Writes the variables and signatures into a new directory."""
    if any(each.processing for each in signatures):
        _save_with_tensorflow(directory, store, signatures)
    else:
        proto.write(directory, store, signatures)


def _save_with_tensorflow(directory: Path, store: Store, signatures: Sequence[Signature]) -> None:
    """Functions of TensorFlow may hold tables, files and variables: it knows how to save them."""
    tf = tensorflow("to_saved_model")
    variables = make_variables(store)
    root = _root(tf, store.variables, variables)
    functions = {each.key: _function(root, each, variables) for each in signatures}
    options = tf.saved_model.SaveOptions(
        experimental_custom_gradients=any(each.gradient for each in signatures)
    )
    try:
        tf.saved_model.save(root, str(directory), signatures=functions, options=options)
    except AssertionError as error:
        if "untracked" in str(error):
            raise _lost(error) from error
        raise
    canonicalize(directory)


def _lost(error: AssertionError) -> InvalidArgumentError:
    return InvalidArgumentError(
        "A preprocessor or postprocessor uses a variable or a table that cannot be found in it.",
        got=str(error).splitlines()[0],
        write="a tf.Module with the variable or table as an attribute, and a method __call__",
    )


def _function(root: Any, signature: Signature, variables: Sequence[Any]) -> Any:
    """The function to serve; what stands around it hangs on the root, so that it is kept."""
    gradient = make_gradient(signature)
    if gradient is not None:
        root.gradients[signature.key] = gradient
    if signature.processing is None:
        return make_function(signature, variables, gradient).get_concrete_function()
    stages = make_stages(signature, variables, gradient)
    root.stages[signature.key] = stages
    root.resources.extend(signature.processing.trackables)
    return make_whole(signature, stages).get_concrete_function()


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
    root.stages = {}
    root.gradients = {}
    root.resources = []
    root.trainable_variables = [variable for variable in variables if variable.trainable]
    return root
