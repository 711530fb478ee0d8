"""Tensors of which nothing may move need no gradient, and then cost nothing in backward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def freeze_masked(module: nn.Module, masks: Mapping[str, Tensor]) -> list[str]:
    """Switch off the gradient of parameters whose mask is all zero; return their names.

    Where these are the first layers of a network, the backward pass ends above them. Before a mask
    that lets some of them move again, switch their gradient on with ``requires_grad_(True)``.

    Args:
        module: its parameters are changed in place.
        masks: by parameter name, ``True`` where an entry may move.

    Raises:
        ValueError: if a mask is of no parameter.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 1)
        >>> freeze_masked(layer, {"weight": torch.tensor([[False, False]])})
        ['weight']
        >>> layer.weight.requires_grad, layer.bias.requires_grad
        (False, True)
    """
    params = dict(module.named_parameters())
    unknown = [name for name in masks if name not in params]
    if unknown:
        raise ValueError(f"masks: the module has no parameter {', '.join(unknown[:3])}")
    frozen = [name for name, mask in masks.items() if not bool(mask.any())]
    for name in frozen:
        params[name].requires_grad_(False)
        params[name].grad = None
    return frozen
