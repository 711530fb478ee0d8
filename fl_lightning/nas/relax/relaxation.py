"""How a search runs many architectures in one network: what a rule of relaxation must offer.

    edge r of the network:  y = Σ_o h[r, o] · o(x),   h = weights(α)

A rule makes h of the architecture parameters α, once a step for the whole network, and says which
operations have to run at all. Gradients of α flow through h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import Candidate


@dataclass(frozen=True)
class SearchStep:
    """What a step of the search tells a rule, besides α.

    Attributes:
        progress: part of the search that is over, in [0, 1].
        generator: of the step's draws, on the CPU; a rule that draws needs one. Key it by seed,
            round, client and step, and the same step draws the same on every device.
        moves_alpha: whether this step is to move α; else it moves the weights.

    Raises:
        ConfigurationError: if the progress is not in [0, 1].
    """

    progress: float = 0.0
    generator: torch.Generator | None = None
    moves_alpha: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.progress <= 1:
            raise ConfigurationError(
                f"progress must be in [0, 1], got {self.progress}: it is the part of the search "
                "that is over"
            )


@dataclass(frozen=True, eq=False)
class EdgeWeights:
    """What the edges of a network multiply their operations by; every edge looks at its row.

    Attributes:
        operations: h, (num_rows, num_operations).
        running: for every row, the numbers of the operations that run; None: all of them do.
        bare: whether operations that do not run add their bare h, which is zero: the sum stays,
            and their α gets a gradient as if they had given ones.
        edges: factors of whole edges, (num_rows,); None: one.
    """

    operations: Tensor
    running: tuple[tuple[int, ...], ...] | None = None
    bare: bool = False
    edges: Tensor | None = None


class MixedEdge(nn.Module):
    """All candidates of one edge; those that a step needs run.

    Args:
        row: of α.
        operations: in the order of α's columns.
    """

    def __init__(self, row: int, operations: Sequence[nn.Module]) -> None:
        super().__init__()
        self.row = row
        self.operations = nn.ModuleList(operations)

    def forward(self, x: Tensor, weights: EdgeWeights | None = None) -> Tensor:
        """Return Σ_o h[row, o] · o(x).

        Raises:
            ValueError: if there are no weights, or not one for each operation.
        """
        if weights is None:
            raise ValueError("an edge of a search needs the weights that a rule makes of alpha")
        h = weights.operations[self.row]
        if len(h) != len(self.operations):
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
    """A rule: what edges are made of, and what they multiply their operations by.

    Attributes:
        alpha_from: progress from which α moves; before, weights alone learn.
        has_beta: whether the rule has logits β of whole edges, (num_rows,), besides α.
        draws: whether its weights depend on draws, so that no network is the mean of all.
    """

    alpha_from: float = 0.0
    has_beta: bool = False
    draws: bool = True

    @abstractmethod
    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return what the edges multiply by in one step.

        Args:
            alpha: logits, (num_rows, num_operations); gradients flow.
            step: of the search.
            edge_shares: softmax of β over a node's edges (`CellSpace.edge_shares`), (num_rows,),
                where the rule `has_beta`; gradients flow.
        """

    def edge(
        self,
        row: int,
        candidates: Sequence[Candidate],
        channels_in: int,
        channels_out: int,
        stride: int,
    ) -> nn.Module:
        """Return an edge that a space's `network` takes (`MakeEdge`)."""
        return MixedEdge(row, [make(channels_in, channels_out, stride) for make in candidates])

    def temperature(self, progress: float) -> float:
        """Return τ when this part of the search is over, in [0, 1]."""
        return 1.0

    def stepped(self, before: Tensor, after: Tensor, weights: EdgeWeights) -> Tensor:
        """Return where α stands after a step of its optimizer took it from `before` to `after`.

        Args:
            before: (num_rows, num_operations).
            after: (num_rows, num_operations).
            weights: of the step.
        """
        return after


def drawn_from(step: SearchStep) -> torch.Generator:
    """Return the generator of a step.

    Raises:
        ValueError: if it has none.
    """
    if step.generator is None:
        raise ValueError("this rule draws operations: give the step a generator")
    return step.generator


def gumbel_noise(alpha: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gumbel noise of α's shape; drawn in float64 on the CPU, so the same everywhere."""
    exponential = torch.empty(alpha.shape, dtype=torch.float64).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(torch.float64).tiny).log().to(alpha)


def drawn_operations(alpha: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """Return different operations of each row, drawn by softmax(α) one after the other.

    Args:
        alpha: (num_rows, num_operations).
        num_draws: how many of each row.
        generator: of the draws.

    Returns:
        Their numbers, (num_rows, num_draws). The largest of α plus Gumbel noise are such draws
        (Kool et al. 2019), and no probability that rounds to zero can break them.
    """
    logits = alpha.detach().cpu().double()
    return (logits + gumbel_noise(logits, generator)).topk(num_draws, dim=1).indices


def one_hot(choices: Tensor, like: Tensor) -> Tensor:
    """Return ones at the choices (num_rows, 1) and zeros elsewhere, of the shape of `like`."""
    return torch.zeros_like(like).scatter(1, choices.to(like.device), 1.0)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return `hard` to the last bit, with the gradient of `soft`.

    ``soft - soft`` is zero exactly, so this order needs no luck with rounding.
    """
    return hard + (soft - soft.detach())
