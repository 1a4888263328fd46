"""A package that is missing is named itself: pip knows it, whatever index this one is on."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from pax_export._foundations.optional import PACKAGES, find, install, require
from pax_export.errors import MissingPackageError

_SETUP = Path(__file__).parents[2] / "setup.cfg"


def lines(text):
    return [line for line in text.split("\n") if line.strip()]


def brought(extras, name):
    """What an extra brings, those that it names included."""
    found = []
    for line in lines(extras[name]):
        if line.startswith("pax-export["):
            for other in line[len("pax-export[") : -1].split(","):
                found += brought(extras, other)
        else:
            found.append(line)
    return found


def test_packages_are_those_of_the_extras():
    config = configparser.ConfigParser()
    config.read(_SETUP)
    extras = config["options.extras_require"]
    for name, packages in PACKAGES.items():
        expected = (
            lines(config["options"]["install_requires"]) if name == "all" else brought(extras, name)
        )
        assert list(packages) == expected, name


@pytest.mark.parametrize("ask", [require, find])
def test_the_message_can_be_pasted(ask):
    with pytest.raises(MissingPackageError) as caught:
        ask("no_such_package", "stablehlo", "to_something")
    assert str(caught.value) == (
        "to_something needs the package 'no_such_package', which is not installed.\n"
        '  fix: python -m pip install "safetensors>=0.7" "zlib-ng>=0.5" "flatbuffers>=24.3.25" '
        "(the extra [stablehlo] of pax-export)"
    )


def test_without_jax_it_is_jax_that_is_named():
    assert install("all").startswith('python -m pip install "jax>=')
    with pytest.raises(MissingPackageError) as caught:
        require("no_such_jax", "all", "load")
    assert caught.value.write == install("all")
