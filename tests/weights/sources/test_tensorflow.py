"""TensorFlow's checkpoints and SavedModels as a source."""

from __future__ import annotations

import numpy as np
import pytest

from pax_export._foundations.wire import masked_crc32c
from pax_export.errors import WeightsFileError
from pax_export.export import spec, to_saved_model
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.export.models import affine, affine_params
from tests.refusals import refused

KINDS = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool",
         "complex64", "uint32", "float8_e5m2"]  # fmt: skip


def variables(tf):
    return {
        kind: tf.Variable(np.array([[0, 1, 1]]).astype(kind), name=f"layer/{kind}")
        for kind in KINDS
    }


def wide(array):
    return array.astype(np.complex128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tf = pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("checkpoint")
    large = tf.Variable(np.arange(1 << 18, dtype=np.float32).reshape(512, -1), name="large")
    saver = tf.train.Checkpoint(net=tf.Module(), text=tf.Variable("words"))
    saver.net.parts = [*variables(tf).values(), large, large]
    saver.net.nameless = [tf.Variable(1.0), tf.Variable(2.0)]
    return saver.write(str(folder / "net"))


def test_variables_by_the_names_they_were_given(checkpoint):
    for path in (checkpoint, f"{checkpoint}.index", checkpoint.removesuffix("/net")):
        with open_source(path) as source:
            assert source.kind == "tensorflow"
            named = [*(f"layer/{kind}" for kind in KINDS), "large"]
            assert [name for name in source.entries if name in named] == named
            for kind in KINDS:
                entry = source.entries[f"layer/{kind}"]
                assert (entry.dtype.name, entry.shape) == (kind, (1, 3))
                assert_close(wide(entry.read()), wide(np.array([[0, 1, 1]])))
    with open_source(checkpoint) as source:
        part = (slice(500, 501), slice(1, 3))
        assert_close(source.entries["large"].read_part(part), [[500 * 512 + 1, 500 * 512 + 2]])
        assert_close(source.entries["large"].read(), np.arange(1 << 18).reshape(512, -1), rtol=0)
        assert_close(source.entries["net/nameless/1"].read(), 2.0)
        assert source.metadata["keys"]["large"].startswith("net/parts/")


def test_our_own_saved_model(tmp_path):
    pytest.importorskip("tensorflow")
    params = affine_params()
    to_saved_model((params, affine), tmp_path / "net", spec("2, 3"), validate=False)
    with open_source(tmp_path / "net") as source:
        arrays = [entry.read() for entry in source.entries.values()]
    for name, array in params.items():
        assert any(np.array_equal(each, array) for each in arrays), name


def test_a_checkpoint_of_the_old_kind(tmp_path):
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("scope/w", initializer=np.eye(2))
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(tmp_path / "old"))
    with open_source(tmp_path) as source:
        assert list(source.entries) == ["scope/w"]
        assert_close(source.entries["scope/w"].read(), np.eye(2))


def test_every_changed_byte_is_noticed(checkpoint, tmp_path):
    """In the index, the names of the graph, and the numbers of the first variables."""
    tf = pytest.importorskip("tensorflow")
    prefix = tf.train.Checkpoint(a=tf.Variable([1.5, 2.5])).write(str(tmp_path / "net"))
    chance = np.random.default_rng(0)
    for file in (tmp_path / "net.index", tmp_path / "net.data-00000-of-00001"):
        content = file.read_bytes()
        for place in chance.choice(len(content), 60, replace=False):
            changed = bytearray(content)
            changed[place] ^= 1 << int(chance.integers(8))
            file.write_bytes(changed)
            try:
                with open_source(prefix) as source:
                    arrays = [entry.read() for entry in source.entries.values()]
                assert any(np.array_equal(array, [1.5, 2.5]) for array in arrays)
            except WeightsFileError:
                pass
        file.write_bytes(content[:-3])
        with pytest.raises(WeightsFileError):
            with open_source(prefix) as source:
                [entry.read() for entry in source.entries.values()]
        file.write_bytes(content)


def test_several_checkpoints_of_a_folder(tmp_path):
    tf = pytest.importorskip("tensorflow")
    for name in "ab":
        tf.train.Checkpoint(a=tf.Variable(1.0)).write(str(tmp_path / name))
    with refused(WeightsFileError, got="a.index, b.index"):
        open_source(tmp_path)


def test_an_index_that_names_one_block_again_and_again(tmp_path):
    """Its keys are all the same, and its bytes are few: it would be read for hours."""

    def block(content):
        raw = content + bytes(4) + b"\0"  # no restarts, and not packed
        return raw + masked_crc32c(raw).to_bytes(4, "little")

    def handle(offset, content):
        return b"".join(
            bytes([part & 127 | 128, part >> 7 & 127 | 128, part >> 14])
            for part in (offset, len(content) - 5)
        )

    keys = block(b"\0\1\0a" + b"\1\0\0" * 1000)
    index = block((b"\0\0\6" + handle(0, keys)) * 1000)
    footer = (bytes(2) + handle(len(keys), index)).ljust(40, b"\0")
    footer += bytes.fromhex("57fb808b247547db")
    (tmp_path / "a.index").write_bytes(keys + index + footer)
    with pytest.raises(WeightsFileError):
        open_source(tmp_path / "a.index")
