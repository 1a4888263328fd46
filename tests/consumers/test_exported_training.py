"""Exports that train, and that read text, for the processes that serve them.

ROOT/.../training/model       the SavedModel, with a signature train_step
ROOT/.../training/steps.npz   images, labels and the losses that jax had
ROOT/.../text/model           the SavedModel, which takes text
ROOT/.../text/calls.json      texts, and the numbers that jax made of their words
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from pax_export.export import spec, to_saved_model
from tests.consumers import artifacts
from tests.export.training import batches, make_net, make_optimizer, step


def test_a_net_that_goes_on_training(tmp_path):
    folder = (artifacts.root() or tmp_path) / "training"
    net, data, losses = make_net().train(), batches(12), []
    optimizer = make_optimizer(net)
    for images, labels in data[:2]:  # begun in jax
        net, optimizer, _ = step(net, optimizer, images, labels)
    inputs = spec("batch, 8, 8, 1")
    report = to_saved_model(
        net.eval(), folder / "model", inputs, train_step=step, optimizer=optimizer,
        train_inputs=(inputs, spec("batch", "int32")), overwrite=True, validate=False,
    )  # fmt: skip
    for images, labels in data[2:]:
        net, optimizer, metrics = step(net, optimizer, images, labels)
        losses.append(float(metrics["loss"]))
    images, labels = (np.stack(each) for each in zip(*data[2:]))
    logits = net.eval()(images[0])
    np.savez(folder / "steps.npz", images=images, labels=labels, losses=losses, logits=logits)
    assert report.oldest_tensorflow == "2.15"


def test_a_model_that_reads_text(tmp_path):
    tf = pytest.importorskip("tensorflow")
    folder = (artifacts.root() or tmp_path) / "text"
    words, numbers = ["good", "bad", "film"], np.array([0.0, 1.5, -2.0, 0.25], np.float32)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(words, [1, 2, 3], tf.string, tf.int32), 0
    )
    report = to_saved_model(
        ({"score": numbers}, lambda params, tokens: params["score"][tokens].sum(axis=1)),
        folder / "model", spec("batch, length", "int32"), overwrite=True, validate=False,
        preprocess=lambda text: table.lookup(tf.strings.split(text).to_tensor("")),
        preprocess_inputs=spec("batch", "string"),
        postprocess=lambda score: {
            "score": score, "mood": tf.where(score < 0, "sad", "happy")
        },
    )  # fmt: skip
    texts = ["good film", "a bad film", "", "bad bad good"]
    scores = [
        float(sum(numbers[words.index(word) + 1] for word in text.split() if word in words))
        for text in texts
    ]
    (folder / "calls.json").write_text(json.dumps({"texts": texts, "scores": scores}))
    assert report.oldest_tensorflow == "2.15"
