"""Damage to weights of every format: refused by an error of ours, or read; and little memory.

A flip, a cut, a gap, or numbers that lie, at a place that chance chooses.  Never an error that
is not ours, never a file that takes much time or memory; and a file larger than memory can be
read array by array.
"""

from __future__ import annotations

import random as chance

import h5py
import jax
import numpy as np
import pytest
import safetensors.numpy

from pax_export.errors import PaxError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.hard.size import runs
from tests.memory import peak
from tests.weights.sources.torch_files import state_dict, write_legacy, write_zip

ARRAYS = {
    "layer.kernel": np.arange(64, dtype=np.float32).reshape(2, 32),
    "layer.bias": np.arange(32, dtype=np.float32),
    "step": np.array(3, np.int64),
}
ENOUGH_MEBIBYTES = 512


def in_safetensors(path, arrays):
    safetensors.numpy.save_file(arrays, path)


def in_npz(path, arrays):
    with path.open("wb") as file:
        np.savez(file, **arrays)


def in_packed_npz(path, arrays):
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def in_torch(path, arrays):
    write_zip(path, state_dict(arrays), {str(key): array.tobytes()
                                         for key, array in enumerate(arrays.values())})  # fmt: skip


def in_legacy_torch(path, arrays):
    by_key = {str(key): array for key, array in enumerate(arrays.values())}
    write_legacy(path, state_dict(arrays, legacy=True), by_key)


def in_hdf5(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name.replace(".", "/"), data=array)


def in_gguf(path, arrays):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "b" * 30])
    for name, array in arrays.items():
        writer.add_tensor(name, np.atleast_1d(array))
    packed = np.zeros((4, 34), np.uint8)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_onnx(path, arrays):
    onnx = pytest.importorskip("onnx")
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    node = onnx.helper.make_node("Gemm", ["x", "layer.kernel", "layer.bias"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [], initializer=tensors)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


def in_flax(path, arrays):
    serialization = pytest.importorskip("flax.serialization")
    path.write_bytes(serialization.to_bytes(dict(arrays)))


def in_orbax(path, arrays):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as saver:
        saver.save(path, dict(arrays))


def in_tensorflow(path, arrays):
    tf = pytest.importorskip("tensorflow")
    variables = {name.replace(".", "_"): tf.Variable(array) for name, array in arrays.items()}
    path.mkdir()
    tf.train.Checkpoint(**variables).write(str(path / "net"))


def in_tflite(path, arrays):
    to_tflite = pytest.importorskip("pax_export.export").to_tflite
    kernel, bias, step = (array.astype(np.float32) for array in arrays.values())

    def function(params, x):
        return {"y": x @ params["kernel"] + params["bias"], "step": params["step"] + x}

    params = {"kernel": kernel, "bias": bias, "step": np.full(2, step, np.float32)}
    to_tflite((params, function), path, jax.ShapeDtypeStruct((1, 2), np.float32), validate=False)


# Without HDF5: libhdf5 itself may hang on a damaged file, and holds the interpreter then.
FILES = [in_safetensors, in_npz, in_packed_npz, in_torch, in_legacy_torch, in_gguf,
         in_onnx, in_flax, in_orbax, in_tensorflow, in_tflite]  # fmt: skip


def files(path):
    return sorted(path.rglob("*")) if path.is_dir() else [path]


def damaged(content, dice):
    changed = bytearray(content)
    if not changed:
        return b"\0"
    place = dice.randrange(len(changed))
    match dice.randrange(8):
        case 0 | 1 | 2 | 3:
            for _ in range(dice.choice([1, 1, 2, 8])):
                changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        case 4:
            del changed[place:]
        case 5:
            lies = (b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little"), b"\xff" * 4)
            changed[place : place + 8] = dice.choice(lies)
        case 6:
            del changed[place : place + dice.choice([1, 4, 8, 64])]
        case 7:
            other = dice.randrange(len(changed))
            changed[place : place + 16] = changed[other : other + 16]
    return bytes(changed)


@pytest.mark.parametrize("write", FILES)
def test_damage_is_refused_or_harmless(write, tmp_path):
    path = tmp_path / "net"
    write(path, ARRAYS)
    with open_source(path) as source:
        assert len(source.entries) >= len(ARRAYS)
    there = [file for file in files(path) if file.is_file()]
    dice = chance.Random(0)
    with peak(found := {}, "damaged"):
        for _ in range(runs(short=60, long=5000)):
            file = dice.choice(there)
            whole = file.read_bytes()
            file.unlink()  # what was mapped before stays as it is
            file.write_bytes(damaged(whole, dice))
            read_all(path)
            file.unlink()
            file.write_bytes(whole)
    assert found["damaged"] < ENOUGH_MEBIBYTES


def read_all(path):
    """Reads what can be read; an error that is not ours is one of the test."""
    try:
        with open_source(path) as source:
            for entry in source.entries.values():
                try:
                    entry.read()
                except PaxError:
                    pass
    except PaxError:
        pass


@pytest.mark.parametrize(
    "write", [in_safetensors, in_npz, in_torch, in_legacy_torch, in_hdf5, in_gguf, in_onnx, in_flax]
)
def test_reading_takes_the_memory_of_the_largest_array(write, tmp_path):
    """Of a gigabyte in the long form, in eight arrays."""
    size = runs(short=1 << 20, long=1 << 25)
    arrays = {f"a{number}": np.full(size, number, np.float32) for number in range(8)}
    write(tmp_path / "net", arrays)
    arrays.clear()
    open_source(tmp_path / "net").close()  # what is imported takes its memory
    with peak(found := {}, "read"), open_source(tmp_path / "net") as source:
        for number in range(8):
            assert_close(float(source.entries[f"a{number}"].read().max()), number)
            part = source.entries[f"a{number}"].read_part((slice(7, 9),))
            assert_close(part, [number, number])
    assert found["read"] < 4 * size / 2**20 + 12
