"""Drawings of graph modules."""

import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.experimental.graph import GraphModule, InputNode, build_graph_module


def residual(x):
    y = x >> pax.Linear(8, 8) >> jax.nn.relu
    return (x | y) >> jax.lax.add


def dot_of(recipe, *inputs):
    return build_graph_module(recipe)(*inputs).to_dot()


def test_names_at_nodes_and_shapes_on_edges():
    assert dot_of(residual, jnp.zeros((3, 8))).splitlines() == [
        'digraph "GraphModule" {',
        "  node [shape=box, style=rounded];",
        '  0 [label="x", shape=ellipse];',
        '  1 [label="Linear(in_dim=8, out_dim=8, with_bias=True)"];',
        '  2 [label="x => relu(x)"];',
        '  4 [label="x => add(x)"];',
        '  output [label="output", shape=ellipse];',
        '  0 -> 1 [label="float32[3,8]"];',
        '  1 -> 2 [label="float32[3,8]"];',
        '  0 -> 4 [label="0: float32[3,8]"];',
        '  2 -> 4 [label="1: float32[3,8]"];',
        '  4 -> output [label="float32[3,8]"];',
        "}",
    ]


def test_several_outputs_and_nested_tuples_are_edges():
    x, y = InputNode(jnp.zeros(2)), InputNode(jnp.zeros(3, int))
    net = GraphModule((x, y), (x & y) | (x >> jnp.tanh))
    assert [line.strip() for line in net.to_dot().splitlines() if "->" in line] == [
        '0 -> 3 [label="float32[2]"];',
        '0 -> output [label="0: float32[2]"];',
        '1 -> output [label="1: int32[3]"];',
        '3 -> output [label="2: float32[2]"];',
    ]


def test_the_drawing_is_that_of_the_modules_now():
    net = build_graph_module(residual)(jnp.zeros((3, 8)))
    net = net.replace(modules=[*net.modules[:3], pax.Lambda(jnp.add, name="sum")])
    assert '4 [label="x => sum(x)"];' in net.to_dot()
    assert net.eval().to_dot() == net.to_dot()
    net = net.replace(modules=[*net.modules[:3], jnp.multiply])
    assert '4 [label="x => multiply(x)"];' in net.to_dot()


def awkward(x):
    return x >> pax.Lambda(jnp.tanh, name='a "quoted" \\ name\nof two lines')


def test_text_is_escaped():
    label = r'label="x => a \"quoted\" \\ name\nof two lines(x)"'
    assert label in dot_of(awkward, 1.0)


def test_every_edge_leads_from_a_node_to_a_node():
    dot = dot_of(residual, jnp.zeros((3, 8)))
    nodes = set(re.findall(r"^  (\w+) \[label", dot, re.M))
    edges = re.findall(r"^  (\w+) -> (\w+) ", dot, re.M)
    assert {end for edge in edges for end in edge} == nodes


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("recipe", [residual, awkward])
def test_graphviz_reads_it(recipe):
    dot = dot_of(recipe, jnp.zeros((3, 8)))
    subprocess.run(["dot", "-Tsvg"], input=dot, text=True, check=True, capture_output=True)
