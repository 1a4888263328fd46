"""What the files of an export are noted as: a hash and a size, without what no two runs share.

Whatever differs between two runs of one commit is taken out of the bytes here,
each with its reason; a file that has nothing else in it is left out, by name.
Where the layout of a file is needed it is written out a second time: this must
run on commits that keep their own reader elsewhere.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

REPORT = "pax_export.json"
PLACE = "<place>"
_OF_BUNDLE = '"target": "stablehlo"'

#: Files that hold nothing but what differs, and why.
LEFT_OUT = {"fingerprint.pb": "TensorFlow draws a random number into it"}

# What differs: wall times, and rounding, which depends on the machine.  The
# phases and the names of the outputs stay.
_MEASURED = re.compile(r'("(?:seconds|largest_error)": \{)([^{}]*)(\})')
_NUMBER = re.compile(r": [-+0-9.eE]+|: NaN|: Infinity")
# The version of this package is noted once, with those of all others.
_VERSION = re.compile(r'(?<="pax_export": ")[^"]*')
# jax's own program of a bundle counts the paths and lines of the sources that
# it was traced from; what is written of it has none.
_TRACED_BYTES = re.compile(r'(?<="module_bytes": )\d+')
_SUM = re.compile(rf"^[0-9a-f]{{64}}  ({re.escape(REPORT)}|saved_model\.pb)$", re.M)
# TensorFlow calls a table that is made of values by a random number.
_TABLE = re.compile(rb"hash_table_[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# The key of the report in an ONNX file; see `_of_onnx`.
_KEY_IN_ONNX = b"\x0a" + bytes([len(REPORT)]) + REPORT.encode()
_TAG_IN_ONNX = 14 << 3 | 2  # metadata_props
# TensorFlow numbers functions by how many the process has made; messages of its
# converter name them, and are cut behind so many letters.
_NUMBERED = re.compile(r"(__inference_\w+?)_\d+")
_LONGEST_LINE = 300
# What str() of a report says of wall times, rounding, and the version.
_PRINTED = re.compile(r"largest error [-+0-9.e]+|(?<=seconds ).*|(?<= pax_export )[^,]*")


def notes(place: Path) -> Iterator[tuple[str, str]]:
    """For each file of an export its name, and its hash and size; or why it is left out."""
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    for file in files:
        name = file.name if file == place else file.relative_to(place).as_posix()
        if file.is_symlink():
            yield name, f"a link to {file.readlink()}"
        elif file.is_file() and file.name not in LEFT_OUT:
            for part, content in _parts(file):
                yield name + part, noted(content)


def left_out(place: Path) -> Iterator[tuple[str, str]]:
    """The files that `notes` says nothing of, each with the reason."""
    for file in sorted(place.rglob("*")):
        if file.name in LEFT_OUT:
            yield file.relative_to(place).as_posix(), LEFT_OUT[file.name]


def noted(content: bytes | str) -> str:
    """A hash and a size, as one text."""
    content = content.encode() if isinstance(content, str) else content
    return f"sha256 {hashlib.sha256(content).hexdigest()}, {len(content)} bytes"


def printed(report: object) -> str:
    """What a user reads of a report, without what was measured."""
    return _PRINTED.sub("<left out>", str(report))


def said(error: Exception, folder: Path) -> str:
    """What a user reads of a refusal, wherever the export was to be."""
    text = f"{type(error).__name__}: {error}".replace(str(folder), PLACE)
    return "\n".join([_NUMBERED.sub(r"\1", line)[:_LONGEST_LINE] for line in text.splitlines()])


def _parts(file: Path) -> Iterator[tuple[str, bytes]]:
    content = file.read_bytes()
    if file.suffix in _EMBEDDING:
        content, report = _EMBEDDING[file.suffix](file, content)
        yield f"#{REPORT}", _without_measured(report)
    yield "", _CLEANERS.get(file.name, _unchanged)(content)


def _of_tflite(file: Path, content: bytes) -> tuple[bytes, bytes]:
    """The report lies in a zip archive behind the model."""
    with zipfile.ZipFile(file) as archive:
        (entry,) = archive.infolist()
        report = archive.read(entry)
    # The rest of the archive: it depends on the report's length and checksum.
    kept = f"{entry.filename} {entry.date_time} {entry.compress_type}".encode()
    return content[: entry.header_offset] + kept, report


def _of_onnx(file: Path, content: bytes) -> tuple[bytes, bytes]:
    """The report is a field: tag, length, key, tag, length, report; its hash is the next one."""
    at = content.rindex(_KEY_IN_ONNX)
    for start in range(at - 2, at - 7, -1):
        end = at + _varint(content[start + 1 : at])
        if content[start] == _TAG_IN_ONNX and content[end : end + 1] in (
            b"",
            bytes([_TAG_IN_ONNX]),
        ):
            return content[:start], content[content.index(b"{", at) : end]
    raise ValueError(f"{file.name} does not end with its report")


def _varint(content: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(content))


_EMBEDDING: dict[str, Callable[[Path, bytes], tuple[bytes, bytes]]] = {
    ".tflite": _of_tflite,
    ".onnx": _of_onnx,
}


def _without_measured(content: bytes) -> bytes:
    """A report, without what depends on the machine, the version and the place of sources."""

    def measured(match: re.Match[str]) -> str:
        return match[1] + _NUMBER.sub(": 0", match[2]) + match[3]

    text = _VERSION.sub("<version>", _MEASURED.sub(measured, content.decode()))
    return (_TRACED_BYTES.sub("0", text) if _OF_BUNDLE in text else text).encode()


def _without_sum(content: bytes) -> bytes:
    """The list of hashes without those of files that are noted by themselves, cleaned."""
    return _SUM.sub(r"<noted>  \1", content.decode()).encode()


def _without_tables(content: bytes) -> bytes:
    """A graph in which tables are numbered as they come."""
    names: list[bytes] = []

    def numbered(match: re.Match[bytes]) -> bytes:
        if match[0] not in names:
            names.append(match[0])
        return b"hash_table_%036d" % names.index(match[0])

    return _TABLE.sub(numbered, content)


def _unchanged(content: bytes) -> bytes:
    return content


_CLEANERS: dict[str, Callable[[bytes], bytes]] = {
    REPORT: _without_measured,
    "pax_export_retarget.json": _without_measured,
    "SHA256SUMS": _without_sum,
    "saved_model.pb": _without_tables,
}
