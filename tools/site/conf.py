"""Settings of Sphinx for the documentation site; `tools.site` names the directory of the pages."""

from kvdepot import __version__

project = "kvdepot"
copyright = "the kvdepot authors, Apache-2.0"  # noqa: A001 - Sphinx's name
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
myst_heading_anchors = 4
myst_enable_extensions = ["tasklist"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "kvdepot"
root_doc = "README"
# Blocks without a language are commands and logs.
highlight_language = "none"
