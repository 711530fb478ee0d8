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

from reference_pages import write_pages

import fl_lightning

project = "fl_lightning"
author = "the authors of fl_lightning"
release = fl_lightning.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"fl_lightning {release}"
html_static_path: list[str] = []
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
# links from pages to files of the repository that are no pages: configurations, notebooks, code
suppress_warnings = ["myst.xref_missing"]

default_role = "code"  # docstrings quote names as Markdown does
autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Lightning refer to its own pages
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

nb_execution_mode = os.environ.get("EXECUTE_NOTEBOOKS", "off")
nb_execution_timeout = 600
nb_execution_raise_on_error = True

write_pages(HERE / "reference")
shutil.copytree(HERE.parent / "notebooks", HERE / "tutorials", dirs_exist_ok=True)


def _bars_are_no_substitutions(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Keep ``|x|`` of an equation from being taken for a name that stands for a text."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = re.sub(r"\|(?=[^|`]+\|)|(?<=[^|`\s])\|(?!\|)", r"\\|", line)


def setup(app: Any) -> None:
    """Have docstrings read as they are meant."""
    app.connect("autodoc-process-docstring", _bars_are_no_substitutions)
