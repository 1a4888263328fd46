"""Every layer as a pytree: round trip, key paths, equal treedefs, fast moduledefs, pickles."""

import copy
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export import nn
from pax_export.core import flatten, modules_and_leaves, named_leaves, warn_of_untrained
from tests.contract.table import ROWS, each_row, leaves_equal
from tests.processes import printed

PUBLIC = [getattr(nn, name) for name in nn.__all__]


def test_rows_have_names_of_their_own():
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_function_has_a_row():
    functions = {x for x in PUBLIC if inspect.isfunction(x)}
    built = [row.build() for row in ROWS]
    pooled = {m.func.func for m in built if isinstance(getattr(m, "func", None), functools.partial)}
    called = {pax.dropout}  # by Dropout
    called |= {pax.nn.dot_product_attention, pax.nn.rotary_frequencies}  # by attention, Decoder
    called |= {pax.nn.alibi_slopes, pax.nn.sinusoidal_positions}
    assert functions == pooled | called


@each_row
def test_round_trip(row):
    module = row.build()
    leaves, treedef = jax.tree_util.tree_flatten(module)
    again = jax.tree_util.tree_unflatten(treedef, leaves)
    assert again == module and again is not module
    assert vars(again).keys() == vars(module).keys()
    assert jax.tree_util.tree_map(lambda x: x, module) == module
    assert repr(again) == repr(module) and again.summary() == module.summary()
    assert hash(again) == hash(module)


@each_row
def test_key_paths_lead_to_the_leaves(row):
    module = row.build()
    named = named_leaves(module)
    assert len(dict(named)) == len(jax.tree_util.tree_leaves(module))
    for name, leaf in named:
        assert functools.reduce(step, name.split("."), module) is leaf


def step(value, word):
    if isinstance(value, dict):
        return value[word]
    return value[int(word)] if word.isdigit() else getattr(value, word)


@each_row
def test_one_recipe_gives_one_treedef(row):
    structures = [jax.tree_util.tree_structure(row.build()) for _ in range(2)]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])


@each_row
def test_layouts_are_fast(row):
    """Static data that cannot change, interned, and filled in only when looked at."""
    for module in modules_and_leaves(row.build())[0]:
        moduledef = flatten(module)[1]
        assert not moduledef.changing, moduledef.static
        assert moduledef.lazy
        assert flatten(jax.tree_util.tree_map(jnp.copy, module))[1] is moduledef


@each_row
def test_parameters(row):
    module = row.build()
    parameters = module.parameters()
    assert parameters.parameters() == parameters
    assert parameters | module == module
    assert module | parameters == module
    assert module.update_parameters(parameters) == module
    own = {id(leaf) for leaf in jax.tree_util.tree_leaves(module)}
    assert {id(leaf) for leaf in jax.tree_util.tree_leaves(parameters)} <= own
    assert jax.tree_util.tree_leaves(pax.freeze_parameters(module).parameters()) == []
    warn_of_untrained(module)  # every floating array of a layer is declared


@each_row
def test_state_dict(row):
    a, b = row.build(), row.build()
    assert a.load_state_dict(a.state_dict()) == a
    assert leaves_equal(b.load_state_dict(a.state_dict()), a)


# --- in and out of a pickle, also in another process; deep copies -------------------------


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
