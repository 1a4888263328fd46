"""Checksums of a weights file, in its metadata.

The entry ``pax_export_crc32`` is JSON: the CRC-32 of each array by name, and under "" that of
everything before the arrays, with its own digits as zeros:

    {"": "8e2f0c11", "modules.0.weight": "00d1f2a3"}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from pax_export._wire import crc32, fast  # noqa: F401  `fast` for who reads files
from pax_export.weights._leaves import RESERVED

ENTRY = "pax_export_crc32"
_HEADER, _ZEROS = "", "00000000"
#: The size in bytes from which a thread pays.
_LARGE = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)
#: How the entry begins, as text and in the file; no other text of ours begins so.
_BEGIN = '{"": "'
_RAW_BEGIN = re.compile(rb'\{\\"\\": \\"')


def checksum_of(content: object) -> str:
    """The checksum of bytes."""
    return text_of(crc32(content, 0))


def text_of(number: int) -> str:
    """Formats a checksum as in the file."""
    return f"{number:08x}"


class Computed:
    """Checksums of arrays by name, of large ones in other threads, which end with the block."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS)
        self._sums: dict[str, str | Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def add(self, name: str, array: np.ndarray) -> None:
        """Begins with an array, which must not change until `sums` is asked for."""
        content = array.reshape(-1).view(np.uint8)
        large = content.nbytes >= _LARGE
        self._sums[name] = (
            self._threads.submit(checksum_of, content) if large else checksum_of(content)
        )

    def put(self, name: str, number: int) -> None:
        """Takes over the checksum of an array that was computed elsewhere."""
        self._sums[name] = text_of(number)

    def sums(self) -> dict[str, str]:
        """The checksums, in the order in which the arrays were given."""
        return {
            name: each if isinstance(each, str) else each.result()
            for name, each in self._sums.items()
        }


def checksums_text(arrays: Mapping[str, np.ndarray]) -> str:
    """The entry for some arrays, with zeros for the header."""
    with Computed() as computed:
        for name, array in arrays.items():
            computed.add(name, array)
        return json.dumps({_HEADER: _ZEROS, **computed.sums()})


def seal_header(path: Path) -> None:
    """Sorts the metadata, for reproducible files, and stores the header's checksum in the file."""
    with path.open("r+b") as file:
        begin = file.read(8)
        size = int.from_bytes(begin, "little")
        header = json.loads(file.read(size))
        header[RESERVED] = dict(sorted(header[RESERVED].items()))
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(raw) > size:  # it would be written over the arrays
            raise OSError("safetensors wrote a header that is shorter than its JSON")
        raw = begin + raw.ljust(size)
        place = _find_digits(raw)
        file.seek(0)
        file.write(raw[:place] + checksum_of(raw).encode() + raw[place + len(_ZEROS) :])


def _find_digits(raw: bytes) -> int:
    """Returns the offset of the header's digits; -1 without any."""
    found = _RAW_BEGIN.search(raw)
    return found.end() if found else -1


def read_checksums(raw: bytes, metadata: Mapping[str, str]) -> dict[str, str] | None:
    """The checksums of the arrays by name, or None; no single damaged byte hides the entry."""
    texts = [text for name, text in metadata.items() if name == ENTRY or text.startswith(_BEGIN)]
    if not texts:
        return {}
    place = _find_digits(raw)
    zeros = raw[:place] + _ZEROS.encode() + raw[place + len(_ZEROS) :]
    try:
        sums = json.loads(metadata[ENTRY])
        if place >= 0 and len(texts) == 1 and sums.pop(_HEADER) == checksum_of(zeros):
            return sums
    except (KeyError, ValueError, AttributeError, RecursionError):
        pass
    return None
