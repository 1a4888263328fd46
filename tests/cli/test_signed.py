"""``--sign`` and ``--verify``."""

from __future__ import annotations

import numpy as np
import pytest

from tests.signing_keys import make_pair, sign_folder

pytest.importorskip("model_signing", exc_type=ImportError)


@pytest.fixture
def keys(here):
    return make_pair(here)


@pytest.mark.parametrize("target", ["savedmodel", "stablehlo", "tflite"])
def test_a_signed_export_is_run_and_validated(here, call, keys, quick, target):
    path = "net.tflite" if target == "tflite" else "net"
    how = "--target", target, "--input", "2, 3", "--validate", "no"
    assert call("export", "cli_models:affine", path, *how, "--sign", "key.pem")[0] == 0
    np.save("x.npy", np.ones((2, 3), np.float32))
    assert call("run", path, "--input", "x.npy", "--verify", "key.pub")[0] == 0
    assert call("validate", path, "--verify", "key.pub")[0] == 0
    signature = here / ("net.tflite.sig" if target == "tflite" else "net/model.sig")
    signature.unlink()
    for command in (("run", path, "--input", "x.npy"), ("validate", path)):
        assert call(*command)[0] == 0
        code, out, error = call(*command, "--verify", "key.pub")
        assert (code, out) == (1, "")
        assert error.startswith("pax-export: error: The export is not signed. where: net")
        assert error.endswith(
            "write: an export written with --sign key.pem; or no --verify, if you trust it"
        )


def test_a_model_of_others_that_they_signed(here, call, keys, foreign):
    np.save("x.npy", np.ones((2, 3), np.float32))
    assert (
        "The export is not signed"
        in call("run", "foreign", "--input", "x.npy", "--verify", "key.pub")[2]
    )
    sign_folder(here / "foreign", keys)
    how = "--out", "mended", "--validate", "no", "--verify", "key.pub", "--sign", "key.pem"
    assert call("retarget", "foreign", *how)[0] == 0
    assert (here / "mended" / "model.sig").is_file()
    (here / "foreign" / "new").write_text("")
    code, _, error = call("retarget", "foreign", *how, "--overwrite")
    assert (code, "The export contains unsigned files" in error) == (1, True)


def test_a_wrong_key_is_one_line(here, call):
    (here / "key.pem").write_text("none")
    how = "--input", "2, 3", "--validate", "no", "--sign"
    for key, what in (("key.pem", "This is no private key"), ("no.pem", "The key file")):
        code, _, error = call("export", "cli_models:affine", "net", *how, key)
        assert (code, error.startswith(f"pax-export: error: {what}")) == (1, True)
    assert not (here / "net").exists()
