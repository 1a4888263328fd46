"""Queries, keys and values that are three arrays in a file go into one leaf, and home again."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close
from tests.weights.adoption.foreign import Free, assert_refused, normal

D, HEADS = 6, 2


def apart(name, d=D, kv=D, bias=True):
    """What torch keeps: out x in."""
    file = {}
    for word, size in (("q", d), ("k", kv), ("v", kv)):
        file[f"{name}.{word}_proj.weight"] = normal(size, d)
        if bias:
            file[f"{name}.{word}_proj.bias"] = normal(size)
    return file


def weights(file, name):
    return [file[f"{name}.{word}_proj.weight"].T for word in "qkv"]


def biases(file, name):
    return [file[f"{name}.{word}_proj.bias"] for word in "qkv"]


def by_head(arrays, heads):
    """Along the last axis: queries, keys and values of the first head, then of the second."""
    split = [array.reshape(*array.shape[:-1], heads, -1) for array in arrays]
    return np.stack(split, -2).reshape(*arrays[0].shape[:-1], -1)


class Attention(pax.Module):
    def __init__(self, size=D, out=3 * D):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = pax.Linear(size, out)


def test_the_order_of_fused_weights_is_never_guessed():
    file = apart("attn")
    error = assert_refused(Free(attn=Attention()), file, origin="torch")
    assert isinstance(error, pax.errors.AmbiguousWeightsError)
    assert 'fused="blocks" or fused="by head"' in error.write
    net, report = pax.weights.adopt(Free(attn=Attention()), file, origin="torch", fused="blocks")
    assert np.array_equal(net.attn.qkv.weight, np.concatenate(weights(file, "attn"), 1))
    assert np.array_equal(net.attn.qkv.bias, np.concatenate(biases(file, "attn")))
    assert report.rows[0].how == "transposed, joined, blocks"
    assert len(report.rows[0].arrays) == 3
    net, _ = pax.weights.adopt(Free(attn=Attention()), file, origin="torch", fused="by head")
    assert np.array_equal(net.attn.qkv.weight, by_head(weights(file, "attn"), HEADS))
    assert np.array_equal(net.attn.qkv.bias, by_head(biases(file, "attn"), HEADS))


def test_without_heads_the_order_is_asked_for():
    file = apart("attn")
    net = Free(attn=Free(qkv=pax.Linear(D, 3 * D)))
    assert 'fused="blocks" or "by head" says in which order' in str(
        assert_refused(net, file, origin="torch")
    )
    new, _ = pax.weights.adopt(net, file, origin="torch", fused="blocks")
    assert np.array_equal(new.attn.qkv.weight, np.concatenate(weights(file, "attn"), 1))
    assert "needs the number of heads" in str(
        assert_refused(net, file, origin="torch", fused="by head")
    )


def test_leaves_of_ones_own_that_are_out_x_in_or_have_an_axis_of_three():
    file = apart("attn", bias=False)
    parts = weights(file, "attn")
    for leaf, expected in (
        (jnp.ones((D, 3 * D)), np.concatenate(parts, 1)),
        (jnp.ones((3 * D, D)), np.concatenate(parts, 1).T),
    ):
        net = Free(attn=Free(qkv=leaf))
        net, _ = pax.weights.adopt(net, file, origin="torch", fused="blocks")
        assert np.array_equal(net.attn.qkv, expected)
    file = {f"attn.{word}.weight": normal(4, D) for word in ("query", "key", "value")}
    arrays = list(file.values())
    for leaf, expected in (
        (jnp.ones((3, D, 4)), np.stack([array.T for array in arrays])),
        (jnp.ones((3, 4, D)), np.stack(arrays)),
        (jnp.ones((D, 3, 4)), np.stack([array.T for array in arrays], 1)),
    ):
        net, report = pax.weights.adopt(Free(attn=Free(qkv=Free(w=leaf))), file, origin="torch")
        assert np.array_equal(net.attn.qkv.w, expected)
        assert "one of three" in report.rows[0].how


def test_ambiguous_axes_of_square_weights_are_refused():
    file = apart("attn", bias=False)
    net = Free(attn=Free(qkv=Free(w=jnp.ones((3, D, D)))))
    error = assert_refused(net, file, origin="torch")
    assert isinstance(error, pax.errors.AmbiguousWeightsError)
    for axes, turn in (((1, 0), True), ((0, 1), False)):
        new, _ = pax.weights.adopt(net, file, origin="torch", axes={"attn.qkv.w": axes})
        expected = [w if turn else w.T for w in weights(file, "attn")]
        assert np.array_equal(new.attn.qkv.w, np.stack(expected))


def grouped(arrays, heads, keys, order):
    """Along the last axis; by head the queries of a key, this key, its value, and so on."""
    if order == "blocks":
        return np.concatenate(arrays, -1)
    q, k, v = (np.split(array, count, -1) for array, count in zip(arrays, (heads, keys, keys)))
    shared = heads // keys
    found = []
    for key in range(keys):
        found += [*q[key * shared : (key + 1) * shared], k[key], v[key]]
    return np.concatenate(found, -1)


class Grouped(pax.Module):
    """Attention whose three are in one leaf, or in three."""

    def __init__(self, heads, keys, size, in_one):
        super().__init__()
        self.num_heads = heads
        if in_one:
            self.qkv = pax.Linear(D, (heads + 2 * keys) * size)
        else:
            self.q_proj = pax.Linear(D, heads * size)
            self.k_proj, self.v_proj = (pax.Linear(D, keys * size) for _ in range(2))


@pytest.mark.parametrize("order", ["blocks", "by head"])
@pytest.mark.parametrize("heads, keys, size", [(4, 2, 3), (6, 2, 1)])
def test_fewer_keys_and_values_than_queries(heads, keys, size, order, tmp_path):
    file = apart("attn", heads * size, keys * size)
    file |= {name: normal(len(file[name]), D) for name in file if name.endswith("weight")}
    net = Free(attn=Grouped(heads, keys, size, in_one=True))
    assert isinstance(assert_refused(net, file, origin="torch"), pax.errors.AmbiguousWeightsError)
    new, _ = pax.weights.adopt(net, file, origin="torch", fused=order)
    joined = [grouped(each(file, "attn"), heads, keys, order) for each in (weights, biases)]
    assert np.array_equal(new.attn.qkv.weight, joined[0])
    assert np.array_equal(new.attn.qkv.bias, joined[1])

    in_one = {"attn.Wqkv.weight": joined[0].T, "attn.Wqkv.bias": joined[1]}
    net = Free(attn=Grouped(heads, keys, size, in_one=False))
    assert isinstance(assert_refused(net, in_one, origin="torch"), pax.errors.AmbiguousWeightsError)
    new, report = pax.weights.adopt(net, in_one, origin="torch", fused=order)
    found = [getattr(new.attn, f"{word}_proj") for word in "qkv"]
    for layer, weight, bias in zip(found, weights(file, "attn"), biases(file, "attn")):
        assert np.array_equal(layer.weight, weight) and np.array_equal(layer.bias, bias)
    pax.weights.save_as(new, tmp_path / "home.npz", like=in_one, report=report)
    with np.load(tmp_path / "home.npz") as home:
        assert all(np.array_equal(home[name], array) for name, array in in_one.items())


def test_of_one_key_for_all_queries_both_orders_are_the_same():
    file = apart("attn", D, D // HEADS)
    net, _ = pax.weights.adopt(Free(attn=Grouped(HEADS, 1, 3, in_one=True)), file, origin="torch")
    assert np.array_equal(net.attn.qkv.weight, np.concatenate(weights(file, "attn"), 1))


def test_heads_that_do_not_share_keys_evenly_have_no_order_by_head():
    file = apart("attn", 12, 8)  # three heads of queries, two of keys
    file |= {name: normal(len(file[name]), D) for name in file if name.endswith("weight")}
    net = Free(attn=Free(num_heads=3, qkv=pax.Linear(D, 28)))
    for fused in (None, "by head"):
        assert isinstance(
            assert_refused(net, file, origin="torch", fused=fused), pax.errors.AdoptionError
        )
    new, _ = pax.weights.adopt(net, file, origin="torch", fused="blocks")
    assert np.array_equal(new.attn.qkv.weight, np.concatenate(weights(file, "attn"), 1))


def test_heads_of_keras_and_flax():
    file = {f"attention/{word}/{k}": normal(*shape)
            for word in ("query", "key", "value")
            for k, shape in (("kernel", (D, HEADS, D // HEADS)), ("bias", (HEADS, D // HEADS)))
            }  # fmt: skip
    kernels = [file[f"attention/{word}/kernel"].reshape(D, D) for word in ("query", "key", "value")]
    for fused, joined in (("blocks", lambda a: np.concatenate(a, 1)),
                          ("by head", lambda a: by_head(a, HEADS))):  # fmt: skip
        for origin in ("keras", "flax"):
            net, _ = pax.weights.adopt(
                Free(attention=Attention()), file, fused=fused, origin=origin
            )
            assert np.array_equal(net.attention.qkv.weight, joined(kernels))


def test_stacked_layers_with_fused_leaves(tmp_path):
    file = {n: a for i in range(3) for n, a in apart(f"h.{i}.attn").items()}
    net = Free(layers=T.stack_layers([Free(attn=Attention()) for _ in range(3)]))
    for fused, joined in (("blocks", lambda a: np.concatenate(a, -1)),
                          ("by head", lambda a: by_head(a, HEADS))):  # fmt: skip
        new, report = pax.weights.adopt(net, file, origin="torch", fused=fused)
        for i in range(3):
            assert np.array_equal(
                new.layers.attn.qkv.weight[i], joined(weights(file, f"h.{i}.attn"))
            )
            assert np.array_equal(new.layers.attn.qkv.bias[i], joined(biases(file, f"h.{i}.attn")))
        path = tmp_path / "home.npz"
        qkv = new.layers.attn.qkv
        tuned = new.replace(layers=new.layers.replace(attn=new.layers.attn.replace(
            qkv=qkv.replace(weight=qkv.weight + 1))))  # fmt: skip
        pax.weights.save_as(tuned, path, like=file, report=report)
        with pax.weights.open_source(path) as source:
            for name, entry in source.entries.items():
                assert_close(entry.read(), file[name] + name.endswith("weight"), 1e-6)


def test_parts_with_other_names_are_refused():
    file = {f"attn.{word}.{k}": normal(*s) for word in "xyz" for k, s in
            (("weight", (D, D)), ("bias", (D,)))}  # fmt: skip
    assert isinstance(assert_refused(Free(attn=Attention()), file, origin="torch", fused="blocks"),
                      pax.errors.AdoptionError)  # fmt: skip
    names = dict(zip("xyz", ("query", "key", "value")))
    rename = {f"attn.{one}": f"attn.qkv.{other}" for one, other in names.items()}
    net, _ = pax.weights.adopt(
        Free(attn=Attention()), file, origin="torch", fused="blocks", rename=rename
    )
    expected = np.concatenate([file[f"attn.{word}.weight"].T for word in "xyz"], 1)
    assert np.array_equal(net.attn.qkv.weight, expected)


def test_one_array_of_three_into_one_leaf_is_as_it_was():
    file = {"attn.qkv.weight": normal(3 * D, D), "attn.qkv.bias": normal(3 * D)}
    net, _ = pax.weights.adopt(Free(attn=Attention()), file)
    assert np.array_equal(net.attn.qkv.weight, file["attn.qkv.weight"].T)
