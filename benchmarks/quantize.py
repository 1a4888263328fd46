"""Nets trained on real digits, quantized: what is right, how large files are, what calls take.

Beside them the same nets by onnxruntime's own quantizer and by dynamic ranges of TFLite, and the
errors of weights beside those of qwix.  Batches that quantizers see are of the training, and not
among those that are scored.  Last, the tokens of a language model beside llama.cpp.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table
from pax_export._foundations.optional import is_installed

_EPOCHS, _BATCH, _CALLS = 15, 100, 20


def tables() -> Iterator[str]:
    """A table for each net."""
    for name, build in _NETS.items():
        net, seen, x, labels = _trained(build())
        rows = [
            f"| {name}, digits | accuracy | same class | bytes | µs for 1 |",
            "|---|---|---|---|---|",
        ]
        with tempfile.TemporaryDirectory() as folder:
            rows += _rows(net, seen, x, labels, Path(folder))
        yield "\n".join(rows) + "\n\n" + _weights(net)
    for bits in (8, 4):
        yield _decoding(bits)


def _mlp() -> Any:
    return pax.Sequential(
        lambda x: x.reshape(x.shape[0], -1),
        pax.Linear(64, 512), jax.nn.relu, pax.Linear(512, 512), jax.nn.relu, pax.Linear(512, 10),
    )  # fmt: skip


def _convnet() -> Any:
    layers: list[Any] = []
    for inside, outside, step in ((1, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers += [pax.Conv2D(inside, outside, 3, stride=step, padding="SAME")]
        layers += [pax.BatchNorm2D(outside), jax.nn.relu]
    return pax.Sequential(*layers, lambda x: x.mean((1, 2)), pax.Linear(64, 10))


def _depthwise() -> Any:
    layers: list[Any] = [pax.Conv2D(1, 32, 3, padding="SAME"), pax.BatchNorm2D(32), jax.nn.relu6]
    for inside, outside in ((32, 64), (64, 64), (64, 128)):
        layers += [pax.Conv2D(inside, inside, 3, padding="SAME", feature_group_count=inside)]
        layers += [pax.BatchNorm2D(inside), jax.nn.relu6, pax.Conv2D(inside, outside, 1)]
        layers += [pax.BatchNorm2D(outside), jax.nn.relu6]
    return pax.Sequential(*layers, lambda x: x.mean((1, 2)), pax.Linear(128, 10))


class _Residual(pax.Module):
    """Two convolutions beside what they are given."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.first = pax.Conv2D(inside, outside, 3, stride=stride, padding="SAME")
        self.second = pax.Conv2D(outside, outside, 3, padding="SAME")
        self.norms = [pax.BatchNorm2D(outside), pax.BatchNorm2D(outside)]
        self.beside = pax.Conv2D(inside, outside, 1, stride=stride) if inside != outside else None

    def __call__(self, x: Any) -> Any:
        new = self.norms[1](self.second(jax.nn.relu(self.norms[0](self.first(x)))))
        return jax.nn.relu(new + (x if self.beside is None else self.beside(x)))


def _resnet() -> Any:
    return pax.Sequential(
        pax.Conv2D(1, 32, 3, padding="SAME"), pax.BatchNorm2D(32), jax.nn.relu,
        _Residual(32, 32, 1), _Residual(32, 64, 2), _Residual(64, 64, 1),
        lambda x: x.mean((1, 2)), pax.Linear(64, 10),
    )  # fmt: skip


_NETS = {"convolutions": _convnet, "depthwise": _depthwise, "ResNet": _resnet, "MLP": _mlp}


def _trained(net: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """A net, digits of its training, and others with what they are."""
    optax = importlib.import_module("optax")
    digits = importlib.import_module("sklearn.datasets").load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order]

    def loss(params: Any, net: Any, x: Any, y: Any) -> Any:
        net, logits = net.update_parameters(params) % x
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), net

    @jax.jit
    def update(net: Any, optimizer: Any, x: Any, y: Any) -> tuple[Any, Any]:
        gradient, net = jax.grad(loss, has_aux=True)(net.parameters(), net, x, y)
        return pax.optim.apply_gradients(net, optimizer, gradient)

    optimizer = pax.optim.from_optax(optax.adam(2e-3))(net.parameters())
    train = len(images) - 400
    net = net.train()
    for epoch in range(_EPOCHS):
        shuffled = np.random.default_rng(epoch).permutation(train)
        for start in range(0, train - _BATCH + 1, _BATCH):
            chosen = shuffled[start : start + _BATCH]
            net, optimizer = update(net, optimizer, images[chosen], labels[chosen])
    return net.eval(), images[:200], images[train:], labels[train:]


def _rows(
    net: Any, seen: np.ndarray, x: np.ndarray, labels: np.ndarray, folder: Path
) -> Iterator[str]:
    right = np.asarray(net(x)).argmax(-1)
    found = list(_files(net, seen, folder))
    one = x[:1]
    least = dict.fromkeys(range(len(found)), np.inf)
    for _ in range(_CALLS):  # in turns
        for place, (_, call, _) in enumerate(found):
            call(one)
            least[place] = min(least[place], _seconds(call, one))
    for place, (name, call, count) in enumerate(found):
        got = np.asarray(call(x)).argmax(-1)
        accuracy, same = (got == labels).mean(), (got == right).mean()
        yield f"| {name} | {accuracy:.2%} | {same:.2%} | {count} | {least[place] * 1e6:.0f} |"


def _files(net: Any, seen: np.ndarray, folder: Path) -> Iterator[tuple[str, Any, int]]:
    """What is written of a net: a name, a call, the bytes."""
    spec = pax.export.spec("batch, 8, 8, 1")
    smaller = {f"{bits} bits": pax.quantize(net, bits=bits)[0] for bits in (8, 4)}
    smaller["4 bits, gptq"] = pax.quantize(net, [seen], bits=4, rounding="gptq")[0]
    for way in ("static", "minmax", "dynamic"):
        smaller[f"8 bits, {way} activations"] = pax.quantize(net, [seen], activations=way)[0]
    for kind, write in (("onnx", pax.export.to_onnx), ("tflite", pax.export.to_tflite)):
        yield _written(f"float32, {kind}", net, write, spec, folder)
        for name, small in smaller.items():
            for level in (4, 1) if "a" not in name else (4,):
                title = f"pax.quantize {name}, {kind}, accuracy_level={level}"
                own = partial(write, accuracy_level=level)
                yield _written(title, small, own, spec, folder)
    dynamic = partial(pax.export.to_tflite, quantize="dynamic")
    yield _written("to_tflite(quantize='dynamic')", net, dynamic, spec, folder)
    pax.export.to_onnx(net, folder / "float.onnx", spec, card=False)
    yield from _of_onnxruntime(folder, seen)


def _written(name: str, net: Any, write: Any, spec: Any, folder: Path) -> tuple[str, Any, int]:
    place = folder / "net"
    report = write(net, place, spec, overwrite=True, card=False)
    call = _session(place) if "onnx" in name else pax.export.load(place)
    return name, call, report.graph_bytes


def _of_onnxruntime(folder: Path, x: np.ndarray) -> Iterator[tuple[str, Any, int]]:
    """The float file by onnxruntime's own quantizer."""
    logging.disable(logging.WARNING)
    own = importlib.import_module("onnxruntime.quantization")
    file, made = folder / "float.onnx", folder / "own.onnx"
    name = _session(file).args[1]

    class Reader(own.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter([{name: x}])

        def get_next(self) -> Any:
            return next(self.left, None)

    ways = {
        "dynamic": lambda: own.quantize_dynamic(file, made, per_channel=True),
        "static QDQ": lambda: own.quantize_static(file, made, Reader(), per_channel=True),
    }
    for way, quantize in ways.items():
        quantize()
        yield f"onnxruntime.quantization, {way}", _session(made), made.stat().st_size


def _session(file: Path) -> Any:
    """A call of a file without what `load` does around it, which these small nets would show."""
    session = importlib.import_module("onnxruntime").InferenceSession(file)
    return partial(_called, session, session.get_inputs()[0].name)


def _called(session: Any, name: str, x: np.ndarray) -> Any:
    return session.run(None, {name: x})[0]


def _weights(net: Any) -> str:
    """The errors of weights, beside qwix."""
    lines = []
    for bits in (8, 4):
        _, report = pax.quantize(net, bits=bits)
        for leaf in report.leaves[-1:]:
            weight = dict(pax.core.named_leaves(net))[leaf.name]
            text = f"{leaf.name} {list(leaf.shape)} int{leaf.bits}: error {leaf.relative_error:.3%}"
            if is_installed("qwix"):
                text += f", of qwix {_of_qwix(weight, leaf.bits):.3%}"
            lines.append(text)
    return "\n".join(lines) + "\n"


def _of_qwix(weight: Any, bits: int) -> float:
    qarray = importlib.import_module("qwix._src.core.qarray")
    tiled = {"tiled_axes": {0: 32}} if bits == 4 else {}
    how = qarray.HowToQuantize(qtype=f"int{bits}", channelwise_axes=[1], **tiled)
    made = qarray.dequantize(qarray.quantize(weight, how))
    return float(jnp.linalg.norm(made - weight) / jnp.linalg.norm(weight))


_TOKENS, _VOCAB = 32, 49152


def _decoding(bits: int) -> str:
    """A language model adds tokens: jax, and runtimes beside their own float32 and llama.cpp."""
    config = pax.nets.DecoderConfig(
        _VOCAB, 576, 8, 9, 3, 64, 1536, tied=True, rotary_base=1e5, max_positions=64
    )
    lm = pax.nets.Decoder(config).eval()
    small, _ = pax.quantize(lm, bits=bits, group=32)
    prompt = jnp.ones((1, 1), jnp.int32)

    def generates(net: Any) -> Callable[[], Any]:
        return lambda: pax.generate(net, prompt, max_new_tokens=_TOKENS).block_until_ready()

    candidates = {"jax, float32": generates(lm), f"jax, int{bits}": generates(small)}
    with tempfile.TemporaryDirectory() as folder:
        if is_installed("onnxruntime") and is_installed("tokenizers"):
            nets = {"float32": lm, f"int{bits}": small}
            if bits == 8:
                nets["int8 for each channel"] = pax.quantize(lm)[0]
            for name, net in nets.items():
                candidates[f"onnxruntime, {name}"] = _in_onnxruntime(net, Path(folder, name))
        if is_installed("ai_edge_litert"):
            scheme = small if bits == 4 else pax.quantize(lm)[0]
            for name, net in {"float32": lm, f"int{bits}": scheme}.items():
                candidates[f"LiteRT, {name}"] = _in_litert(net, Path(folder, f"{name}.tflite"))
        if is_installed("xllamacpp") and is_installed("tokenizers"):
            candidates["llama.cpp, the same integers"] = _in_llama(small, Path(folder, "lm.gguf"))
        rows = compare(candidates, rounds=7, least=0.0)
    title = f"{_TOKENS} tokens of a Decoder of SmolLM2's widths with 8 layers, {bits} bits"
    return table(title, rows, "0.7 of the tokens a second of llama.cpp in the best of ours")


def _export(lm: Any, path: Path, format: str) -> None:
    tokenizers = importlib.import_module("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    words = ["<s>", *sorted(byte_level.alphabet()), "ab"]
    words += [f"w{index}" for index in range(len(words), _VOCAB)]
    ids = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("a", "b")]))
    inner.pre_tokenizer = byte_level(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    special = {"bos_token": "<s>", "eos_token": "<s>"}
    tokenizer = pax.generation.Tokenizer(inner, special, chat_template="")
    pax.generation.export(
        lm, path, format=format, tokenizer=tokenizer, max_length=64, validate=False
    )


def _in_onnxruntime(lm: Any, path: Path) -> Callable[[], Any]:
    """Steps of the file for onnxruntime-genai, which keeps the cache outside of the model."""
    _export(lm, path, "genai")
    session = importlib.import_module("onnxruntime").InferenceSession(path / "onnx" / "model.onnx")
    names = [each.name for each in session.get_outputs()]
    empty = np.zeros((1, lm.config.num_kv_heads, 0, lm.config.head_size), np.float32)

    def generate() -> None:
        token = np.ones((1, 1), np.int64)
        past = {name.replace("present", "past_key_values"): empty for name in names[1:]}
        for length in range(1, _TOKENS + 1):
            mask = np.ones((1, length), np.int64)
            made = session.run(names, {"input_ids": token, "attention_mask": mask, **past})
            token = made[0][:, -1].argmax(-1)[None]
            past = dict(zip(past, made[1:]))

    return generate


def _in_litert(lm: Any, path: Path) -> Callable[[], Any]:
    """Steps of a file for LiteRT, without copies of the cache, which no caller in C++ makes."""
    pax.generation.export(
        lm, path, format="tflite", signatures=["decode"], max_length=64, batch=1, layers="listed",
        validate=False,
    )  # fmt: skip
    runtime = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = runtime.Interpreter(str(path), num_threads=os.cpu_count())
    interpreter.allocate_tensors()
    for each in interpreter.get_input_details():
        interpreter.set_tensor(each["index"], np.zeros(each["shape"], each["dtype"]))

    def generate() -> None:
        for _ in range(_TOKENS):
            interpreter.invoke()

    return generate


def _in_llama(lm: Any, path: Path) -> Callable[[], Any]:
    _export(lm, path, "gguf")
    runtime = importlib.import_module("xllamacpp")
    params = runtime.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), 64, 1
    params.warmup, params.fit_params, params.n_gpu_layers, params.verbosity = False, False, 0, -1
    server = runtime.Server(params)
    asked = {"prompt": [1], "n_predict": _TOKENS, "top_k": 1, "ignore_eos": True}
    return lambda: server.handle_completions({**asked, "cache_prompt": False})


def _seconds(call: Callable[[Any], Any], x: Any) -> float:
    begin = time.perf_counter()
    np.asarray(call(x))
    return time.perf_counter() - begin
