"""Runs the tests of `eight_devices/` in a process that has eight devices.

The number of devices is fixed when jax first looks for them, so they cannot run
among the others.
"""

from __future__ import annotations

from pathlib import Path

from tests.processes import python

FOLDER = Path(__file__).parent / "eight_devices"


def test_all_of_them():
    options = ["-q", "-o", "python_files=on_*.py", "-p", "no:cacheprovider"]
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    assert " passed" in python("-m", "pytest", *options, FOLDER, env=variables).stdout
