"""Folders for browsers with a page to chat on."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

import pax_export as pax
from pax_export.errors import MissingPackageError, NotValidatedWarning, ValidationError
from pax_export.export.formats.onnx.web import browser
from pax_export.generation import Tokenizer
from tests import browsers
from tests.generation.test_runtimes import net
from tests.generation.test_tokenizer import byte_level
from tests.refusals import refused

TEMPLATE = (
    "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    made = byte_level()
    made.chat_templates = {"default": template}
    return made


def export(lm, folder, **options):
    given = {"tokenizer": tokenizer(), "max_length": 64} | options
    return pax.generation.export(lm, folder, format="web", **given)


def test_the_folder(tmp_path, monkeypatch):
    browsers.without_packages(monkeypatch)
    lm = net("llama", tmp_path / "hf", num_hidden_layers=1)
    report = export(lm, tmp_path / "web", validate=False)
    assert report.target == "web" and report.validated is None
    files = set(report.details["files"])
    assert {"index.html", "model.js", "model.d.ts", "page.js", "runtime.js"} < files
    assert {"genai_config.json", "tokenizer.json", "onnx/model.onnx"} < files
    module = (tmp_path / "web" / "model.js").read_text()
    begin = module.index("specialTokens} = ") + len("specialTokens} = ")
    about, _ = json.JSONDecoder().raw_decode(module[begin:])
    config = json.loads((tmp_path / "web" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == about["template"] == TEMPLATE
    assert about["specialTokens"]["eos_token"] == "<e>"
    with pytest.raises(pax.errors.ExportPathError):
        export(lm, tmp_path / "web", validate=False)
    with pytest.raises(pax.errors.ExportPathError):
        pax.export.load(tmp_path / "web")
    export(lm, tmp_path / "web", validate=False, overwrite=True)


def test_missing_packages_are_named_before_any_work(tmp_path, monkeypatch):
    lm = net("llama", tmp_path / "hf", num_hidden_layers=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError):
        export(lm, tmp_path / "web")
    with pytest.warns(NotValidatedWarning, match="lacks onnxruntime-web@.*tokenizers@.*jinja@"):
        export(lm, tmp_path / "web", validate=False)
    browsers.program(tmp_path / "npm", "exit 1")
    monkeypatch.delenv(browser.PATH, raising=False)
    with pytest.raises(MissingPackageError):
        export(lm, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_greedy_tokens_in_chromium_are_those_of_jax(tmp_path, monkeypatch):
    browsers.with_packages(monkeypatch)
    prompts = ["Hello", "The quick brown fox", [5, 6, 7], list(range(1, 40))]
    report = export(net("gemma3", tmp_path / "hf"), tmp_path / "web", prompts=prompts)
    assert report.validated == "process" and not report.differs
    counted, _, total = report.details["tokens"].split()[:3]
    assert counted == total and int(total) > 40


def test_other_tokens_are_refused(tmp_path, monkeypatch):
    browsers.with_packages(monkeypatch)
    lm = net("llama", tmp_path / "hf", num_hidden_layers=1)
    from pax_export.generation import _genai

    file = _genai._file
    changed = file("model.js").replace("yield next;", "yield (next + 1) % 5;")
    monkeypatch.setattr(_genai, "_file", lambda name: changed if name == "model.js" else file(name))
    with pytest.raises(ValidationError):
        export(lm, tmp_path / "web", prompts=[[5, 6, 7]])
    assert not (tmp_path / "web").exists()


def test_a_template_that_javascript_renders_otherwise(tmp_path, monkeypatch):
    """@huggingface/jinja drops what a turn of a loop has written before ``break``."""
    browsers.with_packages(monkeypatch)
    template = "{% for each in messages %}{{ each.content }}{% break %}{% endfor %}"
    lm = net("llama", tmp_path / "hf", num_hidden_layers=1)
    with refused(ValidationError, "chat template"):
        export(lm, tmp_path / "web", tokenizer=tokenizer(template))


#: Writes a message on the page, and gives what it shows and what the module says.
CHAT = """
import {chat} from "/model.js";
export async function answer(message) {
  const frame = document.createElement("iframe");
  frame.src = "/index.html";
  document.body.append(frame);
  const find = async (what, until) => {
    for (;;) {
      const found = frame.contentDocument?.querySelector(what);
      if (found && until(found)) return found;
      await new Promise((done) => setTimeout(done, 50));
    }
  };
  const text = await find("textarea", () => true);
  text.value = message;
  frame.contentDocument.querySelector("form").requestSubmit();
  await find("button", (each) => each.textContent === "Stop");
  await find("button", (each) => each.textContent === "Send");
  const pieces = [];
  for await (const each of chat([{role: "user", content: message}])) pieces.push(each);
  const shown = [...frame.contentDocument.querySelectorAll(".chat p")];
  return [shown.map((each) => each.textContent), pieces.join("")];
}
"""


def test_the_page_chats(tmp_path, monkeypatch):
    browsers.with_packages(monkeypatch)
    lm = net("llama", tmp_path / "hf", num_hidden_layers=1)
    words = tokenizer()
    export(lm, tmp_path / "web", tokenizer=words, validate=False)
    with browser.opened(tmp_path / "web", CHAT) as ask:
        (asked, answered), said = ask("Hello")
    ids = words.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True
    )
    steps = 64 - len(ids)
    sampler = pax.generation.samplers.greedy()
    tokens = pax.generation.generate(
        lm, [ids], max_new_tokens=steps, sampler=sampler, stop=words.stop, pad=0
    )
    expected = [*tokens[0].tolist()]
    if words.stop[0] in expected:
        expected = expected[: expected.index(words.stop[0])]
    text = words.decode(expected, skip_special_tokens=True)
    assert asked == "Hello" and said == answered
    assert text.startswith(answered) and len(answered) >= len(text.rstrip("\ufffd")) - 1


#: Continues prompts with transformers.js, and renders the chat template.
TRANSFORMERS = """
const {AutoModelForCausalLM, AutoTokenizer, Tensor, env} = require("@huggingface/transformers");
const path = require("path"), [folder, prompts] = process.argv.slice(1);
Object.assign(env, {allowRemoteModels: false, localModelPath: path.dirname(folder)});
(async () => {
  const name = path.basename(folder), only = {local_files_only: true}, made = [];
  const model = await AutoModelForCausalLM.from_pretrained(name, only);
  const tokenizer = await AutoTokenizer.from_pretrained(name, only);
  for (const ids of JSON.parse(prompts)) {
    const shape = [1, ids.length];
    const tensor = (values) => new Tensor("int64", BigInt64Array.from(values, BigInt), shape);
    const given = {input_ids: tensor(ids), attention_mask: tensor(ids.map(() => 1))};
    const options = {max_new_tokens: 12, do_sample: false, repetition_penalty: 1};
    const all = await model.generate({...given, ...options});
    made.push(all.tolist()[0].slice(ids.length).map(Number));
  }
  const text = tokenizer.apply_chat_template(
    [{role: "user", content: "Hi"}], {tokenize: false, add_generation_prompt: true});
  console.log(JSON.stringify({made, text}));
})();
"""


def test_transformers_js_reads_the_folder_of_genai(tmp_path):
    """It is looked for in the working directory and in NODE_PATH, as Node.js does."""
    look = ["node", "-e", "require.resolve('@huggingface/transformers')"]
    if not shutil.which("node") or subprocess.run(look, capture_output=True).returncode:
        pytest.skip("transformers.js is not installed")
    lm, words = net("llama", tmp_path / "hf", num_hidden_layers=1), tokenizer()
    given = {"tokenizer": words, "max_length": 64, "validate": False}
    pax.generation.export(lm, tmp_path / "genai", format="genai", **given)
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    command = ["node", "-e", TRANSFORMERS, "--", str(tmp_path / "genai"), json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    sampler = pax.generation.samplers.greedy()
    options = {"max_new_tokens": 12, "sampler": sampler, "stop": words.stop, "pad": 0}
    for prompt, said in zip(prompts, found["made"]):
        (own,) = pax.generation.generate(lm, [prompt], **options).tolist()
        assert said == own[: len(said)] and (len(said) == 12 or said[-1] in words.stop)
    messages = [{"role": "user", "content": "Hi"}]
    expected = words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert found["text"] == expected
