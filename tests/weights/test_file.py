"""Files: written whole or not at all, and refused where they are something else."""

import json
import os
import pickle
import random
import stat
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pax_export as pax
from pax_export._foundations.files import system
from pax_export.errors import MissingPackageError
from pax_export.weights import _metadata, _save_load
from tests.processes import printed
from tests.refusals import refused

TREE = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.safetensors"


def names(path):
    return sorted(entry.name for entry in path.parent.iterdir())


# --- writing --------------------------------------------------------------------------


def test_an_existing_file_is_replaced_and_keeps_its_permissions(path):
    pax.save_weights({"a": jnp.zeros(9)}, path)
    path.chmod(0o640)
    pax.save_weights(TREE, path)
    assert pax.load_weights(TREE, path)["b"].shape == (2, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(path) == [path.name]


def test_a_new_file_has_the_permissions_of_any_new_file(path, monkeypatch):
    """Without a look at the umask, which belongs to all threads, and is seen by changing it."""
    monkeypatch.setattr(os, "umask", None)
    pax.save_weights(TREE, path)
    (path.parent / "other").touch()
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode


def test_an_empty_file_and_one_of_another_program_are_replaced(path):
    path.touch()
    pax.save_weights(TREE, path)
    safetensors.numpy.save_file({"a": np.ones(3)}, path)
    pax.save_weights(TREE, path)
    assert pax.load_weights(TREE, path)["b"].shape == (2, 2)


def test_other_files_are_not_replaced(path):
    path.write_text("1,2,3\n4,5,6\n")
    with refused(
        OSError,
        got="a file that begins with b'1,2,3\\n4,5,6\\n'",
        where=str(path),
        write="another path, or remove it yourself",
    ):
        pax.save_weights(TREE, path)
    assert path.read_text() == "1,2,3\n4,5,6\n"
    assert names(path) == [path.name]


def test_named_pipes_are_neither_replaced_nor_read(path):
    os.mkfifo(path)
    link = path.parent / "link"
    link.symlink_to(path)
    for each in (path, link):
        with refused(OSError, got="a FIFO (a named pipe)"):
            pax.save_weights(TREE, each)

        assert "got: a FIFO (a named pipe)" in refusal(each)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_paths_that_lead_nowhere(path):
    path.symlink_to("other")
    (path.parent / "other").symlink_to(path)
    with refused(OSError, got="Too many levels of symbolic links"):
        pax.save_weights(TREE, path)
    assert "Too many levels of symbolic links" in refusal(path)
    broken = f"{path}\0"
    with refused(OSError, got="a path with a null character"):
        pax.save_weights(TREE, broken)
    assert "got: a path with a null character" in refusal(broken)


def test_a_link_stays_and_what_it_leads_to_is_replaced(path):
    real = path.parent / "step-1.safetensors"
    path.symlink_to(real)
    pax.save_weights(TREE, str(path))
    assert path.is_symlink() and real.is_file()
    below = path.parent / "runs" / "1" / "w.safetensors"  # whose folders are made
    pax.save_weights(TREE, below)
    assert below.is_file()


def test_what_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    pax.save_weights(TREE, path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(system.os, "fsync", full)
    with refused(OSError, got="No space left on device"):
        pax.save_weights({"a": jnp.zeros(9)}, path)
    assert path.read_bytes() == before
    assert names(path) == [path.name]


def test_places_that_take_no_file(tmp_path):
    (tmp_path / "file").touch()
    with refused(ValueError, where=str(tmp_path)):
        pax.save_weights(TREE, tmp_path)
    nobody_writes = "/proc/self" if os.geteuid() == 0 else str(tmp_path / "closed")
    if os.geteuid():
        (tmp_path / "closed").mkdir(0o500)
    for folder in (tmp_path / "file", nobody_writes):
        with refused(OSError, where=f"{folder}/w"):
            pax.save_weights(TREE, f"{folder}/w")


# --- reading --------------------------------------------------------------------------


def refusal(path):
    with pytest.raises(OSError) as caught:
        pax.load_weights(TREE, path)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_every_truncation_is_refused(path):
    pax.save_weights(TREE, path)
    whole = path.read_bytes()
    for content in [*(whole[:length] for length in range(len(whole))), whole + b"\0"]:
        path.write_bytes(content)
        assert f"where: {path}" in refusal(path)


def test_a_file_that_shrinks_while_it_is_read(path, monkeypatch):
    tree = {"a": jnp.zeros(1), "b": jnp.zeros(2_000_000)}  # more than is read ahead
    pax.save_weights(tree, path)
    compare = _save_load.compare_leaves

    def truncate(wanted, there):
        report = compare(wanted, there)
        os.truncate(path, path.stat().st_size - 1)
        return report

    monkeypatch.setattr(_save_load, "compare_leaves", truncate)
    with refused(OSError, where=f"b in {path}"):
        pax.load_weights(tree, path)


# --- checksums ------------------------------------------------------------------------


needs_zlib_ng = pytest.mark.skipif(
    _metadata.crc32 is zlib.crc32, reason="zlib-ng is not installed, so zlib computes checksums"
)


@needs_zlib_ng
def test_checksums_are_those_of_zlib():
    draw = random.Random(0)
    data = draw.randbytes(1 << 17)
    for size in [*range(300), 1023, 4096, 65535, 1 << 17]:
        begin = draw.randrange(len(data) - size + 1)
        part, start = memoryview(data)[begin : begin + size], draw.getrandbits(32)
        assert _metadata.crc32(part, start) == zlib.crc32(part, start)
        assert _metadata.crc32(part, 0) == zlib.crc32(part)
    numbers = np.arange(1000.0)
    assert _metadata.crc32(numbers.view(np.uint8), 0) == zlib.crc32(numbers.tobytes())
    number = 0
    for begin in range(0, len(data), 777):
        number = _metadata.crc32(data[begin : begin + 777], number)
    assert number == zlib.crc32(data)


def test_damage_at_any_place_of_an_array_is_found(tmp_path):
    path, tree = tmp_path / "w.safetensors", {"a": jnp.arange(1000.0), "b": jnp.ones(3)}
    pax.save_weights(tree, path)
    assert pax.load_weights(tree, path)["a"].tolist() == list(range(1000))
    data = bytearray(path.read_bytes())
    for back in (13, 13 + 64, 4000):
        data[-back] ^= 1
        path.write_bytes(data)
        with refused(pax.errors.WeightsFileError, "checksum"):
            pax.load_weights(tree, path)
        data[-back] ^= 1


def test_both_ways_write_one_file(tmp_path):
    code = (
        "import sys; sys.modules.update(zlib_ng=None)\n"
        "import numpy as np, pax_export as pax\n"
        "pax.save_weights({'a': np.arange(999, dtype='f')}, sys.argv[1])\n"
        "import zlib; from pax_export.weights import _metadata\n"
        "print(_metadata.crc32 is zlib.crc32)"
    )
    own, other = (tmp_path / f"{name}.safetensors" for name in ("own", "other"))
    assert printed(code, other) == "True\n"
    pax.save_weights({"a": np.arange(999, dtype="f")}, own)
    assert own.read_bytes() == other.read_bytes()


def test_every_changed_byte_is_found(path):
    tree = {**TREE, "key": jax.random.key(3), "int4": jnp.ones(3, jnp.int4)}
    pax.save_weights(tree, path)
    whole = path.read_bytes()
    other = path.parent / "other.safetensors"
    for place in range(len(whole)):
        for change in (1 << place % 8, 0xFF, whole[place] ^ 0x09):
            if change:
                data = bytearray(whole)
                data[place] ^= change
                other.write_bytes(data)
                with refused(OSError, str(other)):
                    pax.load_weights(tree, other)


def test_arrays_of_all_kinds_have_checksums(path):
    tree = {
        "a": jnp.arange(5, dtype=jnp.bfloat16),
        "key": jax.random.key(3),
        "int4": jnp.ones(3, jnp.int4),
        "empty": jnp.zeros((0, 2)),
        'odd "name" \\ é': np.array(1 + 2j),
        "number": np.array(3.0),
    }
    pax.save_weights(tree, path)
    pax.load_weights(tree, path)
    with safetensors.safe_open(path, framework="numpy") as file:
        sums = json.loads(file.metadata()["pax_export_crc32"])
    assert set(sums) == {"", *tree}
    first = path.read_bytes()
    pax.save_weights(tree, path)
    assert path.read_bytes() == first


def test_an_array_that_differs_is_named(path):
    pax.save_weights(TREE, path)
    data = path.read_bytes()
    place = data.index(np.float32(2).tobytes(), len(data) - 28)
    path.write_bytes(data[:place] + np.float32(3).tobytes() + data[place + 4 :])
    with refused(OSError, where=f"a in {path}", got="its numbers differ from their checksum"):
        pax.load_weights(TREE, path)
    # What is not read is not looked at.
    loaded, _ = pax.load_weights({"b": TREE["b"]}, path, strict=False)
    assert loaded["b"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "a file of 0 bytes"),
        (b"GGUF" + bytes(30), "a file of 34 bytes that begins with b'GGUF"),
        (
            json.dumps({"a": [1, 2]}).encode(),
            "a file of 13 bytes that begins with b'{\"a\": [1, 2]}'",
        ),
        (bytes(64), "a file of 64 bytes that begins with"),
    ],
)
def test_other_files_are_called_what_they_are(content, kind, path):
    path.write_bytes(content)
    assert f"got: {kind}" in refusal(path)


def test_a_pickle_is_not_run(path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(path.parent / "sprung"),)

    path.write_bytes(pickle.dumps(Trap()))
    refusal(path)
    assert names(path) == [path.name]


def test_missing_files_and_directories(path):
    with refused(FileNotFoundError, where=str(path)):
        pax.load_weights(TREE, path)
    assert "got: a directory with nothing in it" in refusal(path.parent)
    path.touch()
    assert f"got: a directory with {path.name}" in refusal(path.parent)


@pytest.mark.parametrize("notes", ["text", "[1]", '{"a": 1}', '{"a": {"dtype": "x", "y": "z"}}'])
def test_foreign_metadata_is_refused(notes, path):
    safetensors.numpy.save_file({"a": np.ones(3)}, path, metadata={"pax_export": notes})
    assert str(path) in refusal(path)


def test_dtypes_that_numpy_lacks_do_not_hinder_the_others(path):
    header = {
        "__metadata__": None,  # which safetensors reads as none
        "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "b": {"dtype": "F4", "shape": [2, 2], "data_offsets": [12, 14]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(14))
    loaded, report = pax.load_weights(TREE, path, strict=False)
    assert loaded["a"].tolist() == [0, 0, 0]
    assert report.mismatched == {"b": "F4[2,2] in the file, float32[2,2] in the module"}


def test_a_missing_library_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (pax.save_weights, pax.load_weights):
        with refused(MissingPackageError, call.__name__, "safetensors"):
            call(TREE, path)


def test_arguments_in_the_wrong_order(tmp_path):
    with refused(ValueError, write="a module, or a dict of arrays with other names"):
        pax.save_weights(str(tmp_path), pax.Linear(2, 2))


@pytest.mark.parametrize("folder", [False, True])
def test_other_formats_are_adopted(tmp_path, folder):
    np.savez(tmp_path / "net.npz", weight=np.ones(3))
    with refused(OSError, "pax_export.weights.adopt(module, path)"):
        pax.load_weights(pax.Linear(2, 2), tmp_path if folder else tmp_path / "net.npz")
