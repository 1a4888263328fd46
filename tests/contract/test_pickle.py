"""Every layer in and out of a pickle, also in another process; deep copies."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from tests.contract.table import ROWS, each_row, leaves_equal

ROOT = Path(__file__).parent.parent.parent

_LOAD = """
import pickle, sys
import numpy as np
from tests.contract.table import ROWS

rows = {row.name: row for row in ROWS}
with open(sys.argv[1], "rb") as file:
    saved = pickle.load(file)
for name, (module, output) in saved.items():
    row = rows[name]
    _, again = row.run(module, *row.inputs())
    np.testing.assert_allclose(again, output, rtol=1e-6, atol=1e-6, err_msg=name)
    module.summary(), module.eval(), module.parameters()
print(len(saved))
"""


@each_row
def test_pickle(row):
    module = row.build()
    loaded = pickle.loads(pickle.dumps(module))
    assert leaves_equal(loaded, module)
    assert loaded.summary() == module.summary()
    assert leaves_equal(row.run(loaded, *row.inputs()), row.run(module, *row.inputs()))


@each_row
def test_frozen_and_eval_modules_pickle(row):
    import pax_export as pax

    module = pax.freeze_parameters(row.build()).eval()
    loaded = pickle.loads(pickle.dumps(module))
    assert leaves_equal(loaded, module)
    assert jax.tree_util.tree_leaves(loaded.parameters()) == []


def test_pickles_load_in_another_process(tmp_path):
    saved = {}
    for row in ROWS:
        module = row.build()
        saved[row.name] = module, np.asarray(row.run(module, *row.inputs())[1])
    path = tmp_path / "layers.pickle"
    path.write_bytes(pickle.dumps(saved))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _LOAD, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(ROWS))


@each_row
def test_copies(row):
    module = row.build()
    assert copy.copy(module) == module
    deep = copy.deepcopy(module)
    assert leaves_equal(deep, module)
    assert leaves_equal(row.run(deep, *row.inputs()), row.run(module, *row.inputs()))
