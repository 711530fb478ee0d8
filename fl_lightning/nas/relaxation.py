"""Rules of relaxation, which weigh the operations on the edges of a supernet by α: base class and three rules.

    edge r of the network:  y = Σ_o h[r, o] · o(x),   h = weights(α)

Once per step a rule computes h from the architecture parameters α, and selects the operations that run.
Gradients of α flow through h. Rules with noise are in `sampled_paths`.

    Softmax (DARTS)              h = softmax(α): all operations run
    SinglePath                   h = onehot(o),   o ~ softmax(α): one operation per edge, no gradient of α
    PartialChannels (PC-DARTS)   y = β' · shuffle([Σ_o softmax(α)_o o(x_first), x_rest]),
                                 β' = softmax(β) over a node's edges

With α = 0, `SinglePath` trains all architectures with equal probability (random search with shared weights).
PC-DARTS sends a part of the channels through the operations. The others bypass them, and are pooled if the
operations halve the image size. The shuffle gives the next edge other channels. β' makes the choice of edges
stable, since α of an edge depends on the chosen channels. α is fixed for the first 15 of the 50 epochs.
Sources: Liu, Simonyan, Yang 2019, DARTS, eq. 2; Pham et al. 2018, ENAS; Li, Talwalkar 2019; Guo et al.
2020, Single Path One-Shot; Xu et al. 2020, PC-DARTS, sections 3.2 and 3.3, and its code.
Differs: the pool of the bypassing channels rounds odd sides up, as strided convolutions do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.nas.spaces.cells import Candidate, WeighedEdge


@dataclass(frozen=True)
class SearchStep:
    """Inputs of a relaxation rule, besides α, in one step of the search: progress, random generator and so on.

    Attributes:
        progress: completed fraction of the search, in [0, 1].
        generator: generator of the step's draws, for rules that draw; on the CPU, so that the draws are
            equal on every device.
        moves_alpha: True in a step of α, False in a step of the weights.
        none: index of the operation ``none``; -1 if the space has none.
    """

    progress: float = 0.0
    generator: torch.Generator | None = None
    moves_alpha: bool = True
    none: int = -1


@dataclass(frozen=True, eq=False)
class EdgeWeights:
    """Weights for each edge of a search network: one per operation, and optionally one for the whole edge.

    Attributes:
        operations: factors h, shape (num_rows, num_operations).
        running: indices of the operations that run, per row; None if all run.
        bare: whether an operation that does not run adds its h, which is zero: then its α gets the gradient
            of an output of ones.
        edges: factors of whole edges, shape (num_rows,); None if all are one.
    """

    operations: Tensor
    running: tuple[tuple[int, ...], ...] | None = None
    bare: bool = False
    edges: Tensor | None = None


class MixedEdge(WeighedEdge):
    """Edge that sums its candidate operations, weighted by `EdgeWeights`; operations not selected do not run."""

    def __init__(self, row: int, operations: Sequence[nn.Module]) -> None:
        super().__init__()
        self.row = row
        self.operations = nn.ModuleList(operations)

    def forward(self, x: Tensor, weights: EdgeWeights | None = None) -> Tensor:
        """Return the weighted sum of the operations' outputs, Σ_o h[row, o] · o(x).

        Raises:
            ValueError: if there are no weights, or fewer weights than operations.
        """
        weights = weights or self.weights
        if weights is None:
            raise ValueError(
                "this network is a mixture of operations: call it with edge weights, e.g. those of a rule"
            )
        h = weights.operations[self.row]
        if len(h) < len(self.operations):
            raise ValueError(
                f"this edge has {len(self.operations)} operations, got {len(h)} weights"
            )
        everything = range(len(self.operations))
        running = everything if weights.running is None else weights.running[self.row]
        terms = [h[number] * self.operations[number](x) for number in running]
        if weights.bare:
            terms += [h[number] for number in everything if number not in running]
        total: Tensor = sum(terms[1:], start=terms[0])
        return total


class Relaxation(ABC):
    """Base of the relaxation rules, which turn α into weights of the operations on every edge.

    Attributes:
        alpha_from: fraction of the search, in [0, 1], in which only the weights learn.
        has_beta: whether the rule has logits β of whole edges, shape (num_rows,), besides α.
        draws: whether the factors are random, so that there is no fixed mixture of all operations.
    """

    alpha_from: float = 0.0
    has_beta: bool = False
    draws: bool = True

    @abstractmethod
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        """Return the weights of the operations on every edge; the caller adds weights of whole edges if `has_beta`.

        Args:
            alpha: logits, shape (num_rows, num_operations); gradients flow.
            step: the step of the search.
        """

    def edge(self, row: int, candidates: Sequence[Candidate], *sizes: int) -> nn.Module:
        """Build an edge with these candidate operations; passed as ``make_edge`` to `CellSpace.network`."""
        return MixedEdge(row, [make(*sizes) for make in candidates])

    def stepped(self, before: Tensor, after: Tensor, weights: EdgeWeights) -> Tensor:
        """Return α after the optimizer's step, corrected by this rule; by default not corrected.

        Args:
            before: α before the step, shape (num_rows, num_operations).
            after: α after the step, same shape.
            weights: edge weights of the step.
        """
        return after


def drawn_from(step: SearchStep) -> torch.Generator:
    """Return a search step's random generator; raises ValueError if the step has none."""
    if step.generator is None:
        raise ValueError("this rule draws operations: give the SearchStep a generator")
    return step.generator


def gumbel_noise(alpha: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gumbel noise in the shape of α, drawn in float64 on the CPU so that all devices draw the same."""
    exponential = torch.empty(alpha.shape, dtype=torch.float64).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(torch.float64).tiny).log().to(alpha)


def drawn_operations(alpha: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """Draw several different operations for each edge, without replacement, with probabilities softmax(α).

    They are the largest of α plus Gumbel noise (Kool et al. 2019), also if probabilities round to zero.

    Args:
        alpha: logits, shape (num_rows, num_operations).
        num_draws: number of operations per row.
        generator: generator of the draws.

    Returns:
        Indices of the operations, shape (num_rows, num_draws).
    """
    logits = alpha.detach().cpu().double()
    return (logits + gumbel_noise(logits, generator)).topk(num_draws, dim=1).indices


def one_hot(choices: Tensor, like: Tensor) -> Tensor:
    """Return a tensor like `like`: in each row 1 at the index in `choices`, shape (num_rows, 1), and 0 elsewhere."""
    return torch.zeros_like(like).scatter(1, choices.to(like.device), 1.0)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return `hard`, bit for bit, with the gradient of `soft` (straight-through estimator).

    ``soft - soft`` is exactly zero, so this order of the sum has no rounding error.
    """
    return hard + (soft - soft.detach())


@final
class Softmax(Relaxation):
    """DARTS relaxation: all operations of an edge run, weighted by the softmax of α.

    Example:
        >>> import torch
        >>> Softmax().weights(torch.zeros(1, 4), SearchStep()).operations
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    draws = False

    @override
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        return EdgeWeights(alpha.softmax(1))


def weights_of(choices: Sequence[int], like: Tensor) -> EdgeWeights:
    """Return edge weights under which each edge runs one chosen operation.

    Args:
        choices: index of the operation on every row.
        like: tensor of shape (num_rows, num_operations) with the dtype and device to use.

    Example:
        >>> weights_of([1, 0], torch.zeros(2, 3)).operations
        tensor([[0., 1., 0.],
                [1., 0., 0.]])
    """
    column = torch.tensor(choices)[:, None]
    return EdgeWeights(one_hot(column, like.detach()), tuple((number,) for number in choices))


@final
class SinglePath(Relaxation):
    """ENAS relaxation: each edge runs one operation, drawn by softmax(α); α gets no gradient from the loss."""

    @override
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        return weights_of(drawn_operations(alpha, 1, drawn_from(step))[:, 0].tolist(), alpha)


def shuffle_channels(x: Tensor, num_groups: int) -> Tensor:
    """Interleave the channels of the groups: first channel of every group, then second of every group, and so on.

    Example:
        >>> shuffle_channels(torch.arange(8.0).reshape(1, 8), 4)
        tensor([[0., 2., 4., 6., 1., 3., 5., 7.]])
    """
    batch, channels, *sides = x.shape
    grouped = x.reshape(batch, num_groups, channels // num_groups, *sides)
    return grouped.transpose(1, 2).reshape(x.shape)


class PartialEdge(WeighedEdge):
    """Edge of PC-DARTS: candidate operations run on the first 1/K of the channels; other channels bypass them."""

    def __init__(self, mixed: MixedEdge, part: int, stride: int) -> None:
        super().__init__()
        self.mixed, self._part, self._stride = mixed, part, stride

    def forward(self, x: Tensor, weights: EdgeWeights | None = None) -> Tensor:
        """Return all channels, shuffled and, if edges have weights, multiplied by this edge's weight."""
        weights = weights or self.weights
        active = x.shape[1] // self._part
        y = self.mixed(x[:, :active], weights)
        if self._part > 1:
            rest = x[:, active:]
            if self._stride > 1:
                rest = functional.max_pool2d(rest, self._stride, ceil_mode=True)
            y = shuffle_channels(torch.cat([y, rest], 1), self._part)
        if weights is None or weights.edges is None:
            return y  # type: ignore[no-any-return]
        return weights.edges[self.mixed.row] * y  # type: ignore[no-any-return]


@final
class PartialChannels(Relaxation):
    """PC-DARTS relaxation: operations run on 1/K of the channels, and each edge has a weight.

    Args:
        part: number K of channels of which one runs through the operations, at least 1; 4 in the paper,
            2 for ImageNet.
        edge_weights: whether edges have logits β; False with ``part=1`` is DARTS.
        alpha_from: fraction of the search, in [0, 1], in which α and β do not move.
    """

    draws = False

    def __init__(
        self, part: int = 4, edge_weights: bool = True, alpha_from: float = 15 / 50
    ) -> None:
        check_range("part", part, "at least 1", ": 1 in `part` channels")
        check_range("alpha_from", alpha_from, "in [0, 1]")
        self._part, self.has_beta, self.alpha_from = part, edge_weights, alpha_from

    @override
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        return EdgeWeights(alpha.softmax(1))

    def edge(self, row: int, candidates: Sequence[Candidate], *sizes: int) -> nn.Module:
        """Build an edge whose operations run on 1/K of the channels.

        Raises:
            ConfigurationError: if K does not divide the channels, or the edge changes their number.
        """
        channels_in, channels_out, stride = sizes
        if channels_in != channels_out and self._part > 1:
            raise ConfigurationError(
                f"PartialChannels: the channels that bypass the operations keep their number, but this edge converts "
                f"{channels_in} channels to {channels_out}: use another space or rule, or set part to 1"
            )
        if channels_in % self._part:
            raise ConfigurationError(
                f"PartialChannels: part is {self._part}, and an edge has {channels_in} channels: set part to a "
                f"divisor, or model.channels to a multiple of {self._part}"
            )
        active = channels_in // self._part, channels_out // self._part
        mixed = MixedEdge(row, [make(*active, stride) for make in candidates])
        return PartialEdge(mixed, self._part, stride)
