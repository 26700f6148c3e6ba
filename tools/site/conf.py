"""Settings of Sphinx for the documentation. tools/site/build.py writes the sources and runs it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "Regard"
author = "The authors of Regard"
copyright = author
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "mathml", "docstrings"]
exclude_patterns: list[str] = []
# A warning is an error, but for these: how the output of a console should be coloured, and which of two attributes of
# one name a type in a signature means.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]

# Markdown. Anchors are those that GitHub makes from headings, so that a link works in both.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
html_math_renderer = "mathml"

# The reference
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# The pages
html_theme = "furo"
html_title = "Regard"
html_baseurl = ""
html_static_path = [str(HERE / "static")]
templates_path = [str(HERE / "templates")]
html_css_files = ["regard.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
# A summary would be read from the found page, which a browser refuses for pages that are files.
html_show_search_summary = False
html_theme_options = {
    "navigation_with_keys": True,
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4f0", "color-brand-content": "#7db4f0"},
}
pygments_style = "tango"
pygments_dark_style = "monokai"
