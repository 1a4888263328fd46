"""What is listed of differences from jax is what a sweep finds, and what guide and reports say."""

import platform
import re
from pathlib import Path

import numpy as np
import pytest

from pax_export.export.artifact import known_differences as known
from pax_export.export.artifact.known_differences import DIFFERENCES, known_differences
from tests.export import sweep_differences as sweeps
from tests.export.sweep_differences import (
    GUIDE,
    HEADING,
    RUNTIMES,
    functions,
    measured,
    table,
    values,
)

CPU = Path("/proc/cpuinfo")
NUMBER = re.compile(r"(?<=[we] )-?\d\S*|(?<=±)\S+")


def rows(differences):
    found = {}
    for each in differences:
        begins = [abs(float(number)) for number in NUMBER.findall(each.where)]
        found[each.operation, NUMBER.sub("*", each.where)] = begins
    return found


@pytest.mark.skipif(
    platform.machine() != "x86_64" or (CPU.exists() and "avx512f" not in CPU.read_text()),
    reason="the list was measured with AVX-512; kernels of other processors differ elsewhere",
)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_sweep_finds_the_listed_differences(runtime, exact):
    listed = rows(each for each in DIFFERENCES if each.runtime == runtime and each.exact >= exact)
    found = rows(measured(runtime, exact))
    write = "python -m tests.export.sweep_differences"
    assert found.keys() - listed.keys() == set(), f"not listed: {write}"
    assert listed.keys() - found.keys() == set(), f"no more: {write}"
    for row, begins in found.items():
        for one, other in zip(begins, listed[row], strict=True):
            # Where a function goes up and down, it is chance which number is hit first.
            factor = 4 if 1e5 < other < 1e9 else 1.1
            assert other / factor <= one <= other * factor, (row, write)


def test_the_guide_has_the_list():
    _, _, rest = GUIDE.read_text().partition(HEADING)
    assert rest.split("\n\n")[0].splitlines() == table(DIFFERENCES)


def test_a_sweep_meets_every_kind_of_number():
    for function in functions():
        for given in values(function):
            if given.dtype.kind != "f":
                assert {np.iinfo(given.dtype).min, np.iinfo(given.dtype).max} <= {*given.tolist()}
                continue
            assert np.isnan(given).any()
            assert {np.inf, -np.inf, np.float32(1e-39)} <= {*given.tolist()}
            assert {*np.signbit(given[given == 0]).tolist()} == {True, False}
            assert np.abs(given[np.isfinite(given)]).max() == np.finfo(np.float32).max


def test_a_report_leaves_out_what_matters_to_no_model():
    text = "exp above 88.4: exp(88.5) = inf, in jax 2.72e+38"
    assert known_differences("LiteRT", {"exp", "eq"}) == (text,)
    assert known_differences("LiteRT", {"gelu"}, exact=True) == ()
    assert known_differences("LiteRT", {"reduce_window_max"}) == (
        "reduce_window_max at NaN: reduce_window_max(nan) = -inf, in jax nan",
    )


def test_writing_the_list_again_changes_nothing(tmp_path, monkeypatch):
    files = {each: tmp_path / Path(each).name for each in (known.__file__, str(sweeps.GUIDE))}
    for name, copy in files.items():
        copy.write_text(Path(name).read_text())
    monkeypatch.setattr(known, "__file__", str(files[known.__file__]))
    monkeypatch.setattr(sweeps, "GUIDE", files[str(sweeps.GUIDE)])
    sweeps.write(DIFFERENCES)
    for name, copy in files.items():
        assert copy.read_text() == Path(name).read_text()
