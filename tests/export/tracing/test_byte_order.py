"""Arrays in the other order of bytes, as FITS and HDF5 files bring them."""

from __future__ import annotations

import pytest

from pax_export.export import load, spec, to_saved_model, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import affine, affine_params, random


@pytest.mark.parametrize("write", [to_saved_model, to_stablehlo])
def test_weights_and_inputs_may_be_big_endian(tmp_path, write):
    params = {name: value.astype(">f4") for name, value in affine_params().items()}
    write((params, affine), tmp_path / "model", spec("n, 3"))
    x = random(2, 3)
    expected = affine(affine_params(), x)
    model = load(tmp_path / "model")
    assert_close(model(x), expected)
    assert_close(model(x.astype(">f4")), expected)
