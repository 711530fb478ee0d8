"""A sub-network taken out of a supernet, and which coordinates of the supernet it holds.

A plain network names its layers as the supernet does. Its tensors are the first rows and columns of
the supernet's of the same name; layers of which a part is something else say so by themselves
(`copy_to`, `held_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fl_lightning.nas.elastic.attention import ElasticQKV
from fl_lightning.nas.elastic.kernel import ElasticDepthwise


def copy(supernet: nn.Module, part: nn.Module) -> nn.Module:
    """Write a supernet's weights and statistics into a plain network of smaller size; return that.

    Args:
        supernet: with elastic layers.
        part: whose layers are named alike. It gets the supernet's device, precision and mode.
    """
    like = next(supernet.parameters())
    part.to(like.device, like.dtype).train(supernet.training)
    with torch.no_grad():
        for name, layer in _layers(part):
            source = supernet.get_submodule(name)
            if isinstance(source, ElasticDepthwise | ElasticQKV):
                source.copy_to(layer)  # type: ignore[arg-type]
                continue
            for own, tensor in _own_tensors(layer):
                tensor.copy_(first(getattr(source, own), tensor.shape))
    return part


def held(supernet: nn.Module, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Return a mask for every parameter of a supernet: which coordinates a sub-network holds.

    Args:
        supernet: with elastic layers.
        build: makes the plain network; no memory is taken for it.
    """
    with torch.device("meta"):
        part = build()
    masks = {
        name: torch.zeros(parameter.shape, dtype=torch.bool)
        for name, parameter in supernet.named_parameters()
    }
    for name, layer in _layers(part):
        source = supernet.get_submodule(name)
        before = f"{name}." if name else ""
        if isinstance(source, ElasticDepthwise | ElasticQKV):
            own = source.held_by(layer)  # type: ignore[arg-type]
            masks.update({f"{before}{key}": mask for key, mask in own.items()})
            continue
        for key, parameter in layer.named_parameters(recurse=False):
            first(masks[f"{before}{key}"], parameter.shape).fill_(True)
    return masks


def first(whole: Tensor, shape: torch.Size) -> Tensor:
    """Return the view of the first coordinates, as many as ``shape`` says in each dimension."""
    return whole[tuple(slice(length) for length in shape)]


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what holds tensors: activations may be modules here and functions there."""
    for name, layer in network.named_modules():
        if next(_own_tensors(layer), None) is not None:
            yield name, layer


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)
