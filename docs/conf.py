"""How Sphinx builds this documentation: MyST pages, an API reference from docstrings."""

from __future__ import annotations

import pax_export

project = "pax-export"
author = "the pax-export authors"
copyright = "the pax-export authors, Apache-2.0"
version = release = pax_export.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

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
