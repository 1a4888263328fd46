"""Removes and fuses operators.

A convolution or product that is followed by arithmetic with a number for each channel, as
BatchNorm is when it does not train, has this in its own weights; kernels apply ReLU to what they
have just computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder.graph import Graph, Operator, Tensor

#: Which inputs of an operator are its weights and its bias, and the axis of the results in these.
_CHANNELS = {
    "CONV_2D": (1, 2, 0), "DEPTHWISE_CONV_2D": (1, 2, 3), "FULLY_CONNECTED": (1, 2, 0),
    "TRANSPOSE_CONV": (1, 3, 0),
}  # fmt: skip
_ACTIVATED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "SUB", "MUL", "DIV")
#: From this number of elements on, a sum divided by their number stays a mean.
_MOST = 1 << 20
_REDUCTIONS = ("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_ANY")
_ACTIVATIONS = ("RELU", "RELU6")


def simplify(graph: Graph, fold: bool = True, notes: dict[str, None] | None = None) -> set[str]:
    """Takes operators out of a graph, and of those of its loops and branches.

    Gives the names of the weights that others have taken up; without `fold` none are.
    `notes` gets what was left as it was, and why.
    """
    folded: set[str] = set()
    notes = {} if notes is None else notes
    for operator in graph.operators:
        for each in operator.graphs.values():
            folded |= simplify(each, fold, notes)
    drop_unread(graph)
    fusion = _Fusion(graph, fold, notes)
    fusion.run()
    drop_unread(graph)
    _copy_shared(graph)
    return folded | fusion.folded


#: Kernels whose results are the bytes of their input, in the same memory.
_SAME_BYTES = ("RESHAPE", "EXPAND_DIMS", "SQUEEZE")
#: Dtypes and ranks that `SLICE` copies.
_SLICED = ("float32", "int8", "uint8", "int16", "int32", "uint32", "int64", "bool")
_MOST_AXES = 5


def _copy_shared(graph: Graph) -> None:
    """Puts a copy before a reshape whose result would be written over what others still read.

    LiteRT writes results of elementwise kernels over their operand if nothing else reads it.  It
    counts the readers of the first tensor of such a chain only: of ``b = (x + 1) * 2``, two
    reshapes share the memory of ``x + 1``, and arithmetic on one changes the other.
    """
    reads: dict[int, list[Operator | None]] = {}
    for operator in (None, *graph.operators):
        for each in graph.outputs if operator is None else operator.inputs:
            reads.setdefault(id(each), []).append(operator)
    placed: list[Operator] = []
    for operator in graph.operators:
        shared = operator.inputs[0] if operator.name in _SAME_BYTES else None
        if (
            shared is not None
            and len(reads[id(shared)]) > 1
            and _in_memory_of_another(shared, graph, reads)
            and _is_written_over(operator.outputs[0], reads)
            and shared.dtype.name in _SLICED
            and 0 < shared.shape.rank <= _MOST_AXES
        ):
            copy = _copy_of(shared, graph)
            operator.inputs = [copy.outputs[0], *operator.inputs[1:]]
            placed.append(copy)
        placed.append(operator)
    graph.operators[:] = placed


def _in_memory_of_another(
    tensor: Tensor, graph: Graph, reads: Mapping[int, Sequence[object]]
) -> bool:
    """Whether a kernel may have written it over its operand, which was a result as well."""
    made = tensor.operator if tensor.graph is graph else None
    return made is not None and any(
        each is not None
        and each.operator is not None
        and each.graph is graph
        and len(reads[id(each)]) == 1
        and (made.name in _SAME_BYTES or _fits(each, tensor))
        for each in made.inputs
    )


def _is_written_over(tensor: Tensor, reads: Mapping[int, Sequence[Operator | None]]) -> bool:
    """Whether its only reader may write its own result over it."""
    readers = reads.get(id(tensor), ())
    if len(readers) != 1 or readers[0] is None:
        return False
    (result, *_) = readers[0].outputs
    same = readers[0].name in _SAME_BYTES
    return _is_written_over(result, reads) if same else _fits(tensor, result)


def _fits(tensor: Tensor, result: Tensor) -> bool:
    same = list(tensor.shape) == list(result.shape)
    return same and tensor.dtype.itemsize == result.dtype.itemsize


def _copy_of(tensor: Tensor, graph: Graph) -> Operator:
    begin, size = (np.full(tensor.shape.rank, each, np.int32) for each in (0, -1))
    ends = [Tensor(each.shape, each.dtype, None, each) for each in (begin, size)]
    result = Tensor(tensor.shape, tensor.dtype, graph)
    copy = Operator("SLICE", [tensor, *ends], [result], {}, tensor.operator.source)
    result.operator = copy
    return copy


def drop_unread(graph: Graph) -> None:
    """Takes operators out whose results nothing reads."""
    read = {id(each) for each in graph.outputs}
    kept = []
    for operator in reversed(graph.operators):
        if any(id(each) in read for each in operator.outputs):
            read.update(id(each) for each in operator.inputs if each is not None)
            kept.append(operator)
    graph.operators[:] = reversed(kept)


class _Fusion:
    """One pass over the operators of a graph, in their order."""

    def __init__(self, graph: Graph, fold: bool, notes: dict[str, None]):
        self._graph, self._fold, self._notes = graph, fold, notes
        self.folded: set[str] = set()
        self._reads: dict[int, int] = {}
        for each in (*graph.outputs, *(e for o in graph.operators for e in o.inputs)):
            self._reads[id(each)] = self._reads.get(id(each), 0) + 1
        self._instead: dict[int, Tensor] = {}

    def run(self) -> None:
        kept = []
        for operator in self._graph.operators:
            operator.inputs = [self._now(each) for each in operator.inputs]
            found = self._fused(operator)
            if found is None:
                kept.append(operator)
                continue
            (old,) = operator.outputs
            self._instead[id(old)] = found
            self._reads[id(found)] = self._reads.get(id(old), 0)
        self._graph.operators[:] = kept
        self._graph.outputs = [self._now(each) for each in self._graph.outputs]

    def _now(self, tensor: object) -> Any:
        return self._instead.get(id(tensor), tensor)

    def _fused(self, operator: Operator) -> Tensor | None:
        """A tensor that is the result of this operator from now on, if it is not needed."""
        if operator.name in _ACTIVATIONS:
            return self._activated(operator)
        if operator.name == "RESHAPE":
            return self._kept(operator)
        if operator.name in ("MUL", "DIV") and self._becomes_mean(operator):
            return None
        if operator.name in ("ADD", "SUB", "MUL", "DIV") and not operator.options.get(
            "fused_activation_function"
        ):
            return self._undone(operator) or self._scaled(operator)
        return None

    def _producer(self, tensor: Tensor) -> Operator | None:
        """What made a tensor that nothing else reads, behind reshapes that keep the channels."""
        while self._reads.get(id(tensor)) == 1 and tensor.operator and tensor.graph is self._graph:
            made = tensor.operator
            if made.name != "RESHAPE":
                return made
            source = made.inputs[0]
            if not (source.shape and tensor.shape and source.shape[-1] == tensor.shape[-1]):
                return None
            tensor = source
        return None

    def _activated(self, operator: Operator) -> Tensor | None:
        (x,) = operator.inputs
        made = self._producer(x)
        if (
            made is None
            or made.name not in _ACTIVATED
            or made.options.get("fused_activation_function")
        ):
            return None
        if x.dtype != np.float32:
            return None
        made.options = {**made.options, "fused_activation_function": operator.name}
        return x

    def _kept(self, operator: Operator) -> Tensor | None:
        """A reduction that keeps its axes, where they are put back behind it."""
        (x, _), (result,) = operator.inputs, operator.outputs
        made = x.operator if self._reads.get(id(x)) == 1 and x.graph is self._graph else None
        if made is None or made.name not in _REDUCTIONS or made.options["keep_dims"]:
            return None
        source, places = made.inputs
        axes = {int(axis) for axis in np.atleast_1d(places.value)}
        kept = [1 if axis in axes else size for axis, size in enumerate(source.shape)]
        if list(result.shape) != kept or kept.count(None) > 1:
            return None
        made.options = {**made.options, "keep_dims": True}
        x.shape = result.shape
        return x

    def _becomes_mean(self, operator: Operator) -> bool:
        """Makes a mean of a sum that is divided by how many there are."""
        x, other = operator.inputs
        if x.value is not None and operator.name == "MUL":
            x, other = other, x
        made = x.operator
        if made is None or made.name != "SUM" or x.graph is not self._graph:
            return False
        if other.value is None or other.value.size != 1 or x.dtype != np.float32:
            return False
        source, axes = made.inputs
        sizes = [source.shape[int(axis)] for axis in axes.value]
        if None in sizes or list(x.shape) != list(operator.outputs[0].shape):
            return False
        count = int(np.prod(sizes, dtype=np.int64))
        wanted = np.float32(count) if operator.name == "DIV" else np.float32(1) / np.float32(count)
        if np.ravel(other.value)[0] != wanted:
            return False
        operator.name, operator.inputs, operator.options = "MEAN", list(made.inputs), made.options
        return True

    def _undone(self, operator: Operator) -> Tensor | None:
        """What a product with a number is of, where it is divided by the same number."""
        if operator.name != "DIV" or self._producer(operator.inputs[0]) is None:
            return None
        x, number = operator.inputs
        made = self._producer(x)
        if made is None or made.name != "MUL" or made.outputs[0] is not x or number.value is None:
            return None
        source, factor = made.inputs
        if factor.value is None or factor.value.size != 1 or number.value.size != 1:
            return None
        if (
            made.options.get("fused_activation_function")
            or source.shape != operator.outputs[0].shape
        ):
            return None
        same = np.ravel(factor.value)[0] == np.ravel(number.value)[0]
        return source if same and 1 <= np.max(factor.value) <= _MOST else None

    def _scaled(self, operator: Operator) -> Tensor | None:
        x, other = operator.inputs
        turned = x.value is not None
        if turned:
            x, other = other, x
        if other.value is None or x.dtype != np.float32 or (turned and operator.name == "DIV"):
            return None
        made = self._producer(x)
        if (
            made is None
            or made.name not in _CHANNELS
            or made.options.get("fused_activation_function")
        ):
            return None
        places = _CHANNELS[made.name]
        weights, bias = (made.inputs[place] for place in places[:2])
        if weights.value is None or (bias is not None and bias.value is None):
            return None
        is_bias = operator.name == "ADD" and (bias is None or not np.any(bias.value))
        if not (self._fold or is_bias):
            return None
        axis = places[2]
        channels = weights.shape[axis]
        number = np.asarray(other.value)
        if number.size not in (1, channels) or number.size != (number.shape or (1,))[-1]:
            return None
        if list(x.shape) != list(operator.outputs[0].shape) or x.shape[-1] != channels:
            return None
        number = np.broadcast_to(number.reshape(-1), (channels,))
        scales = operator.name in ("MUL", "DIV") or (turned and operator.name == "SUB")
        if weights.twin is not None and scales:
            positive = operator.name != "SUB" and (number > 0).all()
            if weights.twin.form.group is not None or not positive:
                return None  # it would need other integers
        numbers = np.asarray(weights.value)
        found = _folded_weights(operator.name, turned, numbers, bias, number, axis)
        if found is None:
            named = ", ".join(sorted(weights.sources)[:1]) or "an array of the program"
            self._notes[f"{named} is not folded: its numbers would not be finite"] = None
            return None
        if weights.twin is not None:
            factor = 1 / number if operator.name == "DIV" else number
            factor = factor if scales else np.ones_like(number)
            shape = [-1 if place == axis else 1 for place in range(len(weights.shape))]
            found[0].value = found[0].twin = weights.twin.times(factor.reshape(shape))
        if operator.name in ("MUL", "DIV") or turned:
            self.folded |= weights.sources if weights.twin is None else frozenset()
            self.folded |= other.sources
        # A bias that stands alone is in the file as it is.
        if bias is not None and np.any(bias.value):
            self.folded |= other.sources | bias.sources
        made.inputs = list(made.inputs)
        for place, each in zip(places, found):
            before = made.inputs[place]
            each.sources = other.sources | (before.sources if before is not None else frozenset())
            made.inputs[place] = each
        return x


def _folded_weights(
    name: str, turned: bool, weights: Any, bias: Tensor | None, number: Any, axis: int
) -> list[Tensor] | None:
    """Weights and a bias with which a result is multiplied and shifted already."""
    shape = [1] * weights.ndim
    shape[axis] = -1
    shift = np.zeros(number.shape, np.float32) if bias is None else np.asarray(bias.value)
    with np.errstate(all="ignore"):
        if name in ("ADD", "SUB"):
            if turned and name == "SUB":
                weights, shift = -weights, number - shift
            else:
                shift = shift + number if name == "ADD" else shift - number
        elif name == "MUL":
            weights, shift = weights * number.reshape(shape), shift * number
        else:
            weights, shift = weights / number.reshape(shape), shift / number
    if not (np.isfinite(weights).all() and np.isfinite(shift).all()):
        return None
    made = [np.ascontiguousarray(each, np.float32) for each in (weights, shift)]
    return [Tensor(each.shape, each.dtype, None, each) for each in made]
