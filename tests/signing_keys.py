"""Pairs of keys to sign with, as OpenSSL writes them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pax_export._signing import Signer


class Pair(NamedTuple):
    """Two files."""

    private: str
    public: str


def sign_folder(folder, keys):
    """Signs a folder as an export, whatever is in it."""
    Signer(keys.private, "a test").sign_folder(folder, folder.name)


def make_pair(folder, name="key", curve="SECP256R1", password=None):
    """A new pair of keys in a folder."""
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    from cryptography.hazmat.primitives import serialization as s

    private = ec.generate_private_key(getattr(ec, curve)())
    protection = s.BestAvailableEncryption(password) if password else s.NoEncryption()
    texts = {
        "pem": private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, protection),
        "pub": private.public_key().public_bytes(
            s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo
        ),
    }
    for suffix, text in texts.items():
        (folder / f"{name}.{suffix}").write_bytes(text)
    return Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.pub"))
