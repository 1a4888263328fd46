"""How Sphinx builds this documentation: MyST pages, an API reference from docstrings."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pax_export

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "pax-export"
author = "the pax-export authors"
copyright = "the pax-export authors, Apache-2.0"
version = release = pax_export.__version__

extensions = [
    "myst_nb",  # brings myst_parser
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "linking",
    "navigation",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = False
# An annotation `bytes` is Python's, not the attribute of that name of one of our classes.
suppress_warnings = ["ref.python"]
default_role = "code"  # what docstrings have in backticks

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

# The pages of tutorials/ are notebooks: run at each build, and one cell that fails ends it.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress, and what TensorFlow says when it starts

autosummary_generate = True
autosummary_imported_members = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # the fields of a NamedTuple are members already
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"pax-export {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# --- what a reader sees is public ---------------------------------------------------------

_PRIVATE = re.compile(r"pax_export(?:\.[a-z]\w*)*\._[a-z]\w*(?:\.\w+)*")


def _public_names(app: Any, doctree: Any, page: str) -> None:
    """Says the name by which something is imported, where Sphinx says the file it is in."""
    from docutils import nodes

    for node in doctree.findall(nodes.reference):
        _, _, name = node.get("refuri", "").partition("#")
        name = name or node.get("refid", "")
        if _PRIVATE.search(node.get("reftitle", "")) and name.startswith("pax_export"):
            node["reftitle"] = name
    for text in list(doctree.findall(nodes.Text)):
        if _PRIVATE.search(text):
            shown = _PRIVATE.sub(lambda match: match[0].rsplit(".", 1)[-1], text)
            text.parent.replace(text, nodes.Text(re.sub(r"<class '(\w+)'>", r"\1", shown)))


def _public_bases(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Says the next bases that the reference lists, where it does not list a base."""

    def is_public(base: Any) -> bool:
        ours = base.__module__.startswith("pax_export")
        return bool(app.our_names.name_of(base)) if ours else base is not object

    found: list[Any] = []
    for base in bases:
        ways = [each for each in getattr(base, "__mro__", []) if is_public(each)]
        found.append(ways[0] if ways else base)
    bases[:] = dict.fromkeys(found)


def _inherited(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Lists the methods that a class has from listed classes, each a link to where it is shown."""
    if what != "class" or not isinstance(obj, type):
        return
    listed = {id(each): full for full, each in app.our_names.objects.items()}
    own, found = set(vars(obj)), []
    for base in obj.__mro__[1:]:
        full = listed.get(id(base))
        names = [each for each in vars(base) if not each.startswith("_") and each not in own]
        found += [
            f":py:meth:`{each} <{full}.{each}>`"
            for each in names
            if full and callable(getattr(base, each))
        ]
        own |= set(vars(base))
    if found:
        lines += ["", "**Inherited:** " + ", ".join(found), ""]


def _nothing_private(app: Any, error: Exception | None) -> None:
    """A page with a private path is an error of the build, with `-W`."""
    from sphinx.util import logging

    if error is not None or app.builder.name != "html":
        return
    for file in sorted(Path(app.outdir).rglob("*.html")):
        for found in sorted(set(_PRIVATE.findall(file.read_text(encoding="utf-8")))):
            logging.getLogger(__name__).warning("%s has the private path %s", file.name, found)


# --- notebooks ----------------------------------------------------------------------------


#: The first cell of a notebook that is downloaded.
_INSTALL = '%pip install -q "pax-export[all,examples]"'


def _to_download(app: Any, doctree: Any) -> None:
    """Offers a notebook, with what its cells printed, under its title."""
    from docutils import nodes
    from sphinx import addnodes

    executed = Path(app.outdir).parent / "jupyter_execute" / f"{app.env.docname}.ipynb"
    if (
        not executed.exists()
        or '"id": "install"' in executed.read_text(encoding="utf-8")
        or app.env.docname not in app.env.nb_metadata
    ):
        return
    _tidy(executed)
    place = "/" + os.path.relpath(executed, app.srcdir)
    link = addnodes.download_reference(place, "this page as a notebook", reftarget=place)
    title = next(doctree.findall(nodes.title))
    title.parent.insert(title.parent.index(title) + 1, nodes.paragraph("", "", link))


def _tidy(notebook: Path) -> None:
    """Leaves what the page shows: no stderr, stdout once, where it was merged, and no output
    that is empty in the end, as progress is."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    code = next(cell for cell in content["cells"] if cell["cell_type"] == "code")
    install = {"id": "install", "source": _INSTALL, "outputs": [], "execution_count": None}
    content["cells"].insert(content["cells"].index(code), {**code, **install})
    for cell in content["cells"]:
        outputs = cell.get("outputs", [])
        first = next((each for each in outputs if each.get("name") == "stdout"), None)
        named = [each for each in outputs if each.get("name") is None or each is first]
        outputs[:] = [each for each in named if any(each.get("data", {"": "some"}).values())]
    notebook.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _tutorials_apart(app: Any, env: Any, docnames: list[str]) -> None:
    """Notebooks take seconds each: every process reads some, instead of the last one all."""
    from sphinx.util.parallel import make_chunks

    chunks = make_chunks(docnames, app.parallel)
    tutorials = [name for name in docnames if name.startswith("tutorials/")]
    others = [name for name in docnames if name not in tutorials]
    for place, name in enumerate(tutorials):
        others.insert(place * len(chunks[0]), name)
    docnames[:] = others


def setup(app: Any) -> None:
    app.connect("env-before-read-docs", _tutorials_apart)
    app.connect("doctree-read", _to_download, priority=100)  # before files to copy are listed
    app.connect("autodoc-process-bases", _public_bases)
    app.connect("autodoc-process-docstring", _inherited)
    app.connect("doctree-resolved", _public_names)
    app.connect("build-finished", _nothing_private)
