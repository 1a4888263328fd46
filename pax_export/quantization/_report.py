"""The report of quantized weights, and the bits that fit a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._foundations.errors import QuantizationError
from pax_export._foundations.tables import bytes_text
from pax_export._foundations.types import Array, PyTree
from pax_export.precision.quantized import Form, QuantizedArray, dequantized
from pax_export.quantization._rounding import RoundedArray, quantized
from pax_export.quantization._weights import NO_LAYER, Net, QuantizableArray, leaves_of

#: Why arrays of a user's own modules are kept, what to write, and how many bytes make it worth it.
_ALL_ARRAYS = "pax.quantize((net.eval(), lambda net, x: net(x)), [x])"
_LARGE = 1 << 16


@dataclass(frozen=True)
class QuantizedLeaf:
    """A weight that was quantized.

    Attributes:
        name: the path of the weight.
        shape: the shape of the weight.
        bits: 8 or 4.
        group: the number of neighbors that share a scale; None for one scale per channel.
        before: its size before, in bytes.
        after: its size after, with scales, in bytes.
        largest_error: the largest difference of an element.
        relative_error: the norm of the difference, relative to the norm of the array.
        sensitivity: the loss of the net with only this weight in 4 bits, if a budget was given.
        activations: the rounding of the inputs of its products; None without rounding.
        rounding: ``"nearest"`` or ``"gptq"``, which increases the error of the array and decreases
            that of products.
        scheme: ``"symmetric"``, ``"asymmetric"`` (a zero point per group) or ``"float"``.

    Example:
        >>> import pax_export as pax
        >>> _, report = pax.quantize(pax.Linear(64, 8), bits=4)
        >>> report.leaves[0].name, report.leaves[0].bits, report.leaves[0].group
        ('weight', 4, 32)
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    group: int | None
    before: int
    after: int
    largest_error: float
    relative_error: float
    sensitivity: float | None = None
    activations: str | None = None
    rounding: str = "nearest"
    scheme: str = "symmetric"

    @classmethod
    def of(cls, target: QuantizableArray, array: QuantizedArray, **others: Any) -> QuantizedLeaf:
        """Measures the errors of a quantized weight."""
        weight = target.weight.weight if isinstance(target.weight, RoundedArray) else target.weight
        largest, norm, norm_of_weight = map(float, _errors(weight, array.form, *array.stored))
        return cls(
            name=target.name,
            shape=tuple(weight.shape),
            bits=array.form.bits,
            group=array.form.group,
            before=weight.nbytes,
            after=array.nbytes,
            largest_error=largest,
            relative_error=norm / norm_of_weight if norm_of_weight else 0.0,
            scheme=array.form.scheme,
            **others,
        )

    @property
    def numbers(self) -> str:
        """The format of its numbers, such as ``"int4, groups of 32"``."""
        name = ("float" if self.scheme == "float" else "int") + str(self.bits)
        name += ", zero points" if self.scheme == "asymmetric" else ""
        return name + (f", groups of {self.group}" if self.group else "")


@partial(jax.jit, static_argnums=1)
def _errors(weight: Array, form: Form, *stored: Array) -> tuple[Any, Any, Any]:
    """The largest error of a quantized weight, its norm, and that of the weight."""
    numbers = weight.astype(jnp.float32)
    apart = dequantized(*stored, form=form).astype(jnp.float32) - numbers
    return jnp.max(jnp.abs(apart)), jnp.linalg.norm(apart), jnp.linalg.norm(numbers)


@dataclass(frozen=True)
class Difference:
    """The differences of outputs for the batches from those of the net before.

    Attributes:
        largest: the largest difference of an element.
        mean: the mean difference.
        scale: the mean size of an output of the net before.
        kl: the mean Kullback-Leibler divergence in nats, if the outputs may be logits; otherwise
            None.
        same_largest: the share of outputs with the same largest element; None as for `kl`.
        seconds: the latency of the net before and now, the minimum of several calls.

    Example:
        >>> import jax, pax_export as pax
        >>> x = jax.random.normal(jax.random.key(0), (4, 64))
        >>> found = pax.quantize(pax.Linear(64, 8), [x])[1].difference
        >>> found.mean <= found.largest < found.scale
        True
    """

    largest: float
    mean: float
    scale: float
    kl: float | None
    same_largest: float | None
    seconds: tuple[float, float]


@dataclass(frozen=True)
class QuantizationReport:
    """The report of `quantize`; it can be printed.

    Attributes:
        leaves: the weights that were quantized.
        kept: the names of the other floating-point arrays, the largest first, with reasons.
        fallbacks: the names of weights with more bits than requested, with reasons.
        before: the size of all leaves of the net, in bytes.
        after: the size of all leaves of the quantized net.
        metric: the metric before and now, if given.
        difference: the difference of the outputs, if batches were given.
        weights_alone: the same with float activations, if these are rounded.
        runtimes: by format, the difference of its runtime from jax on the same integers, with the
            latencies of the float net and this one there; measured by `pax-export quantize
            --runtime`.
        kept_bytes: the sizes of the kept arrays.

    Example:
        >>> import pax_export as pax
        >>> print(pax.quantize(pax.Linear(256, 64))[1])
        1 weights quantized, 1 arrays kept
          size        64.2 KiB to 16.5 KiB (0.257)
          weight  int8                error ...%
          kept (a vector or a number): bias 256 B
    """

    leaves: tuple[QuantizedLeaf, ...]
    kept: dict[str, str]
    fallbacks: dict[str, str]
    before: int
    after: int
    metric: tuple[float, float] | None = None
    difference: Difference | None = None
    weights_alone: Difference | None = None
    runtimes: Mapping[str, Difference] = field(default_factory=dict)
    kept_bytes: Mapping[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The losses as plain data, for the reports of exports."""
        summary: dict[str, Any] = {"bytes": [self.before, self.after]}
        if self.metric is not None:
            summary["metric"] = list(self.metric)
        if self.difference is not None:
            found = asdict(self.difference) | {"seconds": list(self.difference.seconds)}
            summary |= {name: each for name, each in found.items() if each is not None}
        return summary

    def __str__(self) -> str:
        lines = [f"{len(self.leaves)} weights quantized, {len(self.kept)} arrays kept"]
        share = self.after / max(self.before, 1)
        sizes = f"{bytes_text(self.before)} to {bytes_text(self.after)}"
        lines.append(f"  size        {sizes} ({share:.3f})")
        if self.metric is not None:
            lines.append(f"  metric      {self.metric[0]:.6g} to {self.metric[1]:.6g}")
        if self.difference is not None:
            lines += _of_outputs(self.difference)
        if self.weights_alone is not None:
            lines.append(f"  weights     alone: {_far(self.weights_alone)}")
        width = max((len(each.name) for each in self.leaves), default=0)
        for name, found in self.runtimes.items():
            times = " to ".join(f"{each * 1e3:.3g}" for each in found.seconds)
            lines.append(f"  in {name:<8} adds {_far(found)}; a call {times} ms")
        schemes = [_scheme(each) for each in self.leaves]
        of_scheme = max(20, *(len(each) + 2 for each in schemes), 0)
        for each, scheme in zip(self.leaves, schemes):
            alone = "" if each.sensitivity is None else f", loses {each.sensitivity:.2g} in 4 bits"
            error = f"error {each.relative_error:.2%}{alone}"
            lines.append(f"  {each.name:<{width}}  {scheme:<{of_scheme}}{error}")
        lines += [f"  {name}: {reason}" for name, reason in self.fallbacks.items()]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            named = ", ".join(f"{name} {bytes_text(self._bytes([name]))}" for name in names[:3])
            rest = names[3:]
            more = f" and {len(rest)} more, {bytes_text(self._bytes(rest))}" if rest else ""
            lines.append(f"  kept ({reason}): {named}{more}")
            if reason == NO_LAYER and self._bytes(names) > _LARGE:
                lines.append(f"    fix: {_ALL_ARRAYS}, which quantizes what calls multiply with")
        return "\n".join(lines)

    def _bytes(self, names: list[str]) -> int:
        return sum(self.kept_bytes.get(name, 0) for name in names)


def _scheme(leaf: QuantizedLeaf) -> str:
    inputs = f", {leaf.activations} inputs" if leaf.activations else ""
    return leaf.numbers + (", gptq" if leaf.rounding == "gptq" else "") + inputs


def _of_outputs(found: Difference) -> list[str]:
    lines = [f"  outputs     differ by {_far(found)}"]
    if found.kl is not None and found.same_largest is not None:
        lines.append(f"  as logits   KL {found.kl:.3g} nats, {found.same_largest:.2%} same largest")
    before, after = found.seconds
    return [*lines, f"  a call      {before * 1e3:.3g} to {after * 1e3:.3g} ms in jax"]


def _far(found: Difference) -> str:
    return f"{found.largest:.3g} at most, {found.mean:.3g} in the mean, of {found.scale:.3g}"


def bytes_of(net: Net) -> int:
    """The size of all arrays of a net."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(leaves_of(net)))


# --- Chooses weights for 4 bits, by the loss of each and of all of them --------------------------

#: The loss relative to the quantized net.
Loss = Callable[[Any], float]


class ChosenBits(NamedTuple):
    """The bits of weights by name, and the loss of each alone in 4 bits."""

    bits: Mapping[str, int]
    sensitivity: Mapping[str, float]


def choose(
    arrays: PyTree,
    targets: Sequence[QuantizableArray],
    scheme: str,
    loss: Loss,
    budget: float,
) -> ChosenBits:
    """Chooses as many weights for 4 bits as the budget allows; the others have 8."""
    leaves, treedef = jax.tree_util.tree_flatten(arrays)
    at: dict[int, list[int]] = {}  # a tied weight is at several
    for number, leaf in enumerate(leaves):
        at.setdefault(id(leaf), []).append(number)
    numbers = {
        (target.name, bits): quantized(target, bits, scheme=scheme)[0].dequantized()
        for target in targets
        for bits in (4, 8)
    }

    def lost(bits: Mapping[str, int]) -> float:
        changed = list(leaves)
        for target in targets:
            if target.name in bits:
                for number in at[id(target.weight)]:
                    changed[number] = numbers[target.name, bits[target.name]]
        return loss(treedef.unflatten(changed))

    every = {target.name: 8 for target in targets}
    least = lost(every)
    if not least <= budget:
        alone = {name: lost({name: 8}) for name in every}
        worst = sorted(alone, key=lambda name: -alone[name])[:3]
        raise QuantizationError(
            "The budget cannot be met: the net loses more with 8 bits for every weight.",
            where="quantize(budget=...)",
            got=f"budget={budget:.3g}; {least:.3g} with 8 bits, most of it by {', '.join(worst)}",
            write=f"budget={least * 1.05:.2g}, or at= with layers that lose less",
        )
    sensitivity = {name: lost({name: 4}) for name in every}
    size = {target.name: target.weight.size for target in targets}
    order = sorted(every, key=lambda name: sensitivity[name] / size[name])
    few, many = 0, len(order) + 1  # `few` weights with 4 bits are within the budget, `many` are not
    while many - few > 1:
        middle = (few + many) // 2
        fits = lost({**every, **dict.fromkeys(order[:middle], 4)}) <= budget
        few, many = (middle, many) if fits else (few, middle)
    return ChosenBits({**every, **dict.fromkeys(order[:few], 4)}, sensitivity)
