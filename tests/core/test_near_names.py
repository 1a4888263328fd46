"""One rule says which name a mistyped one may stand for, whoever asks."""

from pathlib import Path

import pytest

from pax_export._foundations.errors import near_names

PACKAGE = Path(__file__).parent.parent.parent / "pax_export"


@pytest.mark.parametrize(
    ("name", "names", "near"),
    [
        ("wieght", ["bias", "weight", "weights"], ["weight", "weights"]),
        ("modell", ["data", "model"], ["model"]),
        ("layer.0", ["encoder.layers.0", "encoder.norm"], ["encoder.layers.0"]),
        ("x", ["data", "model"], []),
        ("a", [], []),
        ("", ["a"], []),
        ("same", ["other", "same"], ["same"]),
    ],
)
def test_near_names(name, names, near):
    assert near_names(name, names, 2) == near
    assert near_names(name, names) == near[:1]


def test_of_equally_near_names_the_first_one_comes_first():
    assert near_names("conv3", ["conv1", "conv2"], 3) == ["conv1", "conv2"]


def test_it_is_the_only_place():
    using = {path.name for path in PACKAGE.rglob("*.py") if "difflib" in path.read_text()}
    assert using == {"errors.py"}
