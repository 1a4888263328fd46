"""opax over pax_export: everything it offers runs, and nobody else notices."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import jmp
import pytest

import pax_export as pax
from pax_export import opax
from tests.closeness import assert_close
from tests.optim.steps import X, Y, assert_trees_close, grads_of, kinds, loss_fn, make_model
from tests.processes import printed
from tests.refusals import refused

MAKERS = {
    "adam": lambda: opax.adam(1e-2),
    "adamw": lambda: opax.adamw(1e-2),
    "rmsprop": lambda: opax.rmsprop(1e-3),
    "rmsprop, centered": lambda: opax.rmsprop(1e-3, centered=True, momentum=0.5),
    "sgd": lambda: opax.sgd(1e-2),
    "clip": lambda: opax.chain(opax.clip(0.1), opax.scale(0.1)),
    "clip_by_global_norm": lambda: opax.chain(opax.clip_by_global_norm(0.5), opax.sgd(1e-2)),
    "schedule": lambda: opax.chain(
        opax.trace(0.9),
        opax.scale_by_schedule(opax.schedule.exponential_decay(1e-2, 10, min_value=1e-4)),
    ),
    "add_decayed_weights": lambda: opax.chain(opax.add_decayed_weights(1e-3), opax.scale(0.1)),
    "scale_by_adam": lambda: opax.chain(opax.scale_by_adam(), opax.scale(1e-2)),
    "scale_by_rms": lambda: opax.chain(opax.scale_by_rms(), opax.scale(1e-3)),
    "scale_by_stddev": lambda: opax.chain(opax.scale_by_stddev(initial_scale=1.0), opax.scale(0.1)),
    "ema": lambda: opax.chain(opax.transform.ema(0.9, debias=False), opax.scale(0.1)),
    "identity": lambda: opax.chain(opax.transform.identity(), opax.scale(0.1)),
}
# What is called by other tests here, or is no transformation.
OTHERS = {
    "GradientTransformation", "apply_gradients", "apply_updates", "chain", "scale", "schedule",
    "differentially_private_aggregate", "transform_gradients", "trace", "scale_by_schedule",
}  # fmt: skip

each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def test_every_public_name_is_covered():
    assert set(opax.__all__) == OTHERS | (set(MAKERS) & set(opax.__all__))


@each_maker
def test_training_is_traced_once_for_every_new_optimizer_pickle_and_copy(make):
    traces = []

    def counted(model, x, y):
        traces.append(x)
        return loss_fn(model, x, y)

    update = jax.jit(pax.build_update_fn(counted))
    for _ in range(2):
        model = make_model()
        optimizer, losses = make()(model.parameters()), []
        first = kinds(optimizer)
        for _ in range(30):
            model, optimizer, loss = update(model, optimizer, X, Y)
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        assert kinds(optimizer) == first
    state = model, optimizer
    expected = update(*state, X, Y)
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
        assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(state)
        assert_trees_close(update(*again, X, Y), expected)
    assert len(traces) == 1
    frozen = pax.freeze_parameters(optimizer)
    assert pickle.loads(pickle.dumps(frozen)).summary() == frozen.summary()


@pytest.mark.parametrize("options", [{"flatten": True}, {"strict": False}, {"strict": True}])
def test_other_layouts_of_the_state_step_alike(options):
    model = make_model()
    grads = grads_of(model)
    clipped = opax.chain(opax.clip_by_global_norm(0.5), opax.adamw(1e-2))
    plain, other = clipped(model.parameters()), clipped.init(model.parameters(), **options)
    assert_trees_close(
        opax.apply_gradients(model, plain, grads)[0], opax.apply_gradients(model, other, grads)[0]
    )


@each_maker
def test_its_own_functions_agree_with_ours(make):
    model = make_model()
    optimizer = make()(model.parameters())
    grads = grads_of(model)
    theirs = opax.apply_gradients(model, optimizer, grads)
    assert_trees_close(theirs, pax.optim.apply_gradients(model, optimizer, grads))
    kept = opax.apply_gradients(model, optimizer, grads, all_finite=jnp.array(False))
    assert_trees_close(kept, (model, optimizer))
    updates, _ = opax.transform_gradients(grads, optimizer, params=model.parameters())
    new = model.update_parameters(opax.apply_updates(model.parameters(), updates))
    assert_trees_close(new, theirs[0])


@pytest.mark.parametrize(
    "make",
    [
        MAKERS["adamw"],
        MAKERS["schedule"],
        lambda: opax.chain(opax.clip_by_global_norm(0.5), opax.rmsprop(1e-3, centered=True)),
    ],
    ids=["adamw", "schedule", "clipped rmsprop"],
)
@pytest.mark.parametrize("scale", [jmp.DynamicLossScale, pax.precision.DynamicLossScale])
def test_frozen_layers_policies_and_loss_scales(make, scale):
    """All at once, traced once."""
    traces = []

    @jax.jit
    def step(model, optimizer, loss_scale, x):
        traces.append(x)

        def scaled_loss(model):
            loss, (_, model) = loss_fn(model, x, Y)
            return loss_scale.scale(loss), (loss, model)

        grads, (loss, model) = pax.grad(scaled_loss, has_aux=True)(model)
        scaled = pax.experimental.apply_scaled_gradients
        return *scaled(model, optimizer, loss_scale, grads), loss

    model = make_model().apply(pax.experimental.default_mp_policy)
    model = model.set(0, pax.freeze_parameters(model[0]))
    optimizer = make()(model.parameters())
    state, first, losses = (model, optimizer, scale(jnp.float32(2.0**15))), model, []
    for count in range(12):
        overflow = count == 3
        before, (*state, loss) = state, step(*state, X * jnp.where(overflow, jnp.inf, 1.0))
        if overflow:
            assert float(state[2].loss_scale) < float(before[2].loss_scale)
            assert_trees_close(state[1], before[1])
        else:
            losses.append(float(loss))
    assert len(traces) == 1 and losses[-1] < losses[0]
    assert (state[0][0].weight == first[0].weight).all()
    assert repr(state[0]) == repr(first) and kinds(state[0]) == kinds(first)


def test_pickles_load_in_another_process(tmp_path):
    rate = opax.schedule.exponential_decay(1e-2, 10, min_value=1e-4)
    classes = opax.chain(opax.clip(1.0), opax.adamw(rate, weight_decay=0.1), opax.scale(0.5))
    layer = pax.Linear(2, 2)
    optimizer, _ = classes(layer.parameters()) % (layer.parameters(), layer.parameters())
    (tmp_path / "state").write_bytes(pickle.dumps((layer, optimizer, classes)))
    assert run(
        "import pickle, jax\n"
        f"layer, optimizer, classes = pickle.load(open({str(tmp_path / 'state')!r}, 'rb'))\n"
        "fresh = classes(layer.parameters())\n"
        "optimizer, _ = optimizer % (layer.parameters(), layer.parameters())\n"
        "print(jax.tree.structure(optimizer) == jax.tree.structure(fresh))\n"
        "print(optimizer[1][0].count, optimizer[1][2].schedule_fn(optimizer[1][0].count))\n"
    ) == ["True", "2", str(rate(jnp.array(2)))]


def test_a_class_with_an_array_in_it_pickles():
    classes = opax.scale(jnp.float32(2))
    assert pickle.loads(pickle.dumps(classes))([])([jnp.ones(1)])[0].tolist() == [2]


def test_clipping_clips():
    grads = [jnp.array([3.0, -4.0])]
    clipped = opax.clip(1.0)(grads)(grads)
    assert clipped[0].tolist() == [1, -1]
    by_norm, updates = pax.module_and_value(opax.clip_by_global_norm(1.0)(grads))(grads)
    assert_close(updates[0], [0.6, -0.8], rtol=1e-6)
    assert float(by_norm.global_norm) == 5
    small = [jnp.array([0.3, -0.4])]
    _, same = pax.module_and_value(by_norm)(small)
    assert_trees_close(same, small)


def test_a_schedule_has_a_floor():
    rate = opax.schedule.exponential_decay(1.0, 1, min_value=0.25)
    assert [float(rate(jnp.array(step))) for step in (0, 1, 2, 9)] == [1, 0.5, 0.25, 0.25]


def test_differentially_private_aggregate():
    layer, x = pax.Linear(3, 1), X

    def loss(layer, x):
        return jnp.sum(layer(x[None]) ** 2)

    grads = jax.vmap(pax.grad(loss), in_axes=(None, 0))(layer, x)
    aggregate = opax.differentially_private_aggregate(1.0, 0.0, seed=0)(layer.parameters())
    new, updates = pax.module_and_value(aggregate)(grads, layer.parameters())
    pax.assert_structure_equal(updates, layer.parameters())
    assert updates.weight.shape == layer.weight.shape
    assert (new.rng_key != aggregate.rng_key).any()
    with refused(ValueError, "batch dimension"):
        pax.module_and_value(aggregate)(layer.parameters(), layer.parameters())


def test_the_summary_of_the_seed():
    net = pax.Linear(3, 3)
    assert opax.adam(1e-3)(net.parameters()).summary() == (
        "chain.<locals>.Chain\n"
        "├── transforms.0: scale_by_adam.<locals>.ScaleByAdam\n"
        "│   ├── mu: Linear(in_dim=3, out_dim=3, with_bias=True)\n"
        "│   └── nu: Linear(in_dim=3, out_dim=3, with_bias=True)\n"
        "└── transforms.1: scale.<locals>.Scale"
    )


def test_equal_calls_give_one_class():
    assert opax.adam(1e-3) is opax.adam(learning_rate=1e-3, b1=0.9)
    assert opax.scale(0.1) is opax.transform.scale(0.1)
    assert opax.adam(1e-3) is not opax.adam(1e-2)
    assert opax.adam(1) is not opax.adam(1.0)
    rates = [opax.schedule.exponential_decay(rate, 10) for rate in (0.1, 0.1, 0.2)]
    assert opax.sgd(rates[0]) is opax.sgd(rates[1]) is not opax.sgd(rates[2])


def test_an_array_as_argument_is_not_kept():
    def train(rate, grads):
        return opax.scale(rate)(grads)(grads)

    assert jax.jit(train)(2.0, [jnp.ones(2)])[0].tolist() == [2, 2]
    assert jax.jit(train)(3.0, [jnp.ones(2)])[0].tolist() == [3, 3]
    assert opax.scale(jnp.float32(2)) is not opax.scale(jnp.float32(2))


def test_modules_are_ours():
    assert issubclass(opax.GradientTransformation, pax.StateModule)
    assert opax.transform.__name__ == "pax_export.opax.transform"
    assert isinstance(opax.adam(1e-3)(pax.Linear(1, 1)), opax.GradientTransformation)


def run(code):
    return printed(code).split()


def test_nothing_else_is_touched():
    before = "import sys, jax.numpy as jnp; clip, path = jnp.clip, list(sys.path)"
    load = "from pax_export import opax; import pax_export.opax.schedule as schedule"
    check = (
        "assert opax.schedule is schedule; assert jnp.clip is clip and sys.path == path; "
        "print(*[n for n in sys.modules if n.split('.')[0] in ('opax', 'pax')], 'end')"
    )
    assert run(f"{before}\n{load}\n{check}") == ["end"]


def test_it_is_loaded_on_first_use():
    assert run("import sys, pax_export; print('pax_export.opax' in sys.modules)") == ["False"]
    assert run("import pax_export; print(pax_export.opax.adam.__name__)") == ["adam"]


def test_without_opax():
    code = (
        "import importlib.util as util\n"
        "import pax_export\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'opax' else find(name)\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        pax_export.opax\n"
        "    except ImportError as error:\n"
        "        print(type(error).__name__, str(error).replace(chr(10), '').replace(' ', '_'))\n"
    )
    message = (
        "pax_export.opax_needs_the_package_'opax',_which_is_not_installed."
        '__fix:_python_-m_pip_install_"opax>=0.2.11"_(the_extra_[opax]_of_pax-export)'
    )
    assert run(code) == ["MissingPackageError", message] * 2
