"""What was adopted goes home: the same names, the same layouts, and the same bytes."""

from __future__ import annotations

import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.weights.adoption.foreign import CASES, LAYOUTS


def read(path):
    with pax.weights.open_source(path) as source:
        return {name: np.array(entry.read()) for name, entry in source.entries.items()}


@pytest.mark.parametrize("ending", ["safetensors", "npz", "pt"])
def test_every_array_has_the_bytes_that_it_had(tmp_path, ending):
    for number, make in enumerate(CASES):
        case = make(4)
        for framework in LAYOUTS:
            file = {name: np.ascontiguousarray(a) for name, a in case.file(framework).items()}
            net, _ = pax.weights.adopt(case.net, file)
            path = tmp_path / f"{number}.{ending}"
            pax.weights.save_as(net, path, like=file)
            back = read(path)
            assert set(back) == set(file)
            for name, array in back.items():
                assert array.dtype == file[name].dtype, name
                assert array.shape == file[name].shape, name
                assert array.tobytes() == file[name].tobytes(), name


def test_what_was_changed_comes_back_as_it_is(tmp_path):
    for make, framework in zip(CASES, ("torch", "keras", "flax", "torch", "torch")):
        case = make(4)
        file = case.file(framework)
        net, report = pax.weights.adopt(case.net, file)
        changed = jax.tree_util.tree_map(
            lambda a: jnp.asarray(0.5 * np.asarray(a) + 0.1, a.dtype) if a.ndim else a, net
        )
        path = tmp_path / "net.safetensors"
        pax.weights.save_as(changed, path, like=file, report=report)
        again, _ = pax.weights.adopt(case.net, path, origin=framework)
        for one, other in zip(*map(jax.tree_util.tree_leaves, (changed, again))):
            assert_close(other, one, 1e-6, atol=1e-6)


def test_arrays_that_are_one_stay_one(tmp_path):
    table = np.ones((7, 4), np.float32)
    file = {"wte.weight": table, "lm_head.weight": table}
    net, report = pax.weights.adopt(pax.Embed(7, 4), file)
    assert report.tied == {"lm_head.weight": "wte.weight"}
    pax.weights.save_as(net.replace(weight=2 * net.weight), tmp_path / "net.npz", like=file)
    assert all((array == 2).all() for array in read(tmp_path / "net.npz").values())


def test_other_endings_are_refused_and_other_files_stay(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    net, _ = pax.weights.adopt(pax.Linear(2, 3), file)
    with pytest.raises(pax.errors.InvalidArgumentError, match="not written in this format"):
        pax.weights.save_as(net, tmp_path / "net.h5", like=file)
    for ending in ("npz", "pt"):
        path = tmp_path / f"net.{ending}"
        path.write_text("a letter")
        with pytest.raises(pax.errors.WeightsFileError, match="no file of weights"):
            pax.weights.save_as(net, path, like=file)
        assert path.read_text() == "a letter"
    with pytest.raises(pax.errors.WeightsFileError, match="cannot be written here"):
        (tmp_path / "file").write_text("")
        pax.weights.save_as(net, tmp_path / "file" / "net.pt", like=file)


def test_archives_of_others_stay(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    net, _ = pax.weights.adopt(pax.Linear(2, 3), file)
    np.savez(tmp_path / "data.npz", x_train=np.ones(5))
    with zipfile.ZipFile(tmp_path / "run.pt", "w") as archive:  # as torch keeps a training run
        archive.writestr("run/data.pkl", b"\x80\x02}q\x00X\x05\x00\x00\x00epochq\x01K\x07s.")
    for name in ("data.npz", "run.pt"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(pax.errors.WeightsFileError, match="no file of weights that save_as"):
            pax.weights.save_as(net, tmp_path / name, like=file)
        assert (tmp_path / name).read_bytes() == before
    for name in ("own.npz", "own.pt"):
        for _ in range(2):
            pax.weights.save_as(net, tmp_path / name, like=file)


def test_a_report_of_another_module_is_refused(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    _, report = pax.weights.adopt(pax.Linear(2, 3), file)
    other = pax.Sequential(pax.Linear(2, 3))
    with pytest.raises(pax.errors.AdoptionError, match="not one of this module"):
        pax.weights.save_as(other, tmp_path / "net.npz", like=file, report=report)


def test_what_is_no_report_is_refused(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    net, _ = pax.weights.adopt(pax.Linear(2, 3), file)
    with pytest.raises(pax.errors.InvalidArgumentTypeError, match=r"no report of adopt") as caught:
        pax.weights.save_as(net, tmp_path / "net.npz", like=file, report=[1])
    assert (caught.value.where, caught.value.got) == ("save_as: report", "[1]")
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_torch_lacks_is_refused_and_nothing_is_written(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32),
            "steps": np.zeros(2, np.uint16)}  # fmt: skip
    net, _ = pax.weights.adopt(pax.Linear(2, 3), file, ignore="steps")
    with pytest.raises(pax.errors.UnsupportedDtypeError, match="torch has no storage"):
        pax.weights.save_as(net, tmp_path / "net.pt", like=file, ignore="steps")
    assert not list(tmp_path.iterdir())
