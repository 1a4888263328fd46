"""Files of weights that are signed."""

from __future__ import annotations

import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import SignatureError, WeightsFileError
from tests.closeness import assert_close
from tests.refusals import refused
from tests.signing_keys import make_pair

pytest.importorskip("model_signing", exc_type=ImportError)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("keys"))


def test_weights_are_those_that_were_signed(tmp_path, keys):
    weights, path = {"a": np.arange(5.0), "b": np.ones(2)}, tmp_path / "w.safetensors"
    for _ in range(2):  # the second takes the place of the first, with its signature
        pax.save_weights(weights, path, sign=keys.private)
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, f"{path.name}.sig"]
    assert_close(pax.load_weights(weights, path, verify=keys.public)["a"], weights["a"])
    loaded, report = pax.load_weights(weights, path, strict=False, verify=keys.public)
    assert report.complete and sorted(loaded) == ["a", "b"]

    pax.save_weights({**weights, "b": np.zeros(2)}, path)
    pax.load_weights(weights, path)
    with refused(SignatureError, where=str(path), got="w.safetensors"):
        pax.load_weights(weights, path, verify=keys.public)


def test_links_to_signed_files_are_verified(tmp_path, keys):
    (tmp_path / "real").mkdir()
    (tmp_path / "w").symlink_to("real/w.safetensors")
    pax.save_weights({"a": np.ones(2)}, tmp_path / "w", sign=keys.private)
    pax.load_weights({"a": np.ones(2)}, tmp_path / "w", verify=keys.public)


def test_something_else_has_the_name_of_the_signature(tmp_path, keys):
    (tmp_path / "w.sig").write_text("of a user")
    with pytest.raises(WeightsFileError):
        pax.save_weights({"a": np.ones(2)}, tmp_path / "w", sign=keys.private)
    assert [each.name for each in tmp_path.iterdir()] == ["w.sig"]
