"""quantize: replaces the weights of a net by low-bit integers."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.tree_util import tree_map

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import InvalidArgumentError, QuantizationError
from pax_export._foundations.types import PyTree
from pax_export.core import Module, Selection, Selector
from pax_export.precision.quantized import (
    GROUP,
    ArrayLike,
    DynamicInputs,
    Form,
    QuantizedArray,
    StaticInputs,
)
from pax_export.quantization._batches import (
    METHODS,
    call_of,
    checked,
    compared,
    loss_of_outputs,
    observe,
    static_ranges,
)
from pax_export.quantization._functions import WeightsOfFunction
from pax_export.quantization._report import QuantizationReport, QuantizedLeaf, bytes_of, choose
from pax_export.quantization._rounding import (
    LEVELS,
    InputMoments,
    RoundedArray,
    quantized,
    rounded_by_inputs,
)
from pax_export.quantization._weights import (
    Left,
    Net,
    QuantizableArray,
    WeightsOfModule,
    leaves_of,
)

Weights = WeightsOfModule | WeightsOfFunction
Arrays = dict[str, QuantizedArray]
Targets = dict[str, QuantizableArray]
Calls = list[tuple[Any, ...]]


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
    options = _IntegerOptions(bits, group, scheme, activations, rounding, budget, train)
    options.check(batches is not None, metric is not None)
    calls = [] if batches is None else checked(batches)
    if isinstance(net, Selection):
        if at is not None:
            raise InvalidArgumentError(
                "The selection already defines the quantized parts.",
                where="quantize(at=...)",
                got=repr(at)[:100],
                write="quantize(net.at(...)), or quantize(net, at=...)",
            )
        net, at = net.root, net
    is_module = isinstance(net, Module)
    weights = WeightsOfModule(net, at) if is_module else WeightsOfFunction(net, at, calls)
    before = call_of(weights.whole)
    arrays, targets, left = _trained_and_others(weights, options)
    of_weights, sensitivity = _chosen_bits(weights, before, targets, options, calls, metric)
    nearest = {name: quantized(targets[name], of_weights[name], group, scheme) for name in targets}
    arrays |= {name: array for name, (array, _) in nearest.items()}
    corrected = _by_inputs(weights, targets, arrays, calls) if rounding == "gptq" else {}
    arrays |= corrected

    def built(arrays: Arrays) -> Net:
        return weights.put(_trainable(targets, arrays) if train else arrays)

    small = float_inputs = built(arrays)
    missing: dict[str, str] = {}
    if activations is not None:
        arrays, missing = _with_inputs(weights, arrays, calls, activations)
        small = built(arrays)
    left |= weights.others({*arrays, *left})
    kept = sorted(left.items(), key=lambda each: -each[1].nbytes)
    return small, QuantizationReport(
        leaves=tuple(
            QuantizedLeaf.of(
                target,
                arrays[name],
                sensitivity=sensitivity.get(name),
                activations=None if name in missing else activations,
                rounding="gptq" if name in corrected else "nearest",
            )
            for target in weights.targets
            if (name := target.name) in arrays
        ),
        kept={name: each.why for name, each in kept},
        fallbacks=missing | {name: why for name, (_, why) in nearest.items() if why},
        before=bytes_of(weights.whole),
        after=bytes_of(small),
        metric=None if metric is None else (float(metric(weights.whole)), float(metric(small))),
        difference=compared(before, call_of(small), calls) if calls else None,
        weights_alone=compared(before, call_of(float_inputs), calls)
        if calls and activations
        else None,
        kept_bytes={name: each.nbytes for name, each in kept},
    )


@dataclass(frozen=True)
class _IntegerOptions:
    """The options of all weights."""

    bits: int
    group: int | None
    scheme: str
    activations: str | None
    rounding: str
    budget: float | None
    train: bool

    def check(self, has_batches: bool, has_metric: bool) -> None:
        """Raises for options that there are not, or that exclude each other."""
        bits, group, scheme = self.bits, self.group, self.scheme
        if self.budget is not None and bits == 8 and scheme == "asymmetric":
            bits = 4  # of the weights that the budget allows it
        is_known = isinstance(scheme, str) and (scheme, bits) in LEVELS
        if not is_known or group not in (None, GROUP) or (group and scheme == "float"):
            raise InvalidArgumentError(
                "There are no integers with these bits, groups and scheme.",
                where="quantize(bits, group, scheme)",
                got=f"bits={bits!r}, group={group!r}, scheme={scheme!r}",
                write=" or ".join(f"bits={bits}, scheme={scheme!r}" for scheme, bits in LEVELS)
                + f"; group=None, or {GROUP} for integers",
            )
        checked_choice(self.rounding, ("nearest", "gptq"), "quantize(rounding=...)")
        if self.activations is not None:
            checked_choice(self.activations, METHODS, "quantize(activations=...)")
        is_gptq = self.rounding == "gptq"
        needs_batches = is_gptq or self.activations not in (None, "dynamic")
        if (needs_batches and not has_batches) or (is_gptq and self.train):
            raise InvalidArgumentError(
                "Static scales and GPTQ require batches, and GPTQ is not for training.",
                where="quantize(batches=...)",
                got="train=True" if has_batches else "no batches",
                write="quantize(net, [x], ...); activations='dynamic'",
            )
        if self.budget is None:
            return
        is_number = isinstance(self.budget, numbers.Real) and self.budget >= 0
        is_other = self.bits != 8 or group is not None or scheme == "float"
        if not is_number or is_other or not (has_batches or has_metric):
            raise InvalidArgumentError(
                "A budget requires batches or a metric, and chooses the bits itself.",
                where="quantize(budget=...)",
                got=f"budget={self.budget!r}, bits={bits}, group={group}, scheme={scheme!r}",
                write="quantize(net, batches, budget=0.01), "
                "or quantize(net, metric=..., budget=0.01)",
            )

    def ask_for_others(self, form: Form) -> bool:
        """Whether they ask for other integers than those of a trained weight."""
        new = self.train or self.rounding != "nearest" or self.budget is not None
        like = ((8, form.bits), (None, form.group), ("symmetric", form.scheme))
        own = self.bits, self.group, self.scheme
        return new or any(each not in known for each, known in zip(own, like))


def _trained_and_others(
    net: Weights, options: _IntegerOptions
) -> tuple[Arrays, Targets, dict[str, Left]]:
    """The arrays of rounded weights, the weights to be quantized, and why others are not."""
    arrays: Arrays = {}
    targets: Targets = {}
    left: dict[str, Left] = {}
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
            if options.ask_for_others(target.weight.form):
                raise QuantizationError(
                    "The integers of this weight are trained, and stay as they are.",
                    where=target.name,
                    got=f"{target.weight!r}, and other options of quantize",
                    write="quantize(net) of the trained net, or these options for the net before",
                )
            arrays[target.name] = target.weight.quantized()
        elif why := target.why_not():
            left[target.name] = Left(why, getattr(target.weight, "nbytes", 0))
        else:
            targets[target.name] = target
    if not arrays and not targets:
        kept = ", ".join(f"{name}: {each.why}" for name, each in left.items())
        raise InvalidArgumentError(
            "The net has no weights to quantize.",
            where="quantize",
            got=kept[:300] or repr(net.whole)[:100],
            write="a net with Linear, Embed or convolutions, or (params, function)",
        )
    return arrays, targets, left


def _trainable(targets: Targets, arrays: Arrays) -> dict[str, RoundedArray]:
    return {
        name: RoundedArray(
            targets[name].weight, each.form, targets[name].reduced, each.inputs, each.outputs
        )
        for name, each in arrays.items()
    }


def _chosen_bits(
    net: Weights,
    call: partial[Any],
    targets: Targets,
    options: _IntegerOptions,
    calls: Calls,
    metric: Callable[[Any], Any] | None,
) -> tuple[Mapping[str, int], Mapping[str, float]]:
    """The bits of each weight, and with a budget what it alone loses in 4 bits."""
    if options.budget is None:
        return dict.fromkeys(targets, options.bits), {}
    if metric is None:
        loss = loss_of_outputs(call, calls)
    else:
        before = float(metric(net.whole))
        loss = lambda tree: before - float(metric(net.of_leaves(tree)))  # noqa: E731
    chosen = list(targets.values())
    return choose(leaves_of(net.whole), chosen, options.scheme, loss, options.budget)


def _by_inputs(net: Weights, targets: Targets, arrays: Arrays, calls: Calls) -> Arrays:
    """The arrays that are rounded for the inputs of their products."""
    in_8_bits = {name: quantized(target, 8)[0] for name, target in targets.items()}
    near = {**arrays, **in_8_bits}  # so that inputs are nearly those of the float net
    moments = InputMoments()
    numbers = observe(
        {name: (near[name], target.rank) for name, target in targets.items() if target.is_matrix},
        lambda observed: net.put({**near, **observed}),
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
    net: Weights, arrays: Arrays, calls: Calls, activations: str
) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays with rounded inputs; and those without, with reasons."""
    inputs: Mapping[str, DynamicInputs | StaticInputs]
    inputs, outputs = {name: DynamicInputs() for name in arrays}, {}
    if activations != "dynamic":
        ranks = {each.name: each.rank for each in net.targets}
        of_layers = {name: (each, ranks[name]) for name, each in arrays.items()}
        inputs, outputs = static_ranges(of_layers, net.put, calls, activations)
    why = "its inputs stay as they are: no batch reached a product with it"
    return {
        name: each.replace(inputs=inputs.get(name), outputs=outputs.get(name))
        for name, each in arrays.items()
    }, {name: why for name in arrays if name not in inputs}


def dequantize(net: PyTree) -> Any:
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
