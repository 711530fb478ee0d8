"""The modes of a module's parts, training or evaluation, put back after a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Give every part of a module the mode it had when the block began.

    Example:
        >>> module = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with modes_kept(module):
        ...     _ = module.eval()
        >>> [part.training for part in module]
        [True, False]
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
