"""safetensors as a source: whole, in several files, damaged."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import pax_export as pax
from pax_export.errors import MissingWeightsFileError, UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused


def arrays():
    chance = np.random.default_rng(0)
    return {
        "layer.weight": chance.normal(size=(3, 4)).astype(np.float32),
        "layer.bias": chance.normal(size=4).astype(np.float16),
        "steps": np.array(7, np.int64),
        "large": chance.normal(size=(512, 1024)).astype(np.float32),
    }


def raw(header, data=b"", path=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def file(tmp_path):
    safetensors.numpy.save_file(arrays(), tmp_path / "a.safetensors", metadata={"format": "pt"})
    return tmp_path / "a.safetensors"


def test_every_array_and_the_metadata(file):
    with open_source(file) as source:
        assert source.kind == "safetensors"
        assert source.metadata == {"format": "pt"}
        assert {name: entry.read().dtype.name for name, entry in source.entries.items()} == {
            name: array.dtype.name for name, array in arrays().items()
        }
        for name, array in arrays().items():
            assert_close(source.entries[name].read(), array, rtol=0)
            assert not source.entries[name].read().flags.writeable
        part = source.entries["large"].read_part((slice(3, 5), slice(None, None, 2)))
        assert_close(part, arrays()["large"][3:5, ::2], rtol=0)


def test_the_other_names_of_a_tied_array_are_in_the_metadata(tmp_path):
    """As safetensors.torch.save_model notes them, beside texts about no array."""
    noted = {"head.weight": "layer.weight", "format": "pt", "about": "a layer", "steps": "large"}
    safetensors.numpy.save_file(arrays(), tmp_path / "a.safetensors", metadata=noted)
    with open_source(tmp_path / "a.safetensors") as source:
        assert source.tied == {"head.weight": "layer.weight"}
        assert {*source.entries} == {*arrays(), "head.weight"}
        assert_close(source.entries["head.weight"].read(), arrays()["layer.weight"], rtol=0)


def test_numbered_files_need_no_index(tmp_path):
    whole = arrays()
    for number, name in enumerate(whole, 1):
        file = tmp_path / f"model-0000{number}-of-00004.safetensors"
        noted = {"tied": name} if number == 2 else None
        safetensors.numpy.save_file({name: whole[name]}, file, metadata=noted)
    with open_source(tmp_path) as source:
        assert {*source.entries} == {*whole, "tied"} and source.tied == {"tied": "layer.bias"}
        assert_close(source.entries["steps"].read(), 7)
    index = {"weight_map": {each: f"model-0000{i}-of-00004.safetensors"
                            for i, each in enumerate(whole, 1)}}  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_source(tmp_path) as source:
        assert source.tied == {"tied": "layer.bias"} and "tied" in source.entries
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00003-of-00004.safetensors").rename(tmp_path / "model-00005-of-00004.bin")
    with refused(WeightsFileError):
        open_source(tmp_path)
    (tmp_path / "model-00005-of-00004.bin").unlink()
    with refused(WeightsFileError, "3 of 4"):
        open_source(tmp_path)


def test_a_view_of_the_file_outlives_the_source(file):
    with open_source(file) as source:
        array = source.entries["large"].read()
    assert_close(array, arrays()["large"], rtol=0)
    with pytest.raises(WeightsFileError):
        source.entries["layer.bias"].read()


def test_what_save_weights_wrote(tmp_path):
    tree = {"key": jax.random.key(3), "few": jax.numpy.arange(4, dtype="int4"), "z": np.array(1j)}
    pax.save_weights(tree, tmp_path / "a.safetensors")
    with open_source(tmp_path / "a.safetensors") as source:
        assert source.entries["few"].read().dtype.name == "int4"
        assert_close(source.entries["z"].read(), 1j)
        assert source.entries["key"].note == "keys of threefry2x32"
        assert_close(source.entries["key"].read(), jax.random.key_data(tree["key"]))


def test_a_changed_number_is_noticed_where_there_are_checksums(tmp_path):
    path = tmp_path / "a.safetensors"
    pax.save_weights({"a": np.ones(3, np.float32)}, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with open_source(path) as source, refused(WeightsFileError, "checksum"):
        source.entries["a"].read()


def sharded(folder, **files):
    for name, content in files.items():
        safetensors.numpy.save_file(content, folder / f"{name}.safetensors")
    index = {"weight_map": {key: f"{name}.safetensors" for name in files for key in files[name]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def test_several_files_by_their_index_or_folder(tmp_path):
    path = sharded(tmp_path, one={"b": np.ones(2)}, two={"a": np.zeros(3)})
    for each in (path, tmp_path):
        with open_source(each) as source:
            assert list(source.entries) == ["b", "a"]
            assert_close(source.entries["a"].read(), np.zeros(3))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".", "..", "a\\b", "a\0", 3])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    (tmp_path / "a.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsFileError):
        open_source(tmp_path / "a.index.json")


@pytest.mark.parametrize("weight_map", [None, [], {"a": "one.safetensors"}, {}])
def test_an_index_that_does_not_fit_its_files(tmp_path, weight_map):
    path = sharded(tmp_path, one={"b": np.ones(2)})
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsFileError):
        open_source(path)


def test_a_missing_shard_and_a_missing_file(tmp_path):
    path = sharded(tmp_path, one={"b": np.ones(2)})
    (tmp_path / "one.safetensors").unlink()
    with refused(MissingWeightsFileError, "one.safetensors"):
        open_source(path)
    with pytest.raises(MissingWeightsFileError):
        open_source(tmp_path / "no such file")


def test_a_folder_of_several_files_without_an_index(tmp_path):
    for name in "ab":
        safetensors.numpy.save_file({"x": np.ones(1)}, tmp_path / f"{name}.safetensors")
    with refused(WeightsFileError, got="a.safetensors, b.safetensors"):
        open_source(tmp_path)


def field(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"shape": list(shape), "dtype": dtype, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        {"a": field(shape=(-2,))},
        {"a": field(shape=(2.0,))},
        {"a": field(shape=(1 << 62, 4))},
        {"a": field(offsets=(0, 1 << 62))},
        {"a": field(offsets=(8, 16))},
        {"a": field(), "b": field()},  # the same bytes twice
        {"a": field(shape=(1,), offsets=(0, 4))},  # bytes left over
        {"a": {}},
        {"a": None},
        [],
        b'{"a": 1, "a": 2}',
        b'{"a": ' + b"[" * 100_000,
        b"{",
        {"__metadata__": {"a": 1}},
        {"__metadata__": {"pax_export": "[]"}, "a": field()},
    ],
)
def test_inconsistent_headers_are_refused(tmp_path, header):
    with pytest.raises(WeightsFileError):
        open_source(raw(header, bytes(8), tmp_path / "a"))


def test_every_cut_is_noticed(file):
    content = file.read_bytes()
    for cut in (0, 1, 8, 20, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(WeightsFileError):
            open_source(file)


def test_all_dtypes_that_nothing_here_has_are_named(tmp_path):
    header = {
        "a": field(dtype="F4"),
        "b": field(dtype="F32", offsets=(8, 16)),
        "c": field(dtype="I7", offsets=(16, 24)),
    }
    with refused(UnsupportedDtypeError, got="a: 'F4', c: 'I7'"):
        open_source(raw(header, bytes(24), tmp_path / "a"))
