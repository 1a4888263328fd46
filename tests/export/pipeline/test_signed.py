"""Exports that are signed: every format, and what opens, replaces or makes them anew."""

import json
import shutil
import time

import numpy as np
import pytest

from pax_export.errors import (
    ExportPathError,
    InvalidArgumentError,
    SignatureError,
    UntrustedExportError,
)
from pax_export.export import load, renew, retarget, spec, to_saved_model, to_stablehlo, to_tflite
from tests.closeness import assert_close
from tests.export.models import affine, affine_params, random, rehash
from tests.refusals import refused
from tests.signing_keys import make_pair, sign_folder

pytest.importorskip("model_signing", exc_type=ImportError)

MODEL = (affine_params(), affine)
X = random(2, 3)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("keys"))


def save(write, path, **options):
    return write(MODEL, path, spec("2, 3"), **{"validate": False, **options})


WRITERS = {"saved": to_saved_model, "bundle": to_stablehlo, "net.tflite": to_tflite}


@pytest.fixture(scope="module")
def whole(keys, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    for name, write in WRITERS.items():
        save(write, path / name, sign=keys.private)
    return path


@pytest.fixture
def exports(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "exports")


def signature(path):
    return path / "model.sig" if path.is_dir() else path.with_name(path.name + ".sig")


@pytest.mark.parametrize("name", WRITERS)
def test_signed_artifacts_are_loaded(exports, keys, name):
    for options in ({"verify": keys.public}, {}, {"verify": keys.public, "trusted": True}):
        assert_close(load(exports / name, **options)(X), affine(affine_params(), X), rtol=1e-5)
    assert signature(exports / name).is_file()


@pytest.mark.parametrize("name", WRITERS)
def test_unsigned_artifacts_are_refused(exports, keys, name, tmp_path):
    with pytest.raises(SignatureError):
        load(exports / name, verify=make_pair(tmp_path, "other").public)
    signature(exports / name).unlink()
    with pytest.raises(SignatureError):
        load(exports / name, verify=keys.public)


def test_files_that_no_hash_of_ours_covers(exports, keys):
    """TensorFlow looks for what it likes: the fingerprint, information for debuggers."""
    (exports / "saved" / "fingerprint.pb").write_bytes(b"")
    (exports / "saved" / "debug").mkdir()
    (exports / "saved" / "debug" / "saved_model_debug_info.pb").write_bytes(b"")
    load(exports / "saved")
    with refused(SignatureError, got="debug/saved_model_debug_info.pb, fingerprint.pb"):
        load(exports / "saved", verify=keys.public)


def test_who_changes_an_export_can_change_its_hashes_but_not_its_signature(exports, keys):
    report = json.loads((exports / "bundle" / "pax_export.json").read_text())
    report["model"] = "Other"
    (exports / "bundle" / "pax_export.json").write_text(json.dumps(report))
    assert load(rehash(exports / "bundle")).report.model == "Other"
    with refused(SignatureError, got="SHA256SUMS, pax_export.json"):
        load(exports / "bundle", verify=keys.public)


def test_a_signature_says_who_and_not_that_it_does_no_harm(exports, keys):
    from tests.export.artifact.test_trust import changed, in_graph

    (exports / "saved" / "SHA256SUMS").unlink()
    changed(exports / "saved", in_graph)
    sign_folder(exports / "saved", keys)
    with pytest.raises(UntrustedExportError):
        load(exports / "saved", verify=keys.public)


def test_nothing_is_read_before_it_is_verified(exports, keys, monkeypatch):
    from pax_export.export.artifact import loading

    monkeypatch.setattr(loading, "read_report", lambda path: pytest.fail("it was read"))
    signature(exports / "saved").unlink()
    with pytest.raises(SignatureError):
        load(exports / "saved", verify=keys.public)


def test_missing_paths_are_named(tmp_path, keys):
    with refused(ExportPathError, "pax_export"):
        load(tmp_path / "nothing", verify=keys.public)


# --- writing -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_signed_export_is_replaced(exports, keys, name):
    save(WRITERS[name], exports / name, sign=keys.private, overwrite=True)
    load(exports / name, verify=keys.public)
    # Another model: the same bytes would still be those that were signed.
    params = {**affine_params(), "b": np.zeros(4, np.float32)}
    WRITERS[name]((params, affine), exports / name, spec("2, 3"), validate=False, overwrite=True)
    load(exports / name)
    with pytest.raises(SignatureError):
        load(exports / name, verify=keys.public)


def test_the_key_is_asked_for_before_the_work(tmp_path):
    def model(params, x):
        pytest.fail("it was traced")

    start = time.perf_counter()
    for write, path in ((to_saved_model, "m"), (to_stablehlo, "m"), (to_tflite, "m.tflite")):
        with pytest.raises(InvalidArgumentError):
            write(({}, model), tmp_path / path, spec("2, 3"), sign=tmp_path / "none.pem")
    assert time.perf_counter() - start < 3
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_name_of_the_signature_is_not_replaced(tmp_path, keys):
    (tmp_path / "net.tflite.sig").write_text("of a user")
    for overwrite in (False, True):
        with refused(ExportPathError, where=str(tmp_path / "net.tflite.sig")):
            save(to_tflite, tmp_path / "net.tflite", sign=keys.private, overwrite=overwrite)
    assert [each.name for each in tmp_path.iterdir()] == ["net.tflite.sig"]
    save(to_tflite, tmp_path / "net.tflite")
    assert (tmp_path / "net.tflite.sig").read_text() == "of a user"


def test_reports_do_not_contain_keys(whole, keys):
    assert "key" not in str(load(whole / "saved").report)
    assert keys.private not in (whole / "saved" / "pax_export.json").read_text()


# --- making anew -------------------------------------------------------------------------


def test_a_mended_model_is_signed_anew_or_not_at_all(exports, keys, tmp_path):
    retarget(exports / "saved", out=tmp_path / "plain", validate=False, verify=keys.public)
    assert not (tmp_path / "plain" / "model.sig").exists()
    load(tmp_path / "plain")
    retarget(exports / "saved", out=tmp_path / "signed", validate=False, sign=keys.private)
    load(tmp_path / "signed", verify=keys.public)
    with pytest.raises(SignatureError):
        retarget(tmp_path / "plain", out=tmp_path / "no", verify=keys.public)
    assert not (tmp_path / "no").exists()


def test_a_renewed_bundle_is_signed_anew_or_not_at_all(exports, keys):
    renew(exports / "bundle", verify=keys.public, sign=keys.private)
    load(exports / "bundle", verify=keys.public)
    renew(exports / "bundle")
    assert not (exports / "bundle" / "model.sig").exists()
    load(exports / "bundle")
    with pytest.raises(SignatureError):
        renew(exports / "bundle", verify=keys.public)
