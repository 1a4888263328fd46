"""Checkpoints between meshes: in a process of its own, with eight devices."""

from tests.processes import python


def test_on_eight_devices(tmp_path):
    variables = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    python("-m", "tests.checkpoint.on_meshes", tmp_path, variables=variables)
