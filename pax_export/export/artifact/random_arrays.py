"""Random inputs for tests of exports; no jax is needed to make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pax_export.export.artifact.dtypes import STRING, is_integer

#: What text is in the tests.
_WORDS = np.array([b"", b"a", b"the quick brown fox", "naïve 0.5 ✓".encode(), b"42"], object)


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
