"""Batch norm statistics of a sub-network, from sums that add up over batches, clients and processes.

    mean = Σx / n,   variance = (Σx² - (Σx)² / n) / (n - 1),   per channel over examples and pixels

While sums are collected every layer normalises by its batch, as in training: what a layer gets does
not depend on old statistics. With one batch this is what PyTorch's running statistics would be after
one step of momentum 1. Statistics belong to one sub-network: collect and apply anew for each.
Sources: Cai et al. 2020 (Once-for-All), Yu et al. 2020 (BigNAS), section 3.2, "batch norm calibration".
Differs: they average the batches' statistics; sums count examples alike, however batches are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError

# of each batch norm by name: n, Σx, Σx², float64 of shape (3, channels)
Sums = dict[str, Tensor]


def collect_sums(network: nn.Module, run: Callable[[Any], Any], batches: Iterable[Any]) -> Sums:
    """Return the sums of every batch norm that runs.

    The network's parameters, statistics and modes are left as they were.

    Args:
        network: with batch norms.
        run: runs it on a batch, e.g. ``lambda batch: network(batch[0], architecture)``.
        batches: of examples.
    """
    sums: Sums = {}
    layers = {name: layer for name, layer in network.named_modules() if _is_norm(layer)}
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: _add(sums, name, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad(), _batch_statistics(network, layers.values()):
            for batch in batches:
                run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def add_sums(left: Sums, right: Sums) -> Sums:
    """Return the sums over the examples of both; of one sub-network.

    Raises:
        ConfigurationError: if they are of sub-networks of different sizes.
    """
    if {name: own.shape for name, own in left.items()} != {
        n: own.shape for n, own in right.items()
    }:
        raise ConfigurationError("sums of two sub-networks cannot be added: their sizes differ")
    return {name: own + right[name] for name, own in left.items()}


def apply_sums(network: nn.Module, sums: Sums) -> None:
    """Write the statistics that sums give into a network's batch norms.

    Args:
        network: the supernet, of whose layers the first channels are written; or a plain network.
        sums: over all examples.

    Raises:
        ConfigurationError: if a layer saw fewer than two numbers a channel.
    """
    for name in sums:
        layer: Any = network.get_submodule(name)
        mean, variance = _mean_and_variance(name, sums)
        with torch.no_grad():
            layer.running_mean[: len(mean)] = mean.to(layer.running_mean)
            layer.running_var[: len(mean)] = variance.to(layer.running_var)


@contextmanager
def normalised_by(network: nn.Module, sums: Sums) -> Iterator[None]:
    """Have batch norms that keep no statistics use those of sums for a while, in evaluation mode.

    Args:
        network: whose layers the sums name; others go on with the statistics of the batch.
        sums: over all examples.

    Raises:
        ConfigurationError: if a layer saw fewer than two numbers a channel.
    """
    layers: dict[str, Any] = {name: network.get_submodule(name) for name in sums}
    like = next(network.parameters())
    try:
        for name, layer in layers.items():
            mean, variance = _mean_and_variance(name, sums)
            layer.running_mean, layer.running_var = mean.to(like), variance.to(like)
        yield
    finally:
        for layer in layers.values():
            layer.running_mean = layer.running_var = None


def _mean_and_variance(name: str, sums: Sums) -> tuple[Tensor, Tensor]:
    counts, totals, squares = sums[name]
    if counts[0] < 2:
        raise ConfigurationError(
            f"batch norm {name} saw {int(counts[0])} numbers a channel: give it at least 2"
        )
    mean = totals / counts
    return mean, ((squares - totals * mean) / (counts - 1)).clamp(min=0)


def has_norms(network: nn.Module) -> bool:
    """Return whether there is anything to collect."""
    return any(_is_norm(layer) for layer in network.modules())


def flatten_sums(sums: Sums) -> Tensor:
    """Return sums as one vector, to travel."""
    return torch.cat([own.flatten() for own in sums.values()])


def unflatten_sums(vector: Tensor, like: Sums) -> Sums:
    """Return the sums of a vector, shaped as those of the same sub-network."""
    pieces = vector.split([own.numel() for own in like.values()])
    return {
        name: piece.view_as(own) for (name, own), piece in zip(like.items(), pieces, strict=True)
    }


def _is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)


def _add(sums: Sums, name: str, x: Tensor) -> None:
    numbers = x.detach().transpose(0, 1).flatten(1).double()
    counts = torch.full((len(numbers),), float(numbers.shape[1]), dtype=torch.float64)
    own = torch.stack([counts.to(x.device), numbers.sum(1), numbers.square().sum(1)])
    sums[name] = sums[name] + own if name in sums else own


@contextmanager
def _batch_statistics(network: nn.Module, norms: Iterable[nn.Module]) -> Iterator[None]:
    """Everything as in evaluation (no dropout), but batch norms use their batch and learn nothing."""
    modes = {layer: layer.training for layer in network.modules()}
    kept = {
        layer: {name: buffer.clone() for name, buffer in layer.named_buffers(recurse=False)}
        for layer in norms
    }
    network.eval()
    for layer in kept:
        layer.train()
    try:
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training
        for layer, buffers in kept.items():
            for name, buffer in buffers.items():
                layer.get_buffer(name).copy_(buffer)
