"""Draws data flow between modules as SVG, with fast-sugiyama for the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.optional import require
from pax_export._foundations.types import PyTree
from pax_export.core import Module, named_modules
from pax_export.inspection._flow import FlowNode, FlowReader, trace_call
from pax_export.inspection._table import save_marked
from pax_export.nn import Lambda, function_name

_MARK = "<!-- pax_export drawing -->"
_LETTER, _LINE, _GAP = 7.2, 16, 46  # of the text, in pixels
_SMALL = 10 / 12  # letters of paths and edges, relative to those of titles
# Each rule names the drawing, because in a page its style would apply to the whole page.
_STYLE = """
.pax-drawing text { font: 12px ui-monospace, monospace; text-anchor: middle; fill: #222 }
.pax-drawing .path, .pax-drawing .edge { font-size: 10px; fill: #666 }
.pax-drawing .edge { paint-order: stroke; stroke: #fff; stroke-width: 3px }
.pax-drawing rect { stroke: #447; fill: #eef2ff }
.pax-drawing .operation rect { fill: #fff; stroke: #bbb }
.pax-drawing .input rect, .pax-drawing .output rect { fill: #f3f3e8; stroke: #996 }
.pax-drawing path { fill: none; stroke: #889; marker-end: url(#tip) }
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Drawing:
    """The modules of a net as nodes, and the arrays between them as edges.

    A notebook shows it.  Operations between modules are nodes as well.

    Attributes:
        nodes: each with ``kind``, ``title`` and ``path``.
        edges: ``(number of a node, number of another, the arrays that go there)``.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
        >>> drawing = pax.inspection.draw(net, pax.export.spec("batch, 3"))
        >>> [node.path or node.title for node in drawing.nodes]
        ['x', 'modules.0', 'modules.1', 'output']
        >>> drawing.edges[1]
        (1, 2, ('float32[batch,4]',))
    """

    nodes: tuple[FlowNode, ...]
    edges: tuple[tuple[int, int, tuple[str, ...]], ...]

    def to_svg(self) -> str:
        """Returns the drawing; the same net gives the same bytes.

        Raises:
            MissingPackageError: fast-sugiyama is not installed.
        """
        return _draw_svg(self)

    def save_svg(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the drawing to a file, atomically.

        Args:
            path: the path of the file.
            overwrite: whether to replace an earlier drawing.

        Raises:
            ExportPathError: (an OSError) the file cannot be written.
        """
        return save_marked(self.to_svg(), Path(path), _MARK, overwrite)

    def _repr_svg_(self) -> str:
        return self.to_svg()


def draw(
    net: Module, *inputs: PyTree, kwargs: Mapping[str, Any] | None = None, depth: int = 1
) -> Drawing:
    """Draws any module from a traced call of it.

    Args:
        net: a module; it may be abstract.
        *inputs: the inputs of its call, as for `inspect`.
        kwargs: keyword inputs.
        depth: the number of levels of modules; deeper ones are part of the node around them.

    Returns:
        A `Drawing`.

    Raises:
        InvalidArgumentTypeError: not a module.
        InvalidArgumentError: no inputs, or a depth below one.

    Example:
        >>> import pax_export as pax
        >>> net = pax.nets.ResNet18(3, 10).eval()
        >>> drawing = pax.inspection.draw(net, pax.export.spec("batch, 3, 32, 32"))
        >>> drawing.to_svg()[:4]
        '<svg'
    """
    if not isinstance(net, Module):
        raise InvalidArgumentTypeError(
            "draw needs a module.",
            got=type(net).__name__,
            write="pax.inspection.draw(net, x) with the inputs of its call",
        )
    if not inputs and not kwargs:
        raise InvalidArgumentError(
            "A drawing requires the inputs of a call.",
            where=type(net).__name__,
            write='pax.inspection.draw(net, pax.export.spec("batch, 3"))',
        )
    if depth < 1:
        raise InvalidArgumentError("depth must be at least 1.", got=f"depth={depth}")
    trace = trace_call(net, inputs, kwargs)
    classes = {path: title_of(module) for path, module in named_modules(net)}
    flow = FlowReader(trace, classes, depth).flow
    edges = tuple((*pair, tuple(texts)) for pair, texts in flow.edges.items())
    return Drawing(tuple(flow.nodes), edges)


# --- SVG ------------------------------------------------------------------------------


def _draw_svg(drawing: Drawing) -> str:
    places, routes = _lay_out(drawing)
    boxes = {n: _box_size(drawing.nodes[n]) for n in places}
    edges = list(_routed_edges(drawing, places, routes, boxes))
    reach = [abs(x) + boxes[n][0] / 2 for n, (x, _) in places.items()]
    for edge in edges:
        reach += [abs(x) for x, _ in edge.points]
        reach.append(abs(edge.middle[0]) + len(edge.label) * _LETTER * _SMALL / 2)
    width = 2 * max(reach, default=50) + 20
    height = max((y for _, y in places.values()), default=0) + 3 * _LINE + 20
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="pax-drawing" '
        f'viewBox="{-width / 2:.0f} -30 {width:.0f} {height + 30:.0f}" '
        f'width="{width:.0f}" height="{height + 30:.0f}">',
        _MARK,
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#889;stroke:none"/>'
        "</marker></defs>",
        *map(str, edges),
        *(_node_svg(drawing.nodes[n], corner, boxes[n]) for n, corner in places.items()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lay_out(drawing: Drawing) -> tuple[dict[int, Point], dict[tuple[int, int], list[Point]]]:
    """Positions of nodes from the top down, and points of long edges."""
    sugiyama = require("fast_sugiyama", "drawing", "a drawing")
    spacing = max((_box_size(node)[0] for node in drawing.nodes), default=0.0) + _GAP / 2
    pairs = [(a, b) for a, b, _ in drawing.edges]
    known = len(drawing.nodes)
    places: dict[int, Point] = {}
    hops: dict[int, list[int]] = {}
    left = 0.0
    for positions, width, height, edges in sugiyama.from_edges(
        pairs, vertex_spacing=spacing, dummy_vertices=True, dummy_size=spacing / 4
    ):
        scale = (_GAP + 2 * _LINE) / spacing
        places.update({n: (x + left, (height - y) * scale) for n, (x, y) in positions})
        left += width + spacing
        for a, b in edges:
            hops.setdefault(a, []).append(b)
    alone = [n for n in range(known) if n not in places]
    places.update({n: (left + spacing * i, 0.0) for i, n in enumerate(alone)})
    middle = (min(x for x, _ in places.values()) + max(x for x, _ in places.values())) / 2
    places = {n: (x - middle, y) for n, (x, y) in places.items()}
    routes = {
        (a, b): [places[n] for n in _lay_edge(a, b, hops, known)] for a, b in pairs if a in hops
    }
    return {n: places[n] for n in sorted(places) if n < known}, routes


def _lay_edge(start: int, end: int, hops: Mapping[int, list[int]], known: int) -> list[int]:
    """Dummy nodes of an edge that crosses layers."""
    for first in hops.get(start, ()):
        way, at = [], first
        while at >= known:
            way.append(at)
            (at,) = hops[at][:1] or (end,)
        if way and at == end:
            return way
    return []


def _box_size(node: FlowNode) -> tuple[float, float]:
    letters = max(len(node.title), _SMALL * len(node.path))
    lines = 2 if node.path else 1
    return letters * _LETTER + 18, lines * _LINE + 6


def _node_svg(node: FlowNode, corner: Point, box: tuple[float, float]) -> str:
    (x, y), (width, height) = corner, box
    text = (
        f'<text x="{x:.1f}" y="{y + 4 - (7 if node.path else 0):.1f}">{escape(node.title)}</text>'
    )
    if node.path:
        text += f'<text class="path" x="{x:.1f}" y="{y + 13:.1f}">{escape(node.path)}</text>'
    return (
        f'<g class="{node.kind}"><rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}" rx="5"/>{text}</g>'
    )


class _Edge(NamedTuple):
    points: list[Point]
    label: str

    @property
    def middle(self) -> Point:
        """The position of the label."""
        if len(self.points) > 2:
            return self.points[len(self.points) // 2]
        (x, y), (to_x, to_y) = self.points
        return (x + to_x) / 2, (y + to_y) / 2

    def __str__(self) -> str:
        x, y = self.middle
        return (
            f'<path d="{_curve_path(self.points)}"/>\n'
            f'<text class="edge" x="{x:.1f}" y="{y + 3:.1f}">{escape(self.label)}</text>'
        )


def _routed_edges(
    drawing: Drawing,
    places: Mapping[int, Point],
    routes: Mapping[tuple[int, int], list[Point]],
    boxes: Mapping[int, tuple[float, float]],
) -> Iterator[_Edge]:
    for a, b, texts in drawing.edges:
        (x, y), (to_x, to_y) = places[a], places[b]
        y, to_y = y + boxes[a][1] / 2, to_y - boxes[b][1] / 2
        yield _Edge([(x, y), *routes.get((a, b), ()), (to_x, to_y)], ", ".join(texts))


def _curve_path(points: list[Point]) -> str:
    """A smooth line that leaves and arrives from above."""
    (x, y), *rest = points
    text = f"M{x:.1f} {y:.1f}"
    for to_x, to_y in rest:
        half = (y + to_y) / 2
        text += f" C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    return text


_LONGEST = 60


def function_of(module: Module) -> str:
    """The name of the function, shortened to one column; empty for other layers."""
    if not isinstance(module, Lambda):
        return ""
    name = " ".join(function_name(module.func).split())
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def title_of(module: Module) -> str:
    """The class of a module, with the function that it is for: ``Lambda(relu)``."""
    function = function_of(module)
    return type(module).__name__ + (f"({function})" if function else "")
