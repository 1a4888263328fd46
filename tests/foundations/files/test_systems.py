"""Everything is written where Windows' or macOS' calls are all there are.

What is simulated (`other_system.py`): missing names, directories that cannot be
opened, open files that cannot be renamed. What is not: Windows' paths and file systems.
"""

from __future__ import annotations

import pytest

from tests.processes import ROOT, python

CODE = """
import os, sys
from pathlib import Path
import jax, numpy as np
import pax_export as pax
from pax_export import export
from pax_export._foundations.files import system
from tests.closeness import assert_close
from tests.generation.test_runtimes import ascii_tokenizer, net as language_model

# The simulation is on.
assert not system.rename2(Path("a"), Path("b"), system.EXCHANGE)
assert (system.fcntl is None) == (sys.argv[2] == "windows")

here = Path(sys.argv[1])
net = pax.Sequential(pax.Linear(3, 4), jax.nn.relu, pax.Linear(4, 2))
x, specs = np.ones((2, 3), np.float32), export.spec("batch, 3")
expected = net(x)

def same(other):
    assert_close(other, expected, 1e-4)

# macOS lacks one call of these, which Windows lacks too, and has locks: one writer of files and
# one of folders meet that.
writers = {"to_stablehlo": "stablehlo", "to_onnx": "net.onnx"}
if sys.argv[2] == "windows":
    writers |= {"to_saved_model": "saved", "to_tflite": "net.tflite"}
for writer, name in writers.items():
    for overwrite in (False, True):
        report = getattr(export, writer)(
            net, here / name, specs, overwrite=overwrite, validate=overwrite
        )
    assert report.validated, report
    loaded = export.load(here / name, trusted=True)
    same(jax.tree.leaves(loaded(x))[0])
    del loaded
os.environ["PATH"] = ""  # without npm, folders for browsers name the packages that they need
for overwrite in (False, True):
    export.to_web(net, here / "web", specs, overwrite=overwrite, validate=False)
    export.to_onnx(
        net, here / "external.onnx", specs, overwrite=overwrite, external_data=True, validate=False
    )

for _ in range(2):
    pax.save_weights(net, here / "net.safetensors")
    same(pax.load_weights(net, here / "net.safetensors")(x))
adapted = pax.adapters.add(net, pax.Linear, 2, key=jax.random.key(1))
for overwrite in (False, True):
    pax.adapters.save(adapted, here / "adapter")
    pax.inspect(net).save_html(here / "net.html", overwrite=overwrite)
for step in range(2):
    with pax.checkpoint.Checkpoints(here / "run", keep=1) as run:
        run.save(step, model=net)
        same(run.restore(model=net)["model"](x))
        assert run.steps == (step,)

formats = {"genai": "genai", "gguf": "lm.gguf", "litertlm": "lm.litertlm"}
lm, tokenizer = language_model("llama", here / "hub"), ascii_tokenizer()
for overwrite in (False, True):
    for format, name in formats.items() if sys.argv[2] == "windows" else ():
        pax.generation.export(
            lm, here / name, format=format, tokenizer=tokenizer, max_length=16, validate=False,
            overwrite=overwrite,
        )
    pax.generation.save_pretrained(lm, here / "pretrained", validate=False, overwrite=overwrite)
pax.nets.Decoder.from_pretrained(here / "pretrained")
print(sorted(each.name for each in here.iterdir() if each.name.startswith(".")))
"""


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_everything_is_written_and_read(tmp_path, system):
    start, work, temporary = tmp_path / "start", tmp_path / "work", tmp_path / "temporary"
    for folder in (start, work, temporary):
        folder.mkdir()
    # Python runs it when it starts, also in the processes that validate.
    (start / "sitecustomize.py").write_text(
        f"from tests.foundations.files.other_system import pretend; pretend({system!r})"
    )
    # Tests of this system beside it would remove temporaries without a lock, which Windows lacks.
    env = {"PYTHONPATH": f"{start}:{ROOT}", "TMPDIR": str(temporary)}
    done = python("-c", CODE, work, system, env=env)
    assert done.stdout.endswith("[]\n"), done.stdout
