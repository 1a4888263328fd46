"""PAX's interface: every public name, every signature, the classes of its errors."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import jmp
import pytest

import pax_export as pax
from pax_export.experimental import graph
from tests.processes import python

NAMES = {
    pax: """
        apply_mp_policy assert_structure_equal avg_pool BatchNorm1D BatchNorm2D build_update_fn
        Conv1D Conv1DTranspose Conv2D Conv2DTranspose dropout Dropout EMA Embed EmptyNode
        enable_eval_mode enable_train_mode experimental freeze_parameters grad GroupNorm GRU
        GRUState Identity Lambda LayerNorm Linear LSTM LSTMState max_pool module_and_value Module
        MultiHeadAttention nets next_rng_key ParameterModule parameters_method pure purecall RngSeq
        scan seed_rng_key select_parameters Sequential StateModule unfreeze_parameters
        unwrap_mp_policy update_parameters utils value_and_grad VanillaRNN VanillaRNNState
        __version__
    """,
    pax.experimental: """
        apply_scaled_gradients default_mp_policy Flattener graph LazyModule load_weights_from_dict
        mutable save_weights_to_dict
    """,
    graph: "build_graph_module GraphModule InputNode Node",
    pax.nets: "ResNet18 ResNet34 ResNet50 ResNet101 ResNet152 ResNet200 Transformer",
    pax.utils: "build_update_fn grad scan",
    pax.Module: """
        copy train eval parameters update_parameters replace replace_node replace_method
        set_attribute submodules apply apply_submodules map state_dict load_state_dict summary
        scan_bugs pytree_attributes _repr
    """,
}
# What this package has beside PAX's names and layers of its own.
OURS = {
    "Declared",
    "Selection", "adapters", "checkpoint", "debug", "errors", "export", "generate", "generation",
    "inspect", "inspection",
    "install_as_pax", "load_weights",
    "save_weights", "optim", "precision", "quantization", "quantize",
    "sharding", "transforms", "weights",
}  # fmt: skip


def test_every_name_is_there():
    for room, names in NAMES.items():
        assert [name for name in names.split() if not hasattr(room, name)] == []
    assert set(dir(pax)) == set(NAMES[pax].split()) | OURS | set(pax.nn.__all__)
    for name in NAMES[pax.utils].split():
        assert getattr(pax.utils, name) is getattr(pax, name)


CONV = "stride=1, rate=1, padding='SAME', with_bias=True, w_init=None, b_init=None"
TRANSPOSED = "stride=1, padding='SAME', with_bias=True, w_init=None, b_init=None"
NET = "(input_channels, num_classes, logits_config=None, initial_conv_config=None)"
NORM = "num_channels, create_scale=True, create_offset=True, decay_rate=0.9, eps=1e-05"
SIGNATURES = {
    "Module": "(*, training=True, name=None)",
    "Linear": "(in_dim, out_dim, with_bias=True, w_init=None, b_init=None, "
    "*, rng_key=None, name=None)",
    "Conv1D": f"(in_features, out_features, kernel_shape, {CONV}, data_format='NWC', "
    "feature_group_count=1, *, name=None, rng_key=None)",
    "Conv2D": f"(in_features, out_features, kernel_shape, {CONV}, data_format='NHWC', "
    "feature_group_count=1, *, name=None, rng_key=None)",
    "Conv1DTranspose": f"(in_features, out_features, kernel_shape, {TRANSPOSED}, "
    "data_format='NWC', *, name=None, rng_key=None)",
    "Conv2DTranspose": f"(in_features, out_features, kernel_shape, {TRANSPOSED}, "
    "data_format='NHWC', *, name=None, rng_key=None)",
    "BatchNorm1D": f"({NORM}, data_format='NWC', *, name=None)",
    "BatchNorm2D": f"({NORM}, data_format='NHWC', *, name=None)",
    "EMA": "(initial_value, decay_rate, debias=False, allow_int=False)",
    "LayerNorm": "(num_channels, axis=-1, create_scale=True, create_offset=True, eps=1e-05, "
    "scale_init=None, offset_init=None, *, rng_key=None, name=None)",
    "GroupNorm": "(groups, num_channels, axis=slice(1, None, None), create_scale=True, "
    "create_offset=True, eps=1e-05, scale_init=None, offset_init=None, "
    "data_format='channels_last', *, rng_key=None, name=None)",
    "LSTM": "(input_dim, hidden_dim, w_init=None, forget_gate_bias=0.0, "
    "*, rng_key=None, name=None)",
    "GRU": "(input_dim, hidden_dim, *, reset_after=False, rng_key=None, name=None)",
    "VanillaRNN": "(input_dim, hidden_dim, *, rng_key=None, name=None)",
    "LSTMState": "(hidden, cell)",
    "GRUState": "(hidden)",
    "VanillaRNNState": "(hidden)",
    "Embed": "(vocab_size, embed_dim, w_init=None, *, rng_key=None, name=None)",
    "MultiHeadAttention": "(num_heads, key_size, w_init_scale=1.0)",
    "Dropout": "(dropout_rate, *, name=None)",
    "dropout": "(rng_key, dropout_rate, x)",
    "Sequential": "(*layers, name=None)",
    "Lambda": "(func, name=None)",
    "Identity": "(*, training=True, name=None)",
    "RngSeq": "(seed=None, rng_key=None)",
    "max_pool": "(value, window_shape, strides, padding, channel_axis=-1)",
    "avg_pool": "(value, window_shape, strides, padding, channel_axis=-1)",
    "seed_rng_key": "(seed)",
    "next_rng_key": "()",
    "pure": "(func)",
    "build_update_fn": "(loss_fn, *, scan_mode=False)",
    "update_parameters": "(module, *, params)",
    "unfreeze_parameters": "(module, *, origin)",
    "apply_mp_policy": "(module, mp_policy)",
    "parameters_method": "(*names, submodules=True)",
    "Module.summary": "(self, return_list=False)",
    "Module.replace_node": "(self, node, value)",
    "Module._repr": "(self, info=None)",
    "nets.Transformer": "(dim, num_heads, num_layers, dropout_rate)",
    "nets.ResNet18": NET,
    "nets.ResNet200": NET,
    "experimental.graph.InputNode": "(value, fx=identity, *, name=None)",
    "experimental.graph.Node": "(parents, fx, value)",
    "experimental.graph.GraphModule": "(inputs, output, name=None)",
    "experimental.LazyModule": "(*, training=True, name=None)",
    "experimental.Flattener": "(**kwargs)",
    "experimental.mutable": "(module)",
}


def written(signature: inspect.Signature) -> str:
    """A signature as it stands in the table: without annotations."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    for index, parameter in enumerate(parameters):
        if inspect.isfunction(parameter.default):
            name = Written(parameter.default.__name__.strip("_"))
            parameters[index] = parameter.replace(default=name)
    return str(inspect.Signature(parameters))


class Written(str):
    def __repr__(self) -> str:
        return str(self)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    value = pax
    for word in name.split("."):
        value = getattr(value, word)
    assert written(inspect.signature(value)) == SIGNATURES[name]


HALF = jmp.get_policy("p=f32,c=f16,o=f32")


class Plain(pax.Module):
    """A module that cannot be called."""


class Misnamed(pax.Module):
    parameters = pax.parameters_method("weight")


def layer():
    return pax.Linear(2, 3)


def half():
    return pax.apply_mp_policy(layer(), HALF)


# What PAX raises for wrong use; programs and tests catch it by this class.
ERRORS = {
    "set outside": (ValueError, lambda: setattr(layer(), "weight", 1)),
    "delete outside": (ValueError, lambda: delattr(layer(), "weight")),
    "name is read-only": (AttributeError, lambda: setattr(layer(), "name", "x")),
    "training is read-only": (AttributeError, lambda: setattr(layer(), "training", False)),
    "replace: unknown": (AssertionError, lambda: layer().replace(nothing=1)),
    "replace: name": (AttributeError, lambda: layer().replace(name="x")),
    "replace_node: none": (ValueError, lambda: layer().replace_node(jnp.ones(1), 1)),
    "% on what cannot be called": (AssertionError, lambda: Plain() % 1),
    "| of other structures": (ValueError, lambda: layer() | layer().eval()),
    "parameters_method": (AssertionError, lambda: Misnamed().parameters()),
    "load_state_dict: missing": (KeyError, lambda: layer().load_state_dict({})),
    "load_state_dict: containers": (
        ValueError,
        lambda: pax.Sequential(layer()).load_state_dict({"modules": [{}, {}]}),
    ),
    "seed": (AssertionError, lambda: pax.seed_rng_key(1.5)),  # type: ignore[arg-type]
    "RngSeq: no key": (ValueError, lambda: pax.RngSeq(rng_key="key")),
    "pure: not callable": (ValueError, lambda: pax.pure(3)()),  # type: ignore[arg-type]
    "purecall: no module": (AssertionError, lambda: pax.purecall(3)),
    "purecall: no __call__": (AssertionError, lambda: pax.purecall(Plain())),
    "module_and_value: not callable": (ValueError, lambda: pax.module_and_value(3)),
    "module_and_value: no __call__": (AssertionError, lambda: pax.module_and_value(Plain())),
    "module_and_value: no module": (AssertionError, lambda: pax.module_and_value(len)([])),
    "grad: no module": (ValueError, lambda: pax.grad(lambda x: x)(1.0)),
    "update: no module": (AssertionError, lambda: pax.build_update_fn(len)(1, layer())),
    "structures differ": (AssertionError, lambda: pax.assert_structure_equal(layer(), Plain())),
    "policy: twice": (ValueError, lambda: pax.apply_mp_policy(half(), HALF)),
    "policy: none": (ValueError, lambda: pax.unwrap_mp_policy(layer())),
    "Flattener: unknown": (AttributeError, lambda: pax.experimental.Flattener(a=1).b),
    "Flattener: parameters": (ValueError, lambda: pax.experimental.Flattener(a=1).parameters()),
    "graph: not callable": (ValueError, lambda: graph.InputNode(jnp.ones(1)) >> 3),
    "graph: no node": (AssertionError, lambda: graph.build_graph_module(id)(jnp.ones(1))),
    "width of Linear": (TypeError, lambda: layer()(jnp.ones((1, 3)))),
    "rate of Dropout": (AssertionError, lambda: pax.Dropout(1.0)),
    "heads of a Transformer": (AssertionError, lambda: pax.nets.Transformer(7, 2, 1, 0.1)),
    "name of the logits": (TypeError, lambda: pax.nets.ResNet18(1, 2, logits_config={"name": "x"})),
}  # fmt: skip


def test_checks_are_made_under_python_O():
    """PAX's were bare asserts."""
    code = (
        "import sys, tests.compat.test_interface as this\n"
        "assert False  # not run\n"
        "for name, (error, wrong) in this.ERRORS.items():\n"
        "    try: wrong()\n"
        "    except error as raised: str(raised).strip() or sys.exit(name)\n"
        "    else: sys.exit(name)\n"
    )
    python("-O", "-c", code)
