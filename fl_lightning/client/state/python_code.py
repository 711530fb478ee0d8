"""Whose code a class or a function is, and which global names it uses."""

from __future__ import annotations

import dis
import sys
from functools import cache, lru_cache
from types import CodeType

# Libraries whose objects hold nothing that a training step would keep in them.
_LIBRARIES = frozenset(
    (
        *sys.stdlib_module_names,
        "fl_lightning",
        "jsonargparse",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "matplotlib",
        "mlflow",
        "numpy",
        "pandas",
        "PIL",
        "pytorch_lightning",
        "scipy",
        "sklearn",
        "tensorboard",
        "torch",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "wandb",
    )
) - {"__main__"}


def is_library(module_name: str) -> bool:
    """Return whether a module is Python's, torch's, Lightning's or of a library near them.

    Example:
        >>> is_library("torch.nn.modules.linear"), is_library("__main__")
        (True, False)
    """
    return module_name.partition(".")[0] in _LIBRARIES


@cache
def is_users(module_name: str) -> bool:
    """Return whether a module is the user's own, and not one that was installed."""
    if is_library(module_name):
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that a function may read globally, and those that it sets globally.

    Those of functions inside it are among them.
    """
    read = dict.fromkeys(code.co_names)
    steps = dis.get_instructions(code)
    written = dict.fromkeys(s.argval for s in steps if s.opname == "STORE_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_read, inner_written = names_in(constant)
            read |= dict.fromkeys(inner_read)
            written |= dict.fromkeys(inner_written)
    return tuple(read), tuple(written)
