"""Language models in the very runtimes: greedy tokens of every family are those of jax."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import pax_export as pax
from pax_export.generation._export import RUNTIMES
from tests.generation.test_runtimes import net
from tests.generation.test_tokenizer import byte_level
from tests.nets import decoder_reference as reference

_LACKS: dict[str, set[str]] = {"genai": set()}


@pytest.mark.parametrize("family", list(reference.CONFIGS))
@pytest.mark.parametrize("format", sorted(RUNTIMES))
def test_a_runtime_says_what_jax_says(format, family, tmp_path):
    for package in RUNTIMES[format].packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    lm = net(family, tmp_path / "hf")
    options = {"format": format, "tokenizer": byte_level(), "max_length": lm.config.max_positions}
    if family in _LACKS[format]:
        with pytest.raises(pax.errors.InvalidArgumentError, match=RUNTIMES[format].title):
            pax.generation.export(lm, tmp_path / "served", **options)
        return
    report = pax.generation.export(lm, tmp_path / "served", **options)
    assert report.validated == "process"
    print(family, report.details["tokens"], report.differs)
