"""The one maker of random calls: sizes that the constraints allow, and arrays of these sizes.

Every test of an export calls it with these: what was just written, what lies there, and
what others wrote.  No jax is needed to make them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pax_export.export.artifact import dimensions
from pax_export.export.artifact.dtypes import STRING, is_integer

#: What text is in the tests.
_WORDS = np.array([b"", b"a", b"the quick brown fox", "naïve 0.5 ✓".encode(), b"42"], object)


@dataclass(frozen=True)
class RandomInput:
    """The shape of an input, with text for symbolic sizes, and its dtype outside of jax."""

    shape: tuple[dimensions.Size, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class RandomCall:
    """The sizes of one call, and its arrays by name."""

    sizes: dict[str, int]
    inputs: dict[str, np.ndarray]

    @property
    def label(self) -> str:
        """The sizes as a message shows them; nothing if there are none."""
        text = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return text and f"({text})"


def random_calls(
    inputs: Mapping[str, RandomInput],
    constraints: Sequence[str] = (),
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> Iterator[RandomCall]:
    """Calls at several sizes.

    Args:
        inputs: by name.
        constraints: what must hold of the symbolic sizes.
        sizes: of the symbolic ones in each call, where the caller chooses them.
    """
    if sizes is None:
        sizes = dimensions.choose([each.shape for each in inputs.values()], constraints)
    random = np.random.default_rng(0)
    for chosen in sizes:
        arrays = {
            name: random_array(dimensions.shape(each.shape, chosen), each.dtype, random)
            for name, each in inputs.items()
        }
        yield RandomCall(dict(chosen), arrays)


def random_array(shape: Sequence[int], dtype: np.dtype, random: np.random.Generator) -> np.ndarray:
    """Normal numbers, small integers, coin tosses, or words."""
    if dtype == STRING:
        return random.choice(_WORDS, shape)
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    if dtype.kind == "c":
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(dtype)
    if is_integer(dtype):
        return random.integers(0, 4, shape).astype(dtype)
    return random.normal(size=shape).astype(dtype)
