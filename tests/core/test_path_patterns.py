"""The language of paths: what fits what, and what is proposed where nothing does."""

from __future__ import annotations

from fnmatch import fnmatchcase
from random import Random

import pytest

from pax_export.core import better_path, escape_step, path_pattern
from pax_export.errors import InvalidArgumentError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "fits", "fits_not"),
    [
        ("head", ["head"], ["encoder.head", "head.weight", "heads", ""]),
        ("layers.*.norm", ["layers.0.norm"], ["layers.norm", "layers.0.a.norm", "a.layers.0.norm"]),
        ("layers.**.norm", ["layers.norm", "layers.0.norm", "layers.0.a.norm"], ["layers.0"]),
        ("layers.**", ["layers", "layers.0", "layers.0.norm"], ["a.layers"]),
        ("**", ["", "a", "a.b.c"], []),
        ("*", ["a", "a.b"], [""]),
        (".*", ["a"], ["", "a.b"]),
        ("*.weight", ["a.weight", "a.b.weight"], ["weight", "a.weights"]),
        ("**.weight", ["weight", "a.b.weight"], ["a.weights"]),
        ("*norm", ["norm", "a.layer_norm"], ["norm.scale"]),
        (".*norm", ["layer_norm"], ["a.layer_norm"]),
        ("fc?", ["fc1", "a.fcx".replace("a.", "")], ["fc", "fc12", "a.b"]),
        ("fc[12]", ["fc1", "fc2"], ["fc3", "fc[12]", "a.fc1"]),
        ("[ab].c", ["a.c"], ["x.a.c"]),
        ("fc[!12]", ["fc3"], ["fc1", "fc"]),
        ("a[b", ["a[b"], ["ab"]),
        ("a+b$", ["a+b$"], ["aab"]),
        ("", [""], ["a"]),
        (".", [""], ["a"]),
        (".head", ["head"], ["a.head"]),
    ],
)
def test_matching_paths(text, fits, fits_not):
    pattern = path_pattern(text)
    assert [path for path in fits if not pattern.fits(path)] == []
    assert [path for path in fits_not if pattern.fits(path)] == []


def test_a_filter_begins_anywhere_unless_it_says_otherwise():
    assert path_pattern("norm.scale", anywhere=True).fits("layers.0.norm.scale")
    assert path_pattern("norm", anywhere=True).fits("norm")
    assert not path_pattern(".norm", anywhere=True).fits("layers.0.norm")
    assert not path_pattern("norm", anywhere=True).fits("layers.0.layer_norm")


def test_patterns_cover_descendants():
    pattern = path_pattern("layers.*")
    assert pattern.covers("layers.0") and pattern.covers("layers.0.norm.scale")
    assert not pattern.covers("layers") and not pattern.covers("head.weight")
    assert path_pattern("").covers("anything.at.all")


def test_a_name_with_letters_of_the_language_can_be_written():
    for name in ("w*", "a[0]", "what?", "[", "plain"):
        pattern = path_pattern(f".{escape_step(name)}")
        assert pattern.fits(name) and not pattern.fits("w1") and not pattern.fits("a0")


@pytest.mark.parametrize("text", ["a..b", "a.", "..", "..a", ".a.", "*..b"])
def test_an_empty_step_is_refused(text):
    with refused(InvalidArgumentError, got=repr(text)):
        path_pattern(text)


def test_a_deep_path_with_many_open_steps_takes_no_time():
    pattern = path_pattern("**.*a*.**.*a*.**.*a*.**.x")
    assert not pattern.fits(".".join(["aaaaaaaa"] * 40))


def test_deeper_paths_are_proposed_before_similar_names():
    paths = ["encoder.attention", "encoder.attention.query", "attentive", "head"]
    assert better_path("attention", paths) == (
        "'**.attention', which fits encoder.attention; or one of them"
    )
    assert better_path("encoder.atention", paths) == "encoder.attention, encoder.attention.query"
    assert better_path("zzz", paths) == "encoder.attention, encoder.attention.query, attentive"
    assert better_path("zzz", []) == ""


def fits_slowly(steps, path):
    """What a pattern means, step by step: independent of the regular expressions."""
    if not steps:
        return not path
    if steps[0] == "**":
        return any(fits_slowly(steps[1:], path[n:]) for n in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], steps[0]) and fits_slowly(steps[1:], path[1:])


def test_random_patterns_equal_stepwise_matching():
    random = Random(0)
    for _ in range(3000):
        steps = random.choices(["a", "b", "ab", "a*", "*", "?b", "[ab]", "[!a]", "**"], k=4)
        steps, path = steps[random.randint(0, 3) :], random.choices(["a", "b", "ab", "c"], k=5)
        path, at_root, anywhere = path[random.randint(0, 5) :], *random.choices([True, False], k=2)
        pattern = path_pattern("." * at_root + ".".join(steps), anywhere)
        free = not at_root and (anywhere or steps[0][0] == "*")
        meant, text = [*["**"] * free, *steps], ".".join(path)
        assert pattern.fits(text) == fits_slowly(meant, path), (pattern, text)
        assert pattern.covers(text) == fits_slowly([*meant, "**"], path), (pattern, text)
