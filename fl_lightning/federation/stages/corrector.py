"""A correction at work in a run: terms from memories, memories from updates, their mean.

    m ← m + 1/N Σ_{i in S} (m_i⁺ - m_i)        N: all clients,  S: those whose updates were accepted

A client's new memory counts from the round's end on, as its update does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.corrections.correction import AddedLoss, Correction, GradientTerm, Outcome
from fl_lightning.client.corrections.fedprox import FedProx
from fl_lightning.client.local_solver import LocalSolver
from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, LazyDeltas, Updates
from fl_lightning.server.aggregator import Aggregator, AllReduce
from fl_lightning.server.means.exact_mean import ExactMean
from fl_lightning.server.means.running_mean import RunningMean, new_mean
from fl_lightning.server.server import added_up

_NAME = "correction"


class Corrector:
    """Holds what a correction needs between rounds.

    Args:
        correction: what clients add to their objective; nothing if None.
        memory: where clients' memories are.
        num_clients: all of them, N.
        module: that trains.
        optimizers: the clients'.
        aggregator: says whether sums must have the same bits over any number of processes, and
            whether updates must say how many gradients they add up to.

    Raises:
        ConfigurationError: if the correction refuses module or optimizer, or updates of this
            optimizer do not add up gradients.

    Attributes:
        correction: as given; one that does nothing if None.
    """

    def __init__(
        self,
        correction: Correction | None,
        memory: ClientMemory,
        num_clients: int,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        aggregator: Aggregator,
    ) -> None:
        self.correction: Correction = correction or FedProx(mu=0.0)
        for optimizer in optimizers:
            self.correction.check(module, optimizer)
        self._memory, self._num_clients = memory, num_clients
        # rules that see all updates give the same bits over any number of processes as well
        self._exact = aggregator.exact or aggregator.exchanges
        self._module = module
        self._solver = LocalSolver(*optimizers, pull=self.correction.pull)
        self._counts_steps = aggregator.needs_effective_steps
        if self._counts_steps:
            # refuses what has no such number; after one step all momenta are alike
            self._solver.effective_steps(2)
        self._mean: Tensor | None = None

    def open_round(self, like: Tensor) -> None:
        """Forget what an unfinished round has learnt; ``like`` is a vector of shape (k,)."""
        self._device = like.device
        self._changes = self._new_mean(like)
        self._num_changes = 0

    def _new_mean(self, like: Tensor) -> RunningMean | ExactMean:
        kept = like if self.correction.needs_mean else like.new_empty(0)
        is_exact = self._exact and like.device.type != "mps"  # which lacks float64
        return new_mean(kept, exact=is_exact)

    @property
    def kind(self) -> str | None:
        """What checkpoints call a correction with memories; None without."""
        return type(self.correction).__name__ if self.correction.remembers else None

    def term(self, client: int) -> GradientTerm:
        """Return a client's term for this round.

        Raises:
            ConfigurationError: if it has another pull than the correction says, which slots go by.
        """
        term = self.correction.term(self._recalled(client), self._mean)
        if term.pull != self.correction.pull:
            name = type(self.correction).__name__
            raise ConfigurationError(
                f"federation.correction {name}: its term for client {client} has the pull {term.pull}, "
                f"and its pull is {self.correction.pull}: let both be the same number"
            )
        return term

    def contrast(self, client: int, start: Tensor, space: Space) -> AddedLoss | None:
        """Return what a client adds to its loss in this round; None if nothing.

        Args:
            client: its id.
            start: the global model, shape (k,).
            space: of its coordinates.
        """
        last = self._recalled(client) if self.correction.changes_loss else None
        if last is None:
            return None
        return self.correction.added_loss(self._module, space, start, last)

    def accept(
        self, update: ClientUpdate, start: Tensor, space: Space, gradient: Callable[[], Tensor]
    ) -> None:
        """Remember a client's round; one whose optimizer took no step has shown nothing.

        Args:
            update: what it sent.
            start: the global model, shape (k,).
            space: of its coordinates.
            gradient: gives the gradient of its whole shard at ``start``.
        """
        num_steps = _optimizer_steps(update)
        if not (self.correction.remembers and _any(num_steps)):
            return
        outcome = Outcome(
            start, update.delta, lambda: self._solver.travel(num_steps, space), gradient
        )
        before = self._recalled(update.client_id)
        after = self.correction.remember(before, self._mean, outcome)
        self._memory.put(_NAME, update.client_id, after)
        if self.correction.needs_mean:
            self._changes.add(after if before is None else after - before, 1)
            self._num_changes += 1

    def counted(self, updates: Updates) -> Updates:
        """Have updates say how many gradients they add up to, where the aggregator asks for it."""
        if not self._counts_steps:
            return updates
        taken = updates.optimizer_steps or [None] * len(updates.num_steps)
        pairs = zip(updates.num_steps, taken, strict=True)
        steps = [self._solver.effective_steps(n if own is None else own) for n, own in pairs]
        return replace(updates, effective_steps=steps)

    def bytes_up(self, like: Tensor | LazyDeltas, *, is_lossy: bool) -> int:
        """Return how many bytes a client sends besides its update: the change of its memory.

        Args:
            like: updates, shape (…, k).
            is_lossy: whether what arrives of an update is not what was sent.
        """
        rule = self.correction
        travels = rule.needs_mean and (is_lossy or not rule.shows_change)
        return _num_bytes(like) if travels else 0

    def bytes_down(self, like: Tensor) -> int:
        """Return how many bytes a client gets besides the model, shape (k,): the mean."""
        rule = self.correction
        return _num_bytes(like) if rule.needs_mean and rule.reads_mean else 0

    def reduce(self, all_reduce: AllReduce) -> None:
        """Add up what the clients of all processes have learnt."""
        if not self.correction.needs_mean:
            return
        sums = self._changes.sums()
        count = torch.full_like(sums[-1], self._num_changes)
        *sums, count = added_up([*sums, count], all_reduce)
        self._changes.load_sums(sums)
        self._num_changes = int(count)

    def close_round(self) -> None:
        """Let what the clients have learnt count; their memories are committed by themselves."""
        if self._num_changes:
            change = self._changes.value() * (self._num_changes / self._num_clients)
            self._mean = change if self._mean is None else self._mean + change

    def pseudo_gradient(self, aggregate: Tensor) -> Tensor:
        """Return what the server descends; to be called after `close_round`."""
        return self.correction.pseudo_gradient(aggregate, self._mean)

    def relocate(self, positions: Tensor) -> None:
        """Go on in other coordinates, see `Server.relocate`; what is new is 0.

        Memories that are models are dropped: 0 is no weight that a model had.
        """
        if not self.correction.needs_mean:
            self._memory.forget(_NAME)
            return
        self._memory.relocate(_NAME, positions)
        if self._mean is not None:
            known = self._mean[positions.clamp(min=0)]
            self._mean = torch.where(positions >= 0, known, 0)

    def _recalled(self, client: int) -> Tensor | None:
        if not self.correction.remembers:
            return None
        vector = self._memory.get(_NAME, client)
        return None if vector is None else vector.to(self._device)

    def state_dict(self, *, with_round: bool = True) -> dict[str, Any]:
        """Return the mean and, inside a round, what has been learnt so far; not the memories."""
        state: dict[str, Any] = {"kind": self.kind, "mean": self._mean}
        return state | {"round": self.round_state()} if with_round else state

    def load_state_dict(self, state: dict[str, Any], like: Tensor) -> None:
        """Take up where `state_dict` left off."""
        self.open_round(like)
        mean = state.get("mean")  # nothing is saved of a correction without memories
        self._mean = None if mean is None else mean.to(like.device)
        if "round" in state:
            self.load_round_state(state["round"])

    def round_state(self) -> dict[str, Any]:
        """Return what has been learnt in the open round but for memories."""
        return {"changes": self._changes.state_dict(), "num_changes": self._num_changes}

    def load_round_state(self, state: dict[str, Any]) -> None:
        """Take up where `round_state` left off."""
        self._changes.load_state_dict(state["changes"])
        self._num_changes = state["num_changes"]


def _optimizer_steps(update: ClientUpdate) -> int | tuple[int, ...]:
    return update.num_steps if update.optimizer_steps is None else update.optimizer_steps


def _any(num_steps: int | tuple[int, ...]) -> bool:
    return num_steps > 0 if isinstance(num_steps, int) else any(num_steps)


def _num_bytes(like: Tensor | LazyDeltas) -> int:
    return like.shape[-1] * like.dtype.itemsize
