"""What holds for every test."""

import atexit
import collections
import gc
import os
import sys
from pathlib import PurePosixPath

import jax
import numpy as np
import pytest

import pax_export as pax
from tests import no_float16

# Tracing makes objects by the thousand, and hardly any in a cycle: look for those more seldom.
gc.set_threshold(50_000, 20, 20)

# From 10 to 50 seconds each.
_LONGEST = (
    "tests/sharding/test_eight_devices.py",
    "tests/compat/test_programs.py::test_install_as_pax",
    "tests/test_example",
    "tests/sharding/test_processes.py",
)

# Their exports are validated at two sizes of each dimension; the others are tests of validation.
_TWO_SIZES = (
    "tests/adapters/", "tests/docs/test_pages.py", "tests/export/formats/",
    "tests/export/lowering/", "tests/export/orbax/", "tests/export/portable/",
    "tests/export/retargeting/", "tests/export/tracing/", "tests/generation/",
    "tests/quantization/",
)  # fmt: skip


def pytest_configure(config):
    """A worker ends at once: jax would put away what it has compiled, for seven seconds."""
    config.pluginmanager.register(no_float16)
    if hasattr(config, "workerinput") and "coverage" not in sys.modules:  # which writes at the end
        atexit.register(os._exit, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests: searching each of their files for some takes seconds of a worker."""
    found = yield
    return [each for each in found if type(each) is pytest.Module] or found


def pytest_collection_modifyitems(items):
    """What takes longest begins first: in the end the other worker would only wait for it."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped():
    """Drops compiled programs before a process has as many memory maps as Linux allows.

    XLA maps several pieces of memory for each program.  Beyond ``vm.max_map_count`` (65,530 by
    default) the process ends with a segmentation fault.
    """
    if _count_memory_maps() > 25_000:
        gc.unfreeze()
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def short_collections(compiled_programs_are_dropped):
    """Leaves objects of earlier tests, above all jax's caches, out of later collections."""
    gc.collect()
    gc.freeze()


def _count_memory_maps():
    """The number of memory maps of this process, 0 where the system does not list them."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def two_sizes(request, monkeypatch):
    """Each size more compiles each program once more, in jax and in the runtime."""
    if request.node.nodeid.startswith(_TWO_SIZES):
        monkeypatch.setattr("pax_export.export.artifact.dimensions.SIZES", (1, 5))


@pytest.fixture(autouse=True)
def same_weights():
    """Layers draw the same weights whichever tests ran before."""
    pax.seed_rng_key(42)


def pytest_terminal_summary(terminalreporter):
    """Where something broke, before one reads what: the rooms, with the failures of each."""
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if reports:
        terminalreporter.section("rooms with failures")
    for room, count in sorted(collections.Counter(room_of(r.nodeid) for r in reports).items()):
        terminalreporter.write_line(f"{room}: {count}")


def room_of(test):
    """The room of a test or doctest by its id: ``tests/core/test_tree.py::test_round_trip``."""
    file = PurePosixPath(test.partition("::")[0])
    below = PurePosixPath(*file.parts[1:])
    return str(below.parent) if len(below.parts) > 1 else below.stem.removeprefix("test_")


@pytest.fixture(autouse=True)
def random_numbers_are_the_same_in_any_order(request):
    """A module's `RANDOM` begins anew in each test, whichever tests its process ran before."""
    if isinstance(getattr(request.module, "RANDOM", None), np.random.Generator):
        request.module.RANDOM = np.random.default_rng(0)
