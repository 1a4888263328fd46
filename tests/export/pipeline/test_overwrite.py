"""What `overwrite=True` replaces: exports of ours, and nothing that a user would miss."""

import errno
import os
import resource
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from pax_export.errors import ExportPathError
from pax_export.export import Report, retarget, spec, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.artifact.own_exports import export_of_ours, saved_model_files
from tests.export.models import affine, affine_params
from tests.refusals import fields

MODEL = (affine_params(), affine)


def save(write, path, **options):
    options = {"overwrite": True, "validate": False, **options}
    return write(MODEL, path, spec("2, 3"), **options)


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refusal(call, *args, **options):
    with pytest.raises(ExportPathError) as caught:
        call(*args, **options)
    return caught.value


@pytest.fixture
def project(tmp_path):
    path = tmp_path / "proj"
    (path / "src").mkdir(parents=True)
    (path / "data.csv").write_text("1,2,3")
    (path / "src" / "main.py").write_text("print(1)")
    return path


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "model"
    module = tf.Module()
    module.v = tf.Variable([1.0])
    tf.saved_model.save(module, str(path))
    return path


@pytest.mark.parametrize("write", [to_saved_model, to_stablehlo])
def test_a_folder_of_a_user_is_refused(project, write):
    before = content(project)
    error = refusal(save, write, project)
    assert error == fields(where=str(project), got="a directory with data.csv, src")
    assert content(project) == before
    assert os.listdir(project.parent) == ["proj"]


@pytest.mark.parametrize("write", [to_saved_model, to_stablehlo])
def test_an_export_of_ours_is_replaced_by_any_format(tmp_path, write):
    path = tmp_path / "model"
    path.mkdir()  # an empty folder is filled
    for each in (to_saved_model, to_stablehlo, write):
        save(each, path)
    assert Report.read(path).target == {to_saved_model: "saved_model"}.get(write, "stablehlo")
    before = content(path)
    (path / "data.csv").write_text("1")
    (path / "runs").mkdir()
    (path / "runs" / "saved_model.pb").write_text("2")
    (path / "notes.mlir").write_text("3")
    assert refusal(save, write, path) == fields(got="data.csv, notes.mlir, runs/saved_model.pb")
    assert {name: content(path)[name] for name in before} == before


def test_a_saved_model_of_somebody_else(foreign):
    before = content(foreign)
    assert refusal(save, to_saved_model, foreign).got.startswith("a directory with ")
    assert content(foreign) == before
    belongs = saved_model_files(foreign)
    assert belongs and all(map(belongs, before))


def test_assets_belong_to_a_saved_model_if_it_names_them(tmp_path):
    save(to_saved_model, tmp_path / "model")
    graph = tmp_path / "model" / "saved_model.pb"
    graph.write_bytes(graph.read_bytes() + b"\x12\x09vocab.txt")
    belongs = export_of_ours(tmp_path / "model")
    assert belongs is not None
    assert belongs("assets/vocab.txt")
    assert not belongs("assets/vocab.txt.bak") and not belongs("assets/mine.txt")


def test_an_archive_of_an_export_is_none(tmp_path):
    save(to_stablehlo, tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        for name, data in content(tmp_path / "model").items():
            archive.writestr(name, data)
    refusal(save, to_tflite, tmp_path / "model.zip")


def test_a_mended_model_is_written_again_and_nothing_else(tmp_path, project):
    save(to_saved_model, tmp_path / "old", operations="xla")
    new = tmp_path / "new"
    for _ in range(2):
        retarget(tmp_path / "old", out=new, overwrite=True, validate=False)
    (new / "pax_export.json").unlink()  # as if the old one were somebody else's
    retarget(tmp_path / "old", out=new, overwrite=True, validate=False)
    options = {"overwrite": True, "validate": False}
    assert "data.csv" in refusal(retarget, tmp_path / "old", out=project, **options).got
    (new / "data.csv").write_text("1")
    assert refusal(retarget, tmp_path / "old", out=new, **options).got == "data.csv"
    # In its own place all files are kept.
    retarget(new, **options)
    assert (new / "data.csv").read_text() == "1"


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*", "a?", "back\\slash"])
def test_a_path_that_tensorflow_takes_for_a_pattern(tmp_path, name):
    path = tmp_path / name / "model"
    assert refusal(save, to_saved_model, path).where == str(path)
    assert not list(tmp_path.iterdir())
    save(to_stablehlo, path)
    assert Report.read(path).target == "stablehlo"


# --- a disk that gets full: the system's error, and nothing left behind ---


PARAMS = {"w": np.ones((1000, 300), np.float32)}  # 1.1 MiB


def save_large(path, **options):
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
    save_large(tmp_path / "deep" / "model")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    largest_file(100_000)
    for path, overwrite in ((tmp_path / "deep" / "model", True), (tmp_path / "b" / "c", False)):
        with pytest.raises(OSError) as error:
            save_large(path, overwrite=overwrite)
        assert error.value.errno == errno.EFBIG
    largest_file(resource.RLIM_INFINITY)
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["deep"]
