"""numpy's archives as a source."""

from __future__ import annotations

import os
import pickle
import zipfile

import numpy as np
import pytest

from pax_export.errors import UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused

ARRAYS = {
    "a/b": np.arange(12, dtype=np.float32).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "number": np.array(3, ">i4"),
    "none": np.zeros((0, 2), bool),
    "large": np.arange(1 << 18, dtype=np.int64),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_array(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    with open_source(tmp_path / "a.npz") as source:
        assert source.kind == "npz"
        assert list(source.entries) == list(ARRAYS)
        for name, array in ARRAYS.items():
            assert_close(source.entries[name].read(), array, rtol=0)
            assert source.entries[name].shape == array.shape
            part = (slice(0, 1),) * array.ndim
            assert_close(source.entries[name].read_part(part), array[part], rtol=0)


class Harmful:
    def __reduce__(self):
        return os.system, ("echo harm > harm",)


def test_objects_are_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", a=np.array([Harmful()], object))
    with refused(UnsupportedDtypeError, where="a in a.npz", got="object"):
        open_source("a.npz")
    np.savez("a.npz", a=np.array(["text"]))
    with refused(UnsupportedDtypeError, where="a in a.npz", got="<U4"):
        open_source("a.npz")
    assert not os.path.exists("harm")


def header(text):
    text = text.encode().ljust(118)
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,)}"),
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({1 << 60},)}}"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}") + bytes(4),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}") + bytes(4),
        header("__import__('os').system('echo harm')"),
        b"\x93NUMPY\x09\x00",
        pickle.dumps(3),
        b"",
    ],
)
@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_inconsistent_members_are_refused(tmp_path, content, packing):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", packing) as archive:
        archive.writestr("a.npy", content)
    with refused(WeightsFileError, "a in "):
        open_source(tmp_path / "a.npz")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({1 << 28},)}}"
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("a.npy", "w") as member:
            member.write(header(text))
            for _ in range(1 << 4):
                member.write(bytes(1 << 24))
    with refused(WeightsFileError, "expands"):
        open_source(tmp_path / "a.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", b"")
        archive.writestr("a.npy", b"")
    with refused(WeightsFileError, got="ValueError: the name 'a.npy' twice in the archive"):
        open_source(tmp_path / "a.npz")


def test_a_changed_number_is_noticed(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(10_000))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[40_000] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with open_source(tmp_path / "a.npz") as source:
        with refused(WeightsFileError, got="ValueError: 'a.npy' differs from its checksum"):
            source.entries["a"].read()
