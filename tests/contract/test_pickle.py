"""Every layer in and out of a pickle, also in another process; deep copies."""

import copy
import pickle

import jax
import numpy as np

import pax_export as pax
from tests.contract.table import ROWS, each_row, leaves_equal
from tests.processes import printed

COMPARED = {"Linear", "Dropout", "Sequential"}

_LOAD = """
import pickle, sys
import jax
import numpy as np
from tests.contract.table import ROWS
from tests.closeness import assert_close

rows = {row.name: row for row in ROWS}
with open(sys.argv[1], "rb") as file:
    saved = pickle.load(file)
for name, (module, output) in saved.items():
    structure = jax.tree_util.tree_structure(module)
    if output is not None:
        row = rows[name]
        assert structure == jax.tree_util.tree_structure(row.build())
        _, again = row.run(module, *row.inputs())
        assert_close(again, output, rtol=1e-6, atol=1e-6, where=name)
print(len(saved))
"""


@each_row
def test_pickles_and_copies(row):
    module = row.build()
    assert copy.copy(module) == module
    for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert leaves_equal(again, module)
        assert again.summary() == module.summary()
        assert leaves_equal(row.run(again, *row.inputs()), row.run(module, *row.inputs()))


@each_row
def test_frozen_and_eval_modules_pickle(row):
    module = pax.freeze_parameters(row.build()).eval()
    loaded = pickle.loads(pickle.dumps(module))
    assert leaves_equal(loaded, module)
    assert jax.tree_util.tree_leaves(loaded.parameters()) == []


def test_pickles_load_in_another_process(tmp_path):
    """A few are compared with what is built and computed there."""
    saved = {}
    for row in ROWS:
        module = row.build()
        output = row.run(module, *row.inputs())[1] if row.name in COMPARED else None
        saved[row.name] = module, np.asarray(output) if output is not None else None
    path = tmp_path / "layers.pickle"
    path.write_bytes(pickle.dumps(saved))
    assert printed(_LOAD, path).strip() == str(len(ROWS))
