"""What torch computes a weight from goes where the weight goes: norms and masks."""

from __future__ import annotations

import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.adoption.foreign import Free, N, normal, read

NAMES = {
    "old": ("weight_g", "weight_v"),
    "new": ("parametrizations.weight.original0", "parametrizations.weight.original1"),
}


def normed(name, v, axis, names="old"):
    """What `weight_norm(dim=axis)` of torch keeps, and the weight that it stands for."""
    others = tuple(one for one in range(v.ndim) if one != axis)
    g = normal(*[size if one == axis else 1 for one, size in enumerate(v.shape)])
    g = g if axis is not None else g.reshape(())
    weight = g * (v / np.sqrt(np.square(v).sum(others, keepdims=True)))
    length, direction = NAMES[names]
    return {f"{name}.{length}": g, f"{name}.{direction}": v}, weight


@pytest.mark.parametrize("names", NAMES)
def test_convolutions_and_dense_layers_with_a_weight_norm(names):
    conv, w = normed("body.conv", normal(5, 3, 4), 0, names)
    up, transposed = normed("body.up", normal(5, 2, 4), 0, names)
    fc, dense = normed("fc", normal(7, 2), 1, names)
    file = {**conv, "body.conv.bias": normal(5), **up, "body.up.bias": normal(2), **fc,
            "fc.bias": normal(7)}  # fmt: skip
    net = Free(conv=pax.Conv1D(3, 5, 4), up=pax.Conv1DTranspose(5, 2, 4), fc=pax.Linear(2, 7))
    net, report = pax.weights.adopt(net, file)
    assert_close(net.conv.weight, w.transpose(2, 1, 0), 1e-6)
    assert_close(net.up.weight, transposed.transpose(2, 1, 0)[::-1], 1e-6)
    assert_close(net.fc.weight, dense.T, 1e-6)
    row = next(row for row in report.rows if row.leaf == "conv.weight")
    assert row.how == "weight norm, OIW to WIO"
    assert row.arrays == tuple(conv)


def test_a_length_of_the_whole_weight_and_weights_of_an_lstm():
    fc, dense = normed("fc", normal(4, 3), None)
    net, _ = pax.weights.adopt(pax.Linear(3, 4, with_bias=False), fc)
    assert_close(net.weight, dense.T, 1e-6)
    v, u, b = normal(8, 3), normal(8, 2), normal(8)
    plain = {"rnn.weight_ih_l0": v, "rnn.bias_ih_l0": b, "rnn.bias_hh_l0": 0 * b}
    g = normal(8, 1)
    file = {**plain, "rnn.weight_hh_l0_g": g, "rnn.weight_hh_l0_v": u}
    whole = {**plain, "rnn.weight_hh_l0": g * u / np.sqrt(np.square(u).sum(1, keepdims=True))}
    found, _ = pax.weights.adopt(pax.LSTM(3, 2), file)
    expected, _ = pax.weights.adopt(pax.LSTM(3, 2), whole)
    assert_close(found.fc.weight, expected.fc.weight, 1e-6)


def test_a_module_with_a_direction_and_a_length_of_its_own_gets_them():
    net = Free(fc=Free(weight_g=np.ones((4, 1), np.float32), weight_v=np.ones((4, 3), np.float32)))
    file, _ = normed("fc", normal(4, 3), 0)
    net, _ = pax.weights.adopt(net, file)
    assert np.array_equal(net.fc.weight_g, file["fc.weight_g"])
    assert np.array_equal(net.fc.weight_v, file["fc.weight_v"])


def test_arrays_whose_shapes_are_no_length_and_direction_are_not_put_together():
    for g in (normal(4, 3), normal(3, 1), normal(4)):
        file = {"fc.weight_g": g, "fc.weight_v": normal(4, 3)}
        with refused(pax.errors.AdoptionError, "fc.weight_g"):
            pax.weights.adopt(pax.Linear(3, 4, with_bias=False), file)


def test_a_direction_of_zeros_is_refused():
    file, _ = normed("fc", normal(4, 3), 0)
    file["fc.weight_v"][1] = 0
    with refused(pax.errors.AdoptionError, got="1 directions of zeros"):
        pax.weights.adopt(pax.Linear(3, 4, with_bias=False), file)


@pytest.mark.parametrize("names", NAMES)
def test_the_way_home_is_as_torch_takes_a_weight_apart(tmp_path, names):
    fc, _ = normed("fc", normal(4, 3), 0, names)
    other, _ = normed("last", normal(2, 4), 0, names)
    file = {**fc, **other}
    net = pax.Sequential(pax.Linear(3, 4, with_bias=False), pax.Linear(4, 2, with_bias=False))
    net, report = pax.weights.adopt(net, file)
    first = net[0].replace(weight=2 * net[0].weight)
    for given in (report, None):
        path = tmp_path / f"{given is None}.safetensors"
        pax.weights.save_as(net.replace(modules=[first, net[1]]), path, like=file, report=given)
        back = read(path)
        assert set(back) == set(file)
        for name in other:
            assert back[name].tobytes() == file[name].tobytes()
        length, direction = (back[name] for name in fc)
        assert length.shape == (4, 1)
        assert_close(length, 2 * np.abs(file[next(iter(fc))]), 1e-6)
        assert_close(direction, first.weight.T, 1e-6)
        again, _ = pax.weights.adopt(net, path)
        assert_close(again[0].weight, first.weight, 1e-6)


def test_names_of_either_kind_may_be_ignored():
    fc, dense = normed("net.fc", normal(4, 3), 0)
    ema, _ = normed("ema.fc", normal(4, 3), 0)
    for ignore in ("ema", "ema.fc.weight", ["ema.fc.weight_g", "ema.fc.weight_v"]):
        net, _ = pax.weights.adopt(pax.Linear(3, 4, False), {**fc, **ema}, ignore=ignore)
        assert_close(net.weight, dense.T, 1e-6)


@pytest.mark.parametrize("lone", ["weight_v", "parametrizations.weight.original1"])
def test_a_direction_whose_length_was_lost_is_no_weight(lone):
    file = {"a.weight": np.ones((2, 4)), "a.bias": np.ones(2), f"b.{lone}": np.ones((3, 2)),
            "b.bias": np.ones(3)}  # fmt: skip
    net = Free(a=pax.Linear(4, 2), b=pax.Linear(2, 3))
    with pytest.raises(pax.errors.AdoptionError):
        pax.weights.adopt(net, file, origin="torch")
    rename = {f"b.{lone}": "b.weight"}
    new, _ = pax.weights.adopt(net, file, origin="torch", rename=rename)
    assert np.array_equal(new.b.weight, np.ones((2, 3)))


def test_letters_of_other_things_are_no_weight_norm():
    N = np.random.default_rng(0)
    file = {f"at.weight_{letter}": N.normal(size=(3, 5)) for letter in "qkv"}
    net = Free(at=Free(**{letter: np.ones((3, 5)) for letter in "qkv"}))
    new, _ = pax.weights.adopt(net, file)
    assert all(np.array_equal(getattr(new.at, k), file[f"at.weight_{k}"]) for k in "qkv")
    own, _ = pax.weights.adopt(Free(weight_v=np.ones((3, 2))), {"weight_v": np.zeros((3, 2))})
    assert not own.weight_v.any()


# Spectral norms, pruning, and what else torch computes weights by

SPECTRAL = {
    "old": ("weight_orig", "weight_u", "weight_v"),
    "new": ("parametrizations.weight.original", "parametrizations.weight.0._u",
            "parametrizations.weight.0._v"),
}  # fmt: skip


def spectral(name, weight, axis, names="old", steps=3):
    """What a spectral norm of torch keeps after some steps, and the weight of its eval mode."""
    matrix = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float64)
    u = N.normal(size=len(matrix))
    for _ in range(steps):
        v = u @ matrix / np.linalg.norm(u @ matrix)
        u = matrix @ v / np.linalg.norm(matrix @ v)
    arrays = weight, u.astype(np.float32), v.astype(np.float32)
    file = {f"{name}.{part}": array for part, array in zip(SPECTRAL[names], arrays)}
    return file, (weight / (u @ matrix @ v)).astype(np.float32)


@pytest.mark.parametrize("names", SPECTRAL)
def test_a_weight_is_divided_by_its_spectral_norm(tmp_path, names):
    fc, dense = spectral("fc", normal(7, 4), 0, names)
    up, transposed = spectral("up", normal(4, 4, 4), 1, names)  # any axis would fit by its size
    file = {**fc, **up, "fc.bias": normal(7), "up.bias": normal(4)}
    net = Free(up=pax.Conv1DTranspose(4, 4, 4), fc=pax.Linear(4, 7))
    net, report = pax.weights.adopt(net, file, origin="torch")
    assert_close(net.fc.weight, dense.T, 1e-5)
    assert_close(net.up.weight, transposed.transpose(2, 1, 0)[::-1], 1e-5)
    row = next(row for row in report.rows if row.leaf == "fc.weight")
    assert (row.how, row.arrays) == ("spectral norm, transposed", tuple(fc))

    path = tmp_path / "net.npz"
    tuned = net.replace(fc=net.fc.replace(bias=net.fc.bias + 1))
    pax.weights.save_as(tuned, path, like=file, report=report)
    home = read(path)
    for name in (*fc, *up):
        assert home[name].tobytes() == file[name].tobytes()
    tuned = net.replace(fc=net.fc.replace(weight=net.fc.weight + 1))
    with pytest.raises(pax.errors.AdoptionError) as caught:
        pax.weights.save_as(tuned, path, like=file, report=report)
    assert caught.value.where == next(iter(fc))


@pytest.mark.parametrize("names", SPECTRAL)
def test_a_weight_before_its_spectral_norm_is_no_weight(names):
    file, _ = spectral("fc", normal(7, 4), 0, names)
    weight, u, v = file
    for ignore in ([u, v], [f"{u[:-1]}*"]):
        with pytest.raises(pax.errors.AdoptionError):
            pax.weights.adopt(pax.Linear(4, 7, with_bias=False), file, ignore=ignore)
    with refused(pax.errors.AdoptionError, "fc.weight"):
        pax.weights.adopt(pax.Linear(4, 7, with_bias=False), {weight: file[weight]})
    rename = {weight: "weight"}
    net, _ = pax.weights.adopt(
        pax.Linear(4, 7, with_bias=False), {weight: file[weight]}, rename=rename, origin="torch"
    )
    assert np.array_equal(net.weight, file[weight].T)


def test_a_spectral_norm_that_cannot_be_known_is_refused():
    w = normal(4, 4, 3)
    fresh = {"up.weight_orig": w, "up.weight_u": normal(4), "up.weight_v": normal(12)}
    with refused(pax.errors.AdoptionError, "up.weight_orig"):
        pax.weights.adopt(pax.Conv1D(4, 4, 3, with_bias=False), fresh)
    flat = {"fc.weight_orig": normal(2, 3), "fc.weight_u": np.zeros(2, np.float32),
            "fc.weight_v": normal(3)}  # fmt: skip
    with pytest.raises(pax.errors.AdoptionError):
        pax.weights.adopt(pax.Linear(3, 2, with_bias=False), flat)


def test_pruned_weights_are_zero_and_are_saved_back(tmp_path):
    mask = (normal(7, 4) > 0).astype(np.float32)
    file = {"fc.weight_orig": normal(7, 4), "fc.weight_mask": mask, "fc.bias_orig": normal(7),
            "fc.bias_mask": mask[:, 0]}  # fmt: skip
    net, report = pax.weights.adopt(pax.Linear(4, 7), file)
    assert np.array_equal(net.weight, (file["fc.weight_orig"] * mask).T)
    assert np.array_equal(net.bias, file["fc.bias_orig"] * mask[:, 0])
    path = tmp_path / "net.npz"
    pax.weights.save_as(net.replace(weight=2 * net.weight), path, like=file, report=report)
    home = read(path)
    before = np.where(mask, 2 * file["fc.weight_orig"], file["fc.weight_orig"])
    assert np.array_equal(home["fc.weight_orig"], before)
    assert np.array_equal(home["fc.weight_mask"], mask)
    with pytest.raises(pax.errors.AdoptionError):
        pax.weights.save_as(net.replace(weight=net.weight + 1), path, like=file, report=report)


def test_unsupported_parametrizations_are_refused():
    original = "fc.parametrizations.weight.original"
    for file in (
        {original: normal(3, 4)},  # an orthogonal matrix, a symmetric one: the file does not say
        {original: normal(3, 4), "fc.parametrizations.weight.0.base": normal(4, 4)},
        {f"{original}0": normal(3, 1), f"{original}1": normal(3, 4),
         "fc.parametrizations.weight.1._u": normal(3)},
    ):  # fmt: skip
        with refused(pax.errors.AdoptionError, "fc.weight"):
            pax.weights.adopt(pax.Linear(4, 3, with_bias=False), file)
