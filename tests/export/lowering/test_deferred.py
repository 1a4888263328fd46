"""Models on several devices, or on disk: in a process of its own, with eight devices."""

from __future__ import annotations

import os

from tests.memory import measured, on_linux

EIGHT = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
SIZE = 128  # MiB, in four variables
LARGEST = SIZE / 4
#: What compiling and tracing take, whatever the size of the model.
FIXED = 24


@on_linux
def test_exports_are_right_and_hold_one_array_at_a_time(tmp_path):
    peaks = measured("tests.export.deferred", tmp_path, SIZE, env=EIGHT)
    assert peaks["on_devices"] <= LARGEST + FIXED
    # One that is read is there three times for a moment: decoded, put together, written.
    assert peaks["on_disk"] <= 3 * LARGEST + FIXED < SIZE
