"""`repr` of a module says its class, its size and its mode in one line; `summary` is PAX's."""

import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

import pax_export as pax
from pax_export import opax


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.first = pax.Linear(3, 4)
        self.layers = [pax.BatchNorm1D(4), jax.nn.relu, pax.Linear(4, 2)]


NET = Net()  # 16 and 8 and 10 parameters; 2 x 4 averages and 2 counters
HALF = jmp.get_policy("params=float32,compute=float16,output=float32")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (NET, "Net(parameters=34, state=10, mode=train)"),
        (NET.eval(), "Net(parameters=34, state=10, mode=eval)"),
        (
            NET.replace(first=pax.freeze_parameters(NET.first)),
            "Net(parameters=34, frozen=16, state=10, mode=train)",
        ),
        (jax.eval_shape(lambda: NET), "Net(parameters=34, state=10, mode=train)"),
        (NET.parameters(), "Net(parameters=34, mode=train)"),
        (pax.apply_mp_policy(NET, mp_policy=HALF), None),
        (pax.Sequential(pax.Linear(1, 1), name="s"), "(s) Sequential(parameters=2, mode=train)"),
        (pax.Linear(2, 3), "Linear(in_dim=2, out_dim=3, with_bias=True)"),
        (pax.Linear(2, 3).eval(), "Linear(in_dim=2, out_dim=3, with_bias=True, mode=eval)"),
        (pax.Lambda(jnp.tanh), "Lambda(tanh)"),
        (pax.transforms.Remat(pax.Linear)(2, 3), "Remat(parameters=9, mode=train)"),
        (
            pax.transforms.Scan(pax.Linear, length=3)(2, 2).eval(),
            "Scan(length=3, parameters=18, mode=eval)",
        ),
    ],
)
def test_repr_has_class_size_and_mode(module, line):
    assert repr(module) == (line or "Net(parameters=34, state=10, mode=train, mp_policy=FHF)")


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (
            opax.adam(1e-3)(pax.Linear(2, 3).parameters()),
            "chain.<locals>.Chain(rules=[ScaleByAdam, Scale], state=19, mode=train)",
        ),
        (
            pax.optim.from_optax(optax.chain(optax.clip(1.0), optax.adamw(1e-3))),
            "OptaxOptimizer(rules=[ScaleByAdam], state=19, mode=train)",
        ),
        (pax.optim.from_optax(optax.sgd(0.1)), "OptaxOptimizer(state=0, mode=train)"),
    ],
)
def test_an_optimizer_names_its_rules_and_counts_its_state(optimizer, line):
    made = optimizer if isinstance(optimizer, pax.Module) else optimizer(pax.Linear(2, 3))
    assert repr(made) == line


def test_a_summary_names_attributes():
    class Named(Net):
        def __repr__(self):
            return "my " + super().__repr__()

    lines = [
        "├── Linear(in_dim=3, out_dim=4, with_bias=True)",
        "├── BatchNorm1D(num_channels=4, create_scale=True, create_offset=True, "
        "data_format=NWC, decay_rate=0.9)",
        "└── Linear(in_dim=4, out_dim=2, with_bias=True)",
    ]
    names = ["first", "layers.0", "layers.2"]
    of_net = [f"{line[:4]}{name}: {line[4:]}" for name, line in zip(names, lines)]
    assert NET.eval().summary(return_list=True) == ["Net", *of_net]
    own = f"my {Named.__qualname__}"
    assert Named().summary(return_list=True) == [own, *of_net]
    assert repr(Named()) == own + "(parameters=34, state=10, mode=train)"
    # A name given to a module is shown, unless it is its attribute's.
    named = NET.replace(first=pax.Linear(3, 4, name="embed"))
    assert named.summary(return_list=True)[1] == of_net[0].replace(": ", ": (embed) ")
    named = NET.replace(first=pax.Linear(3, 4, name="first"))
    assert named.summary(return_list=True)[1] == of_net[0]


def test_info_replaces_the_count():
    class Table(pax.Module):
        def __init__(self, rows):
            super().__init__()
            self.values = jnp.zeros((rows, 2))

        def _repr(self, info=None):
            return super()._repr({"rows": len(self.values), **(info or {})})

    assert repr(Table(3)) == f"{Table.__qualname__}(rows=3)"
    assert repr(Table(3).eval()) == f"{Table.__qualname__}(rows=3, mode=eval)"


def test_a_module_that_cannot_be_counted_still_has_a_line():
    class Broken(pax.Module):
        def parameters(self):
            raise RuntimeError(f"in {self!r}")

    class Unmade(pax.Module):
        def __init__(self):
            self.line = repr(self)  # before super().__init__()
            super().__init__()
            self.child, self.x = pax.Linear(1, 1), jnp.ones(3)
            self.half_made = repr(self)

    assert repr(Broken()).endswith("Broken(mode=train)")
    assert Unmade().half_made.endswith("Unmade(parameters=2, state=3, mode=train)")


def test_a_line_changes_nothing():
    net = Net()
    leaves, treedef = jax.tree.flatten(net)
    repr(net)
    again, treedef_again = jax.tree.flatten(net)
    assert treedef == treedef_again and all(a is b for a, b in zip(leaves, again))
    seen = []

    @pax.pure
    def inside(net):
        seen.append(repr(net))
        net.first = pax.Linear(3, 5)
        seen.append(repr(net))
        return net

    assert inside(net).first.out_dim == 5
    assert [line.partition(",")[0] for line in seen] == ["Net(parameters=34", "Net(parameters=38"]
