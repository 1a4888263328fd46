"""Copies pinned packages of npm."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pax_export._foundations.errors import MissingPackageError
from pax_export._foundations.files import atomic

#: The time limit of a download, most of which npm itself takes, in seconds.
_SECONDS = 300
_PATIENCE = ("--fetch-retries=1", "--fetch-timeout=60000")


class Package(NamedTuple):
    """A version of a package, and the files to copy.

    Attributes:
        name: its name in npm.
        version: the version to copy.
        sha512: the hash of the archive, in base64, as in npm's ``dist.integrity``.
        files: paths in the archive.
    """

    name: str
    version: str
    sha512: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


_ORT = "package/dist/ort"
ONNXRUNTIME = Package(
    "onnxruntime-web",
    "1.30.0",
    "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    (
        f"{_ORT}.wasm.min.mjs",
        f"{_ORT}-wasm-simd-threaded.mjs",
        f"{_ORT}-wasm-simd-threaded.wasm",
        f"{_ORT}.webgpu.min.mjs",
        f"{_ORT}-wasm-simd-threaded.asyncify.mjs",
        f"{_ORT}-wasm-simd-threaded.asyncify.wasm",
    ),
)
TOKENIZERS = Package(
    "@huggingface/tokenizers",
    "0.2.0",
    "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
    ("package/dist/tokenizers.min.mjs", "package/LICENSE"),
)
JINJA = Package(
    "@huggingface/jinja",
    "0.5.11",
    "YzEzwM5oQf4r0vs7ifWQ+yuVR1YkAHrjERQ+a8WRsStHHp4NRBg+NesjiFc+X2AFUpRvvrIeHDS1xFy9jY/IjQ==",
    ("package/dist/index.js", "package/LICENSE"),
)


def found() -> bool:
    return shutil.which("npm") is not None


def check(packages: Iterable[Package], purpose: str) -> None:
    """Refuses, by a MissingPackageError, to go on without npm."""
    if not found():
        raise MissingPackageError(
            f"{purpose} copies packages of npm, and npm is not installed.",
            got=f"no npm in PATH, for {', '.join(map(str, packages))}",
            write="Node.js with npm; or validate=False to write without them",
        )


def copy(package: Package, folder: Path) -> None:
    """Copies the files of a package into a new folder.

    The suffix ``.mjs`` becomes ``.js``, which every server supports.

    Raises:
        MissingPackageError: npm is missing, or cannot download it, or the archive has another hash.
    """
    with atomic.scratch() as scratch:
        archive = _download(package, scratch)
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != package.sha512:
            raise MissingPackageError(
                "npm: another archive was downloaded than the pinned one.",
                where=str(package),
                got=f"sha512-{digest}, expected sha512-{package.sha512}",
                write="the registry's own archive: npm config get registry",
            )
        folder.mkdir(parents=True)
        with tarfile.open(archive) as content:
            for name in package.files:
                target = folder / Path(name).name
                if target.suffix == ".mjs":
                    target = target.with_suffix(".js")
                member = content.extractfile(name)
                assert member is not None
                with member, target.open("wb") as file:
                    shutil.copyfileobj(member, file)


def _download(package: Package, directory: Path) -> Path:
    command = ["npm", "pack", str(package), "--silent", "--prefer-offline", "--ignore-scripts"]
    try:
        done = _run([*command, *_PATIENCE], directory)
        problem = done.stderr.strip()[-1000:] or done.stdout[-1000:] or f"exit {done.returncode}"
    except FileNotFoundError:
        check([package], "An export for browsers")
        raise
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_SECONDS} s"
    archives = list(directory.glob("*.tgz"))
    if len(archives) == 1:
        return archives[0]
    raise MissingPackageError(
        "npm: a package cannot be downloaded.",
        where=str(package),
        got=problem,
        write=f"npm pack {package}, which prints details; or validate=False without npm",
    )


def _run(command: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    quiet = {**os.environ, "npm_config_update_notifier": "false", "npm_config_loglevel": "error"}
    return subprocess.run(
        command, cwd=directory, env=quiet, capture_output=True, text=True, errors="replace",
        timeout=_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
