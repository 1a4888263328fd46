"""Nets, what each framework would write of them, and what they compute: all in numpy.

Nothing here knows how `adopt` reads anything.  A convolution, a transposed one, an LSTM and an
attention are written out from their definitions, and so are the layouts of torch, Keras and flax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export.errors import AdoptionError
from tests.core.models import Free
from tests.refusals import refused

N = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return N.normal(size=shape).astype(np.float32)


def assert_refused(net: Any, file: Any, *names: str, kind: type = AdoptionError, **options: Any):
    """`adopt` raises an error of this class, whose text has these names; the error."""
    with refused(kind, *names) as caught:
        pax.weights.adopt(net, file, **options)
    return caught.value


def read(path: Any) -> dict[str, np.ndarray]:
    with pax.weights.open_source(path) as source:
        return {name: np.array(entry.read()) for name, entry in source.entries.items()}


Arrays = dict[str, np.ndarray]


@dataclass
class Unit:
    """One layer: its kind, what it is called abroad, and its numbers."""

    kind: str
    names: dict[str, str]  # by framework
    arrays: Arrays


@dataclass
class Case:
    """A module to fill, its true weights, and what it then computes."""

    net: Any
    units: list[Unit]
    x: np.ndarray
    forward: Callable[[np.ndarray], np.ndarray]
    call: Callable[[Any, Any], Any]

    def file(self, framework: str) -> Arrays:
        """What the framework would write."""
        found: Arrays = {}
        for unit in self.units:
            for name, array in {**LAYOUTS, **OTHERS}[framework](unit).items():
                found[name] = array
        return found


# What frameworks write


def _torch(unit: Unit) -> Arrays:
    a, name = unit.arrays, unit.names["torch"]
    if unit.kind == "lstm":
        rows = {k: np.concatenate([a[f"{k}{g}"] for g in "ifgo"], -1).T for k in ("x", "h")}
        bias = np.concatenate([a[f"b{g}"] for g in "ifgo"])
        half = (bias * 0.25).astype(np.float32)
        return {f"{name}.weight_ih_l0": rows["x"], f"{name}.weight_hh_l0": rows["h"],
                f"{name}.bias_ih_l0": half, f"{name}.bias_hh_l0": bias - half}  # fmt: skip
    if unit.kind == "attention":
        return {f"{name}.in_proj_weight": np.concatenate([a[f"{k}_w"].T for k in "qkv"]),
                f"{name}.in_proj_bias": np.concatenate([a[f"{k}_b"] for k in "qkv"]),
                f"{name}.out_proj.weight": a["o_w"].T,
                f"{name}.out_proj.bias": a["o_b"]}  # fmt: skip
    words = {"w": "weight", "b": "bias", "mean": "running_mean", "var": "running_var"}
    found = {f"{name}.{words[key]}": value for key, value in a.items()}
    w = a["w"]
    if unit.kind == "linear":
        found[f"{name}.weight"] = w.T
    elif unit.kind == "conv":
        found[f"{name}.weight"] = w.transpose(3, 2, 0, 1)
    elif unit.kind == "up":  # held as torch defines it: in, out, height, width
        found[f"{name}.weight"] = w
    if unit.kind == "batch_norm":
        found[f"{name}.num_batches_tracked"] = np.array(7)
    return found


def _keras(unit: Unit) -> Arrays:
    a, name = unit.arrays, unit.names["keras"]
    if unit.kind == "lstm":
        whole = {k: np.concatenate([a[f"{k}{g}"] for g in "ifgo"], -1) for k in "xhb"}
        return {f"{name}/kernel": whole["x"], f"{name}/recurrent_kernel": whole["h"],
                f"{name}/bias": whole["b"]}  # fmt: skip
    if unit.kind == "attention":
        found: Arrays = {}
        d, heads = a["q_w"].shape[0], int(a["heads"])
        for key, word in (("q", "query"), ("k", "key"), ("v", "value")):
            found[f"{name}/{word}/kernel"] = a[f"{key}_w"].reshape(d, heads, -1)
            found[f"{name}/{word}/bias"] = a[f"{key}_b"].reshape(heads, -1)
        found[f"{name}/attention_output/kernel"] = a["o_w"].reshape(heads, -1, d)
        found[f"{name}/attention_output/bias"] = a["o_b"]
        return found
    words = {"w": "kernel", "b": "bias", "mean": "moving_mean", "var": "moving_variance"}
    if unit.kind in ("norm", "batch_norm"):
        words |= {"w": "gamma", "b": "beta"}
    if unit.kind == "embed":
        words["w"] = "embeddings"
    found = {f"{name}/{words[key]}": value for key, value in a.items()}
    if unit.kind == "up":
        found[f"{name}/kernel"] = a["w"].transpose(2, 3, 1, 0)
    return found


def _flax(unit: Unit) -> Arrays:
    a, name = unit.arrays, unit.names["flax"]
    if unit.kind == "lstm":
        found = {}
        for gate in "ifgo":
            found[f"params/{name}/i{gate}/kernel"] = a[f"x{gate}"]
            found[f"params/{name}/h{gate}/kernel"] = a[f"h{gate}"]
            found[f"params/{name}/h{gate}/bias"] = a[f"b{gate}"]
        return found
    if unit.kind == "attention":
        found = {k.replace("attention_output", "out"): v for k, v in _keras(
            Unit("attention", {"keras": f"params/{name}"}, a)).items()}  # fmt: skip
        return found
    words = {"w": "kernel", "b": "bias", "mean": "mean", "var": "var"}
    if unit.kind in ("norm", "batch_norm"):
        words["w"] = "scale"
    if unit.kind == "embed":
        words["w"] = "embedding"
    found = {
        f"{'batch_stats' if key in ('mean', 'var') else 'params'}/{name}/{words[key]}": value
        for key, value in a.items()
    }
    if unit.kind == "up":
        found[f"params/{name}/kernel"] = a["w"][:, :, ::-1, ::-1].transpose(2, 3, 0, 1)
    return found


def _gpt2(unit: Unit) -> Arrays:
    """In a file of torch, but all dense weights are in x out."""
    a, name = unit.arrays, unit.names["gpt2"]
    if unit.kind == "attention":
        whole = {k: np.concatenate([a[f"{n}_{k}"] for n in "qkv"], -1) for k in "wb"}
        return {f"{name}.c_attn.weight": whole["w"], f"{name}.c_attn.bias": whole["b"],
                f"{name}.c_proj.weight": a["o_w"], f"{name}.c_proj.bias": a["o_b"]}  # fmt: skip
    return {f"{name}.{'weight' if key == 'w' else 'bias'}": value for key, value in a.items()}


def _bert(unit: Unit) -> Arrays:
    a, name = unit.arrays, unit.names["bert"]
    if unit.kind != "attention":
        return _torch(Unit(unit.kind, {"torch": name}, a))
    found = {}
    for key, word in (("q", "self.query"), ("k", "self.key"), ("v", "self.value"),
                      ("o", "output.dense")):  # fmt: skip
        found[f"{name}.{word}.weight"], found[f"{name}.{word}.bias"] = (
            a[f"{key}_w"].T,
            a[f"{key}_b"],
        )
    return found


def _neox(unit: Unit) -> Arrays:
    """Queries, keys and values of the first head, then of the second."""
    a, name = unit.arrays, unit.names["bert"]
    if unit.kind != "attention":
        return _torch(Unit(unit.kind, {"torch": name}, a))
    heads, d = int(a["heads"]), a["q_w"].shape[0]
    w = np.stack([a[f"{k}_w"].T.reshape(heads, -1, d) for k in "qkv"], 1).reshape(3 * d, d)
    b = np.stack([a[f"{k}_b"].reshape(heads, -1) for k in "qkv"], 1).reshape(3 * d)
    return {f"{name}.query_key_value.weight": w, f"{name}.query_key_value.bias": b,
            f"{name}.dense.weight": a["o_w"].T, f"{name}.dense.bias": a["o_b"]}  # fmt: skip


#: More ways to write a net with attention.
OTHERS = {"gpt2": _gpt2, "bert": _bert, "neox": _neox}
LAYOUTS = {"torch": _torch, "keras": _keras, "flax": _flax}


# What the layers compute


def dense(x: np.ndarray, a: Arrays) -> np.ndarray:
    return x @ a["w"] + a["b"]


def normed(x: np.ndarray, a: Arrays) -> np.ndarray:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * a["w"] + a["b"]


def batch_normed(x: np.ndarray, a: Arrays) -> np.ndarray:
    return (x - a["mean"]) / np.sqrt(a["var"] + 1e-5) * a["w"] + a["b"]


def convolved(x: np.ndarray, a: Arrays) -> np.ndarray:
    """NHWC, stride 1, as large as before; the kernel is odd, height x width x in x out."""
    w = a["w"]
    h, v = w.shape[0] // 2, w.shape[1] // 2
    wide = np.pad(x, ((0, 0), (h, h), (v, v), (0, 0)))
    y = sum(
        wide[:, i : i + x.shape[1], j : j + x.shape[2]] @ w[i, j]
        for i in range(w.shape[0])
        for j in range(w.shape[1])
    )
    return y + a["b"]


def spread(x: np.ndarray, a: Arrays) -> np.ndarray:
    """NHWC, twice as large, no padding: each place adds its kernel, in x out x 2 x 2."""
    n, height, width, _ = x.shape
    w = a["w"]
    y = np.zeros((n, 2 * height, 2 * width, w.shape[1]), x.dtype)
    for i in range(height):
        for j in range(width):
            y[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] += np.einsum("nc,cohw->nhwo", x[:, i, j], w)
    return y + a["b"]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def stepped(state: tuple, x: np.ndarray, a: Arrays) -> tuple[tuple, np.ndarray]:
    h, c = state
    z = {g: x @ a[f"x{g}"] + h @ a[f"h{g}"] + a[f"b{g}"] for g in "ifgo"}
    c = _sigmoid(z["f"]) * c + _sigmoid(z["i"]) * np.tanh(z["g"])
    h = _sigmoid(z["o"]) * np.tanh(c)
    return (h, c), h


def attended(x: np.ndarray, a: Arrays) -> np.ndarray:
    heads = int(a["heads"])
    q, k, v = ((x @ a[f"{n}_w"] + a[f"{n}_b"]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
    logits = np.einsum("bthd,bThd->bhtT", q, k) / np.sqrt(q.shape[-1])
    logits = np.exp(logits - logits.max(-1, keepdims=True))
    weights = logits / logits.sum(-1, keepdims=True)
    y = np.einsum("bhtT,bThd->bthd", weights, v).reshape(x.shape)
    return y @ a["o_w"] + a["o_b"]


# Nets


class Maker:
    """Draws the weights of nets."""

    def __init__(self, seed: int):
        self.chance = np.random.default_rng(seed)

    def normal(self, *shape: int) -> np.ndarray:
        return self.chance.normal(size=shape).astype(np.float32)

    def of(self, kind: str, *sizes: int) -> Arrays:
        n = self.normal
        if kind == "linear":
            return {"w": n(*sizes) / np.sqrt(sizes[0]), "b": n(sizes[1])}
        if kind in ("norm", "batch_norm"):
            found = {"w": 1 + 0.5 * n(sizes[0]), "b": n(sizes[0])}
            if kind == "batch_norm":
                found |= {"mean": n(sizes[0]), "var": 0.5 + np.abs(n(sizes[0]))}
            return found
        if kind == "conv":
            return {"w": n(*sizes) / np.sqrt(sizes[0] * sizes[1] * sizes[2]), "b": n(sizes[3])}
        if kind == "up":
            return {"w": n(sizes[0], sizes[1], 2, 2), "b": n(sizes[1])}
        if kind == "embed":
            return {"w": n(*sizes)}
        if kind == "attention":
            d = sizes[0]
            found = {f"{k}_w": n(d, d) / np.sqrt(d) for k in "qkvo"}
            return found | {f"{k}_b": n(d) for k in "qkvo"} | {"heads": np.array(sizes[1])}
        inputs, h = sizes
        found = {}
        for gate in "ifgo":
            found |= {f"x{gate}": n(inputs, h), f"h{gate}": n(h, h), f"b{gate}": n(h)}
        return found


def named(torch: str, keras: str, flax: str) -> dict[str, str]:
    return {"torch": torch, "keras": keras, "flax": flax}


def numbered(word: str, number: int) -> str:
    return word if number == 0 else f"{word}_{number}"


def perceptron(seed: int) -> Case:
    """Dense layers, some of equal sizes, and a norm between."""
    make = Maker(seed)
    depth = int(make.chance.integers(2, 5))
    sizes = [3, *make.chance.choice([4, 4, 4, 5], depth).tolist(), 2]
    units, layers = [], []
    for i in range(depth + 1):
        a = make.of("linear", sizes[i], sizes[i + 1])
        units.append(
            Unit("linear", named(f"layers.{2 * i}", numbered("dense", i), f"Dense_{i}"), a)
        )
        layers.append(pax.Linear(sizes[i], sizes[i + 1]))
    names = str(make.chance.choice(["layers", "hidden", "blocks", "modules"]))
    net = pax.Sequential(*layers) if names == "modules" else Free(**{names: layers})

    def forward(x: np.ndarray) -> np.ndarray:
        for unit in units[:-1]:
            x = np.tanh(dense(x, unit.arrays))
        return dense(x, units[-1].arrays)

    def call(net: Any, x: Any) -> Any:
        *most, last = getattr(net, names)
        for layer in most:
            x = jnp.tanh(layer(x))
        return last(x)

    return Case(net, units, make.normal(4, 3), forward, call)


def convolutional(seed: int) -> Case:
    """Convolutions with batch norms, then one dense layer."""
    make = Maker(seed)
    depth = int(make.chance.integers(1, 4))
    channels = [3, *make.chance.choice([3, 4, 4], depth).tolist()]
    units, blocks = [], []
    for i in range(depth):
        conv = make.of("conv", 3, 3, channels[i], channels[i + 1])
        norm = make.of("batch_norm", channels[i + 1])
        units.append(Unit("conv", named(f"stages.{i}.conv", numbered("conv2d", i),
                                        f"ConvBlock_{i}/Conv_0"), conv))  # fmt: skip
        units.append(Unit("batch_norm", named(f"stages.{i}.bn", numbered("batch_normalization", i),
                                              f"ConvBlock_{i}/BatchNorm_0"), norm))  # fmt: skip
        blocks.append(
            Free(conv=pax.Conv2D(channels[i], channels[i + 1], 3), norm=pax.BatchNorm2D(
                channels[i + 1]))
        )  # fmt: skip
    head = make.of("linear", channels[-1], 2)
    units.append(Unit("linear", named("classifier", "predictions", "Dense_0"), head))
    net = Free(stages=blocks, head=pax.Linear(channels[-1], 2))

    def forward(x: np.ndarray) -> np.ndarray:
        for i in range(depth):
            x = np.tanh(batch_normed(convolved(x, units[2 * i].arrays), units[2 * i + 1].arrays))
        return dense(x.mean((1, 2)), head)

    def call(net: Any, x: Any) -> Any:
        for block in net.stages:
            x = jnp.tanh(block.norm(block.conv(x)))
        return net.head(x.mean((1, 2)))

    return Case(net, units, make.normal(2, 4, 4, 3), forward, call)


def attentive(seed: int) -> Case:
    """An embedding, then attention and two dense layers, each after a norm."""
    make = Maker(seed)
    depth, d = int(make.chance.integers(1, 3)), 4
    names = named("tok_embeddings", "token_embedding", "Embed_0")
    units = [Unit("embed", names | {"gpt2": "wte", "bert": "embeddings.word_embeddings"},
                  make.of("embed", 7, d))]  # fmt: skip
    layers = []
    for i in range(depth):
        t, f = f"encoder.layers.{i}", f"EncoderLayer_{i}"
        k = numbered("encoder_layer", i)
        g, b = f"h.{i}", f"encoder.layer.{i}"
        others = iter((
            (f"{g}.attn", f"{b}.attention"), (f"{g}.attn_norm", f"{b}.attention.LayerNorm"),
            (f"{g}.mlp_norm", f"{b}.ffn.LayerNorm"), (f"{g}.mlp.c_fc", f"{b}.intermediate.dense"),
            (f"{g}.mlp.c_proj", f"{b}.output.dense"),
        ))  # fmt: skip
        for kind, names, sizes in (
            ("attention", (f"{t}.self_attn", f"{k}/self_attention", f"{f}/attention"), (d, 2)),
            ("norm", (f"{t}.attention_norm", f"{k}/attention_norm", f"{f}/norm_attention"), (d,)),
            ("norm", (f"{t}.ffn_norm", f"{k}/mlp_layer_norm", f"{f}/norm_mlp"), (d,)),
            ("linear", (f"{t}.linear1", f"{k}/dense1", f"{f}/Dense_0"), (d, 2 * d)),
            ("linear", (f"{t}.linear2", f"{k}/dense2", f"{f}/Dense_1"), (2 * d, d)),
        ):
            found = named(*names) | dict(zip(("gpt2", "bert"), next(others)))
            units.append(Unit(kind, found, make.of(kind, *sizes)))
        layers.append(
            Free(
                attention=pax.MultiHeadAttention(2, d // 2),
                attention_norm=pax.LayerNorm(d, -1, True, True),
                mlp_norm=pax.LayerNorm(d, -1, True, True),
                fc1=pax.Linear(d, 2 * d),
                fc2=pax.Linear(2 * d, d),
            )
        )
    net = Free(embed=pax.Embed(7, d), layers=layers)

    def forward(x: np.ndarray) -> np.ndarray:
        h = units[0].arrays["w"][x]
        for i in range(depth):
            attention, one, two, up, down = (unit.arrays for unit in units[1 + 5 * i : 6 + 5 * i])
            h = h + attended(normed(h, one), attention)
            h = h + dense(np.tanh(dense(normed(h, two), up)), down)
        return h

    def call(net: Any, x: Any) -> Any:
        h = net.embed(x)
        for layer in net.layers:
            y = layer.attention_norm(h)
            h = h + layer.attention(y, y, y)
            h = h + layer.fc2(jnp.tanh(layer.fc1(layer.mlp_norm(h))))
        return h

    return Case(net, units, make.chance.integers(0, 7, (2, 3)), forward, call)


def recurrent(seed: int) -> Case:
    """Two LSTM of equal or of other sizes, and a dense layer."""
    make = Maker(seed)
    h = int(make.chance.choice([3, 4]))
    extra = float(make.chance.choice([0.0, 1.0]))
    units = [
        Unit("lstm", named(f"rnn.{i}", numbered("lstm", i), f"LSTMCell_{i}"), make.of("lstm", n, h))
        for i, n in enumerate((3, h))
    ]
    units.append(Unit("linear", named("fc", "dense", "Dense_0"), make.of("linear", h, 2)))
    net = Free(
        cells=[pax.LSTM(3, h, forget_gate_bias=extra), pax.LSTM(h, h, forget_gate_bias=extra)],
        output=pax.Linear(h, 2),
    )

    def forward(x: np.ndarray) -> np.ndarray:
        for unit in units[:2]:
            state, ys = (np.zeros((x.shape[1], h)), np.zeros((x.shape[1], h))), []
            for step in x:
                state, y = stepped(state, step, unit.arrays)
                ys.append(y)
            x = np.stack(ys)
        return dense(x[-1], units[2].arrays)

    def call(net: Any, x: Any) -> Any:
        for cell in net.cells:
            state, ys = cell.initial_state(x.shape[1]), []
            for step in x:
                state, y = cell(state, step)
                ys.append(y)
            x = jnp.stack(ys)
        return net.output(x[-1])

    return Case(net, units, make.normal(2, 2, 3), forward, call)


def hourglass(seed: int) -> Case:
    """A convolution, transposed ones, and a convolution of one place."""
    make = Maker(seed)
    c = int(make.chance.choice([2, 3]))
    sizes = [(c, c), (c, 4)] if make.chance.random() < 0.5 else [(c, 5), (5, 4)]
    units = [Unit("conv", named("down.conv", "down_conv", "down/Conv_0"),
                  make.of("conv", 3, 3, 3, c))]  # fmt: skip
    for i, (before, after) in enumerate(sizes):
        names = named(f"up.{i}.deconv", numbered("conv2d_transpose", i), f"ConvTranspose_{i}")
        units.append(Unit("up", names, make.of("up", before, after)))
    units.append(Unit("conv", named("final", "final_conv", "final"), make.of("conv", 1, 1, 4, 2)))
    net = Free(
        down=pax.Conv2D(3, c, 3),
        ups=[pax.Conv2DTranspose(a, b, 2, 2, "VALID") for a, b in sizes],
        last=pax.Conv2D(4, 2, 1),
    )

    def forward(x: np.ndarray) -> np.ndarray:
        x = np.tanh(convolved(x, units[0].arrays))
        for unit in units[1:3]:
            x = np.tanh(spread(x, unit.arrays))
        return convolved(x, units[3].arrays)

    def call(net: Any, x: Any) -> Any:
        x = jnp.tanh(net.down(x))
        for up in net.ups:
            x = jnp.tanh(up(x))
        return net.last(x)

    return Case(net, units, make.normal(1, 3, 3, 3), forward, call)


CASES = (perceptron, convolutional, attentive, recurrent, hourglass)
