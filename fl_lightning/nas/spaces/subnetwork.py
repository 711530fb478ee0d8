"""Sub-networks of a supernet: their weights, their coordinates, and the order of channels.

A plain network has the same layer names as the supernet. Its tensors are the first rows and columns of the
supernet's tensors of the same name; other layers define `copy_to` and `held_by`.

The most important channels are sorted to the front, so that a narrow sub-network keeps them:

    importance of channel j = Σ |W_next[:, j]|,   the L1 norm of its weights in the next layer

Permuting the inner channels of a block, in all tensors that have them, does not change the outputs of the
largest network. Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2, "elastic width".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.nas.spaces.elastic import ElasticDepthwise, ElasticQKV


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
    """Yield the modules that hold tensors: activations may be modules here and functions there."""
    for name, layer in network.named_modules():
        if next(_own_tensors(layer), None) is not None:
            yield name, layer


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


@dataclass(frozen=True)
class Channels:
    """Channels inside a block.

    Attributes:
        places: the tensors that number them, each with the dimension that does.
        ranked_by: the next layer's weights, with the dimension.
    """

    places: tuple[tuple[Tensor, int], ...]
    ranked_by: tuple[Tensor, int]

    @property
    def number(self) -> int:
        """Number of channels."""
        weights, dimension = self.ranked_by
        return weights.shape[dimension]

    @property
    def importance(self) -> Tensor:
        """The L1 norm of each channel, shape (channels,)."""
        weights, dimension = self.ranked_by
        return weights.detach().abs().transpose(0, dimension).flatten(1).sum(1)


def norm_tensors(norm: nn.BatchNorm2d) -> list[Tensor]:
    """Tensors of a batch norm with one number per channel."""
    candidates = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return [tensor for tensor in candidates if tensor is not None]


def ranking(importance: Tensor, widths: Sequence[int] = ()) -> Tensor:
    """Return the channels by falling importance; of equal ones the earlier first.

    Args:
        importance: of each channel, shape (channels,).
        widths: rising; channels stay on their side of each.

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
    """Sort the channels inside every block of a supernet, in place.

    The largest network computes the same; smaller ones now use what counts most. An optimizer's
    memory is not permuted: start it anew.

    Args:
        network: whose blocks say by `hidden_channels` where channels live.
        trained: plain networks of sub-networks that keep computing the same (`SizeSpace.build`; the
            numbers in them do not matter): no channel leaves or enters them.
    """
    smaller = [dict(plain.named_modules()) for plain in trained]
    with torch.no_grad():
        for name, block in network.named_modules():
            parts = [_channels(plain[name]) for plain in smaller if name in plain]
            for index, channels in enumerate(_channels(block)):
                widths = sorted({part[index].number for part in parts})
                order = ranking(channels.importance, widths)
                for tensor, dimension in channels.places:
                    tensor.copy_(tensor.index_select(dimension, order.to(tensor.device)))


def _channels(block: Any) -> list[Channels]:
    return block.hidden_channels() if hasattr(block, "hidden_channels") else []
