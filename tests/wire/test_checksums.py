"""CRC-32C by numpy, and by compiled code where there is some."""

from __future__ import annotations

import numpy as np
import pytest

from pax_export._wire import checksums


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 4096, 8192, 8195, 100_003])
@pytest.mark.parametrize("crc32c", [checksums._by_numpy, checksums.crc32c])
def test_the_checksum_of_any_number_of_bytes(size, crc32c):
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    state = 0xFFFFFFFF
    for byte in content.tolist():
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c(content, 0) == state ^ 0xFFFFFFFF
    part = size // 3
    assert crc32c(content[part:], crc32c(content[:part].tobytes(), 0)) == state ^ 0xFFFFFFFF
