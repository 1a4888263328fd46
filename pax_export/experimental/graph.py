"""Names of PAX's API for graph modules."""

from pax_export.graph import GraphModule, InputNode, Node, build_graph_module

__all__ = ["GraphModule", "InputNode", "Node", "build_graph_module"]
