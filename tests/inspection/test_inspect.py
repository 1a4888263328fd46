"""`pax.inspect`: rows of facts about modules."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import spec
from tests.contract.table import ROWS, call
from tests.refusals import refused


class Block(pax.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = pax.LayerNorm(dim)
        self.layers = [pax.Linear(dim, 2 * dim), pax.Linear(2 * dim, dim)]

    def __call__(self, x):
        return x + self.layers[1](jax.nn.relu(self.layers[0](self.norm(x))))


class Net(pax.Module):
    def __init__(self, dim: int = 4, count: int = 2):
        super().__init__()
        self.embed = pax.Embed(10, dim)
        self.blocks = tuple(Block(dim) for _ in range(count))
        self.head = pax.Linear(dim, 3)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def paths(net):
    return [name for name, _ in pax.core.named_leaves(net)]


def test_a_row_for_each_module_and_array_in_tree_order_with_the_paths_of_the_library():
    net = Net()
    found = pax.inspect(net)
    assert [row.path for row in found if row.kind == "array"] == paths(net)
    modules = [row.path for row in found if row.kind == "module"]
    assert modules == [name for name, _ in pax.core.named_modules(net)]
    order = [row.path for row in found]
    assert order.index("blocks.0.norm") < order.index("blocks.0.layers.0.weight")
    assert order.index("embed.weight") < order.index("blocks.0")


def test_counts_and_bytes_are_those_of_the_arrays():
    net = Net()
    leaves = jax.tree_util.tree_leaves(net)
    found = pax.inspect(net)
    assert found.parameters == sum(leaf.size for leaf in leaves)
    assert found.bytes == sum(leaf.nbytes for leaf in leaves)
    assert found["head"].parameters == net.head.weight.size + net.head.bias.size
    assert found.flops is None and found["head"].inputs == ()


def test_shapes_dtypes_and_calls_of_a_traced_call():
    found = pax.inspect(Net(), np.zeros((5, 7), np.int32))
    assert found["embed"].inputs == ("int32[5,7]",)
    assert found["blocks.1.layers.0"].outputs == ("float32[5,7,8]",)
    assert found["head"].calls == 1
    assert found[""].outputs == ("float32[5,3]",)


def test_number_of_calls():
    class Twice(pax.Module):
        def __init__(self):
            super().__init__()
            self.layer = pax.Linear(3, 3)

        def __call__(self, x):
            return self.layer(self.layer(x))

    row = pax.inspect(Twice(), np.ones((2, 3), np.float32))["layer"]
    assert row.calls == 2
    assert row.flops == 2 * (2 * 2 * 3 * 3 + 2 * 3)


def test_roles_of_trained_frozen_and_state():
    net = pax.Sequential(pax.Linear(2, 3), pax.BatchNorm1D(3))
    net = net.set(0, pax.freeze_parameters(net[0]))
    found = pax.inspect(net)
    assert found["modules.0.weight"].role == "frozen"
    assert found["modules.1.scale"].role == "trainable"
    assert found["modules.1.ema_mean.averages"].role == "state"
    assert "frozen" in str(found)


def test_single_arrays_that_are_frozen_are_no_states():
    net = pax.Sequential(pax.Linear(2, 3)).at("modules.0.bias").freeze()
    roles = {row.path: row.role for row in pax.inspect(net) if row.path.count(".") == 2}
    assert roles == {"modules.0.weight": "trainable", "modules.0.bias": "frozen"}
    assert repr(net) == "Sequential(parameters=9, frozen=3, mode=train)"


def test_symbolic_sizes_give_formulas():
    found = pax.inspect(pax.Linear(4, 8), spec("batch, 4"))
    assert found.flops == "72*batch"
    assert found[""].inputs == ("float32[batch,4]",)


def test_the_dtype_that_is_computed_in():
    half = jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
    net = pax.Sequential(pax.apply_mp_policy(pax.Linear(4, 4), half), pax.Linear(4, 4))
    found = pax.inspect(net, np.ones((1, 4), np.float32))
    assert (found["modules.0"].dtype, found["modules.0"].computed_in) == ("float32", "bfloat16")
    assert found["modules.1"].computed_in == "float32"
    assert pax.inspect(net)["modules.0"].computed_in == "bfloat16"


def test_work_inside_of_transforms_belongs_to_its_module():
    stack = pax.transforms.Scan(pax.Linear, length=5, scan_output=False)(3, 3)
    found = pax.inspect(stack, np.ones((2, 3), np.float32))
    assert found.flops == 5 * (2 * 2 * 3 * 3 + 2 * 3)
    batched = pax.transforms.Vmap(pax.Linear, axis_size=5)(3, 3)
    assert pax.inspect(batched, np.ones((5, 2, 3), np.float32)).flops == found.flops


def test_a_net_in_train_mode_is_traced_as_it_is():
    net = pax.Sequential(pax.BatchNorm1D(3), pax.Dropout(0.5))
    assert pax.inspect(net, np.ones((4, 3), np.float32))["modules.0"].mode == "train"


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (lambda: Net(), None),
        (lambda: pax.Conv2D(3, 8, 3, stride=2, padding="SAME"), (2, 17, 17, 3)),
        (lambda: pax.Conv2DTranspose(3, 8, 4, stride=2), (1, 9, 9, 3)),
        (lambda: pax.MultiHeadAttention(2, 8, 1.0), (2, 5, 16)),
    ],
    ids=["net", "conv", "transpose", "attention"],
)
def test_flops_are_those_that_xla_counts(net, shape):
    net = net()
    x = jax.ShapeDtypeStruct(shape, "float32") if shape else jax.ShapeDtypeStruct((5, 7), "int32")
    args = (x, x, x) if isinstance(net, pax.MultiHeadAttention) else (x,)
    counted = jax.jit(pax.purecall).lower(net, *args)
    expected = counted.cost_analysis()["flops"]
    assert abs(pax.inspect(net, *args).flops - expected) <= 0.02 * expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_flops_of_every_layer(row):
    net, inputs = row.build().eval(), row.inputs(b=2)
    if row.call is not call:
        pytest.skip("it is used by a method")
    counted = jax.jit(pax.purecall).lower(net, *inputs).cost_analysis()
    expected = (counted or {}).get("flops", 0.0)
    found = pax.inspect(net, *inputs)
    assert abs(found.flops - expected) <= 0.02 * expected
    assert found.uncounted == ()


def test_models_larger_than_memory():
    net = jax.eval_shape(lambda: pax.Linear(2**20, 2**17))
    found = pax.inspect(net, spec("batch, 1048576"))
    assert found.bytes > 2**39
    assert found.flops.endswith("*batch")


def test_the_net_is_as_it_was():
    net = Net()
    before = jax.tree_util.tree_structure(net)
    pax.inspect(net, np.zeros((5, 7), np.int32))
    assert jax.tree_util.tree_structure(net) == before
    assert type(net.head) is pax.Linear


def test_it_is_data():
    import json

    found = pax.inspect(Net(), spec("batch, 7", "int32"))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["parameters"] == found.parameters
    assert len(data["rows"]) == len(found)


def test_time_shares():
    found = pax.inspect(Net(), np.zeros((5, 7), np.int32), measure=True)
    assert found[""].time_share == 1.0
    assert found["head"].time_share > 0


def test_time_needs_numbers():
    with refused(ValueError, "numbers"):
        pax.inspect(pax.Linear(4, 8), spec("batch, 4"), measure=True)
    with refused(ValueError, where="Linear"):
        pax.inspect(pax.Linear(4, 8), measure=True)


def test_other_values_are_refused():
    with pytest.raises(TypeError):
        pax.inspect({"a": 1})


@pytest.mark.parametrize("look", [pax.inspect, pax.inspection.draw])
@pytest.mark.parametrize("value", [5, [1], {1: 2}])
def test_keyword_inputs_are_shown_as_a_dict(look, value):
    with refused(pax.errors.InvalidArgumentTypeError, where="kwargs", got=repr(value)):
        look(Net(), np.zeros((5, 7), np.int32), kwargs=value)


def test_html_names_every_row_and_fetches_nothing(tmp_path):
    found = pax.inspect(Net(), np.zeros((5, 7), np.int32))
    page = found.save_html(tmp_path / "net.html").read_text(encoding="utf-8")
    assert all(row.path in page for row in found)
    assert (
        page.count("<details") == page.count("</details>") == sum(r.kind == "module" for r in found)
    )
    assert "http" not in page and "<script" not in page
    found.save_html(tmp_path / "net.html", overwrite=True)
    (tmp_path / "own.html").write_text("<p>mine</p>")
    with refused(OSError, "replaced"):
        found.save_html(tmp_path / "own.html", overwrite=True)
    assert found._repr_html_() in page


def test_a_table_of_some_levels():
    found = pax.inspect(Net())
    lines = found.table(depth=1, arrays=False).splitlines()
    found = [line.split()[0] for line in lines[1:6]]
    assert found == ["(root)", "embed", "blocks.0", "blocks.1", "head"]


def test_a_notebook_shows_a_module_as_a_tree():
    net = Net()
    assert net._repr_html_() == pax.inspect(net)._repr_html_()
    assert "blocks.1.layers.0.weight" in net._repr_html_()


def _scale(x, by):
    return by * x


class Gate(pax.Lambda):
    """A layer of the user's that is a function."""


def test_a_function_as_a_layer_shows_its_name():
    net = pax.Sequential(
        pax.Linear(3, 3),
        jax.nn.relu,
        functools.partial(_scale, by=2),
        pax.Lambda(jnp.tanh, name="squash"),
        pax.freeze_parameters(Gate(jnp.sin)),
        lambda x: x,
    )
    found = pax.inspect(net, np.ones((2, 3), np.float32))
    assert [row.function for row in found if row.kind == "module"] == [
        "", "", "relu", "functools.partial(_scale, by=2)", "tanh", "sin", "<lambda>",
    ]  # fmt: skip
    lines = str(found).splitlines()
    assert any("Lambda(relu)" in line for line in lines)
    assert any("Lambda(tanh) 'squash'" in line for line in lines)
    assert any("Gate(sin)" in line for line in lines)
    assert "Lambda<wbr>(&lt;lambda&gt;)" in found._repr_html_()
    assert found.to_dict()["rows"][4]["function"] == "relu"


def test_the_name_of_a_function_stays_on_one_short_line():
    given = functools.partial(_scale, by=np.arange(400.0).reshape(20, 20))
    row = pax.inspect(pax.Sequential(given))["modules.0"]
    assert "\n" not in row.function
    assert len(row.function) <= 60
    assert row.function.startswith("functools.partial(_scale, by=array(")


def test_two_tables_of_one_page_have_their_own_columns():
    """A style holds for the whole page of a notebook, so the columns lie at each table."""
    nets = pax.Linear(1, 1), pax.nets.Transformer(8, 2, 1, 0.1)
    pages = [pax.inspect(net)._repr_html_() for net in nets]
    styles = {re.search("<style>(.*?)</style>", page, re.DOTALL)[1] for page in pages}
    columns = {re.search('style="--pax-columns: ([^;]*);', page)[1] for page in pages}
    assert len(styles) == 1 and len(columns) == 2


def test_a_table_is_as_narrow_as_the_page_of_a_site():
    """Long columns shrink and break, so that role, parameters and flops are seen at once."""
    net = pax.Sequential(pax.Conv2D(1, 16, 3), pax.BatchNorm2D(16), pax.Linear(16, 10))
    page = pax.inspect(net.eval(), spec("batch, 8, 8, 1"))._repr_html_()
    columns = re.search("--pax-columns: ([^;]*);", page)[1]
    least = [float(width) for width in re.findall(r"(?:^|[ (])([\d.]+)em", columns)]
    assert len(least) == page.partition("</div>")[0].count("<span") == 9
    site = 736 / 12  # the text column of the site, in the size of the table's letters
    assert sum(least) + 0.8 * 8 < site
    assert (
        re.findall(r"\.(\w+) {[^}]*nowrap", page) == ["number"]
        and "overflow-wrap: anywhere" in page
    )
    assert re.search(r'class="number formula">\d+\*<wbr>batch', page)  # formulas wrap, too


def test_what_people_have():
    """A model that is no module has one row for itself, and one for each of its arrays."""

    def affine(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
    for model in ((params, affine), functools.partial(affine, params)):
        found = pax.inspect(model, spec("batch, 4"))
        (root, *arrays) = found
        assert (root.class_name, root.parameters, root.flops) == ("affine", 10, "18*batch")
        assert (root.inputs, root.outputs) == (("float32[batch,4]",), ("float32[batch,2]",))
        assert [row.path.removeprefix("params.") for row in arrays] == ["b", "w"]
    assert pax.inspect(jnp.exp, spec("3"))[""].transcendentals == 3
    with refused(TypeError, "measures"):
        pax.inspect(jnp.exp, spec("3"), measure=True)


def test_a_method_of_a_module():
    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.layer = pax.Linear(4, 2)

        def encode(self, x):
            return self.layer(x)

    found = pax.inspect(Net().encode, spec("batch, 4"))
    assert found["layer"].outputs == ("float32[batch,2]",)
    assert found.flops == "18*batch"
