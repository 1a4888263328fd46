"""Capabilities of TensorFlow versions, measured by loading artifacts in each.

TensorFlow 2.16 and 2.17 accept more StableHLO than they can run, so they count as 2.15.
"""

from __future__ import annotations

import re

from pax_export._foundations.errors import ConsumerError, InvalidArgumentError

Version = tuple[int, ...]

#: TensorFlow release, the newest StableHLO it reads, its newest calling convention.
TENSORFLOW: tuple[tuple[Version, Version, int], ...] = (
    ((2, 15), (0, 14, 0), 8),
    ((2, 18), (1, 3, 0), 9),
    ((2, 19), (1, 9, 0), 9),
    ((2, 20), (1, 12, 0), 10),
    ((2, 21), (1, 13, 0), 10),
)

#: The targets to try, oldest first: the oldest that any StableHLO still
#: written version, then the version that each release reads.
TARGETS: tuple[Version, ...] = ((0, 9, 0), *(stablehlo for _, stablehlo, _ in TENSORFLOW))

#: 4-bit integers are in every StableHLO, and XLA in TensorFlow 2.15 has none.
FOUR_BITS: Version = (1, 3, 0)

#: Custom calls that XLA in TensorFlow expands itself, on every platform.
CUSTOM_CALLS = frozenset("""
    Sharding SPMDFullToShardShape SPMDShardToFullShape shape_assertion
    stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator stablehlo.dynamic_top_k
""".split())  # fmt: skip


def format_version(version: Version) -> str:
    """A version as people write it: ``"2.15"``."""
    return ".".join(map(str, version))


def oldest_tensorflow(stablehlo: Version, calling_convention: int) -> Version:
    for release, reads, convention in TENSORFLOW:
        if stablehlo <= reads and calling_convention <= convention:
            return release
    raise ConsumerError(
        "No TensorFlow release can read this model.",
        got=f"StableHLO {format_version(stablehlo)}, calling convention {calling_convention}",
    )


def parse_consumer(consumer: str | None) -> Version | None:
    """Reads ``"tensorflow>=2.17"``.

    Example:
        >>> parse_consumer("tensorflow>=2.17")
        (2, 17)
    """
    if consumer is None:
        return None
    match = re.fullmatch(r"\s*tensorflow\s*>=\s*(\d+)\.(\d+)[.\d]*\s*", str(consumer))
    if match is None:
        raise InvalidArgumentError(
            "The consumer is unknown.", got=repr(consumer), write='consumer="tensorflow>=2.17"'
        )
    return int(match[1]), int(match[2])


def check(consumer: str | None, oldest: Version, signature: str) -> None:
    """Refuses a model that needs a newer TensorFlow than its consumer has."""
    wanted = parse_consumer(consumer)
    if wanted is not None and oldest > wanted:
        raise ConsumerError(
            "The model uses operations that the consumer does not support.",
            where=signature,
            got=consumer,
            write=f'consumer="tensorflow>={format_version(oldest)}", or leave consumer= out',
        )
