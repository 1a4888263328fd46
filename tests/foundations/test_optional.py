"""A package that is missing is named itself: pip knows it, whatever index this one is on."""

from __future__ import annotations

from importlib import metadata

import pytest

from pax_export._foundations.optional import find, install, packages_of, require
from pax_export.errors import MissingPackageError


def test_packages_are_those_of_the_extra_and_of_those_that_it_names():
    assert packages_of("onnx") == ["onnx>=1.20", "onnxruntime>=1.24"]
    assert packages_of("genai") == [*packages_of("onnx"), "onnxruntime-genai>=0.18"]


def test_sources_alone_name_the_extra(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install("onnx") == 'python -m pip install "pax-export[onnx]"'


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
