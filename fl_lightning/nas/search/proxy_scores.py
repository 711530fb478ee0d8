"""Scores of architectures by zero-cost proxies: combined, pooled over clients, on noise or images.

Several proxies are combined by ranks, which need no common unit: the score of an architecture is the share
of random architectures that it beats, averaged over proxies (`MeanRank`).
Over clients a score is pooled: every client scores the network on its own batch, and sends a number.

    S = Σ_c (n_c / n)^d S_c,   n = Σ_c n_c,   n_c examples of client c

n^d S is a sum over examples for ``plain`` (d = 1, S is linear in the gradient of a mean) and ``fisher`` (d = 3,
S is a mean of squares of gradients of a mean): then S is the score of all examples in one batch, but for batch
norms, which see a client's batch alone. ``snip`` and ``grad_norm`` are not linear in the gradient, ``grasp`` multiplies
the gradients of different clients, ``naswot``, ``jacov`` and ``epe`` compare their examples: they are refused.
``synflow``, ``l2_norm`` and ``zen`` see no examples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.data.sources.image_folder import ImageFolder
from fl_lightning.nas.search.proxies import PROXIES
from fl_lightning.nas.spaces.space import Architecture, Networks, SearchSpace

Batch = tuple[Tensor, Tensor]  # images, labels

# the powers d of the scores that can be pooled; 0 for those that see no examples
_POWERS = {"synflow": 0, "l2_norm": 0, "zen": 0, "plain": 1, "fisher": 3}


@final
@dataclass(frozen=True, eq=False)
class ProxyScore:
    """Score of an architecture: a proxy of an untrained network.

    Every network is initialised with the same seed, and sees the same batch.

    Attributes:
        name: name of the proxy, one of `PROXIES`.
        networks: networks that are scored.
        batches: batch of each client; of several the score is pooled.
        seed: seed of the initial weights.

    Raises:
        ConfigurationError: for several batches and a proxy that cannot be pooled.
    """

    name: str
    networks: Networks
    batches: Sequence[Batch]
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.batches) > 1 and self.name not in _POWERS:
            raise ConfigurationError(
                f"score {self.name} is no sum over examples, so that those of {len(self.batches)} clients do "
                f"not add up: use {', '.join(_POWERS)}, or the images of one client"
            )

    def __call__(self, architecture: Architecture) -> float:
        """Return the score of an architecture."""
        device = self.batches[0][0].device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices=devices):  # PyTorch's layers draw from the global one
            torch.manual_seed(derive_seed(self.seed, "proxy weights"))
            network = self.networks.build(architecture).to(device)
        proxy, total = PROXIES[self.name], sum(len(labels) for _, labels in self.batches)
        power = _POWERS.get(self.name, 0)
        seen = self.batches if power else self.batches[:1]
        return sum((len(batch[1]) / total) ** power * proxy(network, *batch) for batch in seen)


@final
class MeanRank:
    """Mean rank of an architecture among random architectures, over several scores.

    Args:
        scores: scores of architectures.
        space: space of the random architectures.
        num_others: number of different random architectures, at least 1; fewer in a small space.
        seed: seed of their draws.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> size = lambda architecture: float(sum(architecture.choices))
        >>> score = MeanRank([size, lambda one: size(one) ** 2], space, num_others=20)
        >>> score(space.smallest), score(space.largest)
        (0.0, 1.0)
    """

    def __init__(
        self,
        scores: Sequence[Callable[[Architecture], float]],
        space: SearchSpace,
        *,
        num_others: int = 64,
        seed: int = 0,
    ) -> None:
        generator = torch_generator(seed, "mean rank")
        drawn = dict.fromkeys(space.sample(generator) for _ in range(4 * num_others))
        others = list(drawn)[:num_others]
        self._scores = [(score, sorted(map(score, others))) for score in scores]

    def __call__(self, architecture: Architecture) -> float:
        """Return the share of random architectures that this one beats, averaged over scores, in [0, 1]."""
        ranks = [
            bisect_left(known, score(architecture)) / len(known) for score, known in self._scores
        ]
        return sum(ranks) / len(ranks)


def noise_batch(batch_size: int, networks: Networks, seed: int) -> tuple[Tensor, Tensor]:
    """Return images of Gaussian noise with random labels, for proxies without data.

    Args:
        batch_size: number of images.
        networks: networks that see the images.
        seed: seed of the draws.
    """
    generator, classes = torch_generator(seed, "proxy batch"), networks.shape["num_classes"]
    images = torch.randn(networks.images(batch_size).shape, generator=generator)
    return images, torch.randint(classes, (batch_size,), generator=generator)


def folder_batches(
    folders: Sequence[str | Path], batch_size: int, networks: Networks, seed: int
) -> list[Batch]:
    """Return random images and labels of each folder, with mean 0 and standard deviation 1 over its batch.

    Args as for `noise_batch`, with a sub-folder of images per class in each of `folders`; sub-folders of one name
    are one class. `in_channels` is 1 for gray images or 3 for color.

    Raises:
        ConfigurationError: if a folder or an image cannot be read, or there are too many classes.
    """
    in_channels, num_classes = (networks.shape[name] for name in ("in_channels", "num_classes"))
    if in_channels not in (1, 3):
        raise ConfigurationError(
            f"images: in_channels must be 1 or 3 for images, got {in_channels}"
        )
    source = partial(ImageFolder, image_size=networks.side, test=None)
    try:
        every = [source(str(p.parent), train=p.name).load() for p in map(Path, folders)]
    except ConfigurationError as error:
        raise ConfigurationError(f"images: {str(error).removeprefix('root: ')}") from None
    classes = sorted({name for loaded in every for name in loaded.class_names})
    if len(classes) > num_classes:
        raise ConfigurationError(
            f"images {', '.join(map(str, folders))}: {len(classes)} classes, and num_classes is "
            f"{num_classes}: raise it"
        )
    batches = []
    for loaded in every:
        rows: Any = loaded.train
        generator = torch_generator(seed, "proxy batch")
        chosen = rows.select(torch.randperm(len(rows), generator=generator)[:batch_size])
        images, numbers = (
            chosen.images.float(),
            torch.tensor(list(map(classes.index, loaded.class_names))),
        )
        if in_channels == 1:
            luminance = torch.tensor([0.299, 0.587, 0.114])
            images = (images * luminance[:, None, None]).sum(1, keepdim=True)
        images = (images - images.mean()) / images.std().clamp_min(1e-6)
        batches.append((images, numbers[chosen.targets]))
    return batches
