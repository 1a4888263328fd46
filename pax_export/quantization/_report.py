"""Reports of quantization and of its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pax_export._files import bytes_text


@dataclass(frozen=True)
class QuantizedLeaf:
    """A weight that was quantized.

    Attributes:
        name: its path.
        shape: of the array.
        bits: 8 or 4.
        group: how many neighbors share a scale; None for one scale for each channel.
        before: its bytes before.
        after: its bytes now, with scales.
        largest_error: the largest difference of an element.
        relative_error: the norm of the difference, in parts of the norm of the array.
        sensitivity: what the net loses with this weight alone in 4 bits, if a budget was given.
        activations: how the inputs of its products are rounded; None if they are not.
        rounding: ``"nearest"`` or ``"gptq"``, by which it is farther from the array, and products
            nearer.
        scheme: ``"symmetric"``, ``"asymmetric"`` (a zero point for each group) or ``"float"``.

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

    @property
    def numbers(self) -> str:
        """What its numbers are, as ``"int4, groups of 32"``."""
        name = ("float" if self.scheme == "float" else "int") + str(self.bits)
        name += ", zero points" if self.scheme == "asymmetric" else ""
        return name + (f", groups of {self.group}" if self.group else "")


@dataclass(frozen=True)
class Difference:
    """How far the outputs for the batches are from those of the net before.

    Attributes:
        largest: the largest difference of an element.
        mean: the mean of all.
        scale: the mean size of an output of the net before.
        kl: the mean Kullback-Leibler divergence in nats, if the outputs were logits; None where
            they cannot be.
        same_largest: of how many outputs the largest element is the same one; None likewise.
        seconds: of a call of the net before and now, the least of several.

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
    """What `quantize` did; ``print`` shows it.

    Attributes:
        leaves: the weights that were quantized.
        kept: the names of the other arrays of floating-point numbers, with the reason of each.
        fallbacks: of quantized weights that have more bits than was asked for, the reason.
        before: the bytes of all leaves of the net.
        after: those of the quantized net.
        metric: of the net before and now, where a metric was given.
        difference: of the outputs, where batches were given.
        weights_alone: the same with float activations, where these are rounded.
        runtimes: by format, how far its runtime is from jax on the same integers, with the
            seconds of a call of the float net and of this one there; as `pax-export quantize
            --runtime` measures them.

    Example:
        >>> import pax_export as pax
        >>> print(pax.quantize(pax.Linear(256, 64))[1])
        1 weights quantized, 1 arrays kept
          size        64.2 KiB to 16.5 KiB (0.257)
          weight  int8                error ...%
          kept (a vector or a number): bias
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

    def summary(self) -> dict[str, Any]:
        """What was lost, as plain data; the reports of exports have it."""
        made: dict[str, Any] = {"bytes": [self.before, self.after]}
        if self.metric is not None:
            made["metric"] = list(self.metric)
        if self.difference is not None:
            found = asdict(self.difference) | {"seconds": list(self.difference.seconds)}
            made |= {name: each for name, each in found.items() if each is not None}
        return made

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
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  kept ({reason}): {', '.join(names[:3])}{more}")
        return "\n".join(lines)


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


def tree_bytes(leaves: list[Any]) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
