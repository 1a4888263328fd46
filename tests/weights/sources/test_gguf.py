"""llama.cpp's files as a source: dequantised, or as integers and scales."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from pax_export.errors import UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def packed(kind, rows, columns):
    """Random bits, with scales that are numbers."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block, size), np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for number, at in enumerate(halves):
        raw[..., at : at + 2] = np.array([0.25 + number], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.fixture
def file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokens", ["a", "ß", ""])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.ones((2, 2), np.float16))
    writer.add_tensor(
        "brain", np.array([[1.5]], "bfloat16").view(np.uint8),
        raw_dtype=gguf.GGMLQuantizationType.BF16,
    )  # fmt: skip
    for kind in BLOCKS:
        writer.add_tensor(kind, packed(kind, 6, 512), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "a.gguf"


def test_arrays_and_metadata(file):
    with open_source(file) as source:
        assert source.kind == "gguf"
        assert source.metadata["llama.block_count"] == 3
        assert source.metadata["tokens"] == ["a", "ß", ""]
        assert_close(source.metadata["scores"], [0.5, 1.5])
        assert_close(source.entries["plain"].read(), np.arange(12.0).reshape(3, 4))
        assert_close(source.entries["brain"].read(), [[1.5]])
        assert source.entries["brain"].dtype.name == "bfloat16"
        for kind in BLOCKS:
            entry, right = source.entries[kind], gguf.dequantize(
                packed(kind, 6, 512), gguf.GGMLQuantizationType[kind]
            )  # fmt: skip
            assert (entry.note, entry.shape, entry.dtype) == (kind, (6, 512), np.float32)
            assert_close(entry.read(), right, rtol=0)
            part = (slice(1, 5, 2), slice(100, 300))
            assert_close(entry.read_part(part), right[part], rtol=0)


@pytest.mark.parametrize("kind", BLOCKS)
def test_integers_and_scales_give_what_gguf_gives(file, kind):
    with open_source(file, keep_quantized=True) as source:
        parts = {name: entry for name, entry in source.entries.items() if name.startswith(kind)}
        integers, scales = parts[kind].read(), parts[f"{kind}.scales"].read()
        assert integers.dtype == np.int8
        assert kind in parts[kind].note
        whole = integers.reshape(*scales.shape, -1) * scales[..., None].astype(np.float32)
        if f"{kind}.minima" in parts:
            whole = whole + parts[f"{kind}.minima"].read()[..., None].astype(np.float32)
        right = gguf.dequantize(packed(kind, 6, 512), gguf.GGMLQuantizationType[kind])
        assert_close(whole.reshape(6, 512), right, rtol=0)
        assert source.entries["plain"].read().dtype == np.float32


def header(arrays=1, keys=0, version=3, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, arrays, keys) + rest


def text(content):
    return struct.pack("<Q", len(content)) + content


def head(name=b"a", sizes=(4,), code=0, offset=0):
    many = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + many + struct.pack("<IQ", code, offset)


HUGE = 1 << 60


@pytest.mark.parametrize(
    "content",
    [
        header(version=1),
        header(version=0x03000000),
        header(arrays=HUGE),
        header(keys=HUGE),
        header(0, 1, rest=struct.pack("<Q", HUGE)),
        header(0, 1, rest=text(b"k") + struct.pack("<I", 99)),
        header(0, 1, rest=text(b"k") + struct.pack("<IIQ", 9, 0, HUGE)),
        header(0, 1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, HUGE)),
        header(0, 1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, HUGE) * 50),
        header(0, 2, rest=2 * (text(b"k") + struct.pack("<II", 4, 1))),
        header(0, 1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        header(rest=head(sizes=(HUGE, HUGE))),
        header(rest=head(sizes=(1,) * 9)),
        header(rest=head(offset=HUGE)),
        header(rest=head(sizes=(33,), code=2) + bytes(99)),
        header(rest=head(sizes=(), code=2) + bytes(99)),
        header(2, rest=head() + head() + bytes(99)),
        b"GGUF",
    ],
)
def test_inconsistent_headers_are_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(WeightsFileError):
        open_source(tmp_path / "a")


def test_a_dtype_that_gguf_does_not_know(tmp_path):
    (tmp_path / "a").write_bytes(header(rest=head(code=250)))
    with refused(UnsupportedDtypeError, got="the dtype 250"):
        open_source(tmp_path / "a")


def test_every_cut_is_noticed(file):
    content = file.read_bytes()
    for cut in (5, 30, 100, 700, len(content) - 100):
        file.write_bytes(content[:cut])
        with pytest.raises(WeightsFileError):
            open_source(file)
