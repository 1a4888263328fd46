"""quantize: replaces the weights of a net by low-bit integers."""

from __future__ import annotations

import dataclasses
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    QuantizationError,
)
from pax_export._foundations.types import Array
from pax_export.adapters import apply_changes, chosen_modules
from pax_export.core import Module, Selection, Selector, is_array, named_leaves
from pax_export.precision.quantized import (
    GROUP,
    ArrayLike,
    DynamicInputs,
    Form,
    QuantizedArray,
    dequantized,
)
from pax_export.quantization._batches import (
    METHODS,
    Net,
    call_of,
    checked,
    compared,
    loss_of_outputs,
    observe,
    static_ranges,
)
from pax_export.quantization._functions import RoundedArray, pair_of, targets_of_function
from pax_export.quantization._report import (
    QuantizationReport,
    QuantizedLeaf,
    choose,
    tree_bytes,
)
from pax_export.quantization._rounding import (
    LEVELS,
    InputMoments,
    QuantizableArray,
    fits_halves,
    is_matrix,
    other_arrays,
    rounded,
    rounded_by_inputs,
    targets_of_layers,
    targets_of_tree,
    why_not,
)

Arrays = dict[str, QuantizedArray]


class _Net(NamedTuple):
    """A module, or params with their function, and its weights to be quantized."""

    whole: Net
    targets: list[QuantizableArray]
    put: Callable[[Mapping[str, Any]], Any]  # the net with arrays in these places, by name


def quantize(
    net: Module,
    batches: Iterable[Any] | None = None,
    *,
    bits: int = 8,
    group: int | None = None,
    scheme: str = "symmetric",
    at: Selector = None,
    activations: str | None = None,
    rounding: str = "nearest",
    metric: Callable[[Any], Any] | None = None,
    budget: float | None = None,
    train: bool = False,
) -> tuple[Any, QuantizationReport]:
    """Quantizes the weights of a net.

    The weights of `Linear`, `Embed` and convolutions become `QuantizedArray`s, whose integers and
    scales are leaves.  The result runs, jits, saves, loads and exports like the net, and all files
    have the same integers.  Integers and scales are not trained; biases, other layers and
    adapters (`pax_export.adapters`) are.

    Args:
        net: a module; a selection of one, ``net.at("layers")``, to quantize only these parts;
            ``(params, function)``, or another model that can be exported: of equinox, flax, haiku
            or Keras.  Their arrays that the first batch multiplies or looks up rows of are
            quantized; without batches, all of ``params`` with two or more axes, as ``x @ array``.
        batches: a list of inputs, each an array or a tuple of arguments; the report compares the
            outputs with those of the net before.
        bits: 8: from -127 to 127, one float32 scale per output channel (per row of an `Embed`);
            4: from -8 to 7, one float16 scale per group of 32.
        group: 32: groups with float16 scales for 8 bits, too.
        scheme: ``"symmetric"``; ``"asymmetric"``: 4-bit groups with an integer zero point each;
            ``"float"``: 8 bits are float8 numbers (``float8_e4m3fn``), with one float32 scale per
            output channel.
        at: the parts of a module to quantize, as for `Module.at`; default: all.
        activations: round the inputs of products to 8 bits, too.  ``"dynamic"``: with a scale per
            row (per example for convolutions), computed in every call; ``"static"``: with one
            scale and zero point from ``batches``, by least squares (also ``"mse"``); ``"minmax"``
            uses the whole range, ``"percentile"`` all but one in 10,000 at each end.  ONNX and
            TFLite files then also round the outputs of convolutions.
        rounding: ``"nearest"``, or ``"gptq"``: integers of `Linear` and 1×1 convolutions
            compensate each other's errors on the inputs in ``batches``, which helps 4 bits more
            often than 8; it takes seconds for a matrix with 1,000 inputs.
        metric: a function from a net to a number, larger is better; the report has it before and
            after.
        budget: the allowed loss of the metric or, without one, of the outputs for the batches:
            their mean difference, relative to their mean size.  Weights have 8 bits, and as many
            as the budget allows 4, those with the smallest loss first.  The report has the loss
            of each.
        train: quantization-aware training: weights become `RoundedArray`s, which are trained
            while the net computes with their quantized values; ``quantize`` of the trained net
            returns the integers.

    Returns:
        The quantized net, of the same type as ``net`` (for a selection, the whole net; for a
        third-party model, ``(params, function)``), and a `QuantizationReport`, which lists arrays
        that are not quantized, with reasons.

    Raises:
        InvalidArgumentError: unsupported bits or groups; batches that are empty, all zero, not
            finite, or not valid inputs; nothing to quantize.
        InvalidArgumentTypeError: not a net.
        QuantizationError: (a ValueError) it is already quantized, or the budget cannot be met.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Linear(64, 32), jax.nn.relu, pax.Linear(32, 10))
        >>> x = jax.random.normal(jax.random.key(0), (8, 64))
        >>> small, report = pax.quantize(net, [x], bits=4)
        >>> [leaf.bits for leaf in report.leaves], list(report.kept)
        ([4, 4], ['modules.0.bias', 'modules.2.bias'])
        >>> small(x).shape
        (8, 10)

    """
    wanted = _IntegerOptions(bits, group, scheme, rounding, budget, train)
    few = 4 if budget is not None and scheme == "asymmetric" else bits
    _check(wanted._replace(bits=few), activations, batches is not None)
    calls = None if batches is None else checked(batches)
    if isinstance(net, Selection):
        if at is not None:
            raise InvalidArgumentError(
                "The selection already defines the quantized parts.",
                where="quantize(at=...)",
                got=repr(at)[:100],
                write="quantize(net.at(...)), or quantize(net, at=...)",
            )
        net, at = net.root, net
    found = _of_module(net, at) if isinstance(net, Module) else _of_pair(net, at, calls)
    before = found.whole
    arrays, targets, left = _trained_and_others(found, wanted)
    fallbacks: dict[str, str] = {}
    sensitivity: Mapping[str, float] = {}
    of_weights = dict.fromkeys(targets, bits)
    if budget is not None:
        _check_budget(budget, calls, metric, bits, group, scheme)
        lost = _loss(before, calls, metric)
        rounded = lambda target, bits: _quantized(target, bits, None, scheme)[0]  # noqa: E731
        chosen = choose(_arrays(before), list(targets.values()), rounded, lost, budget)
        of_weights, sensitivity = chosen
    for name, target in targets.items():
        arrays[name], why = _quantized(target, of_weights[name], group, scheme)
        fallbacks |= {name: why} if why else {}
    if not arrays:
        raise InvalidArgumentError(
            "The net has no weights to quantize.",
            where="quantize",
            got=", ".join(f"{name}: {why}" for name, why in left.items())[:300]
            or repr(before)[:100],
            write="a net with Linear, Embed or convolutions, or (params, function)",
        )
    corrected = _by_inputs(found, targets, arrays, calls or []) if rounding == "gptq" else {}
    arrays |= corrected
    plain, missing, weights_alone = arrays, dict.fromkeys(arrays, ""), None
    if activations is not None:
        arrays, missing = _with_inputs(found, arrays, calls or [], activations)
        fallbacks = missing | fallbacks

    def built(arrays: Arrays) -> Any:
        return found.put({name: _trainable(targets[name], each) for name, each in arrays.items()}
                         if train else arrays)  # fmt: skip

    small = built(arrays)
    if activations is not None and calls is not None:
        weights_alone = compared(call_of(before), call_of(built(plain)), calls)
    if isinstance(before, Module):
        known = {target.name for target, _ in targets_of_layers([("", before)])}
        for name, why in other_arrays(before, {*arrays, *left}):
            left[name] = "not chosen" if name in known else why
    sizes = _sizes(found)
    report = QuantizationReport(
        tuple(
            dataclasses.replace(
                _leaf(target, arrays[target.name]),
                sensitivity=sensitivity.get(target.name),
                rounding="gptq" if target.name in corrected else "nearest",
                activations=None if target.name in missing else activations,
            )
            for target in found.targets
            if target.name in arrays
        ),
        {name: left[name] for name in sorted(left, key=lambda name: -sizes.get(name, 0))},
        fallbacks,
        tree_bytes(tree_leaves(_arrays(before))),
        tree_bytes(tree_leaves(_arrays(small))),
        None if metric is None else (_measured(metric, before), _measured(metric, small)),
        None if calls is None else compared(call_of(before), call_of(small), calls),
        weights_alone,
        kept_bytes={name: sizes.get(name, 0) for name in left},
    )
    return small, report


def _sizes(net: _Net) -> dict[str, int]:
    if not isinstance(net.whole, Module):
        return {target.name: target.weight.nbytes for target in net.targets}
    return {name: leaf.nbytes for name, leaf in named_leaves(net.whole) if is_array(leaf)}


class _IntegerOptions(NamedTuple):
    """The options that decide what integers become."""

    bits: int
    group: int | None
    scheme: str
    rounding: str
    budget: float | None
    train: bool

    def asks_for_others(self, form: Form) -> bool:
        """Whether they ask for other integers than those of a trained weight."""
        new = self.train or self.rounding != "nearest" or self.budget is not None
        like = ((8, form.bits), (None, form.group), ("symmetric", form.scheme))
        return new or any(own not in known for own, known in zip(self[:3], like))


def _trained_and_others(
    net: _Net, wanted: _IntegerOptions
) -> tuple[Arrays, dict[str, QuantizableArray], dict[str, str]]:
    """The arrays of rounded weights, the weights to be quantized, and why others are not."""
    arrays: Arrays = {}
    targets: dict[str, QuantizableArray] = {}
    left: dict[str, str] = {}
    for target in net.targets:
        if isinstance(target.weight, QuantizedArray):
            raise QuantizationError(
                "The net is already quantized.",
                where=target.name,
                got=repr(target.weight),
                write="quantize the original net, quantize(net, at=...) for other parts, or "
                "quantization.dequantize(net) first",
            )
        if isinstance(target.weight, RoundedArray):
            if wanted.asks_for_others(target.weight.form):
                raise QuantizationError(
                    "The integers of this weight are trained, and stay as they are.",
                    where=target.name,
                    got=f"{target.weight!r}, and other options of quantize",
                    write="quantize(net) of the trained net, or these options for the net before",
                )
            arrays[target.name] = target.weight.quantized()
        elif why := why_not(target):
            left[target.name] = why
        else:
            targets[target.name] = target
    return arrays, targets, left


def _trainable(target: QuantizableArray, array: QuantizedArray) -> RoundedArray:
    return RoundedArray(target.weight, array.form, target.reduced, array.inputs, array.outputs)


def _by_inputs(
    net: _Net, targets: Mapping[str, QuantizableArray], arrays: Arrays, calls: list[Any]
) -> Arrays:
    """The arrays that are rounded for the inputs of their products."""
    in_8_bits = {name: _quantized(target, 8)[0] for name, target in targets.items()}
    near = {**arrays, **in_8_bits}  # so that inputs are nearly those of the float net
    moments = InputMoments()
    numbers = observe(
        {name: (near[name], target.rank) for name, target in targets.items() if is_matrix(target)},
        lambda observed: call_of(net.put({**near, **observed})),
        calls,
        moments,
    )
    corrected = {}
    for name, own in numbers.items():
        seen = [moments.sums[int(each)] for each in own.reshape(-1) if int(each) in moments.sums]
        size = targets[name].weight.shape[targets[name].axis]
        # All products were seen, with what is summed in the last axis of their inputs.
        is_seen = len(seen) == own.size and all(len(each) == size for each in seen)
        if is_seen and arrays[name].form.scheme != "float":
            corrected[name] = rounded_by_inputs(targets[name], arrays[name], seen)
    return corrected


def _with_inputs(
    net: _Net, arrays: Arrays, calls: list[Any], activations: str
) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays with rounded inputs; and those without, with reasons."""
    inputs: dict[str, Any] = {name: DynamicInputs() for name in arrays}
    outputs: dict[str, Any] = {}
    if activations != "dynamic":
        of_layers = {target.name: (arrays[target.name], target.rank)
                     for target in net.targets if target.name in arrays}  # fmt: skip
        rebuilt = lambda observed: call_of(net.put(observed))  # noqa: E731
        inputs, outputs = static_ranges(of_layers, rebuilt, calls, activations)
    why = "its inputs stay as they are: no batch reached a product with it"
    return {
        name: each.replace(inputs=inputs.get(name), outputs=outputs.get(name))
        for name, each in arrays.items()
    }, {name: why for name in arrays if name not in inputs}


def _check_budget(
    budget: float,
    calls: list[Any] | None,
    metric: Callable[[Any], Any] | None,
    bits: int,
    group: int | None,
    scheme: str,
) -> None:
    is_number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    is_other = bits != 8 or group is not None or scheme == "float"
    if (calls is None and metric is None) or is_other or not is_number or budget < 0:
        raise InvalidArgumentError(
            "A budget requires batches or a metric, and chooses the bits itself.",
            where="quantize(budget=...)",
            got=f"budget={budget!r}, bits={bits}, group={group}, scheme={scheme!r}",
            write="quantize(net, batches, budget=0.01), or quantize(net, metric=..., budget=0.01)",
        )


def _loss(
    net: Net, calls: list[Any] | None, metric: Callable[[Any], Any] | None
) -> Callable[[Any], float]:
    """What other arrays of a net lose, by the metric or else by the outputs."""
    if metric is None:
        return loss_of_outputs(call_of(net), calls or [])
    before = _measured(metric, net)
    whole = (lambda arrays: arrays) if isinstance(net, Module) else lambda arrays: (arrays, net[1])
    return lambda arrays: before - _measured(metric, whole(arrays))


def _measured(metric: Callable[[Any], Any], net: Net) -> float:
    return float(metric(net))


def dequantize(net: Module) -> Any:
    """Returns a net, or a tree, with a float array in place of each `QuantizedArray`.

    Example:
        >>> import pax_export as pax
        >>> small, _ = pax.quantize(pax.Linear(8, 4))
        >>> pax.quantization.dequantize(small).weight.dtype
        dtype('float32')
    """
    return tree_map(
        lambda each: each.dequantized() if isinstance(each, ArrayLike) else each,
        net,
        is_leaf=lambda each: isinstance(each, ArrayLike),
    )


def _check(wanted: _IntegerOptions, activations: str | None, has_batches: bool) -> None:
    bits, group, scheme = wanted[:3]
    known = isinstance(scheme, str) and (scheme, bits) in LEVELS and not isinstance(bits, bool)
    grouped = group is None or (type(group) is int and group == GROUP and scheme != "float")
    if not (known and grouped):
        raise InvalidArgumentError(
            "There are no integers with these bits, groups and scheme.",
            where="quantize(bits, group, scheme)",
            got=f"bits={bits!r}, group={group!r}, scheme={scheme!r}",
            write=" or ".join(f"bits={bits}, scheme={scheme!r}" for scheme, bits in LEVELS)
            + f"; group=None, or {GROUP} for integers",
        )
    checked_choice(wanted.rounding, ("nearest", "gptq"), "quantize(rounding=...)")
    if activations is not None:
        checked_choice(activations, METHODS, "quantize(activations=...)")
    is_gptq = wanted.rounding == "gptq"
    needs_batches = is_gptq or activations not in (None, "dynamic")
    if (needs_batches and not has_batches) or (is_gptq and wanted.train):
        raise InvalidArgumentError(
            "Static scales of activations and GPTQ require batches, and GPTQ is not for training.",
            where="quantize(batches=...)",
            got="no batches" if not has_batches else "train=True",
            write="quantize(net, [x], ...); activations='dynamic'",
        )


def _of_module(net: Module, at: Selector) -> _Net:
    modules = [("", net)] if at is None else chosen_modules(net, at, "quantize")
    found = list(targets_of_layers(modules))

    def put(arrays: Mapping[str, Any]) -> Any:
        by_layer: dict[int, dict[str, Any]] = defaultdict(dict)
        for target, own in found:
            if target.name in arrays:
                by_layer[id(own.layer)][own.name] = arrays[target.name]
        changes = {layer: partial(_with_arrays, arrays=each) for layer, each in by_layer.items()}
        return apply_changes(net, changes)

    return _Net(net, [target for target, _ in found], put)


def _with_arrays(layer: Module, *, arrays: dict[str, Any]) -> Any:
    return layer.replace(**arrays)


def _of_pair(net: Any, at: Selector, calls: list[Any] | None) -> _Net:
    has_function = isinstance(net, tuple) and len(net) == 2 and callable(net[1])
    params, function = pair_of(net)
    if not any(map(is_array, tree_leaves(params))):
        raise InvalidArgumentError(
            "A function without params has no weights to quantize.",
            where="quantize(net)",
            got=f"the function {getattr(function, '__name__', '')}",
            write="a module, a model of another framework, or (params, function)",
        )
    if at is not None:
        raise InvalidArgumentTypeError(
            "Only modules of pax_export have parts to quantize.",
            where="quantize(at=...)",
            got=f"{type(net).__name__} with at={at!r}"[:200],
            write="quantize(net, batches), or quantize(module, at=...)",
        )
    if calls is None and not has_function:
        raise InvalidArgumentError(
            "A third-party model requires batches.",
            where="quantize(batches=...)",
            got=f"{type(net).__name__} without batches",
            write="quantize(net, [x])",
        )
    of_call = None if calls is None else targets_of_function(params, function, calls[0])
    targets = list(of_call or targets_of_tree(params))

    def put(arrays: Mapping[str, Any]) -> Any:
        new = {id(each.weight): arrays[each.name] for each in targets if each.name in arrays}
        is_leaf = lambda each: isinstance(each, RoundedArray)  # noqa: E731
        return tree_map(lambda leaf: new.get(id(leaf), leaf), params, is_leaf=is_leaf), function

    return _Net((params, function), targets, put)


def _quantized(
    target: QuantizableArray, bits: int, group: int | None = None, scheme: str = "symmetric"
) -> tuple[Any, str]:
    """The integers of a place, and why they are not those that were asked for."""
    weight = jnp.asarray(target.weight)
    dtype = np.dtype(weight.dtype).name
    why = ""
    if bits == 4 or group is not None:
        form = Form(bits, GROUP, target.axis, dtype, scheme if bits == 4 else "symmetric")
        size = weight.shape[target.axis]
        if size % GROUP:
            why = f"int8 for each channel: {size} is no multiple of {GROUP}"
        elif not fits_halves(weight, form):
            why = "int8 for each channel: scales of groups are outside of float16"
        else:
            return rounded(weight, form, target.reduced), ""
    whole = scheme if scheme == "float" else "symmetric"
    return rounded(weight, Form(8, None, target.axis, dtype, whole), target.reduced), why


def _leaf(target: QuantizableArray, array: QuantizedArray) -> QuantizedLeaf:
    weight = target.weight.weight if isinstance(target.weight, RoundedArray) else target.weight
    largest, norm, norm_of_weight = map(float, _errors(weight, array.form, *array.stored))
    return QuantizedLeaf(
        target.name,
        tuple(target.weight.shape),
        array.form.bits,
        array.form.group,
        target.weight.nbytes,
        array.nbytes,
        largest,
        norm / norm_of_weight if norm_of_weight else 0.0,
        scheme=array.form.scheme,
    )


@partial(jax.jit, static_argnums=1)
def _errors(weight: Array, form: Form, *stored: Array) -> tuple[Any, Any, Any]:
    """The largest error of a quantized weight, its norm, and that of the weight."""
    numbers = weight.astype(jnp.float32)
    apart = dequantized(*stored, form=form).astype(jnp.float32) - numbers
    return jnp.max(jnp.abs(apart)), jnp.linalg.norm(apart), jnp.linalg.norm(numbers)


def _arrays(net: Net) -> Any:
    return net if isinstance(net, Module) else net[0]
