"""Corrections of a client's objective, which keep clients with different data from drifting apart.

    gradient of client i at y:   ∇F_i(y) + pull · (y - x) + shift_i        x: the global model

FedProx has a pull, SCAFFOLD a shift, FedDyn both. The shift depends on the client's memory m_i, one
vector that is computed after each of the client's rounds (0 before the first), and on the mean of all
clients' memories, m = 1/N Σ_i m_i, on the server. So a correction is a few functions of vectors; the run
stores the memories.

The term is added to gradients before clipping and the optimizer's step, as if it were part of the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.space import Space
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits


@dataclass(frozen=True)
class GradientTerm:
    """The term that a client adds to its gradient at y: pull · (y - x) + shift, with x the global model.

    Attributes:
        pull: strength of the pull towards the global model, ≥ 0.
        shift: vector of shape (k,); None stands for 0.
    """

    pull: float = 0.0
    shift: Tensor | None = None

    @property
    def is_nothing(self) -> bool:
        """True if the term is 0 everywhere."""
        return self.pull == 0 and self.shift is None


@dataclass(frozen=True)
class Outcome:
    """Result of a client's local training, from which a correction computes the client's new memory.

    Attributes:
        start: the global model x, shape (k,).
        delta: global model minus the client's model, x - y, shape (k,).
        travel: returns the distance η ‖a‖₁ of each coordinate under a gradient of 1 (`LocalSolver`): one
            number, or shape (k,) if parameter groups differ. It raises `ConfigurationError` if the
            optimizer is not SGD.
        gradient: returns the gradient of the client's whole shard at x, shape (k,).
    """

    start: Tensor
    delta: Tensor
    travel: Callable[[], Tensor | float]
    gradient: Callable[[], Tensor]


# Returns the term that a client adds to the loss of a batch, a scalar with a gradient.
AddedLoss = Callable[[Any], Tensor]


_OF_MEMORIES = Traits(
    needs={
        Trait.COHORTS: "compares clients that start from the same model",
        Trait.ONE_MASK: "stores a number for every coordinate",
    },
    instead={
        Trait.COHORTS: "use FedProx",
        Trait.ONE_MASK: "use one mask for all, or FedProx",
    },
)
_OF_MEANS = Traits(
    needs={Trait.SINGLE_UPDATES: "sends the change of a client's memory in addition to its update"},
    breaks={
        Trait.PRIVATE_CLIENTS: "sends the mean of clients' memories to everybody, without clipping or noise"
    },
    instead={
        Trait.SINGLE_UPDATES: "use FedProx, or no correction",
        Trait.PRIVATE_CLIENTS: "use FedProx, or no correction",
    },
)
# of corrections that use a client's examples or loss outside of its local steps
OF_LOSSES = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "uses a client's examples in addition to its noisy steps"},
    instead={Trait.PRIVATE_EXAMPLES: "use FedProx, FedDyn or Scaffold with option II"},
)


class Correction(Ranged):
    """Base of corrections against client drift (FedProx, SCAFFOLD, …); subclasses are frozen dataclasses.

    Override `pull` for a pull towards the global model, `shift` for a shift, and `remember` for
    a memory. The other properties follow from the overridden methods.

    Attributes:
        needs_mean: whether the server computes the mean of all memories.
        reads_mean: whether clients use the mean memory, which is then sent with the model.

    Example:
        >>> class Halved(Correction):
        ...     pull = 0.5
        >>> Halved().pull, Halved().has_shift, Halved().remembers
        (0.5, False, False)
    """

    needs_mean: bool = False
    reads_mean: bool = False

    @property
    def pull(self) -> float:
        """Strength of the pull towards the global model, ≥ 0, the same for all clients."""
        return 0.0

    @property
    def remembers(self) -> bool:
        """True if each client keeps a vector from round to round (its memory): the class overrides `remember`."""
        return type(self).remember is not Correction.remember

    @property
    def has_shift(self) -> bool:
        """True if clients may add a constant vector to their gradients: the class overrides `shift`."""
        return type(self).shift is not Correction.shift

    @property
    def shows_change(self) -> bool:
        """True if the server can compute from a client's update how the client's memory vector changed.

        Otherwise, if the mean is needed, the change is sent with the update.
        """
        return True

    @property
    def changes_loss(self) -> bool:
        """True if the correction changes the loss or the outputs; such clients train one after the other."""
        own = type(self)
        base = Correction
        return own.added_loss is not base.added_loss or own.calibrated is not base.calibrated

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the correction needs or breaks, to detect conflicting options."""
        traits = OF_LOSSES if self.changes_loss else NO_TRAITS
        if self.remembers:
            traits |= _OF_MEMORIES
        return traits | _OF_MEANS if self.needs_mean else traits

    def check(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Raise ConfigurationError if the correction does not support the module or the clients' optimizer."""
        return

    def check_server(self, optimizer: Optimizer) -> None:
        """Raise ConfigurationError if the correction does not support the server optimizer."""
        return

    def shift(self, memory: Tensor | None, mean: Tensor | None) -> Tensor | None:
        """Return the vector that a client adds to its gradients in every step of a round, shape (k,); None for 0.

        Args:
            memory: memory of the client, shape (k,); None stands for 0.
            mean: mean of all memories, shape (k,); None stands for 0.
        """
        return None

    def remember(self, memory: Tensor | None, mean: Tensor | None, outcome: Outcome) -> Tensor:
        """Return the vector that the client keeps for its next round (its memory), shape (k,)."""
        return torch.zeros_like(outcome.delta)

    def pseudo_gradient(self, aggregate: Tensor, mean: Tensor | None) -> Tensor:
        """Return the vector that the server optimizer descends, shape (k,).

        Args:
            aggregate: aggregate of the round's updates, shape (k,).
            mean: mean of all memories after the round, shape (k,); None stands for 0.
        """
        return aggregate

    def added_loss(
        self, module: nn.Module, space: Space, start: Tensor, memory: Tensor
    ) -> AddedLoss | None:
        """Return a function that computes the term added to the client's loss on a batch; None if there is none.

        Args:
            module: the client's model.
            space: layout of the trainable parameters.
            start: the global model, shape (k,).
            memory: memory of the client, shape (k,).
        """
        return None

    def calibrated(
        self, module: nn.Module, labels: Callable[[], Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context that changes the module's outputs while a client trains.

        Args:
            module: the client's model.
            labels: returns the labels of the client's training examples, shape (n,).
        """
        return nullcontext()


# A parameter with frozen entries: the tensor, indices of the active entries, x and the shift there.
Part = tuple[Tensor, Tensor, Tensor, Tensor | None]


class AddedTerm:
    """A `GradientTerm` bound to one client's parameters, to whose gradients it is added.

    Args:
        space: layout of the trainable parameters.
        start: the global model x, shape (k,).
        term: pull and shift.

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> space = Space.of_parameters(layer)
        >>> added = AddedTerm(space, space.read() - 1, GradientTerm(0.5, torch.tensor([0.0, 3.0])))
        >>> added.add()
        >>> layer.weight.grad
        tensor([[0.5000, 3.5000]])
    """

    def __init__(self, space: Space, start: Tensor, term: GradientTerm) -> None:
        self._pull = term.pull
        shift = torch.zeros_like(start) if term.shift is None else term.shift
        self._whole: list[Tensor] = []
        self._starts: list[Tensor] = []
        self._shifts: list[Tensor] = []
        self._parts: list[Part] = []
        self._has_shift = term.shift is not None
        pairs = zip(space.entries(start), space.entries(shift), strict=True)
        for (param, index, before), (_, _, own) in pairs:
            # in half precision a client starts from the rounded values
            before, own = before.to(param.dtype), own.to(param.dtype)
            if index is not None:
                self._parts.append((param, index, before, own if self._has_shift else None))
                continue
            self._whole.append(param)
            self._starts.append(before)
            self._shifts.append(own)

    def of(self, params: Collection[Tensor]) -> AddedTerm:
        """Return the same term restricted to some of the parameters."""
        chosen, part = set(params), copy.copy(self)
        kept = [n for n, param in enumerate(self._whole) if param in chosen]
        part._whole = [self._whole[n] for n in kept]
        part._starts = [self._starts[n] for n in kept]
        part._shifts = [self._shifts[n] for n in kept]
        part._parts = [each for each in self._parts if each[0] in chosen]
        return part

    @property
    def params(self) -> list[Tensor]:
        """Parameters to whose gradients the term is added."""
        return [*self._whole, *(param for param, *_ in self._parts)]

    @torch.no_grad()
    def add(self, scale: float = 1.0) -> None:
        """Add the term to the parameters' gradients; a missing gradient counts as 0.

        Args:
            scale: factor of the existing gradients (`torch.amp.GradScaler`), by which the term is multiplied.

        Raises:
            ConfigurationError: if a gradient is sparse.
        """
        grads = [_gradient(param) for param in self._whole]
        if self._pull and grads:
            away = torch._foreach_sub(self._whole, self._starts)
            torch._foreach_add_(grads, away, alpha=self._pull * scale)
        if self._has_shift and grads:
            torch._foreach_add_(grads, self._shifts, alpha=scale)
        for param, index, before, shift in self._parts:
            term = (param.reshape(-1).index_select(0, index) - before) * (self._pull * scale)
            if shift is not None:
                term.add_(shift, alpha=scale)
            _gradient(param).put_(index, term, accumulate=True)

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the term that the objective gains, pull/2 ‖y - x‖² + ⟨shift, y - x⟩, a scalar."""
        away = torch._foreach_sub(self._whole, self._starts)
        triples = list(zip(away, self._shifts, strict=True))
        for param, index, before, shift in self._parts:
            moved = param.reshape(-1).index_select(0, index) - before
            triples.append((moved, torch.zeros_like(moved) if shift is None else shift))
        if not triples:
            return torch.zeros(())
        values = [
            0.5 * self._pull * moved.square().sum() + (moved * shift).sum()
            for moved, shift in triples
        ]
        return torch.stack(values).sum()


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    elif param.grad.layout is not torch.strided:
        raise ConfigurationError(
            "federation.correction adds a term to the gradient of every entry, but the gradient of an embedding "
            "is sparse: set sparse=False in nn.Embedding"
        )
    return param.grad
