"""A model larger than the memory of the host goes onto a mesh leaf by leaf, part by part."""

from __future__ import annotations

import os

from tests.memory import measured, on_linux

#: MiB beside the placed arrays: of a file of 64, whose largest leaf is of 32 (Scan) or 8 (list).
MOST = 20


@on_linux
def test_adopting_onto_a_mesh_holds_less_than_the_largest_leaf_beside_it(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    # What is let go of is to leave the process, not to be kept by the C library.
    kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "JAX_PLATFORMS": "cpu"}
    env = {"XLA_FLAGS": flags, **kept}
    found = measured("tests.weights.adoption.measure_memory", tmp_path, env=env)
    assert found.pop("devices") == 8
    assert len(found) == 4 and {key: most for key, most in found.items() if most > MOST} == {}
