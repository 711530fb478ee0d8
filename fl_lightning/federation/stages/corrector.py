"""Corrections such as SCAFFOLD in a run: gradient terms, client states and their mean.

    m ← m + 1/N Σ_{i in S} (m_i⁺ - m_i)        N: all clients,  S: those whose updates were accepted

A client's new state m_i⁺ takes effect at the round's end, as its update does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client.corrections.correction import AddedTerm, Correction, GradientTerm, Outcome
from fl_lightning.client.local_solver import LocalSolver
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.federation.checks.fit import ADDED_TO_LOSS, any_maximises
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import (
    Learning,
    LocalTraining,
    SpansNetwork,
    Stage,
    Start,
    Upload,
    check_same,
)
from fl_lightning.server.means.running_mean import ExactMean, check_summable, new_mean
from fl_lightning.server.server import added_up

_NAME = "correction"


class Corrector(Learning, SpansNetwork):
    """Runs a correction such as SCAFFOLD in the rounds: gradient terms, client states and their mean.

    Args:
        correction: the correction.
        exact: whether sums are bit-identical over any number of processes.
        is_lossy: whether transforms change updates on the way to the server.
    """

    key = "correction"

    def __init__(
        self, correction: Correction, *, exact: bool = False, is_lossy: bool = False
    ) -> None:
        self.correction, self._is_lossy, self._exact = correction, is_lossy, exact
        self._mean: Tensor | None = None
        self._next: Tensor | None = None  # the mean once the server has stepped
        self._change: Tensor | None = None  # of the state of the last client that trained
        self.learns, self.traits = correction.remembers, correction.traits
        if correction.changes_loss:
            self.one_at_a_time = "its correction changes the loss of one model at a time"

    def enter(self, run: Run) -> None:
        """Check that the clients' optimizers suit the correction, and keep the parts of the run that it uses."""
        for optimizer in run.optimizers:
            self.correction.check(run.module, optimizer)
        if any_maximises(run.optimizers):
            raise ConfigurationError(f"federation.correction {ADDED_TO_LOSS}")
        self._memory, self._num_clients = run.memory, len(run.data.clients)
        self._step, self._local, self._plan = run.step, run.local, run.plan
        self._ranks = run.ranks
        self._run, self._collector, self._module = run, run.collector, run.module
        self._solver = LocalSolver(*run.optimizers, pull=self.correction.pull)

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Begin a new sum of changes of client states; the sum of an interrupted round is dropped."""
        like = model.params
        self._device = like.device
        self._kept = like if self.correction.needs_mean else like.new_empty(0)
        is_exact = self._exact and like.device.type != "mps"  # which lacks float64
        self._changes = new_mean(self._kept, exact=is_exact)
        self._num_changes = 0

    @property
    def kind(self) -> str | None:
        """Name of the correction in checkpoints; None if it has no client states."""
        return type(self.correction).__name__ if self.correction.remembers else None

    def term(self, client: int) -> GradientTerm:
        """Return the correction's term that a client adds to its gradients in this round."""
        shift = self.correction.shift(self._recalled(client), self._mean)
        return GradientTerm(self.correction.pull, shift)

    def around(self, training: LocalTraining) -> AbstractContextManager[None]:
        """Return a context manager in which the module's outputs are calibrated to the client's labels, for FedLC."""
        labels = partial(self._plan.labels, training.work)
        return self.correction.calibrated(self._module, labels)

    @contextmanager
    def steps(self, training: LocalTraining) -> Iterator[None]:
        """Add the correction's terms to the client's gradients and loss in all local steps inside the block."""
        if not training.is_corrected:
            yield
            return
        client, start, space = (
            training.work.client_id,
            training.start.model.params,
            self._local.space,
        )
        last = self._recalled(client) if self.correction.changes_loss else None
        if last is not None:
            added = self.correction.added_loss(self._module, space, start, last)
            self._step.contrast = added
        term = self.term(client)
        if not term.is_nothing:
            self._step.term = AddedTerm(space, start, term)
        try:
            yield
        finally:
            self._step.term = self._step.contrast = None

    def learn(self, update: ClientUpdate, work: ClientWork, start: Start) -> Callable[[], None]:
        """Compute a client's new correction state if it took steps, and return a function that stores the state."""
        taken = update.optimizer_steps
        num_steps = update.num_steps if taken is None else taken
        has_stepped = num_steps > 0 if isinstance(num_steps, int) else any(num_steps)
        if not (self.correction.remembers and has_stepped):
            return lambda: None

        def gradient() -> Tensor:
            with self._collector.listening_to(self._module):
                return self._run.shard_gradient(start.model, work)

        def travel() -> Tensor | float:
            self._local.check_one_rate()
            return self._solver.travel(num_steps, self._local.space)

        outcome = Outcome(start.model.params, update.delta, travel, gradient)
        before = self._recalled(update.client_id)
        after = self.correction.remember(before, self._mean, outcome)
        return partial(self._remember, update.client_id, before, after)

    def _remember(self, client: int, before: Tensor | None, after: Tensor) -> None:
        self._memory.put(_NAME, client, after)
        if self.correction.needs_mean:
            self._change = after if before is None else after - before
            self._changes.add(self._change, 1)
            self._num_changes += 1

    def to_sites(self) -> Mapping[str, Tensor]:
        """Return the mean of clients' correction states for remote clients; empty if they do not read it."""
        is_read = self.correction.needs_mean and self.correction.reads_mean
        return {"mean": self._mean} if is_read and self._mean is not None else {}

    def from_server(self, told: Mapping[str, Tensor]) -> None:
        """Receive the mean of clients' correction states from the server (called at a remote site)."""
        mean = told.get("mean")
        self._mean = None if mean is None else mean.to(self._device)

    def to_server(self, client: int) -> Mapping[str, Tensor]:
        """Return the change of a client's correction state for the server; empty if it has not changed."""
        change, self._change = self._change, None
        return {} if change is None else {"change": change}

    def from_site(self, client: int, told: Mapping[str, Tensor]) -> None:
        """Check the change of a remote client's correction state, and add it to the round's sum of changes."""
        if "change" in told:
            change = told["change"].to(self._device)
            if (change.shape, change.dtype) != (self._kept.shape, self._kept.dtype):
                raise ValueError(
                    f"the change of the correction's state must have shape {tuple(self._kept.shape)} and "
                    f"{self._kept.dtype}, got {tuple(change.shape)} and {change.dtype}"
                )
            if not bool(change.isfinite().all()):
                raise ValueError(
                    "the change of the correction's state holds NaN or infinite values"
                )
            if isinstance(self._changes, ExactMean):  # whose sum one client could make overflow
                check_summable(change, 1, self._num_clients)
            self._changes.add(change, 1)
            self._num_changes += 1

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Count the change of a client's correction state as part of its upload bytes, if it is sent."""
        num_bytes = upload.num_bytes + self._bytes_up(upload.arrived.deltas)
        return (upload._replace(num_bytes=num_bytes),)

    def _bytes_up(self, like: Tensor) -> int:
        """Return the upload bytes of the change of a client's correction state; 0 if it is not sent."""
        rule = self.correction
        travels = rule.needs_mean and (self._is_lossy or not rule.shows_change)
        return _num_bytes(like) if travels else 0

    def _bytes_down(self, like: Tensor) -> int:
        """Return the download bytes of the mean of clients' correction states; 0 if it is not sent."""
        rule = self.correction
        return _num_bytes(like) if rule.needs_mean and rule.reads_mean else 0

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Add the size of the mean correction state, if clients need it (as in SCAFFOLD), to the download bytes."""
        num_bytes = start.num_bytes + self._bytes_down(start.present.params)
        return [(start._replace(num_bytes=num_bytes), work)]

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Return the extra bytes that a client uploads and downloads per round for the correction's states."""
        return self._bytes_up(model.params), self._bytes_down(model.params)

    def before_step(self, record: RoundRecord) -> None:
        """Compute the next mean of clients' correction states, from their changes in all processes."""
        if self.correction.needs_mean and self._ranks.size > 1:
            sums = self._changes.sums()
            count = torch.full_like(sums[-1], self._num_changes)
            *sums, count = added_up([*sums, count], self._ranks.all_reduce)
            self._changes.load_sums(sums)
            self._num_changes = int(count)
        self._next = self._mean
        if self._num_changes:
            change = self._changes.value() * (self._num_changes / self._num_clients)
            self._next = change if self._mean is None else self._mean + change

    def on_server(self, aggregate: Tensor) -> Tensor:
        """Return the server's descent direction, corrected by the mean of client states; call `before_step` first."""
        return self.correction.pseudo_gradient(aggregate, self._next)

    def close(self, record: RoundRecord) -> None:
        """Replace the mean of clients' correction states by the mean after this round."""
        self._mean = self._next

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Move clients' correction states to a changed layout of vectors, with 0 in new coordinates.

        States that are models are dropped: 0 would be no weight of that model.
        """
        if positions is None:
            return
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

    def state_dict(self) -> dict[str, Any] | None:
        """Return the correction's name and the mean of client states; `ClientMemory` saves the states themselves."""
        if not self.correction.remembers:
            return None
        return {"kind": self.kind, "mean": self._mean}

    def check(self, state: dict[str, Any] | None) -> None:
        """Raise if the checkpoint is of a run with another correction."""
        check_same("correction", (state or {}).get("kind"), self.kind)

    def load_state_dict(self, state: dict[str, Any] | None, model: GlobalModel) -> None:
        """Restore the mean of client states from what `state_dict` returned."""
        self.open(0, model)
        state = state or {}  # nothing is saved of a correction without client states
        mean = state.get("mean")
        self._mean = None if mean is None else mean.to(self._device)


def _num_bytes(like: Tensor) -> int:
    return like.shape[-1] * like.dtype.itemsize


class StepCounts(Stage):
    """Attaches the effective number of gradient steps to updates, for aggregators that divide by it."""

    traits = NO_TRAITS

    def __init__(self, correction: Correction | None) -> None:
        self._pull = 0.0 if correction is None else correction.pull

    def enter(self, run: Run) -> None:
        """Keep the clients' optimizers; raise if an effective number of gradient steps is not defined for them."""
        self._local, self._solver = run.local, LocalSolver(*run.optimizers, pull=self._pull)
        # raises without such a number; two steps, as momentum does not matter in the first
        self._solver.effective_steps(2)

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Attach the effective number of gradient steps to each update."""
        self._local.check_one_rate()
        updates = upload.arrived
        taken = updates.optimizer_steps or [None] * len(updates.num_steps)
        pairs = zip(updates.num_steps, taken, strict=True)
        steps = [self._solver.effective_steps(n if own is None else own) for n, own in pairs]
        return (upload._replace(arrived=replace(updates, effective_steps=steps)),)
