"""quantize: replaces the weights of a net by low-bit integers."""

from __future__ import annotations

import dataclasses
import numbers
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    QuantizationError,
)
from pax_export._foundations.types import Array, PyTree
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
from pax_export.quantization._calibrate import METHODS, observe, static_ranges
from pax_export.quantization._compare import call_of, checked, compared, loss_of_outputs
from pax_export.quantization._functions import RoundedArray, pair_of, places_of_function
from pax_export.quantization._places import (
    QuantizableArray,
    other_arrays,
    places_of_layers,
    places_of_tree,
    why_not,
)
from pax_export.quantization._report import (
    ChosenBits,
    QuantizationReport,
    QuantizedLeaf,
    choose,
    tree_bytes,
)
from pax_export.quantization._rounding import (
    LEVELS,
    InputMoments,
    fits_halves,
    is_matrix,
    rounded,
    rounded_by_inputs,
)

Wish = Callable[[QuantizableArray], tuple[Any, str]]


@dataclasses.dataclass
class _Found:
    """What was quantized; why other arrays were not, or not as asked for, by name."""

    leaves: list[QuantizedLeaf] = dataclasses.field(default_factory=list)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    fallbacks: dict[str, str] = dataclasses.field(default_factory=dict)


def quantize(
    net: Module,
    batches: object = None,
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
        InvalidArgumentTypeError: not a net; a metric that returns no number.
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
    _check(4 if budget is not None and scheme == "asymmetric" else bits, group, scheme)
    _check_activations(activations, batches)
    _check_rounding(rounding, batches, train)
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
    if isinstance(net, Module):
        of_net, places = _module, [place for place, _ in places_of_layers([("", net)])]
    else:
        net, places = _pair_and_places(net, at, calls)
        of_net = partial(_params, places)
    wish = partial(_quantized, bits=bits, group=group, scheme=scheme)
    small, found = of_net(net, at, wish, train)
    leaves = found.leaves
    if not leaves:
        raise InvalidArgumentError(
            "The net has no weights to quantize.",
            where="quantize",
            got=", ".join(f"{name}: {why}" for name, why in found.kept.items())[:300]
            or repr(net)[:100],
            write="a net with Linear, Embed or convolutions, or (params, function)",
        )
    if budget is not None:
        chosen_bits = _chosen(net, places, calls, metric, budget, leaves, bits, group, scheme)
        wish = lambda place: _quantized(  # noqa: E731
            place, chosen_bits.bits.get(place.name, 8), None, scheme
        )
        small, found = of_net(net, at, wish, train)
        lost = chosen_bits.sensitivity
        leaves = [
            dataclasses.replace(each, sensitivity=lost.get(each.name)) for each in found.leaves
        ]
    if rounding == "gptq":
        wish, corrected = _by_inputs(partial(of_net, net, at), wish, calls or [])
        small, found = of_net(net, at, wish, train)
        lost = {each.name: each.sensitivity for each in leaves}
        leaves = [
            dataclasses.replace(
                each,
                sensitivity=lost[each.name],
                rounding=rounding if each.name in corrected else "nearest",
            )
            for each in found.leaves
        ]
    weights_alone = None
    if activations is not None:
        plain = small
        wish, missing = _with_inputs(partial(of_net, net, at), wish, calls or [], activations)
        small, found = of_net(net, at, wish, train)
        found.fallbacks = missing | found.fallbacks
        leaves = [
            each if each.name in missing else dataclasses.replace(each, activations=activations)
            for each in leaves
        ]
        if calls is not None:
            weights_alone = compared(call_of(net), call_of(plain), calls)
    sizes, kept = _sizes(net, places), found.kept
    report = QuantizationReport(
        tuple(leaves),
        {name: kept[name] for name in sorted(kept, key=lambda name: -sizes.get(name, 0))},
        found.fallbacks,
        tree_bytes(tree_leaves(_arrays(net))),
        tree_bytes(tree_leaves(_arrays(small))),
        None if metric is None else (_measured(metric, net), _measured(metric, small)),
        None if calls is None else compared(call_of(net), call_of(small), calls),
        weights_alone,
        kept_bytes={name: sizes.get(name, 0) for name in kept},
    )
    return small, report


def _sizes(net: Any, places: list[QuantizableArray]) -> dict[str, int]:
    """The sizes of arrays in bytes, by name."""
    if not isinstance(net, Module):
        return {place.name: place.weight.nbytes for place in places}
    return {name: leaf.nbytes for name, leaf in named_leaves(net) if is_array(leaf)}


def _by_inputs(of_net: Any, wish: Wish, calls: list[Any]) -> tuple[Wish, set[str]]:
    """The arrays of a wish, rounded for the inputs of their products; the names of those."""
    places: dict[str, QuantizableArray] = {}

    def in_8_bits(place: QuantizableArray) -> tuple[Any, str]:
        places[place.name] = place
        return _quantized(place, 8)  # so that inputs are nearly those of the float net

    _, arrays, rebuilt = _noted(of_net, in_8_bits)
    moments = InputMoments()
    numbers = observe(
        {name: each for name, each in arrays.items() if is_matrix(places[name])},
        lambda observed: rebuilt(
            {**{name: each for name, (each, _) in arrays.items()}, **observed}
        ),
        calls,
        moments,
    )
    sums = {
        name: [moments.sums[int(each)] for each in own.reshape(-1)]
        for name, own in numbers.items()
        if all(_fits(moments.sums.get(int(each)), places[name]) for each in own.reshape(-1))
    }

    def corrected(place: QuantizableArray) -> tuple[Any, str]:
        array, fallback = wish(place)
        if place.name in sums and array.form.scheme != "float":
            array = rounded_by_inputs(place, array, sums[place.name])
        return array, fallback

    return corrected, set(sums)


def _fits(sums: Any, place: QuantizableArray) -> bool:
    """Whether a product was seen, with what is summed in the last axis of its inputs."""
    return sums is not None and len(sums) == place.weight.shape[place.axis]


def _noted(of_net: Any, wish: Wish) -> tuple[Any, Any, Any]:
    """Resolves a selection: its values, its arrays with axes per layer, and a rebuild function."""
    made: dict[str, tuple[Any, str]] = {}
    arrays: dict[str, tuple[Any, int]] = {}

    def noted(place: QuantizableArray) -> tuple[Any, str]:
        made[place.name] = array, _ = wish(place)
        arrays[place.name] = array, place.rank
        return made[place.name]

    def rebuilt(observed: Any) -> Callable[..., Any]:
        return call_of(of_net(lambda place: (observed[place.name], ""), False)[0])

    of_net(noted, False)
    return made, arrays, rebuilt


def _with_inputs(
    of_net: Any, wish: Wish, calls: list[Any], activations: str
) -> tuple[Wish, dict[str, str]]:
    """Returns the arrays with rounded inputs; and those without, with reasons."""
    made, arrays, rebuilt = _noted(of_net, wish)
    if activations == "dynamic":
        inputs: Any = {name: DynamicInputs() for name in arrays}
        outputs: Any = {}
    else:
        inputs, outputs = static_ranges(arrays, rebuilt, calls, activations)

    def rounding(place: QuantizableArray) -> tuple[Any, str]:
        array, fallback = made[place.name]
        return array.replace(
            inputs=inputs.get(place.name), outputs=outputs.get(place.name)
        ), fallback

    why = "its inputs stay as they are: no batch reached a product with it"
    return rounding, {name: why for name in arrays if name not in inputs}


def _chosen(
    net: Any,
    places: list[QuantizableArray],
    calls: Any,
    metric: Any,
    budget: float,
    leaves: Any,
    bits: int,
    group: int | None,
    scheme: str,
) -> ChosenBits:
    """The bits of each weight within a budget."""
    is_other = bits != 8 or group is not None or scheme == "float"
    if (calls is None and metric is None) or is_other or not _is_amount(budget):
        raise InvalidArgumentError(
            "A budget requires batches or a metric, and chooses the bits itself.",
            where="quantize(budget=...)",
            got=f"budget={budget!r}, bits={bits}, group={group}, scheme={scheme!r}",
            write="quantize(net, batches, budget=0.01), or quantize(net, metric=..., budget=0.01)",
        )
    names = {leaf.name for leaf in leaves}
    places = [place for place in places if place.name in names and is_array(place.weight)]
    is_module = isinstance(net, Module)
    whole = (lambda arrays: arrays) if is_module else (lambda arrays: (arrays, net[1]))
    if metric is None:
        lost = loss_of_outputs(call_of(net), calls or [])
    else:
        before = _measured(metric, net)
        lost = lambda arrays: before - _measured(metric, whole(arrays))  # noqa: E731
    rounded = lambda place, bits: _quantized(place, bits, None, scheme)[0]  # noqa: E731
    return choose(_arrays(net), places, rounded, lost, budget)


def _is_amount(budget: object) -> bool:
    return isinstance(budget, numbers.Real) and not isinstance(budget, bool) and float(budget) >= 0


def _measured(metric: Callable[[Any], Any], net: PyTree) -> float:
    """What the metric of a user says of a net, a number."""
    value: Any = metric
    if callable(metric):
        value = metric(net)
        with suppress(TypeError, ValueError):
            return float(value)
    raise InvalidArgumentTypeError(
        "The metric must be a function that returns a number.",
        where="quantize(metric=...)",
        got=f"{type(value).__name__}: {value!r}"[:120],
        write="a function from a net to a number that is larger for a better net",
    )


def dequantize(net: Module) -> Any:
    """Returns a net, or a tree, with a float array in place of each `QuantizedArray`.

    Example:
        >>> import pax_export as pax
        >>> small, _ = pax.quantize(pax.Linear(8, 4))
        >>> pax.quantization.dequantize(small).weight.dtype
        dtype('float32')
    """
    return jax.tree_util.tree_map(
        lambda each: each.dequantized() if isinstance(each, ArrayLike) else each,
        net,
        is_leaf=lambda each: isinstance(each, ArrayLike),
    )


def _check(bits: object, group: object, scheme: object) -> None:
    if isinstance(bits, bool) or bits not in (4, 8):
        raise InvalidArgumentError(
            "bits must be 8 or 4.", where="quantize(bits=...)", got=repr(bits), write="bits=8"
        )
    if group not in (None, GROUP) or isinstance(group, bool):
        raise InvalidArgumentError(
            f"A group must have {GROUP} elements.",
            where="quantize(group=...)",
            got=repr(group),
            write=f"group={GROUP}, or None",
        )
    known = isinstance(scheme, str) and (scheme, bits) in LEVELS
    if not known or (scheme == "float" and group is not None):
        raise InvalidArgumentError(
            "The scheme is unknown, or does not support these bits or groups.",
            where="quantize(scheme=...)",
            got=f"scheme={scheme!r}, bits={bits}, group={group}",
            write=" or ".join(f"bits={bits}, scheme={scheme!r}" for scheme, bits in LEVELS),
        )


def _check_activations(activations: str | None, batches: object) -> None:
    if activations is None:
        return
    checked_choice(activations, METHODS, "quantize(activations=...)")
    if activations != "dynamic" and batches is None:
        raise InvalidArgumentError(
            "Static scales of activations require batches.",
            where="quantize(activations=...)",
            got=f"activations={activations!r} without batches",
            write=f"quantize(net, [x], activations={activations!r}), or activations='dynamic'",
        )


def _check_rounding(rounding: str, batches: object, train: bool) -> None:
    checked_choice(rounding, ("nearest", "gptq"), "quantize(rounding=...)")
    if rounding == "gptq" and (batches is None or train):
        raise InvalidArgumentError(
            "GPTQ requires batches, and is not for training.",
            where="quantize(rounding='gptq')",
            got="train=True" if train else "no batches",
            write="quantize(net, [x], rounding='gptq')",
        )


def _module(net: Module, at: Selector, wish: Wish, train: bool) -> tuple[Any, _Found]:
    modules = [("", net)] if at is None else chosen_modules(net, at, "quantize")
    done = _Found()
    arrays: dict[int, dict[str, Any]] = defaultdict(dict)
    for place, own in places_of_layers(modules):
        array = _one(place, wish, train, done)
        if array is not None:
            arrays[id(own.layer)][own.name] = array
    changes = {layer: partial(_with_arrays, arrays=each) for layer, each in arrays.items()}
    quantized = {each.name for each in done.leaves}
    known = {place.name for place, _ in places_of_layers([("", net)])}
    for name, why in other_arrays(net, {*quantized, *done.kept}):
        done.kept[name] = "not chosen" if name in known else why
    return apply_changes(net, changes), done


def _with_arrays(layer: Module, *, arrays: dict[str, Any]) -> Any:
    return layer.replace(**arrays)


def _pair_and_places(net: PyTree, at: object, calls: PyTree) -> tuple[Any, list[QuantizableArray]]:
    """Params and function of a net, and the arrays that are quantized."""
    has_function = isinstance(net, tuple) and len(net) == 2 and callable(net[1])
    pair = pair_of(net)
    if not any(map(is_array, tree_leaves(pair[0]))):
        raise InvalidArgumentError(
            "A function without params has no weights to quantize.",
            where="quantize(net)",
            got=f"the function {getattr(pair[1], '__name__', '')}",
            write="a module, a model of another framework, or (params, function)",
        )
    if at is not None:
        raise InvalidArgumentTypeError(
            "Only modules of pax_export have parts to quantize.",
            where="quantize(at=...)",
            got=f"{type(net).__name__} with at={at!r}"[:200],
            write="quantize(net, batches), or quantize(module, at=...)",
        )
    if calls is not None:
        return pair, list(places_of_function(*pair, calls[0]))
    if not has_function:
        raise InvalidArgumentError(
            "A third-party model requires batches.",
            where="quantize(batches=...)",
            got=f"{type(net).__name__} without batches",
            write="quantize(net, [x])",
        )
    return pair, list(places_of_tree(pair[0]))


def _params(
    places: list[QuantizableArray], net: Any, at: object, wish: Wish, train: bool
) -> tuple[Any, _Found]:
    params, function = net
    done = _Found()
    made = {id(place.weight): _one(place, wish, train, done) for place in places}

    def new(leaf: object) -> Any:
        found = made.get(id(leaf))
        return leaf if found is None else found

    is_leaf = lambda each: isinstance(each, RoundedArray)  # noqa: E731
    return (jax.tree_util.tree_map(new, params, is_leaf=is_leaf), function), done


def _one(place: QuantizableArray, wish: Wish, train: bool, done: _Found) -> Any:
    """The quantized array of a place, or None; notes which it is."""
    if isinstance(place.weight, QuantizedArray):
        raise QuantizationError(
            "The net is already quantized.",
            where=place.name,
            got=repr(place.weight),
            write="quantize the original net, quantize(net, at=...) for other parts, or "
            "quantization.dequantize(net) first",
        )
    trained = place.weight if isinstance(place.weight, RoundedArray) else None
    if trained is not None:
        if train:
            raise QuantizationError(
                f"The net is already trained with {trained.form.bits} bits.",
                where=place.name,
                got=repr(trained),
                write="quantize(net) of the trained net, or train=True for the net before",
            )
        place = place._replace(weight=trained.weight)
    why = why_not(place)
    if why:
        done.kept[place.name] = why
        return None
    array, fallback = wish(place) if trained is None else (trained.quantized(), "")
    if fallback:
        done.fallbacks[place.name] = fallback
    done.leaves.append(_leaf(place, array))
    if train:
        return RoundedArray(place.weight, array.form, place.reduced, array.inputs, array.outputs)
    return array


def _quantized(
    place: QuantizableArray, bits: int, group: int | None = None, scheme: str = "symmetric"
) -> tuple[Any, str]:
    """The integers of a place, and why they are not those that were asked for."""
    weight = jnp.asarray(place.weight)
    dtype = np.dtype(weight.dtype).name
    why = ""
    if bits == 4 or group is not None:
        form = Form(bits, GROUP, place.axis, dtype, scheme if bits == 4 else "symmetric")
        size = weight.shape[place.axis]
        if size % GROUP:
            why = f"int8 for each channel: {size} is no multiple of {GROUP}"
        elif not fits_halves(weight, form):
            why = "int8 for each channel: scales of groups are outside of float16"
        else:
            return rounded(weight, form, place.reduced), ""
    whole = scheme if scheme == "float" else "symmetric"
    return rounded(weight, Form(8, None, place.axis, dtype, whole), place.reduced), why


def _leaf(place: QuantizableArray, array: QuantizedArray) -> QuantizedLeaf:
    largest, norm, norm_of_weight = map(float, _errors(place.weight, array.form, *array.stored))
    return QuantizedLeaf(
        place.name,
        tuple(place.weight.shape),
        array.form.bits,
        array.form.group,
        place.weight.nbytes,
        array.nbytes,
        largest,
        norm / norm_of_weight if norm_of_weight else 0.0,
        scheme=array.form.scheme,
    )


@partial(jax.jit, static_argnums=1)
def _errors(weight: Array, form: Form, *stored: Any) -> tuple[Any, Any, Any]:
    """The largest error of a quantized weight, its norm, and that of the weight."""
    numbers = weight.astype(jnp.float32)
    apart = dequantized(*stored, form=form).astype(jnp.float32) - numbers
    return jnp.max(jnp.abs(apart)), jnp.linalg.norm(apart), jnp.linalg.norm(numbers)


def _arrays(net: Module) -> Any:
    return net if isinstance(net, Module) else net[0]
