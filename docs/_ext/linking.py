"""Makes links of names: ours to the API reference, those of others to their own pages.

Markdown and docstrings say `pax.Linear` or `jax.jit` in backticks, and nothing more.  With `-W`
the build fails where a name of ours, in backticks, has no place in the reference.
"""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import Any

from docutils import nodes
from ours import Ours, imported
from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.nodes import make_refnode
from theirs import address, python, value_of

_LOG = logging.getLogger(__name__)
_ERRORS = "api/errors"
# Signatures name jax's types by the files that define them, and types that are imported for type
# checkers alone by their last names.
_PUBLIC_TYPES = {
    "ArrayLike": "jax.typing.ArrayLike",
    "Array": "jax.Array",
    "Initializer": "jax.nn.initializers",
    "Mesh": "jax.sharding.Mesh",
    "PRNGKey": "jax.Array",
    **{name: f"typing.{name}" for name in ("Any", "ClassVar", "Literal")},
    **{name: f"collections.abc.{name}" for name in abc.__all__},
}


class _Links:
    """The addresses that one page uses."""

    def __init__(self, app: Any, page: str) -> None:
        self.app, self.page = app, page
        self.ours: Ours = app.our_names

    def to_ours(self, name: str, content: nodes.Node) -> nodes.reference | None:
        """A link to a listed name; to its class, where a member has no place of its own."""
        if room := self.ours.rooms.get(name):
            return None if room == self.page else self._refer(room, "", content, name)
        domain = self.app.env.domains.python_domain
        entry = domain.objects.get(name)
        if entry is None and name not in self.ours.objects:
            name = name.rpartition(".")[0]
            entry = domain.objects.get(name)
        if entry is not None:
            return self._refer(entry.docname, entry.node_id, content, name)
        if name.startswith("pax_export.errors."):
            return self._refer(_ERRORS, name, content, name)
        _LOG.warning("%s has no place in the API reference", name, location=self.page)
        return None

    def _refer(self, page: str, anchor: str, content: nodes.Node, title: str) -> nodes.reference:
        return make_refnode(self.app.builder, self.page, page, anchor, content, title)


def _read_names(app: Any) -> None:
    app.our_names = Ours(Path(app.srcdir) / "api")


def _anchor_errors(app: Any, doctree: Any) -> None:
    """Gives each kind of error on its page an anchor, which is the row that explains it."""
    if app.env.docname != _ERRORS:
        return
    for row in doctree.findall(nodes.row):
        for literal in list(row[0].findall(nodes.literal))[:1]:
            row["ids"].append(f"pax_export.errors.{literal.astext()}")


def _link_code(app: Any, doctree: Any, page: str) -> None:
    """Links what stands in backticks."""
    links = _Links(app, page)
    imports = imported(
        block.astext()
        for block in doctree.findall(nodes.literal_block)
        if block.get("language") in ("python", "ipython3", "pycon", "python3", "default")
    )
    own = page.rpartition("/")[2]  # a page of one name does not link to itself
    for literal in list(doctree.findall(nodes.literal)):
        if _is_linked(literal):
            continue
        text = literal.astext()
        content = literal.deepcopy()
        link = None
        if name := links.ours.find(text, imports, page):
            link = None if name == own else links.to_ours(name, content)
        elif there := address(text, imports):
            link = _away(there, content)
        if link is not None:
            literal.replace_self(link)


def _is_linked(node: nodes.Node) -> bool:
    """Whether a link or a heading is around it."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | nodes.title | addnodes.pending_xref):
            return True
    return False


def _away(there: str, content: nodes.Node) -> nodes.reference:
    return nodes.reference("", "", content, refuri=there, internal=False)


def _link_missing(app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Links the types of signatures, which Sphinx asks for by the file that defines them."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    last = target.rpartition(".")[2]
    if last == target or target.startswith("jax."):
        target = _PUBLIC_TYPES.get(last, target)
    links = _Links(app, node.get("refdoc", env.docname))
    is_ours = target.startswith("pax_export.")
    name = links.ours.find(target) or (is_ours and links.ours.name_of(value_of(target)))
    if is_ours or name:
        return links.to_ours(name, content) if name else None
    there = address(target) if "." in target else python(target)
    return _away(there, content) if there else None


def _typing_any(app: Any, doctree: Any) -> None:
    """Lets `Any` in a signature be that of typing, and not the filter of that name."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("reftype") == "class" and node.get("reftarget") in ("Any", "typing.Any"):
            node.replace_self(_away(python("typing.Any") or "", nodes.Text("Any")))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("builder-inited", _read_names)
    app.connect("doctree-read", _anchor_errors)
    app.connect("doctree-read", _typing_any)
    app.connect("doctree-resolved", _link_code)
    app.connect("missing-reference", _link_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
