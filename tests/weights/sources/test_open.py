"""What open_source makes of a path, whatever lies there."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from pax_export.errors import MissingWeightsFileError, WeightsFileError
from pax_export.weights import open_source
from tests.refusals import refused


def test_formats_are_detected_by_content(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(1))
    os.rename(tmp_path / "a.npz", tmp_path / "a.safetensors")
    for path in (tmp_path / "a.safetensors", str(tmp_path / "a.safetensors")):
        with open_source(path) as source:
            assert source.kind == "npz"
            assert repr(source).endswith("1 arrays)")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "a file of 0 bytes"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"#!/bin/sh\n", "bin/sh"),
        (pickle.dumps({"a": 1}), "begins with"),
        (bytes(100), "100 bytes"),
    ],
)
def test_other_files_are_refused_with_the_supported_formats(tmp_path, content, got):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(WeightsFileError) as caught:
        open_source(tmp_path / "a.pt")
    assert got in str(caught.value.got)
    for format in ("safetensors", "PyTorch", "GGUF", "Keras", "ONNX", "TensorFlow", "orbax"):
        assert format in str(caught.value.write)


def test_another_folder_is_refused(tmp_path):
    (tmp_path / "readme").write_text("")
    with refused(WeightsFileError, got="a folder with readme"):
        open_source(tmp_path)


def test_other_paths_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with refused(WeightsFileError, got="a FIFO (a named pipe)"):
        open_source(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with refused(WeightsFileError, got="Too many levels of symbolic links"):
        open_source(tmp_path / "loop")
    for path in (tmp_path / "none", tmp_path / "fifo" / "below", ""):
        with pytest.raises((MissingWeightsFileError, WeightsFileError)):
            open_source(path)
    with pytest.raises(WeightsFileError):
        open_source("a\0b")


def test_arrays_may_not_be_written_to(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    with open_source(tmp_path / "a.npz") as source:
        with refused(ValueError, "read-only"):
            source.entries["a"].read()[0] = 2
        source.entries["a"].read_part((slice(0, 1),))[0] = 2  # a part is an array of its own
