"""The public classes of fl_lightning, read from the packages' ``__init__`` files.

To export a new class, add a line ``from its.module import Name as Name`` to an ``__init__`` file: then the
command line accepts its short name, help lists it, and sites of a network allow it. The files are read as
text, so that nothing heavy is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# A short name stands for the class of the first package that exports it.
PACKAGES = (
    "fl_lightning",
    *(f"fl_lightning.{room}" for room in ("client", "data", "server", "secure", "updates")),
    *(f"fl_lightning.{room}" for room in ("sparsity", "models", "nas")),
)


def exported(file: str | Path) -> dict[str, str]:
    """Return, for each name that an ``__init__`` file exports, the module that defines it, sorted by name.

    Args:
        file: path of the file.

    Example:
        >>> exported(Path(__file__).parents[1] / "__init__.py")["FedProx"]
        'fl_lightning.client.corrections.drift'
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.startswith("fl_lightning.") and node.module != __name__
        for alias in node.names
    }
    return dict(sorted(found.items()))


@cache
def public_paths() -> Mapping[str, str]:
    """Return a dict from every public name to its import path.

    Example:
        >>> public_paths()["Krum"], public_paths()["FedProx"]
        ('fl_lightning.server.Krum', 'fl_lightning.FedProx')
    """
    root = Path(__file__).parents[1]
    found: dict[str, str] = {}
    for package in PACKAGES:
        file = Path(root, *package.split(".")[1:], "__init__.py")
        for name in exported(file):
            found.setdefault(name, f"{package}.{name}")
    return found
