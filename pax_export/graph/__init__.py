"""Modules from graphs of nodes: ``x >> Linear(3, 3) >> relu``."""

from pax_export.graph._graph_module import GraphModule, build_graph_module
from pax_export.graph._node import ArgsNode, CatNode, InputNode, Node

__all__ = ["ArgsNode", "CatNode", "GraphModule", "InputNode", "Node", "build_graph_module"]
