"""Models of the Hugging Face Hub; cache, tokens, mirrors and offline mode are huggingface_hub's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pax_export._foundations.errors import (
    ExportPathError,
    MissingWeightsFileError,
    PaxError,
    first_line,
)
from pax_export._foundations.files import own_files
from pax_export._foundations.files.system import as_path
from pax_export._foundations.optional import require

#: ``organization/name``, or a file of it, ``organization/name/model.gguf``.
_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[^\\]+))?")
#: A local file that is not there rather than a model.
_FILE = re.compile(r"\.(safetensors|gguf|npz|pth?|bin|h5|keras|onnx|tflite|msgpack|json)$")
_SAFE = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
#: Other formats of the same weights, for models without safetensors.
_OTHERS = ["*.bin", "*.pt", "*.pth", "*.h5", "*.keras", "*.msgpack", "*.npz", "*.onnx", "*.tflite"]


def local_path(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The path itself, or where the files of a model of the Hub are after they are downloaded."""
    path = as_path(source, "source")
    found = _ID.fullmatch(source) if isinstance(source, str) else None
    if found is None or path.exists() or (revision is None and _is_local(path, found)):
        return path
    if find_spec("huggingface_hub") is None and revision is None:
        raise MissingWeightsFileError(
            "There is no such file or folder.",
            where=str(source),
            got="no huggingface_hub either, which reads models of the Hub",
            write='a path; or pip install "pax-export[hub]"',
        )
    hub = require("huggingface_hub", "hub", f"the model {source}")
    with _explained(source, revision):
        if found["file"]:
            return Path(hub.hf_hub_download(found["repo"], found["file"], revision=revision))
        options: Any = {"revision": revision, "ignore_patterns": ["*/*"]}
        folder = Path(hub.snapshot_download(found["repo"], allow_patterns=_SAFE, **options))
        if not any(folder.glob("*.safetensors")):  # pickles only where there is nothing else
            hub.snapshot_download(found["repo"], allow_patterns=_OTHERS, **options)
        return folder


def _is_local(path: Path, found: re.Match[str]) -> bool:
    return Path(path.parts[0]).is_dir() or bool(not found["file"] and _FILE.search(path.name))


@contextmanager
def _explained(source: object, revision: str | None) -> Iterator[None]:
    """Names the model in errors of downloads and uploads, whatever huggingface_hub raises."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # of huggingface_hub and of its HTTP client; raised again
        raise MissingWeightsFileError(
            "The Hub does not give this model.",
            where=f"{source}" + (f", revision {revision!r}" if revision else ""),
            got=f"{type(error).__name__}: {first_line(error)}"[:300],
            write="an id and a revision that exist, a token for private ones (HF_TOKEN), a "
            "connection; or a local path",
        ) from error


def push_to_hub(
    path: str | os.PathLike[str],
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Uploads an export, adapters, weights or a language model to the Hugging Face Hub.

    The repository is created if it is missing.  A README.md, the Hub's card, is written there
    unless the folder or the repository has one.

    Args:
        path: the folder or file; a file is uploaded with its card and its external data.
        repo: ``"organization/name"``.
        private: whether a new repository is private; default: as the organization decides.
        revision: a branch, which is created if it is missing.
        message: the message of the commit.

    Returns:
        The address of the commit.

    Raises:
        ExportPathError: (an OSError) the path does not exist.
        MissingWeightsFileError: (an OSError) the Hub refuses, with its reason.
        MissingPackageError: huggingface_hub is not installed.

    Example:
        >>> import pax_export as pax
        >>> pax.weights.push_to_hub("server", "me/digits", private=True)  # doctest: +SKIP
        'https://huggingface.co/me/digits/commit/5c0f1b…'
    """
    path = as_path(path)
    if not path.exists():
        raise ExportPathError(
            "There is nothing to upload.", where=str(path), write="the path of an export"
        )
    hub = require("huggingface_hub", "hub", "push_to_hub")
    api = hub.HfApi()
    with _explained(repo, revision):
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        options = {"revision": revision, "commit_message": message or f"Upload {path.name}"}
        has_card = api.file_exists(repo, "README.md", revision=revision)
        files = _files_of(path, None if has_card else _readme(path, repo))
        operations = [hub.CommitOperationAdd(*each) for each in files.items()]
        commit = api.create_commit(repo, operations, **options)
    return str(commit.commit_url)


def _files_of(path: Path, readme: str | None) -> dict[str, str | bytes]:
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file())
        files: dict[str, str | bytes] = {
            each.relative_to(path).as_posix(): str(each) for each in found
        }
    else:
        beside = [own_files.card_of_file(path), *own_files.all_data_of_file(path)]
        files = {each.name: str(each) for each in (path, *beside) if each.is_file()}
    return files if readme is None else {"README.md": readme.encode(), **files}


def _readme(path: Path, repo: str) -> str:
    """The Hub's card: what reads the files, from the report if there is one."""
    report = path / "pax_export.json"
    report_fields = json.loads(report.read_bytes()) if report.is_file() else {}
    kind = report_fields.get("target") or path.suffix.removeprefix(".") or "weights"
    return (
        f"---\nlibrary_name: pax-export\ntags:\n- jax\n- {kind}\n---\n\n# {repo.split('/')[-1]}\n\n"
        f"Written by [pax-export](https://pypi.org/project/pax-export/) as {kind}"
        + (f", from {report_fields['model']}" if report_fields.get("model") else "")
        + f".\n\n```python\nfrom huggingface_hub import snapshot_download\n\n"
        f'path = snapshot_download("{repo}")\n```\n'
    )
