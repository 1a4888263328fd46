"""What was adopted goes home: the same names, the same layouts, and the same bytes."""

from __future__ import annotations

import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.adoption.foreign import CASES, LAYOUTS, Free, normal, read


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


def test_changed_weights_are_saved_back(tmp_path):
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
    with refused(pax.errors.InvalidArgumentError, where="save_as"):
        pax.weights.save_as(net, tmp_path / "net.h5", like=file)
    for ending in ("npz", "pt"):
        path = tmp_path / f"net.{ending}"
        path.write_text("a letter")
        with pytest.raises(pax.errors.WeightsFileError):
            pax.weights.save_as(net, path, like=file)
        assert path.read_text() == "a letter"
    with pytest.raises(pax.errors.WeightsFileError):
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
        with refused(pax.errors.WeightsFileError, "save_as"):
            pax.weights.save_as(net, tmp_path / name, like=file)
        assert (tmp_path / name).read_bytes() == before
    for name in ("own.npz", "own.pt"):
        for _ in range(2):
            pax.weights.save_as(net, tmp_path / name, like=file)


def test_a_report_of_another_module_is_refused(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    _, report = pax.weights.adopt(pax.Linear(2, 3), file)
    other = pax.Sequential(pax.Linear(2, 3))
    with refused(pax.errors.AdoptionError, where="weight"):
        pax.weights.save_as(other, tmp_path / "net.npz", like=file, report=report)
    with refused(pax.errors.InvalidArgumentTypeError, where="save_as: report", got="[1]"):
        pax.weights.save_as(other, tmp_path / "net.npz", like=file, report=[1])
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_torch_lacks_is_refused_and_nothing_is_written(tmp_path):
    file = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32),
            "steps": np.zeros(2, np.uint16)}  # fmt: skip
    net, _ = pax.weights.adopt(pax.Linear(2, 3), file, ignore="steps")
    with refused(pax.errors.UnsupportedDtypeError, where="steps", got="uint16"):
        pax.weights.save_as(net, tmp_path / "net.pt", like=file, ignore="steps")
    assert not list(tmp_path.iterdir())


# A module that was changed after it was adopted


def body_and_head(classes=10):
    return Free(body=pax.Linear(4, 8), head=pax.Linear(8, classes))


def of_torch():
    return {"body.weight": normal(8, 4), "body.bias": normal(8),
            "classifier.weight": normal(3, 8), "classifier.bias": normal(3)}  # fmt: skip


def equal(one, other):
    pairs = zip(*map(jax.tree_util.tree_leaves, (one, other)), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def test_a_head_of_other_classes_takes_the_place_of_the_one_of_its_name(tmp_path):
    file = of_torch()
    file = {name.replace("classifier", "head"): array for name, array in file.items()}
    net, report = pax.weights.adopt(body_and_head(), file, keep="head", ignore="head")
    path = tmp_path / "net.npz"
    pax.weights.save_as(net, path, like=file, report=report)
    home = read(path)
    assert set(home) == set(file)
    assert np.array_equal(home["head.weight"], np.asarray(net.head.weight).T)
    assert home["head.weight"].shape != file["head.weight"].shape


@pytest.mark.parametrize("with_report", [True, False])
def test_a_new_and_an_old_head_need_a_decision(tmp_path, with_report):
    file = of_torch()
    net, report = pax.weights.adopt(body_and_head(), file, keep="head", ignore="classifier")
    told = {"report": report} if with_report else {"keep": "head", "ignore": "classifier"}
    path = tmp_path / "net.npz"
    with pytest.raises(pax.errors.AdoptionError) as caught:
        pax.weights.save_as(net, path, like=file, **told)
    assert caught.value.missing == ("head.weight", "head.bias")
    assert set(caught.value.left) == {"classifier.weight", "classifier.bias"}
    assert 'rename={"classifier": "head"}' in str(caught.value)
    assert not path.exists()

    pax.weights.save_as(net, path, like=file, rename={"classifier": "head"}, **told)
    home = read(path)
    assert set(home) == set(file)
    assert np.array_equal(home["classifier.weight"], np.asarray(net.head.weight).T)
    assert equal(pax.weights.adopt(body_and_head(), path)[0], net)

    pax.weights.save_as(net, path, like=file, rename={"head": "head"}, **told)
    home = read(path)
    assert np.array_equal(home["classifier.weight"], file["classifier.weight"])
    assert np.array_equal(home["head.weight"], np.asarray(net.head.weight).T)
    assert equal(pax.weights.adopt(body_and_head(), path, ignore="classifier")[0], net)


@pytest.mark.parametrize("classes", [10, 1])
def test_resized_layers_are_refused(tmp_path, classes):
    file = of_torch()
    net, report = pax.weights.adopt(body_and_head(3), file)
    net = net.replace(head=pax.Linear(8, classes))
    path = tmp_path / "net.safetensors"
    with refused(pax.errors.AdoptionError, f"head.weight[8, {classes}]"):
        pax.weights.save_as(net, path, like=file, report=report)
    pax.weights.save_as(net, path, like=file, report=report, rename={"classifier": "head"})
    assert read(path)["classifier.weight"].shape == (classes, 8)
    assert equal(pax.weights.adopt(body_and_head(classes), path)[0], net)


def test_extended_and_tied_tables(tmp_path):
    table = normal(7, 4)
    file = {"wte.weight": table, "lm_head.weight": table}
    net, report = pax.weights.adopt(Free(wte=pax.Embed(7, 4)), file)
    net = net.replace(wte=pax.Embed(9, 4))
    path = tmp_path / "net.npz"
    pax.weights.save_as(net, path, like=file, report=report, rename={"wte": "wte"})
    assert all(np.array_equal(array, net.wte.weight) for array in read(path).values())


def test_new_layers_are_written_as_the_framework_keeps_them(tmp_path):
    body = Free(conv=pax.Conv2D(3, 3, 3), table=pax.Embed(3, 3), out=pax.Linear(3, 3))
    net = Free(body=body, norm=pax.BatchNorm1D(3), drop=pax.Dropout(0.5), scale=normal(3))
    names = {
        "torch": ["conv.weight", "conv.bias", "table.weight", "out.weight", "out.bias",
                  "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"],
        "keras": ["conv.kernel", "conv.bias", "table.embeddings", "out.kernel", "out.bias",
                  "norm.gamma", "norm.beta", "norm.moving_mean", "norm.moving_variance"],
        "flax": ["conv.kernel", "conv.bias", "table.embedding", "out.kernel", "out.bias",
                 "norm.scale", "norm.bias", "norm.mean", "norm.var"],
    }  # fmt: skip
    path = tmp_path / "net.safetensors"
    for origin, expected in names.items():
        file = {"scale": normal(3)}
        new, report = pax.weights.adopt(net, file, keep=["body", "norm"], origin=origin)
        new = new.replace(norm=new.norm.replace(scale=new.norm.scale + 1))
        pax.weights.save_as(new, path, like=file, report=report)
        home = read(path)
        body_names = [f"body.{name}" for name in expected[:5]]
        assert set(home) == {"scale", *body_names, *expected[5:]}
        assert home[expected[5]].shape == (3,)
        again, _ = pax.weights.adopt(net, path)
        assert_close(again.body.conv.weight, new.body.conv.weight, 0)
        assert_close(again.body.out.weight, new.body.out.weight, 0)
        assert_close(again.norm.scale, new.norm.scale, 0)


def test_a_new_bias_is_saved_next_to_its_weight(tmp_path):
    file = {"encoder.fc.weight": normal(8, 4)}
    net, report = pax.weights.adopt(Free(own=pax.Linear(4, 8)), file, keep="own.bias")
    pax.weights.save_as(net, tmp_path / "net.npz", like=file, report=report)
    assert set(read(tmp_path / "net.npz")) == {"encoder.fc.weight", "encoder.fc.bias"}


def test_weights_without_a_place_in_the_file_are_refused(tmp_path):
    path, file = tmp_path / "net.npz", of_torch()
    net, report = pax.weights.adopt(body_and_head(3), file)
    cell = Free(body=net.body, head=net.head, cell=pax.LSTM(2, 2))
    with refused(pax.errors.AdoptionError, where="cell.fc.weight"):
        pax.weights.save_as(cell, path, like=file, report=report)
    with refused(pax.errors.AdoptionError, where="body.bias"):
        pax.weights.save_as(
            net.replace(head=pax.Linear(8, 2)), path, like=file, report=report,
            rename={"body": "head"},
        )  # fmt: skip
    for other, where in (
        (Free(body=net.body), "head.weight"),  # a layer that is gone
        (body_and_head(3), "extra"),
    ):
        with pytest.raises(pax.errors.AdoptionError) as caught:
            pax.weights.save_as(other, path, like={**file, "extra": normal(2)}, report=report)
        assert caught.value.where == where
    file = {name: array for name, array in file.items() if name.startswith("body")}
    other, report = pax.weights.adopt(Free(own=pax.Linear(4, 8)), file)
    other = Free(own=other.own, body=pax.Linear(2, 2))
    with refused(pax.errors.AdoptionError, where="body.weight"):
        pax.weights.save_as(other, path, like=file, report=report)
    assert not path.exists()


def test_arrays_that_were_one_and_leaves_that_no_longer_are(tmp_path):
    table = normal(7, 4)
    file = {"wte.weight": table, "lm_head.weight": table}
    net = Free(wte=pax.Embed(7, 4), lm_head=pax.Linear(4, 7, with_bias=False))
    net, report = pax.weights.adopt(net, file)
    head = net.lm_head.replace(weight=3 * net.lm_head.weight)
    pax.weights.save_as(net.replace(lm_head=head), tmp_path / "net.npz", like=file, report=report)
    home = read(tmp_path / "net.npz")
    assert np.array_equal(home["wte.weight"], table)
    assert np.array_equal(home["lm_head.weight"], 3 * table)


def test_numbers_for_which_the_arrays_have_no_room_are_refused(tmp_path):
    file = {name: array.astype(np.float16) for name, array in of_torch().items()}
    net, report = pax.weights.adopt(body_and_head(3), file)
    head = net.head.replace(bias=net.head.bias + 1e6)
    with refused(
        pax.errors.AdoptionError, "becomes inf, in classifier.bias of float16", where="head.bias"
    ):
        pax.weights.save_as(net.replace(head=head), tmp_path / "n.npz", like=file, report=report)
