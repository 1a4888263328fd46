"""Folders and files are what the holder of a key has signed, to the last byte, or refused."""

from __future__ import annotations

import base64
import json
import os
import string
import sys
from pathlib import Path

import pytest

from pax_export._files import signature_file
from pax_export._signing import Signer, verify
from pax_export.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    MissingPackageError,
    SignatureError,
)
from tests.processes import printed
from tests.refusals import fields, refused
from tests.signing_keys import make_pair

pytest.importorskip("model_signing", exc_type=ImportError)

CONTENT = {"a.txt": b"one", "b/c.bin": bytes(range(50)), "b/d/empty": b"", ".gitignore": b"*.log"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def signer(keys):
    return Signer(keys.private, "a test")


def written(folder, content=CONTENT):
    for name, each in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(each)
    return folder


@pytest.fixture
def signed(signer, tmp_path):
    """A folder that is signed."""
    signer.sign_folder(written(tmp_path / "model"), "model")
    return tmp_path / "model"


def refusal(path, key):
    with pytest.raises(SignatureError) as caught:
        verify(path, key, "a test")
    return caught.value


def test_signed_folders_are_verified_after_a_move(signed, keys, tmp_path, monkeypatch):
    verify(signed, keys.public, "a test")
    signed.rename(tmp_path / "another name")
    verify(str(tmp_path / "another name"), keys.public, "a test")
    (tmp_path / "current").symlink_to("another name")
    verify(tmp_path / "current", keys.public, "a test")
    monkeypatch.chdir(tmp_path / "another name")
    verify(".", keys.public, "a test")


def test_without_a_key_or_a_path_there_is_nothing_to_verify(keys, tmp_path):
    verify(written(tmp_path / "model"), None, "a test")
    verify(tmp_path / "nothing", keys.public, "a test")


@pytest.mark.parametrize("curve", ["SECP384R1", "SECP521R1"])
def test_longer_keys(tmp_path, curve):
    pair = make_pair(tmp_path, curve=curve)
    file = written(tmp_path, {"net.tflite": b"1234"}) / "net.tflite"
    Signer(pair.private, "a test").sign_file(file)
    verify(file, pair.public, "a test")
    file.write_bytes(b"1235")
    assert refusal(file, pair.public).got == "net.tflite"


def test_a_changed_file_is_named(signed, keys):
    (signed / "b" / "c.bin").write_bytes(bytes(50))
    assert refusal(signed, keys.public) == fields(where=str(signed), got="b/c.bin")


ADDED = ["new.txt", "b/.git", ".gitattributes", "b/model.sig", ".x.part"]


@pytest.mark.parametrize("name", [*ADDED, *CONTENT])
def test_added_and_removed_files_are_named(signed, keys, name):
    (signed / name).unlink() if name in CONTENT else (signed / name).write_bytes(b"")
    assert refusal(signed, keys.public) == fields(where=str(signed), got=name)


def test_a_renamed_file(signed, keys):
    (signed / "a.txt").rename(signed / "A.txt")
    assert refusal(signed, keys.public).got == "A.txt"


def test_another_key(signed, tmp_path):
    error = refusal(signed, make_pair(tmp_path, "other").public)
    assert error == fields(where=str(signed / "model.sig"))
    assert "openssl ec" in error.write


def test_no_signature(tmp_path, keys):
    error = refusal(written(tmp_path / "model"), keys.public)
    assert error == fields(where=str(tmp_path / "model"), got="no file model.sig")
    assert 'sign="key.pem"' in error.write
    assert refusal(tmp_path / "model" / "a.txt", keys.public).got == "no file a.txt.sig"


def test_the_signature_of_another(signed, signer, keys, tmp_path):
    other = written(tmp_path / "other", {**CONTENT, "a.txt": b"two"})
    signer.sign_folder(other, "other")
    (other / "model.sig").replace(signed / "model.sig")
    assert refusal(signed, keys.public).got == "a.txt"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "3", "\0", "[" * 100_000, '{"dsseEnvelope": {"payload": "e30="}}',
     '{"dsseEnvelope": {"payload": 3}}', '{"dsseEnvelope": {"payload": "?"}}'],
)  # fmt: skip
def test_invalid_signatures_are_refused(signed, keys, text):
    (signed / "model.sig").write_text(text)
    assert refusal(signed, keys.public) == fields(where=str(signed / "model.sig"))


def test_named_pipes_as_signatures_are_refused(signed, keys):
    (signed / "model.sig").unlink()
    os.mkfifo(signed / "model.sig")
    assert "a FIFO (a named pipe)" in refusal(signed, keys.public).got


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("b/c.bin")])
def test_other_paths_are_refused(signed, keys, make):
    (signed / "a.txt").unlink()
    make(signed / "a.txt")
    error = refusal(signed, keys.public)
    assert error == fields(where=f"a.txt in {signed}")
    assert error.got in ("a FIFO (a named pipe)", "a link")


def test_a_signature_that_is_written_in_another_way(signed, keys):
    """The last letter of a text in base64 may hold bits that mean nothing."""
    text = (signed / "model.sig").read_text()
    payload = json.loads(text)["dsseEnvelope"]["payload"]
    at = len(payload.rstrip("=")) - 1
    same = [
        each for each in string.ascii_letters
        if base64.b64decode(payload[:at] + each + payload[at + 1 :]) == base64.b64decode(payload)
    ]  # fmt: skip
    for each in set(same) - {payload[at]}:
        other = payload[:at] + each + payload[at + 1 :]
        (signed / "model.sig").write_text(text.replace(payload, other))
        assert refusal(signed, keys.public) == fields(where=str(signed / "model.sig"))


def test_a_signature_that_leaves_files_out(signed, keys):
    """By the very key, and by the tool itself, which was told not to look at some."""
    import model_signing

    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[signed / "a.txt"])
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
    (signed / "model.sig").unlink()
    config.set_hashing_config(hashing).sign(signed, signed / "model.sig")
    assert refusal(signed, keys.public).got == ".gitignore, a.txt"


# --- the tool itself ---------------------------------------------------------------------


def test_the_tool_verifies_what_we_sign(signed, keys):
    import model_signing

    def check():
        model_signing.verifying.Config().use_elliptic_key_verifier(
            public_key=keys.public
        ).set_hashing_config(
            model_signing.hashing.Config().set_ignored_paths(
                paths=[signed / "model.sig"], ignore_git_paths=False
            )
        ).verify(signed, signed / "model.sig")

    check()
    (signed / "a.txt").write_bytes(b"two")
    with pytest.raises(ValueError):
        check()


@pytest.mark.parametrize("shards", [False, True])
def test_we_verify_what_the_tool_signs(tmp_path, keys, shards):
    import model_signing

    content = {name: each for name, each in CONTENT.items() if each and name[0] != "."}
    folder = written(tmp_path / "model", content)
    hashing = model_signing.hashing.Config()
    if shards:
        hashing.use_shard_serialization(shard_size=20)
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
    config.set_hashing_config(hashing).sign(folder, folder / "model.sig")
    verify(folder, keys.public, "a test")
    (folder / "b" / "c.bin").write_bytes(bytes(50))
    assert "b/c.bin" in refusal(folder, keys.public).got


def test_a_signature_has_the_name_that_the_folder_gets(signer, tmp_path):
    folder = written(tmp_path / ".served.0123.part")
    signer.sign_folder(folder, "served")
    assert b".part" not in payload(folder / "model.sig")
    assert b'"served"' in payload(folder / "model.sig")


def payload(file):
    return base64.b64decode(json.loads(file.read_bytes())["dsseEnvelope"]["payload"])


# --- keys --------------------------------------------------------------------------------


def test_invalid_keys_are_refused(tmp_path, keys):
    (tmp_path / "text.pem").write_text("hello")
    for file in (str(tmp_path / "text.pem"), keys.public):
        with refused(InvalidArgumentError, "openssl ecparam -genkey", where=file):
            Signer(file, "a test")
    for file in (str(tmp_path / "text.pem"), keys.private):
        with refused(InvalidArgumentError, "-pubout -out key.pub"):
            verify(tmp_path, file, "a test")


def test_keys_of_other_kinds(tmp_path):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ed25519

    private = ed25519.Ed25519PrivateKey.generate().private_bytes(
        s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()
    )
    (tmp_path / "key.pem").write_bytes(private)
    protected = make_pair(tmp_path, "protected", password=b"secret").private
    odd = make_pair(tmp_path, "odd", curve="SECP256K1").private
    for file in (str(tmp_path / "key.pem"), protected, odd):
        with pytest.raises(InvalidArgumentError):
            Signer(file, "a test")


@pytest.mark.parametrize("argument", ["sign", "verify"])
def test_a_file_of_a_key_that_cannot_be_read(tmp_path, argument):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(bytes(1 << 20))
    reasons = {
        "nothing": "No such file or directory",
        ".": "a directory",
        "fifo": "a FIFO (a named pipe)",
        "long": "it has 1048576 bytes, and 65536 are the most that is read",
    }
    for name, reason in reasons.items():
        with refused(InvalidArgumentError, got=reason):
            use(argument, tmp_path / name, tmp_path)


def use(argument, key, path):
    return Signer(key, "a test") if argument == "sign" else verify(path, key, "a test")


@pytest.mark.parametrize("argument", ["sign", "verify"])
def test_the_text_of_a_key_is_never_repeated(tmp_path, keys, argument):
    text = Path(keys.private).read_text()
    for key in (text, text.encode()):
        with refused(InvalidArgumentTypeError, got="the text of a key") as caught:
            use(argument, key, tmp_path)
        assert "BEGIN" not in str(caught.value) and text[40:60] not in repr(caught.value)
    with pytest.raises(InvalidArgumentTypeError):
        use(argument, 3, tmp_path)


def test_nothing_of_a_private_key_is_written(signed, keys):
    secret = Path(keys.private).read_text().splitlines()[1]
    assert secret.encode() not in (signed / "model.sig").read_bytes()
    assert {each.name for each in signed.iterdir()} == {".gitignore", "a.txt", "b", "model.sig"}


@pytest.mark.parametrize("argument", ["sign", "verify"])
def test_without_the_package_it_is_named(tmp_path, keys, argument, monkeypatch):
    for name in ("model_signing", "model_signing.signing", "model_signing.verifying"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError) as caught:
        use(argument, keys.private, tmp_path)
    assert "model_signing" in caught.value.what and f"{argument}=" in caught.value.what
    assert caught.value.write == (
        'python -m pip install "model-signing>=1.1" "pyOpenSSL>=25" '
        "(the extra [signing] of pax-export)"
    )


def test_the_package_is_loaded_by_those_who_sign():
    code = "import sys, pax_export.export.artifact.loading; print('model_signing' in sys.modules)"
    assert printed(code) == "False\n"


# --- what a signature is, for who replaces files -----------------------------------------


def test_signatures_are_recognized(signed, tmp_path):
    assert signature_file.recognize_signature(signed / "model.sig")
    (tmp_path / "pgp.sig").write_bytes(b"-----BEGIN PGP SIGNATURE-----\n")
    (tmp_path / "list.sig").write_bytes(b"[]")
    for path in (tmp_path / "pgp.sig", tmp_path / "list.sig", tmp_path / "none.sig", tmp_path):
        assert signature_file.recognize_signature(path) is None
