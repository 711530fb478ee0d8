"""A correction at work in a run: terms from memories, memories from updates, their mean.

    m ← m + 1/N Σ_{i in S} (m_i⁺ - m_i)        N: all clients,  S: those whose updates were accepted

A client's new memory counts from the round's end on, as its update does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.correction import Correction, GradientTerm, Outcome
from fl_lightning.client.local_solver import LocalSolver
from fl_lightning.client.memory import ClientMemory, Key
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregators import new_mean
from fl_lightning.server.server import AllReduce, added_up

_NAME = "correction"


@dataclass(frozen=True)
class Snapshot:
    """What a corrector had learnt in the open round at one moment.

    Attributes:
        state: sums over clients.
        waiting: whose memories are to count at the round's end.
    """

    state: dict[str, Any]
    waiting: frozenset[Key]


class Corrector:
    """Holds what a correction needs between rounds.

    Args:
        correction: what clients add to their objective.
        memory: where clients' memories are.
        num_clients: all of them, N.
        optimizer: the clients'.
        exact: have the same bits over any number of processes.

    Raises:
        ConfigurationError: if the correction refuses the optimizer.

    Attributes:
        correction: as given.
    """

    def __init__(
        self,
        correction: Correction,
        memory: ClientMemory,
        num_clients: int,
        optimizer: Optimizer,
        *,
        exact: bool,
    ) -> None:
        correction.check(optimizer)
        self.correction = correction
        self._memory, self._num_clients, self._exact = memory, num_clients, exact
        self._solver = LocalSolver(optimizer, correction.pull)
        self._mean: Tensor | None = None

    def open_round(self, like: Tensor) -> None:
        """Forget what an unfinished round has learnt; ``like`` is a vector of shape (k,)."""
        self._memory.discard()
        self._changes = new_mean(like, exact=self._exact)
        self._num_changes = 0

    def term(self, client: int) -> GradientTerm:
        """Return a client's term for this round."""
        return self.correction.term(self._recalled(client), self._mean)

    def accept(
        self, update: ClientUpdate, start: Tensor, space: Space, gradient: Callable[[], Tensor]
    ) -> None:
        """Remember a client's round.

        Args:
            update: what it sent.
            start: the global model, shape (k,).
            space: of its coordinates.
            gradient: gives the gradient of its whole shard at ``start``.
        """
        if not self.correction.remembers:
            return
        outcome = Outcome(
            start, update.delta, lambda: self._solver.travel(update.num_steps, space), gradient
        )
        before = self._recalled(update.client_id)
        after = self.correction.remember(before, self._mean, outcome)
        self._memory.put(_NAME, update.client_id, after)
        if self.correction.needs_mean:
            self._changes.add(after if before is None else after - before, 1)
            self._num_changes += 1

    def reduce(self, all_reduce: AllReduce) -> None:
        """Add up what the clients of all processes have learnt."""
        sums = self._changes.sums()
        count = torch.full_like(sums[-1], self._num_changes)
        *sums, count = added_up([*sums, count], all_reduce)
        self._changes.load_sums(sums)
        self._num_changes = int(count)

    def close_round(self) -> None:
        """Let the clients' new memories count."""
        self._memory.commit()
        if self._num_changes:
            change = self._changes.value() * (self._num_changes / self._num_clients)
            self._mean = change if self._mean is None else self._mean + change

    def pseudo_gradient(self, aggregate: Tensor) -> Tensor:
        """Return what the server descends; to be called after `close_round`."""
        return self.correction.pseudo_gradient(aggregate, self._mean)

    def relocate(self, positions: Tensor) -> None:
        """Go on in other coordinates, see `Server.relocate`; what is new is 0."""
        self._memory.relocate(_NAME, positions)
        if self._mean is not None:
            known = self._mean[positions.clamp(min=0)]
            self._mean = torch.where(positions >= 0, known, 0)

    def _recalled(self, client: int) -> Tensor | None:
        return self._memory.get(_NAME, client) if self.correction.remembers else None

    def snapshot(self) -> Snapshot:
        """Return what has been learnt in the open round, for `go_back`."""
        return Snapshot(copy.deepcopy(self._round_state()), self._memory.waiting)

    def go_back(self, snapshot: Snapshot) -> None:
        """Forget what has been learnt since."""
        self._load_round_state(snapshot.state)
        self._memory.discard(keep=snapshot.waiting)

    def state_dict(self, *, with_round: bool = True) -> dict[str, Any]:
        """Return the mean and, inside a round, what has been learnt so far; not the memories."""
        state: dict[str, Any] = {"kind": type(self.correction).__name__, "mean": self._mean}
        return state | {"round": self._round_state()} if with_round else state

    def load_state_dict(self, state: dict[str, Any], like: Tensor) -> None:
        """Take up where `state_dict` left off."""
        self._mean = None if state["mean"] is None else state["mean"].to(like.device)
        if "round" in state:
            self._changes = new_mean(like, exact=self._exact)
            self._load_round_state(state["round"])

    def _round_state(self) -> dict[str, Any]:
        return {"changes": self._changes.state_dict(), "num_changes": self._num_changes}

    def _load_round_state(self, state: dict[str, Any]) -> None:
        self._changes.load_state_dict(state["changes"])
        self._num_changes = state["num_changes"]
