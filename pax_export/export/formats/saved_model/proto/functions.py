"""Signatures and their gradients as graph functions.

A signature is one operation that runs a module, and so is its gradient. As in `tf.custom_gradient`,
an `IdentityN` over results and operands follows the operation, with the name of the gradient as an
attribute. TensorFlow calls the gradient with a cotangent for each of them, zero for operands, and
expects a gradient for each. Other values of a gradient are captured tensors of its forward
function: the inputs, and the values of variables when they were read.

The module of a gradient runs in a function without captures. Such a function can be an object of
the SavedModel together with its own gradient, which would otherwise be lost when TensorFlow saves
the loaded model again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pax_export.export.artifact.calling import tensorflow_keyword
from pax_export.export.artifact.dimensions import is_inexact
from pax_export.export.formats.saved_model.proto import messages
from pax_export.export.formats.saved_model.proto.messages import (
    ANY,
    RESOURCE,
    Body,
    Dtype,
    Message,
    Spec,
    shape,
)
from pax_export.export.lowering.lower import CALLING_CONVENTION, Call, Lowered, Signature
from pax_export.export.lowering.variables import Store

#: The message of TensorFlow for a missing gradient, by the order of the last one.
_NO_GRADIENT = (
    "this export holds no gradients; pax_export.export.to_saved_model(..., vjp_order=1) keeps them",
    "this export holds gradients, but no gradients of these; "
    "pax_export.export.to_saved_model(..., vjp_order=2) keeps them",
    "this export holds gradients and gradients of these; no export holds more",
)


class Operand(NamedTuple):
    """An operand of a module: a variable, an input or a cotangent, by its index.

    ``passed`` is the cotangent of an operand after the module, which is zero.
    """

    kind: str
    place: int
    order: int = 0  # of the gradient that takes the cotangent

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.place}" + (f"_{self.order}" if self.order else "")


@dataclass(frozen=True)
class GraphFunction:
    """A function of the library, and how it is called."""

    name: str
    arguments: dict[str, Spec]
    results: dict[str, Any]  # a Spec each, or None for results without gradient
    captured: tuple[Operand, ...]  # operands after its arguments
    captured_from: str | None = None  # the function of the captured tensors; or variables
    by_keyword: bool = False
    kept: bool = False  # as an object
    gives_one: bool = False  # its result is no list


@dataclass(frozen=True)
class _SignatureModule:
    """A module of a signature: the forward one, its gradient, or the gradient of that."""

    lowered: Lowered
    operands: tuple[Operand, ...]  # in the order in which it takes them
    of: tuple[int, ...]  # those of its results that have cotangents
    wrt: tuple[Operand, ...]  # those of its operands that have gradients
    needed: tuple[Operand, ...]  # by this one and by those after it


def _signature_modules(signature: Signature) -> list[_SignatureModule]:
    forward, gradients = signature.forward, signature.gradients
    calls = [forward, *(gradient.call for gradient in gradients)]
    by_operations = (n for n, call in enumerate(calls) if call.lowered.differentiates)
    last = next(by_operations, len(gradients))  # TensorFlow differentiates it by its operations
    gradients, calls = gradients[:last], calls[: last + 1]
    variables = [Operand("variable", index) for index in forward.variables]
    inputs = [Operand("input", index) for index in range(len(signature.input_names))]
    every = [*variables, *inputs, *(Operand("variable", index) for index in forward.constants)]
    spaces = [every]
    for order, gradient in enumerate(gradients, 1):
        every = [*every, *(Operand("cotangent", index, order) for index in gradient.of)]
        every += [Operand("variable", index) for index in gradient.call.constants]
        spaces.append(every)
    modules: list[_SignatureModule] = []
    needed: dict[Operand, None] = {}
    for order in reversed(range(len(calls))):
        lowered = calls[order].lowered
        operands = tuple(spaces[order][index] for index in lowered.used)
        following = gradients[order] if order < len(gradients) else None
        of = following.of if following else ()
        wrt = tuple(spaces[order][index] for index in following.wrt) if following else ()
        later = (each for each in needed if each.order <= order)
        needed = dict.fromkeys([*operands, *wrt, *later])
        modules.insert(0, _SignatureModule(lowered, operands, of, wrt, tuple(needed)))
    return modules


def write_initializer(
    library: Message, call: Call, store: Store
) -> tuple[GraphFunction, GraphFunction]:
    """Adds the functions that compute variables at loading, and that create their resource.

    TensorFlow calls functions that belong to a resource; this resource is empty.
    """
    creator, scalar = Body(library["function"], "__create_initializer"), shape([])
    creator.node("resource", "VarHandleOp", [], dtype=messages.FLOAT, shape=scalar)
    creator.result("resource", "resource:resource:0", Spec(RESOURCE, scalar))
    body = Body(library["function"], "__initialize")
    captured = [Operand("variable", index) for index in (*call.variables, *store.computed)]
    specs = {each: Spec.of(store.variables[each.place].value) for each in captured}
    for each in captured:
        body.resource(_resource_name(each), specs[each])
    operands = [captured[index] for index in call.lowered.used]
    tensors = [_add_read(body, each, specs[each]) for each in operands]
    results = _run_module(body, call.lowered, tensors, [specs[each].dtype for each in operands])
    for index, result in zip(store.computed, results):
        inputs, dtype = [f"resource_{index}", result], specs[Operand("variable", index)].dtype
        body.effect(f"assign_{index}", "AssignVariableOp", inputs, dtype=dtype)
    return (
        GraphFunction("__initialize", {}, {}, tuple(captured)),
        GraphFunction(
            "__create_initializer", {}, {"resource": Spec(RESOURCE, scalar)}, (), gives_one=True
        ),
    )


def _add_read(body: Body, operand: Operand, spec: Spec) -> str:
    dtype, inputs = spec.dtype, [_resource_name(operand)]
    body.node(operand.name, "ReadVariableOp", inputs, dtype=dtype, _output_shapes=[spec.shape])
    return f"{operand.name}:value:0"


def _run_module(body: Body, lowered: Lowered, tensors: list[str], dtypes: list[Dtype]) -> list[str]:
    if lowered.graph is not None:
        return lowered.graph.write(body, tensors)
    results = list(map(Spec.of, lowered.results))
    # A module for several platforms takes the index of the current one.
    platforms = lowered.platforms[: 1 if lowered.neutral else None]
    unchecked = lowered.neutral and len(lowered.platforms) > 1
    body.node(
        "call",
        "XlaCallModule",
        tensors,
        Tin=dtypes,
        version=CALLING_CONVENTION,
        module=lowered.portable.module,
        Tout=[spec.dtype for spec in results],
        Sout=[spec.shape for spec in results],
        platforms=[name.upper().encode() for name in platforms],
        disabled_checks=[b"platform"] if unchecked else [],
    )
    return [f"call:output:{index}" for index in range(len(lowered.results))]


class SignatureWriter:
    """Adds functions of a signature, with no TensorFlow around it, to a library of functions."""

    def __init__(self, library: Message, signature: Signature, store: Store):
        self._functions: list[Message] = library["function"]
        self._gradients: list[Message] = library["registered_gradients"]
        self._signature = signature
        self._store = store
        self._modules = _signature_modules(signature)
        word, number = re.sub(r"\W", "_", signature.key, flags=re.ASCII), len(self._functions)
        self._names = [
            f"__inference_{word}{'_gradient' * order}_{number}"
            for order in range(len(self._modules))
        ]

    def write(self) -> list[GraphFunction]:
        """Gives the function of the signature, and then those of its gradients."""
        before = self._write_forward()
        functions = [before]
        for order in range(1, len(self._modules)):
            plain = self._plain_gradient(order)
            functions += [plain, self._gradient(order, plain, before)]
            before = plain
        return functions

    def _write_forward(self) -> GraphFunction:
        """Reads variables, calls the module, and assigns new state to variables."""
        signature, body = self._signature, Body(self._functions, self._names[0])
        # TensorFlow sorts arguments by keyword, and results by name.
        inputs = [(name, Operand("input", i)) for i, name in enumerate(signature.input_names)]
        inputs.sort(key=lambda each: tensorflow_keyword(each[0]))
        outputs = sorted((name, index) for index, name in enumerate(signature.output_names))
        tensors = {operand: operand.name for _, operand in inputs}
        for operand in tensors:
            body.argument(operand.name, self._spec_of(operand))
        read = {each for each in self._modules[0].needed if each.kind == "variable"}
        captured = sorted(read.union(Operand("variable", index) for index in signature.assigned))
        for operand in captured:
            body.resource(_resource_name(operand), self._spec_of(operand))
        tensors |= {
            each: _add_read(body, each, self._spec_of(each)) for each in captured if each in read
        }
        results = self._call_module(body, 0, tensors)
        for index, value in zip(signature.assigned, results[len(outputs) :]):
            self._assign(body, Operand("variable", index), value, read)
        for _, index in outputs:
            body.result(f"output_{index}", results[index], self._result_spec(0, index))
        return GraphFunction(
            self._names[0],
            {name: self._spec_of(operand) for name, operand in inputs},
            {name: self._result_spec(0, index) for name, index in outputs},
            tuple(captured),
            by_keyword=True,
        )

    def _assign(self, body: Body, operand: Operand, value: str, read: set[Operand]) -> None:
        """Gives a variable a new value, after the old one was read."""
        inputs = [
            _resource_name(operand),
            value,
            *([f"^{operand.name}"] if operand in read else []),
        ]
        name, dtype = f"assign_{operand.place}", self._spec_of(operand).dtype
        body.effect(name, "AssignVariableOp", inputs, dtype=dtype)

    def _plain_gradient(self, order: int) -> GraphFunction:
        """Runs the module of a gradient; takes all that is needed for it and for those after it."""
        name, module = f"{self._names[order]}_module", self._modules[order]
        body, tensors = Body(self._functions, name), {each: each.name for each in module.needed}
        for operand in tensors:
            body.argument(operand.name, self._spec_of(operand))
        results: dict[str, Any] = {}
        for index, tensor in enumerate(self._call_module(body, order, tensors)):
            result = f"gradient_{index}"
            results[result] = self._result_spec(order, index)
            body.result(result, tensor, results[result])
        arguments = {each.name: self._spec_of(each) for each in tensors}
        return GraphFunction(name, arguments, results, (), kept=bool(module.wrt))

    def _gradient(self, order: int, plain: GraphFunction, before: GraphFunction) -> GraphFunction:
        """Takes cotangents, and returns gradients, for all outputs of the module before."""
        module, body = self._modules[order - 1], Body(self._functions, self._names[order])
        arguments = [Operand("cotangent", index, order) for index in module.of]
        arguments += [Operand("passed", index, order) for index in range(len(module.wrt))]
        captured = [each for each in self._modules[order].needed if each not in arguments]
        for operand in (*arguments, *captured):
            body.argument(operand.name, self._spec_of(operand))
        body.call("gradient", plain.name, plain.arguments, plain.results.values())
        for index, (name, spec) in enumerate(plain.results.items()):
            body.result(name, f"gradient:output:{index}", spec)
        return GraphFunction(
            self._names[order],
            {operand.name: self._spec_of(operand) for operand in arguments},
            {**{f"none_{index}": None for index in module.of}, **plain.results},
            tuple(captured),
            captured_from=before.name,
        )

    def _call_module(self, body: Body, order: int, tensors: dict[Operand, str]) -> list[str]:
        """Runs a module.  Its results can be differentiated, or raise the reason why not."""
        module = self._modules[order]
        inputs = [tensors[operand] for operand in module.operands]
        dtypes = [self._spec_of(operand).dtype for operand in module.operands]
        results = _run_module(body, module.lowered, inputs, dtypes)
        if module.lowered.differentiates:
            return results
        if order + 1 == len(self._modules):
            return [self._last(body, order, index, name) for index, name in enumerate(results)]
        dtypes = [self._result_spec(order, index).dtype for index in module.of]
        dtypes += [self._spec_of(operand).dtype for operand in module.wrt]
        inputs = [*(results[index] for index in module.of), *(tensors[each] for each in module.wrt)]
        function = self._names[order + 1]
        kind = f"{function}_type"
        body.node("differentiable", "IdentityN", inputs, T=dtypes, _gradient_op_type=kind.encode())
        self._gradients.append({"registered_op_type": kind, "gradient_func": function})
        for number, index in enumerate(module.of):
            results[index] = f"differentiable:output:{number}"
        return results

    def _last(self, body: Body, order: int, index: int, tensor: str) -> str:
        """A result without a gradient: asking for one raises an error with advice."""
        struct = self._modules[order].lowered.results[index]
        if not is_inexact(np.dtype(struct.dtype)):
            return tensor
        name, message = f"last_{index}", _NO_GRADIENT[order].encode()
        body.node(name, "PreventGradient", [tensor], T=Spec.of(struct).dtype, message=message)
        return f"{name}:output:0"

    def _spec_of(self, operand: Operand) -> Spec:
        if operand.kind == "variable":
            return Spec.of(self._store.variables[operand.place].value)
        if operand.kind == "input":
            return Spec.of(self._signature.input_structs[operand.place])
        if operand.kind == "cotangent":
            return self._result_spec(operand.order - 1, operand.place)
        # A zero, which TensorFlow makes once if it has no shape.
        return Spec(self._spec_of(self._modules[operand.order - 1].wrt[operand.place]).dtype, ANY)

    def _result_spec(self, order: int, index: int) -> Spec:
        return Spec.of(self._modules[order].lowered.results[index])


def _resource_name(operand: Operand) -> str:
    return f"resource_{operand.place}"
