"""A disk that gets full: the system's error, and nothing left behind."""

import errno
import resource

import numpy as np
import pytest

from pax_export.export import spec, to_saved_model

PARAMS = {"w": np.ones((1000, 300), np.float32)}  # 1.1 MiB


def save(path, **options):
    to_saved_model(
        (PARAMS, lambda p, x: x @ p["w"]), path, spec("n, 1000"), validate=False, **options
    )


@pytest.fixture
def largest_file():
    """Limits the size of the files that this process may write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_quota_of_the_process(tmp_path, largest_file):
    save(tmp_path / "deep" / "model")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    largest_file(100_000)
    for path, overwrite in ((tmp_path / "deep" / "model", True), (tmp_path / "b" / "c", False)):
        with pytest.raises(OSError) as error:
            save(path, overwrite=overwrite)
        assert error.value.errno == errno.EFBIG
    largest_file(resource.RLIM_INFINITY)
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["deep"]
