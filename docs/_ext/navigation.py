"""The tree of pages beside each page: two levels of all, and deeper where the reader is.

A tree with the three hundred names of the reference, made anew for each of their pages, took two
thirds of the build and most of the bytes of a page.
"""

from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from sphinx import addnodes

_ALWAYS = 2  # levels


class _Tree:
    """The tree as one page shows it."""

    def __init__(self, app: Any, page: str) -> None:
        self.builder, self.page = app.builder, page
        self.children: dict[str, list[str]] = app.env.toctree_includes
        self.titles, self.tocs = app.env.titles, app.env.tocs
        self.root = app.config.root_doc
        self.open = self._way_to(page)

    def html(self, above: str = "", level: int = 1) -> str:
        """The list of what stands below a page, as Sphinx writes it."""
        pages = self.children.get(above or self.root, [])
        if not pages or not (level <= _ALWAYS or above in self.open):
            return ""
        groups = self._groups(above or self.root)
        entries = [groups.get(page, "") + self._entry(page, level) for page in pages]
        return "<ul>" + "".join(entries) + "</ul>"

    def _groups(self, above: str) -> dict[str, str]:
        """The captions of lists of pages, or the headings above them, each before its first."""
        found = {}
        for tree in self.tocs[above].findall(addnodes.toctree):
            item = tree.parent.parent  # the heading's entry; that of the page's title is none
            is_below_title = isinstance(item.parent.parent, nodes.list_item)
            title = tree["caption"] or (item[0].astext() if is_below_title else "")
            if title and tree["includefiles"]:
                found[tree["includefiles"][0]] = f'<li class="group">{html.escape(title)}</li>'
        return found

    def _entry(self, page: str, level: int) -> str:
        current = " current" if page in self.open else ""
        title = html.escape(self.titles[page].astext())
        address = "#" if page == self.page else self.builder.get_relative_uri(self.page, page)
        link = f'<a class="{current.strip()} reference internal" href="{address}">{title}</a>'
        return f'<li class="toctree-l{level}{current}">{link}{self.html(page, level + 1)}</li>'

    def _way_to(self, page: str) -> set[str]:
        """The pages from the home page to this one."""
        above = {child: parent for parent, kids in self.children.items() for child in kids}
        way = set()
        while page in above and page not in way:
            way.add(page)
            page = above[page]
        return way


def _replace_tree(app: Any, page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    context["toctree"] = lambda **_: _Tree(app, page).html()


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("html-page-context", _replace_tree, priority=400)  # the theme asks at 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
