"""The day jax moves: without a private name, and without all of them, the library goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pax_export._foundations.jax import PRIVATE, PRIVATE_ATTRIBUTES
from tests.hard.size import IN_LONG_RUNS

ROOT = Path(__file__).parents[3]

NAMES = sorted({name.rpartition(".")[2] for name in (*PRIVATE, *PRIVATE_ATTRIBUTES)})
#: Those whose absence the program notices.
LESS = {"dce_jaxpr_consts"}


def started(program, *names):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.foundations.jax.moved", program, *names], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def finished(process):
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.skipif(not IN_LONG_RUNS, reason="`tox -e hard` runs it: a process for each name")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_name_the_digits_net_trains_and_is_exported(name):
    require_all_but_little([name])


def test_without_all_of_them_it_does_too():
    require_all_but_little(NAMES)


def require_all_but_little(names):
    """The digits net trains, is exported, and what is less is said once, by name."""
    found = finished(started("digits", *names))
    assert found["last"] < 0.5 * found["first"]
    assert found["refused"] == "ImmutableModuleError"
    assert found["error"] < 1e-4 and found["gradient"] < 1e-4
    said = [text.split("no longer has ")[1].split(",")[0] for text in found["less"]]
    assert len(said) == len(set(said))
    assert {name.rpartition(".")[2] for name in said} == LESS & set(names)


def test_undecidable_traces_warn():
    found = finished(started("refused", "get_opaque_trace_state", "bind_with_trace"))
    assert found["refused"] is None
    (text,) = found["less"]
    assert "jax.lax.add_p" in text and "is not refused" in text
