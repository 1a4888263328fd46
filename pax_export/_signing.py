"""Signatures of exports and weights, in the format of the OpenSSF's model-signing.

``python -m model_signing verify key`` checks them as well. A signature lists all files with
hashes; see `signature_file` for its path. Private keys are never written or printed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError, SignatureError, a_few
from pax_export._files import bounded, file_types, signature_file
from pax_export._files.overwrite_guard import files
from pax_export._optional import require

_FEW = 5
#: A key has a few hundred bytes.
_LARGEST_KEY = 1 << 16
#: The name of a single file in a signature.
_ITSELF = "."
_PRIVATE = (
    "an elliptic key without a password, as `openssl ecparam -genkey -name prime256v1 -noout "
    "-out key.pem` makes one"
)
_PUBLIC = (
    "the public half of the key that signed it, as `openssl ec -in key.pem -pubout -out key.pub` "
    "writes it"
)
_AS_SIGNED = "a copy of it, as it was signed"
#: The suffix of a chunk of a larger file whose hash model-signing can sign.
_PIECE = re.compile(r":\d+:\d+$")
_WHOLE_FILES = {"method": "files", "hash_type": "sha256"}

Key = str | os.PathLike[str]


class Signer:
    """A private key for signing; reads the key at once.

    Raises:
        MissingPackageError: model-signing is not installed.
        InvalidArgumentError: the file has no private key.
    """

    def __init__(self, key: Key, purpose: str):
        self._config = _import_part("signing", f"{purpose} with sign=").Config()
        file = _key_file(key, "sign")
        try:
            self._config.use_elliptic_key_signer(private_key=file)
        except Exception as error:  # any exception of the key parser
            raise _no_key("This is no private key to sign with.", file, error, _PRIVATE) from error

    def sign_folder(self, folder: Path, name: str) -> None:
        """Signs all files of a folder, which will have a name."""
        place = signature_file.of_folder(folder)
        place.unlink(missing_ok=True)
        self._sign_manifest(folder, name, place)

    def sign_file(self, file: Path) -> None:
        """Signs one file; the signature is written next to it."""
        self._sign_manifest(file, file.name, signature_file.of_file(file))

    def _sign_manifest(self, path: Path, name: str, place: Path) -> None:
        hashing = _Hashing(_import_part("hashing", "sign="), place, name)
        self._config.set_hashing_config(hashing).sign(path, place)


def signer(key: Key | None, purpose: str) -> Signer | None:
    """Returns a signer for a key; None without a key."""
    return None if key is None else Signer(key, purpose)


def verify(path: str | os.PathLike[str], key: Key | None, purpose: str) -> None:
    """Verifies the signature of an export by a public key; does nothing without a key.

    Raises:
        SignatureError: it is not signed with the key, or has changed.
        MissingPackageError: model-signing is not installed.
        InvalidArgumentError: the file has no public key.
    """
    if key is None:
        return
    config = _import_part("verifying", f"{purpose} with verify=").Config()
    file = _key_file(key, "verify")
    try:
        config.use_elliptic_key_verifier(public_key=file)
    except Exception as error:  # any exception of the key parser
        raise _no_key("This is no public key to verify with.", file, error, _PUBLIC) from error
    if os.path.lexists(path):
        _verify_signature(config, Path(os.path.realpath(path)), str(path))


def _verify_signature(config: Any, path: Path, shown: str) -> None:
    of = signature_file.of_folder if path.is_dir() else signature_file.of_file
    place = of(path)
    listed = _list_files(place, shown)
    hashing = _Comparing(_import_part("hashing", "verify="), place, listed, shown)
    try:
        config.set_hashing_config(hashing).verify(path, place)
    except SignatureError:
        raise
    except Exception as error:  # of a signature that was made or changed by another program
        if hashing.reached:
            raise _changed_error(path, listed, shown, error) from error
        raise SignatureError(
            "The signature was not made with this key, or is damaged.",
            where=str(place),
            got=f"{type(error).__name__}: {error}".removesuffix(": ")[:300],
            write=f"{_PUBLIC}; or {_AS_SIGNED}",
        ) from error


def _import_part(name: str, purpose: str) -> Any:
    """A part of model-signing."""
    require("OpenSSL", "signing", purpose)  # which it imports, and version 1.1 does not ask for
    return require(f"model_signing.{name}", "signing", purpose)


def _key_file(key: Key, argument: str) -> Path:
    """Checks the file of a key and returns its path; errors never contain a key."""
    if not isinstance(key, (str, os.PathLike)) or "\n" in os.fspath(key):
        raise InvalidArgumentTypeError(
            "A key must be the path of its file.",
            where=argument,
            got="the text of a key" if isinstance(key, (str, bytes)) else type(key).__name__,
            write=f'{argument}="key.pem"' if argument == "sign" else f'{argument}="key.pub"',
        )
    file = Path(key)
    try:
        bounded.read_bytes(file, _LARGEST_KEY)
    except (OSError, ValueError) as error:
        kind = None
        with suppress(OSError, ValueError):
            kind = file_types.unusual_type(file)
        raise InvalidArgumentError(
            "The key file cannot be read.",
            where=str(file).replace("\0", "\\0"),
            got=kind or getattr(error, "strerror", None) or error,
            write="the path of a file that you may read",
        ) from error
    return file


def _no_key(what: str, file: Path, error: Exception, write: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        what, where=str(file), got=f"{type(error).__name__}: {error}"[:300], write=write
    )


class _Hashing:
    """Hashes all files but the signature; `hashing.Config` skips git's files."""

    def __init__(self, hashing: Any, place: Path, name: str):
        self._name = name
        self._config = hashing.Config().set_ignored_paths(paths=[place], ignore_git_paths=False)

    def hash(self, path: Path, **_: object) -> Any:
        found = self._config.hash(path)
        return SimpleNamespace(
            model_name=self._name,
            resource_descriptors=found.resource_descriptors,
            serialization_type=found.serialization_type,
        )


@dataclass(frozen=True)
class _List:
    """The files that a signature lists; its author is not verified yet."""

    hashes: Mapping[str, str]  # by the names of files
    how: Mapping[str, Any]  # they were computed, in words of model-signing

    @property
    def of_whole_files(self) -> bool:
        return _WHOLE_FILES.items() <= self.how.items()


class _Comparing:
    """`_Hashing` of a verified signature: model-signing asks only then, so its list is trusted."""

    def __init__(self, hashing: Any, place: Path, listed: _List, shown: str):
        self._config = hashing.Config().set_ignored_paths(paths=[place], ignore_git_paths=False)
        self._place, self._listed, self._shown = place, listed, shown
        self.reached = False

    def add_ignored_paths(self, **_: object) -> None:
        """Regardless of the signature, no files are ignored."""

    def hash(self, path: Path, **_: object) -> Any:
        self.reached = True
        there = set(_signable_files(path, self._place, self._shown))
        listed = self._listed.hashes
        signed = {name if name in there else _PIECE.sub("", name) for name in listed}
        if added := there - signed:
            raise SignatureError(
                "The export contains unsigned files.",
                where=self._shown,
                got=a_few(sorted(added), _FEW),
                write="remove these files, or use a copy of the signed folder",
            )
        if missing := signed - there:
            raise SignatureError(
                "Signed files are missing.",
                where=self._shown,
                got=a_few(sorted(missing), _FEW),
                write=_AS_SIGNED,
            )
        if not self._listed.of_whole_files:
            self._as_signed()
        return self._config.hash(path)

    def _as_signed(self) -> None:
        """Hashes as the one did who signed it, perhaps with another program than this one."""
        how = self._listed.how
        if how["method"] == "shards":
            self._config.use_shard_serialization(
                hashing_algorithm=how["hash_type"], shard_size=int(how["shard_size"])
            )
        else:
            self._config.use_file_serialization(hashing_algorithm=how["hash_type"])


def _signable_files(path: Path, place: Path, shown: str) -> Iterable[str]:
    """The names of all files that are to be signed, by their paths in the folder."""
    names = list(files(path)) if path.is_dir() else [_ITSELF]
    for name in names:
        file = path / name
        kind = "a link" if file.is_symlink() else file_types.unusual_type(file)
        if kind is not None:
            raise SignatureError(
                "Only regular files can be signed.",
                where=f"{name} in {shown}",
                got=kind,
                write=_AS_SIGNED,
            )
    return (name for name in names if path / name != place)


def _list_files(place: Path, shown: str) -> _List:
    try:
        content = json.loads(bounded.read_bytes(place, signature_file.LARGEST))
        stated = json.loads(_decode_base64(content["dsseEnvelope"]["payload"]))["predicate"]
        for each in content["dsseEnvelope"]["signatures"]:
            _decode_base64(each["sig"])
        hashes = {each["name"]: each["digest"] for each in stated["resources"]}
        return _List(hashes, dict(stated["serialization"]))
    except FileNotFoundError as error:
        raise SignatureError(
            "The export is not signed.",
            where=shown,
            got=f"no file {place.name}",
            write='an export written with sign="key.pem"; or no verify=, if you trust it',
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SignatureError(
            "The signature cannot be read.",
            where=str(place),
            got=f"{type(error).__name__}: {error}"[:300],
            write=_AS_SIGNED,
        ) from error


def _decode_base64(text: str) -> bytes:
    """The bytes of a text in base64, which must be in canonical form."""
    found = base64.b64decode(text, validate=True)
    if base64.b64encode(found).decode() != text:
        raise ValueError("it is not written as its content is")
    return found


def _changed_error(path: Path, listed: _List, shown: str, error: Exception) -> SignatureError:
    """Returns the error that names the changed files."""
    changed = []
    for name, digest in listed.hashes.items() if listed.of_whole_files else ():
        with suppress(OSError):
            if _file_digest(path if name == _ITSELF else path / name) != digest:
                changed.append(path.name if name == _ITSELF else name)
    return SignatureError(
        "The signed content was damaged or changed.",
        where=shown,
        got=a_few(changed, _FEW) or f"{type(error).__name__}: {error}"[:300],
        write=_AS_SIGNED,
    )


def _file_digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
