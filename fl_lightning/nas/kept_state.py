"""The state of an optimizer as a buffer of the module: it lasts where optimizers begin anew.

A client's optimizers are fresh in every round. What they have learnt can travel as buffers do:
averaged over clients by the server, or kept by each client for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def num_kept(make_optimizer: Callable[[Iterable[Any]], Optimizer], params: list[Tensor]) -> int:
    """Return how many numbers an optimizer has in its state after a step.

    Example:
        >>> num_kept(torch.optim.Adam, [torch.zeros(3)])  # two moments, and the number of steps
        7
    """
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = make_optimizer(copies)
    _fill(optimizer)
    return sum(tensor.numel() for tensor in _tensors(optimizer))


def keep(optimizer: Optimizer, kept: Tensor) -> None:
    """Copy the state into a buffer, shape (s,), unless that has no place for any."""
    if kept.numel():
        torch.cat([tensor.reshape(-1).to(kept) for tensor in _tensors(optimizer)], out=kept)


def recall(optimizer: Optimizer, kept: Tensor) -> None:
    """Copy the state from a buffer, shape (s,); zeros are that of an optimizer without a step."""
    if not kept.numel():
        return
    if not optimizer.state:
        _fill(optimizer)
    tensors = list(_tensors(optimizer))
    for tensor, part in zip(tensors, kept.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _fill(optimizer: Optimizer) -> None:
    """Have a fresh optimizer make its state, and move nothing."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [(param.detach().clone(), param.grad) for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, (value, gradient) in zip(params, before, strict=True):
        param.data.copy_(value)
        param.grad = gradient


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            for _, value in sorted(optimizer.state[param].items()):
                if isinstance(value, Tensor):
                    yield value
