"""Chooses weights for 4 bits, by the loss of each and of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pax_export._errors import QuantizationError
from pax_export._types import PyTree
from pax_export.quantization._places import QuantizableArray

#: The loss relative to the quantized net.
Loss = Callable[[Any], float]


class ChosenBits(NamedTuple):
    """The bits of weights by name, and the loss of each alone in 4 bits."""

    bits: Mapping[str, int]
    sensitivity: Mapping[str, float]


def choose(
    arrays: PyTree,
    places: Sequence[QuantizableArray],
    rounded: Callable[[QuantizableArray, int], Any],
    loss: Loss,
    budget: float,
) -> ChosenBits:
    """Chooses as many weights for 4 bits as the budget allows; the others have 8.

    Args:
        arrays: the net, or its parameters.
        places: its weights.
        rounded: quantizes a weight with a number of bits.
        loss: returns the loss of such arrays.
        budget: the largest loss.
    """
    leaves, treedef = jax.tree_util.tree_flatten(arrays)
    at = {id(leaf): number for number, leaf in enumerate(leaves)}
    numbers = {
        (place.name, bits): rounded(place, bits).dequantized()
        for place in places
        for bits in (4, 8)
    }

    def lost(bits: Mapping[str, int]) -> float:
        changed = list(leaves)
        for place in places:
            if place.name in bits:
                changed[at[id(place.weight)]] = numbers[place.name, bits[place.name]]
        return loss(treedef.unflatten(changed))

    every = {place.name: 8 for place in places}
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
    size = {place.name: place.weight.size for place in places}
    order = sorted(every, key=lambda name: sensitivity[name] / size[name])
    few, many = 0, len(order) + 1  # `few` weights with 4 bits are within the budget, `many` are not
    while many - few > 1:
        middle = (few + many) // 2
        fits = lost({**every, **dict.fromkeys(order[:middle], 4)}) <= budget
        few, many = (middle, many) if fits else (few, middle)
    return ChosenBits({**every, **dict.fromkeys(order[:few], 4)}, sensitivity)
