"""Hooks of a user's own that a step of many clients would not call, or not as one client's does.

The only file that reads the attributes in which PyTorch keeps hooks; it has no public ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OF_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_OF_MODULES = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_OF_OPTIMIZERS = {
    "_optimizer_step_pre_hooks": "register_step_pre_hook",
    "_optimizer_step_post_hooks": "register_step_post_hook",
}


def hooks_against_slots(module: nn.Module, optimizer: Optimizer) -> str | None:
    """Return the first hook that slots do not call, in words; None if there is none.

    Forward hooks are no such: a stacked step calls them.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters())
        >>> hooks_against_slots(layer, optimizer)
        >>> handle = layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        >>> hooks_against_slots(layer, optimizer)
        'the parameter weight has a hook (register_hook)'
    """
    return next(_found(module, optimizer), None)


def _found(module: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    for name, param in module.named_parameters():
        yield from _of(param, _OF_PARAMETERS, f"the parameter {name}")
    for name, child in module.named_modules():
        yield from _of(child, _OF_MODULES, f"the layer {name}" if name else "the module")
    yield from _of(optimizer, _OF_OPTIMIZERS, "the optimizer")


def _of(owner: Any, names: dict[str, str], who: str) -> Iterator[str]:
    for attribute, method in names.items():
        if getattr(owner, attribute):
            yield f"{who} has a hook ({method})"
