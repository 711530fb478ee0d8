"""The site: ``sphinx-build -W docs docs/_build``.

With ``EXECUTE_NOTEBOOKS=force`` in the environment the tutorials have outputs, which takes minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from docutils import nodes
from house_picture import draw_house
from latex2mathml.converter import convert
from reference_pages import write_pages

import fl_lightning

project = "fl_lightning"
author = "the authors of fl_lightning"
copyright = f"2026, {author}"  # the footer of every page
release = fl_lightning.__version__
extensions = [
    *("myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"),
    *("sphinx_copybutton", "sphinx_design"),
]
html_theme = "furo"
html_title = f"fl_lightning {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]
# links from pages to files of the repository that are no pages: configurations, notebooks, code
suppress_warnings = ["myst.xref_missing"]

default_role = "code"  # docstrings quote names as Markdown does
autodoc_typehints = "description"  # beside each argument; a signature of twelve is not readable
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Lightning refer to its own pages
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_math_renderer = "mathml"

nb_execution_mode = os.environ.get("EXECUTE_NOTEBOOKS", "off")
nb_execution_timeout = 600
nb_execution_raise_on_error = True

copybutton_prompt_text = ">>> "
copybutton_exclude = ".linenos, .gp, .go"

write_pages(HERE / "reference")
draw_house(HERE / "reference")
shutil.copytree(HERE.parent / "notebooks", HERE / "tutorials", dirs_exist_ok=True)


def _bars_are_no_substitutions(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Keep ``|x|`` of an equation from being taken for a name that stands for a text."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = re.sub(r"\|(?=[^|`]+\|)|(?<=[^|`\s])\|(?!\|)", r"\\|", line)


def _no_names_before_colons(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Keep the first words of a property from being taken for its type, as napoleon does ahead of a colon."""
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(": ", "; ", 1)


def _math_inline(writer: Any, node: Any) -> None:
    """Write an equation as MathML, which browsers draw without a script or a network."""
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _math_block(writer: Any, node: Any) -> None:
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Read docstrings as they are meant; draw equations."""
    app.connect("autodoc-process-docstring", _no_names_before_colons, priority=400)
    app.connect("autodoc-process-docstring", _bars_are_no_substitutions)
    app.add_html_math_renderer(
        "mathml", inline_renderers=(_math_inline, None), block_renderers=(_math_block, None)
    )
