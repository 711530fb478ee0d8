"""What a client adds to its objective, so that clients with other data do not drift apart.

    gradient of client i at y:   ∇F_i(y) + pull · (y - x) + shift_i        x: where its round began

FedProx has a pull, SCAFFOLD a shift, FedDyn both. What differs between clients comes from one
vector that each remembers from the last round in which it took part, m_i (0 before the first), and
from the mean of these over all clients, m = 1/N Σ_i m_i, which is all that the server keeps. So a
correction is a few functions of vectors, and the run stores the memories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class GradientTerm:
    """What is added to a client's gradient in every local step: pull · (y - x) + shift.

    Attributes:
        pull: ≥ 0.
        shift: shape (k,); None is 0.
    """

    pull: float = 0.0
    shift: Tensor | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to add."""
        return self.pull == 0 and self.shift is None


@dataclass(frozen=True)
class Outcome:
    """A client's round as its correction sees it.

    Attributes:
        start: the global model x, shape (k,).
        delta: x - y of the client, shape (k,).
        travel: gives how far each coordinate would have moved under a gradient of 1, η ‖a‖₁: a
            number, or of shape (k,) where parameter groups differ. Raises a `ConfigurationError`
            if the optimizer has no such number.
        gradient: gives the gradient of the client's whole shard at x, shape (k,).
    """

    start: Tensor
    delta: Tensor
    travel: Callable[[], Tensor | float]
    gradient: Callable[[], Tensor]


class Correction(Protocol):
    """How clients correct their gradients; frozen and without state.

    Attributes:
        pull: of every client's term, ≥ 0.
        remembers: whether clients have a memory.
        has_shift: whether terms may have a shift.
        needs_mean: whether the mean of all memories is needed.
        reads_mean: whether clients need it, so that it travels with the model.
        shows_change: whether the server can tell from a client's update how its memory changed; if
            not, and the mean is needed, the change travels with the update.
    """

    @property
    def pull(self) -> float:
        """Of every client's term, ≥ 0."""

    @property
    def remembers(self) -> bool:
        """Whether clients have a memory."""

    @property
    def has_shift(self) -> bool:
        """Whether terms may have a shift."""

    @property
    def needs_mean(self) -> bool:
        """Whether the mean of all memories is needed."""

    @property
    def reads_mean(self) -> bool:
        """Whether clients need it."""

    @property
    def shows_change(self) -> bool:
        """Whether a client's update tells how its memory changed."""

    def check(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Refuse a module, or an optimizer of the clients, with which it makes no sense.

        Raises:
            ConfigurationError: saying why.
        """

    def term(self, memory: Tensor | None, mean: Tensor | None) -> GradientTerm:
        """Return a client's term for this round; a memory or a mean that is None is 0."""

    def remember(self, memory: Tensor | None, mean: Tensor | None, outcome: Outcome) -> Tensor:
        """Return what a client remembers after a round, a new vector of shape (k,)."""

    def pseudo_gradient(self, aggregate: Tensor, mean: Tensor | None) -> Tensor:
        """Return what the server descends.

        Args:
            aggregate: of the round's updates, shape (k,).
            mean: of all clients' memories after the round.
        """
