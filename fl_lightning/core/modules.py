"""Small tools for modules and tensors: modes of parts, names of classifiers, copies to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every submodule at the end of the block.

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


def head_names(module: nn.Module) -> list[str]:
    """Return the names of a network's classifier modules; empty without timm's `get_classifier`.

    Args:
        module: a network with timm's `get_classifier`, or a module that holds such networks.

    Example:
        >>> class Network(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        ...     def get_classifier(self):
        ...         return self.head
        >>> head_names(Network()), head_names(nn.ModuleDict({"network": Network()}))
        (['head'], ['network.head'])
    """
    get_classifier = getattr(module, "get_classifier", None)
    if get_classifier is None:
        inner = [(name, head_names(child)) for name, child in module.named_children()]
        return [f"{name}.{head}" for name, heads in inner for head in heads]
    classifier = get_classifier()
    heads = classifier if isinstance(classifier, (tuple, list)) else (classifier,)
    return [name for name, part in module.named_modules() if any(part is head for head in heads)]


# Devices for which PyTorch does not protect a copy under way from later writes to its source.
_WAITING = ("cpu", "mps")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device, without waiting for earlier work on the device.

    Example:
        >>> sent(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    return tensor.to(device, non_blocking=device.type not in _WAITING)
