"""Sub-networks of a supernet: their weights, masks of their coordinates, sorting of channels.

The plain network of a sub-network has the layer names of the supernet, and its tensors are the first rows and
columns of the supernet's. Depthwise convolutions are the exception: they define `copy_to` and `held_by`.

`sort_channels` moves the most important channels to the front, so that a narrow sub-network keeps them:

    importance of channel j = Σ |W_next[:, j]|,   the L1 norm of its weights in the next layer

A permutation of the inner channels of a block, in all tensors that have them as a dimension, does not change
the output of the largest network.
Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2, "elastic width".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.nas.spaces.elastic import ElasticDepthwise


def copy(supernet: nn.Module, part: nn.Module) -> nn.Module:
    """Copy a sub-network's weights and statistics from a supernet into a plain network, and return it.

    Args:
        supernet: network with elastic layers.
        part: plain network of one architecture; gets the device, precision and mode of the supernet.
    """
    like = next(supernet.parameters())
    part.to(like.device, like.dtype).train(supernet.training)
    with torch.no_grad():
        for name, layer in _layers(part):
            source = supernet.get_submodule(name)
            if isinstance(source, ElasticDepthwise):
                source.copy_to(layer)  # type: ignore[arg-type]
                continue
            for own, tensor in _own_tensors(layer):
                tensor.copy_(first(getattr(source, own), tensor.shape))
    return part


def held(supernet: nn.Module, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Return masks of the coordinates a sub-network uses, bool by parameter name of the supernet.

    Args:
        supernet: network with elastic layers.
        build: builds the plain network; it runs on the meta device, without memory.
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
        if isinstance(source, ElasticDepthwise):
            own = source.held_by(layer)  # type: ignore[arg-type]
            masks.update({f"{before}{key}": mask for key, mask in own.items()})
            continue
        for key, parameter in layer.named_parameters(recurse=False):
            first(masks[f"{before}{key}"], parameter.shape).fill_(True)
    return masks


def first(whole: Tensor, shape: torch.Size) -> Tensor:
    """Return a view of a tensor's leading entries, in the given shape."""
    return whole[tuple(slice(length) for length in shape)]


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield, with their names, the modules that directly own parameters or buffers."""
    for name, layer in network.named_modules():
        if next(_own_tensors(layer), None) is not None:
            yield name, layer


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


@dataclass(frozen=True)
class Channels:
    """Group of inner channels of a block, which can be reordered without changing the block's output.

    Attributes:
        out: layers with the channels as outputs, norms among them.
        into: layers with the channels as inputs; the weights of the last one rank them.
        features: number of adjacent features that are one channel, e.g. those of an attention head.
    """

    out: tuple[Any, ...]
    into: tuple[Any, ...]
    features: int = 1

    def places(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each tensor that has this group of channels along a dimension, with the index of that dimension."""
        for layer in self.out:
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                if tensor.ndim:  # a batch norm counts its batches in a scalar
                    yield tensor.data.unflatten(0, (-1, self.features)), 0
        for layer in self.into:
            yield layer.weight.data.unflatten(1, (-1, self.features)), 1

    @property
    def importance(self) -> Tensor:
        """Importance of each channel, shape (channels,): L1 norm of its weights in the layer that reads it."""
        weights: Tensor = self.into[-1].weight.data.unflatten(1, (-1, self.features))
        return weights.abs().transpose(0, 1).flatten(1).sum(1)


def ranking(importance: Tensor, widths: Sequence[int] = ()) -> Tensor:
    """Return channel indices by falling importance; channels of equal importance keep their order.

    Args:
        importance: importance of each channel, shape (channels,).
        widths: numbers of channels, rising: the first so many channels remain the same ones.

    Example:
        >>> ranking(torch.tensor([1.0, 3.0, 2.0, 4.0])).tolist()
        [3, 1, 2, 0]
        >>> ranking(torch.tensor([1.0, 3.0, 2.0, 4.0]), [2]).tolist()
        [1, 0, 3, 2]
    """
    ends = [0, *(width for width in widths if 0 < width < len(importance)), len(importance)]
    groups = [
        importance[start:end].argsort(descending=True, stable=True) + start
        for start, end in pairwise(ends)
    ]
    return torch.cat(groups)


def sort_channels(network: nn.Module, trained: Iterable[nn.Module] = ()) -> None:
    """Sort the inner channels of all blocks of a supernet by importance, in place.

    The outputs of the largest network do not change; narrower networks get the most important channels. The
    state of an optimizer is not sorted: reset it.

    Args:
        network: supernet whose blocks define `hidden_channels`.
        trained: plain networks of further architectures whose outputs must not change, e.g. because they
            already train; only their sizes are read.
    """
    smaller = [dict(plain.named_modules()) for plain in trained]
    with torch.no_grad():
        for name, block in network.named_modules():
            parts = [_channels(plain[name]) for plain in smaller if name in plain]
            for index, channels in enumerate(_channels(block)):
                widths = sorted({len(part[index].importance) for part in parts})
                order = ranking(channels.importance, widths)
                for tensor, dimension in channels.places():
                    tensor.copy_(tensor.index_select(dimension, order.to(tensor.device)))


def _channels(block: Any) -> list[Channels]:
    return block.hidden_channels() if hasattr(block, "hidden_channels") else []
