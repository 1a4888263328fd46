"""Folders for browsers: what is in one, what Chromium makes of it, and what is refused."""

import contextlib
import html
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import (
    ExportPathError,
    InvalidArgumentError,
    MissingPackageError,
    NotValidatedWarning,
    UnsupportedDtypeError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export.export import load, spec, to_web
from pax_export.export.formats.onnx.web import browser, npm
from pax_export.export.formats.onnx.web import export as web_export
from pax_export.export.formats.onnx.web.browser import run
from tests import browsers
from tests.closeness import assert_close

IMAGES = spec("batch, 8, 8, 1", name="images")


class Encoder(pax.Module):
    def __init__(self):
        self.encoder = pax.Linear(3, 4, rng_key=jax.random.key(0))
        self.decoder = pax.Linear(4, 3, rng_key=jax.random.key(1))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, code):
        return {"x": self.decoder(code), "norm": jnp.abs(code).sum(-1)}


def classifier():
    return pax.Sequential(
        pax.Conv2D(1, 4, 3, rng_key=jax.random.key(0)),
        jax.nn.relu,
        lambda x: x.reshape(x.shape[0], -1),
        pax.Linear(256, 10, rng_key=jax.random.key(1)),
    )


def both(folder, **options):
    methods = {"encode": "encode", "decode": "decode"}
    inputs = {"encode": spec("batch, 3"), "decode": spec("batch, 4")}
    net = Encoder()
    return net, to_web(net, folder, inputs, methods=methods, **options)


# --- what is written ---------------------------------------------------------------------------


def test_the_folder(tmp_path, monkeypatch):
    browsers.without_packages(monkeypatch)
    net, report = both(tmp_path / "web", validate=False)
    names = {each.name for each in (tmp_path / "web").iterdir()}
    assert {"encode.onnx", "decode.onnx", "model.js", "model.d.ts", "index.html"} < names
    assert (report.target, report.validated) == ("web", None)
    assert "as a folder for browsers" in str(report)
    assert report.details["onnxruntime-web"] == npm.ONNXRUNTIME.version
    module = (tmp_path / "web" / "model.js").read_text()
    begin = module.index("signatures = {") + len("signatures = ")
    signatures, _ = json.JSONDecoder().raw_decode(module[begin:])
    assert list(signatures) == ["encode", "decode"]
    assert signatures["decode"]["inputs"] == {"code": {"dtype": "float32", "shape": ["batch", 4]}}
    assert list(signatures["decode"]["outputs"]) == ["norm", "x"]
    types = (tmp_path / "web" / "model.d.ts").read_text()
    assert '"encode"(inputs: {' in types and '"norm": Tensor<Float32Array>;' in types
    card = html.unescape((tmp_path / "web" / "pax_export.html").read_text())
    assert 'await model["encode"]({\n  "x": {data: Array(3).fill(0), shape: [1, 3]},\n});' in card
    loaded = load(tmp_path / "web")
    x = np.ones((2, 3), np.float32)
    assert_close(loaded.signatures["encode"](x), net.encode(x), rtol=1e-5)


def test_a_name_is_text_on_the_page(tmp_path, monkeypatch):
    browsers.without_packages(monkeypatch)
    web_export.write_page(tmp_path, "<b>&", "", "")
    assert "<title>&lt;b&gt;&amp;</title>" in (tmp_path / "index.html").read_text()


def test_a_damaged_folder_is_not_loaded(tmp_path, monkeypatch):
    browsers.without_packages(monkeypatch)
    to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    with (tmp_path / "web" / "model.js").open("a") as file:
        file.write("// changed")
    with pytest.raises(ExportPathError) as caught:
        load(tmp_path / "web")
    assert caught.value.where.endswith("model.js")


def test_only_a_folder_of_ours_is_replaced(tmp_path, monkeypatch):
    browsers.without_packages(monkeypatch)
    options = {"validate": False, "overwrite": True}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text("mine")
    with pytest.raises(ExportPathError):
        to_web(classifier(), tmp_path / "other", IMAGES, **options)
    to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    with pytest.raises(ExportPathError):
        to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    to_web(classifier(), tmp_path / "web", IMAGES, **options)
    (tmp_path / "web" / "notes.txt").write_text("mine")
    with pytest.raises(ExportPathError) as caught:
        to_web(classifier(), tmp_path / "web", IMAGES, **options)
    assert caught.value.got == "notes.txt"


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "float8_e4m3fn"])
def test_dtypes_that_javascript_lacks(tmp_path, dtype):
    with pytest.raises(UnsupportedDtypeError, match=f"no arrays of {dtype}") as caught:
        to_web(lambda x: x, tmp_path / "web", spec("2", dtype), outputs="model", validate=False)
    assert "input x" in caught.value.where


def test_states_and_choices(tmp_path):
    with pytest.raises(InvalidArgumentError, match="state"):
        to_web(jnp.sin, tmp_path / "web", spec("2"), state="update")
    with pytest.raises(InvalidArgumentError, match="validate"):
        to_web(jnp.sin, tmp_path / "web", spec("2"), validate="variables")


def untraced(x):
    raise AssertionError("it is traced")


def test_what_is_missing_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match="npm is not installed"):
        to_web(untraced, tmp_path / "web", spec("2"))
    browsers.program(tmp_path / "npm", "exit 1")
    monkeypatch.delenv(browser.PATH, raising=False)
    with pytest.raises(MissingPackageError, match="Chromium, which is not installed"):
        to_web(untraced, tmp_path / "web", spec("2"))
    monkeypatch.setenv(browser.PATH, str(tmp_path / "nothing"))
    with pytest.raises(MissingPackageError) as caught:
        to_web(untraced, tmp_path / "web", spec("2"))
    assert caught.value.got == f"{browser.PATH}={tmp_path / 'nothing'}"
    assert not (tmp_path / "web").exists()


def test_without_npm_the_folder_lacks_the_runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(NotValidatedWarning, match="lacks onnxruntime-web@"):
        report = to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    assert report.left_out == (f"not copied, because npm is not installed: {npm.ONNXRUNTIME}",)
    assert (tmp_path / "web" / "model.js").is_file()
    assert not (tmp_path / "web" / "onnxruntime-web").exists()


def test_a_registry_that_cannot_be_reached(tmp_path, monkeypatch):
    if not npm.found():
        pytest.skip("npm is not installed")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_fetch_retry_mintimeout", "10")
    monkeypatch.setattr(npm, "_PATIENCE", ("--fetch-retries=0",))
    with pytest.raises(MissingPackageError, match="cannot be downloaded"):
        to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    assert not (tmp_path / "web").exists()


def fake_npm(folder, monkeypatch, text):
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    browsers.program(folder / "npm", text)


def test_an_archive_that_is_not_the_pinned_one(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "other.tgz", "w:gz") as archive:
        archive.add(__file__, "package/dist/ort.wasm.min.mjs")
    fake_npm(tmp_path, monkeypatch, f"cp {tmp_path / 'other.tgz'} .")
    with pytest.raises(MissingPackageError, match="another archive") as caught:
        to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    assert npm.ONNXRUNTIME.sha512 in caught.value.got
    assert not (tmp_path / "web").exists()


def test_npm_that_hangs(tmp_path, monkeypatch):
    fake_npm(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(npm, "_SECONDS", 0.5)
    with pytest.raises(MissingPackageError) as caught:
        to_web(classifier(), tmp_path / "web", IMAGES, validate=False)
    assert caught.value.got == "no answer within 0.5 s"


@pytest.mark.parametrize(
    ("text", "found"),
    [("exit 3", "exit code 3"), ("echo $$ > pid; exec sleep 60", "no answer within 1 s")],
)
def test_a_browser_that_ends_or_hangs(tmp_path, monkeypatch, text, found):
    browsers.without_packages(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(browser.PATH, str(browsers.program(tmp_path / "chrome", text)))
    monkeypatch.setattr(browser, "START", 1.0)
    monkeypatch.setattr(web_export._WebExporter, "partial", lambda self: None)
    with pytest.raises(ValidationError, match="returned no result") as caught:
        to_web(classifier(), tmp_path / "web", IMAGES)
    assert found in caught.value.got
    assert not (tmp_path / "web").exists()
    if (tmp_path / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


# --- in Node.js --------------------------------------------------------------------------------

NODE = """
import {model} from "./model.js";
const numbers = Float32Array.from({length: 128}, (_, at) => at / 128);
const {output} = await model.predict({images: numbers});
const row = (at) => [...numbers.slice(8 * at, 8 * at + 8)].map((each) => [each]);
const nested = await model.predict({images: [[0, 1, 2, 3, 4, 5, 6, 7].map(row)]});
const failed = [];
const wrong = [
  {}, {image: 1}, {images: "a"}, {images: [[1], [2, 3]]}, {images: new Int8Array(64)},
  {images: new Float32Array(65)}, {images: {data: [1, 2], shape: [1, 8, 8, 1]}},
];
for (const each of wrong) {
  await model.predict(each).catch((error) => failed.push(`${error}`));
}
const zeros = [1, 2, 3].map((size) => ({images: new Float32Array(64 * size)}));
const several = await Promise.all(zeros.map((each) => model.predict(each)));
console.log(JSON.stringify({
  output: [...output.data], shape: output.shape, nested: [...nested.output.data], failed,
  sizes: several.map((each) => each.output.shape),
}));
"""


def test_the_module_in_node(tmp_path, monkeypatch):
    if not shutil.which("node"):
        pytest.skip("Node.js is not installed")
    browsers.with_packages(monkeypatch, needs_browser=False)
    net = classifier()
    to_web(net, tmp_path / "web", IMAGES, validate=False)
    (tmp_path / "web" / "try.js").write_text(NODE)
    command = ["node", str(tmp_path / "web" / "try.js")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    images = (np.arange(128, dtype=np.float32) / 128).reshape(2, 8, 8, 1)
    expected = np.asarray(net(images))
    assert found["shape"] == [2, 10] and found["sizes"] == [[1, 10], [2, 10], [3, 10]]
    assert_close(np.float32(found["output"]).reshape(2, 10), expected, rtol=1e-4, atol=1e-5)
    assert_close(np.float32(found["nested"]), expected[0], rtol=1e-4, atol=1e-5)
    expects = "TypeError: predict: images: expected float32[batch, 8, 8, 1], got "
    assert found["failed"] == [
        expects + "nothing",
        "TypeError: predict: expected the inputs images, got image",
        expects + "string",
        expects + "rows of several lengths",
        expects + "Int8Array",
        expects + "65 numbers",
        expects + "[1, 8, 8, 1] of 2 numbers",
    ]


def test_every_script_is_javascript(tmp_path):
    if not shutil.which("node"):
        pytest.skip("Node.js is not installed")
    scripts = [*Path(pax.__file__).parent.rglob("*.js")]
    assert len(scripts) >= 7
    for each in scripts:
        copied = shutil.copy(each, tmp_path / f"{each.stem}.mjs")
        done = subprocess.run(["node", "--check", copied], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# --- in Chromium -------------------------------------------------------------------------------


@pytest.fixture
def in_chromium(monkeypatch):
    browsers.with_packages(monkeypatch)


def test_each_function_at_batches_of_1_7_and_64(tmp_path, in_chromium):
    net, report = both(tmp_path / "web")
    assert report.validated == "here" and not report.left_out
    assert set(report.largest_error) == {"encode: output", "decode: x", "decode: norm"}
    assert max(report.largest_error.values()) < 1e-5
    codes = [np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32) for n in (1, 7, 64)]
    cases = [{"signature": "decode", "inputs": {"code": each}} for each in codes]
    for code, found in zip(codes, run(str(tmp_path / "web"), cases)):
        expected = net.decode(code)
        assert_close(found["x"], expected["x"], rtol=1e-5, atol=1e-5)
        assert_close(found["norm"], expected["norm"], rtol=1e-5, atol=1e-5)


def test_dtypes(tmp_path, in_chromium):
    def model(**given):
        return {
            "small": given["a"] + 1, "bytes": given["b"] * 2, "mask": ~given["c"],
            "half": given["d"] * 2, "large": given["e"] + 2**40,
        }  # fmt: skip

    kinds = {"small": "int8", "bytes": "uint8", "mask": "bool", "half": "float16", "large": "int64"}
    with jax.enable_x64(True):
        inputs = {a: spec("batch, 3", kind) for a, kind in zip("abcde", kinds.values())}
        report = to_web(model, tmp_path / "web", (), kwargs=inputs, outputs="model")
    infos = report.signatures["serving_default"].outputs
    assert {each.name: each.dtype for each in infos} == kinds
    values = {a: np.array([[0, 1, 1]]).astype(kind) for a, kind in zip("abcde", kinds.values())}
    (found,) = run(str(tmp_path / "web"), [{"signature": "serving_default", "inputs": values}])
    assert found["large"].tolist() == [[2**40, 2**40 + 1, 2**40 + 1]]
    assert found["mask"].tolist() == [[True, False, False]]


def test_quantized_weights_in_a_process_without_jax(tmp_path, in_chromium):
    net, _ = pax.quantize(pax.Linear(64, 8, rng_key=jax.random.key(0)), bits=8)
    report = to_web(net, tmp_path / "web", spec("batch, 64"), validate="process")
    assert report.validated == "process" and "quantized" in report.details
    assert report.largest_error["serving_default: output"] < 1e-4


def test_a_wrong_result_is_found(tmp_path, in_chromium, monkeypatch):
    files = web_export.page_file
    changed = files("model.js").replace("made[name].data,", "made[name].data.map((x) => x + 1),")
    assert changed != files("model.js")
    monkeypatch.setattr(
        web_export, "page_file", lambda name: changed if name == "model.js" else files(name)
    )
    with pytest.raises(ValidationError):
        to_web(classifier(), tmp_path / "web", IMAGES)
    assert not (tmp_path / "web").exists()


def test_what_the_browser_cannot_run(tmp_path, in_chromium, monkeypatch):
    files = web_export.page_file
    broken = 'throw new Error("no kernel");\n' + files("runtime.js")
    monkeypatch.setattr(
        web_export, "page_file", lambda name: broken if name == "runtime.js" else files(name)
    )
    with pytest.raises(UnsupportedOperationError, match="does not run this model") as caught:
        to_web(classifier(), tmp_path / "web", IMAGES)
    assert "no kernel" in caught.value.got and not (tmp_path / "web").exists()


def test_a_page_that_is_gone(tmp_path, in_chromium):
    script = "export const answer = () => { close(); return new Promise(() => 0); };"
    with browser.opened(tmp_path, script) as ask, pytest.raises(ValidationError) as caught:
        ask({})
    assert "closed" in caught.value.got or "ended" in caught.value.got


def test_an_answer_that_never_comes(tmp_path, in_chromium, monkeypatch):
    monkeypatch.setattr(browser, "ANSWER", 1.0)
    began = time.monotonic()
    script = "export const answer = () => { for (;;); };"
    with browser.opened(tmp_path, script) as ask, pytest.raises(ValidationError) as caught:
        ask({})
    assert caught.value.got == "no answer within 1 s" and time.monotonic() - began < 60


def test_the_browser_ends_with_a_process_that_is_killed(tmp_path, in_chromium):
    program = f"""
import sys
from pathlib import Path
from pax_export.export.formats.onnx.web import browser
script = "export const answer = () => new Promise(() => 0);"
with browser.opened(Path({str(tmp_path)!r}), script) as ask:
    print("open", flush=True)
    ask(0)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        assert processes_that_name(tmp_path)
        process.kill()
    end = time.monotonic() + 30
    while (left := processes_that_name(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def processes_that_name(folder):
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [each.parent.name] * (f"{folder}/.pax_export".encode() in each.read_bytes())
    return found


#: Draws a stroke on the page of the model, and gives what the page says then.
DRAW = """
export async function answer() {
  const frame = document.createElement("iframe");
  Object.assign(frame, {src: "/index.html", width: 800, height: 900});
  document.body.append(frame);
  const find = async (what) => {
    for (;;) {
      const found = frame.contentDocument?.querySelectorAll(what) ?? [];
      if (found.length) return [...found];
      await new Promise((done) => setTimeout(done, 50));
    }
  };
  const [field] = await find("canvas"), {x, y} = field.getBoundingClientRect();
  field.setPointerCapture = () => 0;
  const fire = (type, at) => field.dispatchEvent(
    new PointerEvent(type, {clientX: x + at, clientY: y + at, buttons: 1, pointerId: 1}));
  fire("pointerdown", 40); fire("pointermove", 240); fire("pointerup", 240);
  const bars = await find(".bars meter"), [status] = await find("#status");
  const values = bars.map((each) => each.value);
  return {values, status: status.textContent, title: frame.contentDocument.title};
}
"""


def test_the_page_draws_and_runs(tmp_path, in_chromium):
    net = pax.Sequential(lambda x: x[:, :, :, 0], lambda x: jnp.stack([
        x.mean((1, 2)), x[:, 0, 7], jnp.trace(x, axis1=1, axis2=2) / 8
    ], -1))  # fmt: skip
    to_web(net, tmp_path / "web", IMAGES)
    with browser.opened(tmp_path / "web", DRAW) as ask:
        said = ask({})
    mean, corner, diagonal = said["values"]
    assert 0.1 < mean < 0.5 and corner < 0.05 and diagonal > 0.6  # ink from corner to corner
    assert said["status"] == "Runs in this browser, with WebAssembly."
    assert said["title"] == "Sequential"


def test_webgpu_of_a_processor(tmp_path, in_chromium):
    """Chromium has one in software; a device without float16 computes with WebAssembly."""
    net = classifier()
    to_web(net.apply(pax.experimental.default_mp_policy), tmp_path / "half", IMAGES, validate=False)
    to_web(net, tmp_path / "web", IMAGES, validate=False)
    script = """
    import {load, model} from "/model.js";
    export const answer = async () => {
      const {provider} = await load();
      const {output} = await model.predict({images: new Float32Array(64).fill(0.5)});
      return [provider, [...output.data]];
    };"""
    flags = [each for each in browser._FLAGS if each != "--disable-gpu"]
    flags += ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
    flags += ["--enable-unsafe-swiftshader"]
    images = np.full((1, 8, 8, 1), 0.5, np.float32)
    for name, atol in (("web", 1e-4), ("half", 2e-2)):
        with browser.opened(
            tmp_path / name, script, [*flags, "--enable-unsafe-swiftshader"]
        ) as ask:
            provider, found = ask({})
        if provider != "webgpu":
            pytest.skip("this Chromium has no WebGPU in software")
        assert_close(np.float32(found), np.asarray(net(images))[0], atol=atol)
