"""Checksums by zlib-ng are those of zlib, and both write the same file."""

import random
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.weights import _metadata
from tests.processes import printed
from tests.refusals import refused

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
        "import sys; sys.argv[2] == '1' and sys.modules.update(zlib_ng=None)\n"
        "import jax.numpy as jnp, pax_export as pax\n"
        "pax.save_weights({'a': jnp.arange(999.0)}, sys.argv[1])\n"
        "import zlib; from pax_export.weights import _metadata\n"
        "print(_metadata.crc32 is not zlib.crc32)"
    )
    files = []
    for pure in ("0", "1"):
        files.append(tmp_path / f"{pure}.safetensors")
        fast = printed(code, files[-1], pure)
    assert fast == "False\n"
    assert files[0].read_bytes() == files[1].read_bytes()
