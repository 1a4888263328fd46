"""Nodes and functions of TensorFlow graphs, as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pax_export.export.formats.tf_functions import tensorflow


def add_node(
    nodes: Any, name: str, operation: str, inputs: Sequence[str] = (), **attributes: Any
) -> Any:
    """Adds a node to those of a graph or of a function.

    Args:
        nodes: the repeated field to add it to.
        name: of the node.
        operation: that it runs.
        inputs: the tensors that it takes, then nodes after which it runs (``"^node"``).
        **attributes: Python's and TensorFlow's values, or lists of them.
    """
    node = nodes.add(name=name, op=operation, input=inputs)
    for key, value in attributes.items():
        _fill(node.attr[key], value)
    return node


def _fill(attribute: Any, value: Any) -> None:
    if not isinstance(value, list):
        field, plain = _plain(value)
        if field == "shape":
            attribute.shape.CopyFrom(plain)
        else:
            setattr(attribute, field, plain)
        return
    attribute.list.SetInParent()  # an empty list is one, too
    for field, plain in map(_plain, value):
        getattr(attribute.list, field).append(plain)


def _plain(value: Any) -> tuple[str, Any]:
    """The field of an attribute that holds a value, and what stands there."""
    tf = tensorflow("to_saved_model")
    if isinstance(value, tf.DType):
        return "type", value.as_datatype_enum
    if isinstance(value, tf.TensorShape):
        return "shape", value.as_proto()
    return {bool: "b", int: "i", bytes: "s"}[type(value)], value


def add_call(
    nodes: Any, name: str, function: str, given: Mapping[str, Any], results: Iterable[Any]
) -> None:
    """Adds a call of a function.

    Args:
        nodes: the repeated field to add it to.
        name: of the node.
        function: that it calls.
        given: dtypes by tensors.
        results: the dtypes of the results.
    """
    node = add_node(
        nodes, name, "StatefulPartitionedCall", list(given),
        Tin=list(given.values()), Tout=list(results),
    )  # fmt: skip
    node.attr["f"].func.name = function


class Body:
    """A function, written node by node.

    A tensor is called by the name of an argument, or ``node:output:number``.
    """

    def __init__(self, library: Any, name: str):
        self._function = library.function.add()
        self._function.signature.name = name
        self._function.signature.is_stateful = True

    def argument(self, name: str, spec: Any) -> None:
        """Takes a tensor."""
        place = len(self._function.signature.input_arg)
        self._function.signature.input_arg.add(name=name, type=spec.dtype.as_datatype_enum)
        _fill(self._function.arg_attr[place].attr["_output_shapes"], [spec.shape])

    def resource(self, name: str, spec: Any) -> None:
        """Takes a variable."""
        resource = tensorflow("to_saved_model").resource.as_datatype_enum
        argument = self._function.signature.input_arg.add(name=name, type=resource)
        argument.handle_data.add(dtype=spec.dtype.as_datatype_enum, shape=spec.shape.as_proto())

    def node(self, name: str, operation: str, inputs: Sequence[str], **attributes: Any) -> Any:
        """Runs an operation; see `add_node`."""
        return add_node(self._function.node_def, name, operation, inputs, **attributes)

    def call(
        self, name: str, function: str, given: Mapping[str, Any], results: Iterable[Any]
    ) -> None:
        """Calls a function; `given` and `results` are specs."""
        dtypes = {tensor: spec.dtype for tensor, spec in given.items()}
        results = [spec.dtype for spec in results]
        add_call(self._function.node_def, name, function, dtypes, results)

    def effect(self, name: str, operation: str, inputs: Sequence[str], **attributes: Any) -> None:
        """Runs an operation for what it does, even if nothing comes of it."""
        self.node(name, operation, inputs, **attributes)
        self._function.control_ret[name] = name
        self._function.signature.control_output.append(name)

    def result(self, name: str, tensor: str, spec: Any) -> None:
        """Gives a tensor."""
        self._function.signature.output_arg.add(name=name, type=spec.dtype.as_datatype_enum)
        self._function.ret[name] = tensor
