"""Scores of architectures by zero-cost proxies, on noise or images, and a start of α by them.

Several proxies are combined by ranks, which need no common unit: the score of an architecture is the share
of random architectures that it beats, averaged over proxies (`MeanRank`).
Over clients a score is pooled: every client scores the network on its own batch, and sends one number.

    S = Σ_c (n_c / n)^d S_c,   n = Σ_c n_c,   n_c examples of client c

n^d S is a sum over examples for ``plain`` (d = 1, S is linear in the gradient of a mean) and ``fisher`` (d = 3,
S is a mean of squares of gradients of a mean): S is the score of all examples in one batch, except that batch
norms see the batch of one client. The others are refused: ``snip`` and ``grad_norm`` are not linear in the gradient,
``grasp`` multiplies gradients of different clients, ``naswot``, ``jacov`` and ``epe`` compare examples of different
clients. ``synflow``, ``l2_norm`` and ``zen`` see no examples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import (
    derive_seed,
    preserve_global_generators,
    seed_global_generators,
    torch_generator,
)
from fl_lightning.data.sources.image_folder import ImageFolder
from fl_lightning.nas.relaxation import EdgeWeights
from fl_lightning.nas.search.proxies import PROXIES, Batch
from fl_lightning.nas.spaces.cells import MakeEdge, WeighedEdge
from fl_lightning.nas.spaces.space import Architecture, Networks, SearchSpace

# the powers d of the scores that can be pooled; 0 for those that see no examples
_POWERS = {"synflow": 0, "l2_norm": 0, "zen": 0, "plain": 1, "fisher": 3}


@final
@dataclass(frozen=True, eq=False)
class ProxyScore:
    """Training-free score of an architecture: a zero-cost proxy (e.g. SynFlow) of its network with random weights.

    Every network is initialised with the same seed, and sees the same batch.

    Attributes:
        name: name of the proxy, one of `PROXIES`.
        networks: networks that are scored.
        batches: a batch of each client, over which the score is pooled; or a single batch.
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
                f"score {self.name} cannot be pooled over {len(self.batches)} clients, because it is no sum over "
                f"examples: use {', '.join(_POWERS)}, or give --images once"
            )

    def __call__(self, architecture: Architecture) -> float:
        """Return the score of an architecture."""
        with _fresh_weights(self.seed):
            network = self.networks.build(architecture).to(self.batches[0][0].device)
        proxy, total = PROXIES[self.name], sum(len(labels) for _, labels in self.batches)
        power = _POWERS.get(self.name, 0)
        seen = self.batches if power else self.batches[:1]
        return sum((len(batch[1]) / total) ** power * proxy(network, *batch) for batch in seen)


@final
class MeanRank:
    """Combined score: rank of an architecture among random architectures, averaged over several scores.

    Args:
        scores: scores of architectures.
        space: space of the random architectures.
        num_others: largest number of random architectures, at least 1; fewer in a small space.
        seed: seed of the random architectures.

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
        """Return the share of random architectures with a lower score, averaged over scores, in [0, 1]."""
        ranks = [
            bisect_left(known, score(architecture)) / len(known) for score, known in self._scores
        ]
        return sum(ranks) / len(ranks)


@contextmanager
def _fresh_weights(seed: int) -> Iterator[None]:
    """Return a context in which new layers get initial weights from a seed."""
    with preserve_global_generators():
        seed_global_generators(derive_seed(seed, "proxy weights"))
        yield


def noise_batch(batch_size: int, networks: Networks, seed: int) -> Batch:
    """Return images of Gaussian noise with random labels, for proxies that are computed without data.

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
    """Return, for each folder, one batch of randomly chosen images with their labels.

    The pixels of a batch have mean 0 and standard deviation 1.

    Args:
        folders: folders with a sub-folder of images per class; sub-folders of the same name are one class.
        batch_size: largest number of images per folder.
        networks: networks that see the images, with 1 in_channels for gray images or 3 for colour.
        seed: seed of the draws.

    Raises:
        ConfigurationError: if a folder or an image cannot be read, or there are too many classes.
    """
    in_channels, num_classes = (networks.shape[name] for name in ("in_channels", "num_classes"))
    if in_channels not in (1, 3):
        raise ConfigurationError(
            f"images: in_channels must be 1 (gray) or 3 (colour), got {in_channels}: change --in_channels, or "
            "leave --images out"
        )
    source = partial(ImageFolder, image_size=networks.side, test=None)
    try:
        every = [source(str(p.parent), train=p.name).load() for p in map(Path, folders)]
    except ConfigurationError as error:
        raise ConfigurationError(f"images: {str(error).removeprefix('root: ')}") from None
    classes = sorted({name for loaded in every for name in loaded.class_names})
    if len(classes) > num_classes:
        raise ConfigurationError(
            f"images {', '.join(map(str, folders))}: there are {len(classes)} classes, and num_classes is "
            f"{num_classes}: set --num_classes to {len(classes)}"
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


@final
@dataclass(frozen=True)
class ZeroCostStart:
    """Initial α without training: how far a zero-cost proxy of the mixture falls if an operation is left out.

        s[r, o] = -S(mixture of equal weights without operation o on row r)
        α₀[r] = scale · (s[r] - mean s[r]) / std s[r]

    S sees noise and random weights, both functions of the seed, so that clients send nothing for it.
    Source: Xiang et al. 2023, AAAI, Zero-Cost Operation Scoring, for the scores s. Differs: they start
    α; the paper selects operations by them, edge by edge, and does not train.

    Attributes:
        proxy: name of the proxy, one of `PROXIES`.
        scale: standard deviation of α over the operations of a row, above 0.

    Raises:
        ConfigurationError: for an unknown proxy, or a value out of range.
    """

    proxy: str = "synflow"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.proxy not in PROXIES:
            raise ConfigurationError(
                f"alpha_start: proxy must be one of {', '.join(PROXIES)}, got {self.proxy!r}"
            )
        check_range("alpha_start: scale", self.scale, "above 0 and finite")

    def alpha(self, networks: Networks, edge: MakeEdge, seed: int) -> Tensor:
        """Compute the initial α, shape (num_rows, num_operations).

        It is 0 for operations that a row lacks, and for rows whose operations have equal scores.

        Args:
            networks: networks of a space of cells.
            edge: function that makes a mixed edge, as that of a rule of relaxation.
            seed: seed of the weights and of the noise.

        Raises:
            ConfigurationError: if a score is not finite, or all scores of every row are equal.
        """
        space: Any = networks.space
        with _fresh_weights(seed):
            network = space.network(edge, affine=False, **networks.shape)
        batch = noise_batch(32, networks, seed)
        equal = space.masked(torch.zeros(space.num_rows, len(space.operations))).softmax(1)
        edges = [module for module in network.modules() if isinstance(module, WeighedEdge)]
        scores = torch.full_like(equal, torch.nan, dtype=torch.float64)
        for row, operation in (equal > 0).nonzero().tolist():
            without = equal.clone()
            without[row, operation] = 0
            for one in edges:
                one.weights = EdgeWeights(without)
            scores[row, operation] = -PROXIES[self.proxy](network, *batch)
        centred = scores - scores.nanmean(1, keepdim=True)
        spread = centred.square().nanmean(1, keepdim=True).sqrt()
        is_equal = spread <= 1e-12 * scores.abs().nan_to_num().amax(1, keepdim=True)
        if is_equal.all() or not scores[equal > 0].isfinite().all():
            raise ConfigurationError(
                f"alpha_start: {self.proxy} of the mixture is not finite, or the same whichever operation is "
                "left out: choose another proxy"
            )
        return (self.scale * centred / spread).masked_fill(is_equal, 0).nan_to_num(0.0).float()
