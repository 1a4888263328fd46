"""CRC-32C beside a bit by bit computation of it."""

from __future__ import annotations

import numpy as np
import pytest

from pax_export._foundations.wire.content import crc32c


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 4096, 8192, 8195, 100_003])
def test_the_checksum_of_any_number_of_bytes(size):
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    state = 0xFFFFFFFF
    for byte in content.tolist():
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c(content) == state ^ 0xFFFFFFFF
    part = size // 3
    begin = crc32c(content[:part].tobytes())
    assert crc32c(content[part:], begin) == state ^ 0xFFFFFFFF
