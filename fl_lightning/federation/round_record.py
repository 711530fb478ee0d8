"""The record of one round: counts, seconds, bytes, norms and the clients' metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.core.metrics import ClientMeans
from fl_lightning.core.update import Updates

_LOSS = "train/loss"


@dataclass
class RoundRecord:
    """Counts and metrics of one round, filled while it runs and logged when it ends.

    Attributes:
        finished: sampled clients that trained, failed or were lost, in order of completion.
        skipped: by client, the reason why its update could not be used.
        lost: clients whose update was lost or too late, where devices are simulated.
        durations: virtual seconds that each client took, where devices are simulated.
        began_at: virtual time when the round began, in seconds.
        ended_at: virtual time when the round ended; None without simulated devices.
        seconds: wall time of local training and the server step.
        total_bytes_down: bytes sent to all clients together.
        total_bytes_up: bytes received from all clients together.
        update_norm: L2 norm of the aggregate.
        means: per-client metrics.
        norms: L2 norm of each client's update.
        pooled: metrics over the examples of all clients together.
        privacy: privacy metrics, such as the ε spent so far.
        more: further metrics that stages add, by name.
        bytes_up_of_absent: bytes received from clients whose update is not in the aggregate.
        is_withheld: whether everything that depends on clients and has no noise was removed.
    """

    finished: list[int] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    durations: dict[int, float] = field(default_factory=dict)
    began_at: float = 0.0
    ended_at: float | None = None
    seconds: float = 0.0
    total_bytes_down: int = 0
    total_bytes_up: int = 0
    update_norm: float = 0.0
    means: ClientMeans = field(default_factory=ClientMeans)
    norms: ClientMeans = field(default_factory=ClientMeans)
    pooled: dict[str, float] = field(default_factory=dict)
    privacy: dict[str, float] = field(default_factory=dict)
    more: dict[str, float] = field(default_factory=dict)
    bytes_up_of_absent: int = 0
    is_withheld: bool = False

    def add(
        self,
        updates: Updates,
        counts: Sequence[int],
        num_bytes: int,
        *,
        error: Tensor | None = None,
    ) -> None:
        """Add clients' metrics, and the norms and sizes of their updates.

        Args:
            updates: updates as the clients computed them.
            counts: number of training examples of each client, by which metrics are weighted.
            num_bytes: bytes of each client's message.
            error: relative error of a single compressed update; None if updates arrive unchanged.
        """
        self.total_bytes_up += num_bytes * len(updates.client_ids)
        clients, norms = updates.client_ids, {}
        if updates.deltas.shape[1]:  # else this process has not seen the update
            norms["round/client_update_norm"] = updates.norms
        if error is not None:
            norms["round/compression_error"] = error
        self.means.add_rows(updates.metrics, counts, clients)
        self.norms.add_rows(norms, counts, clients)

    def merge(self, other: RoundRecord) -> None:
        """Add another process's counts and metrics of the same round to this record."""
        self.finished += other.finished
        self.skipped |= other.skipped
        self.lost += other.lost
        self.durations |= other.durations
        self.seconds = max(self.seconds, other.seconds)
        self.total_bytes_down += other.total_bytes_down
        self.total_bytes_up += other.total_bytes_up
        self.means.merge(other.means)
        self.norms.merge(other.norms)

    def withhold(self) -> None:
        """Remove all counts and metrics that depend on clients and have no differential-privacy noise."""
        vars(self).update(vars(RoundRecord(update_norm=self.update_norm, is_withheld=True)))

    def without_clients(self) -> RoundRecord:
        """Return a copy without the fields that reveal which clients took part."""
        nobody = RoundRecord()
        names = "finished", "skipped", "lost", "durations", "means", "norms"
        return replace(self, **{name: getattr(nobody, name) for name in names})

    def metrics(self) -> dict[str, float]:
        """Return clients' metrics, each pooled over the round: a mean over examples, or a sum, minimum or maximum."""
        return self.means.reduced() | self.pooled

    def twins(self) -> set[str]:
        """Return the names of ``train/loss`` metrics that repeat a loss which the module logs itself; else an empty set.

        Two losses are the same if their values agree for every client and for the round, where the module's
        may be another mean, or a sum.
        """
        own, reduced = self.means.by_client(_LOSS), self.means.reduced()
        for name in self.means.names:
            other = self.means.by_client(name)
            if name == _LOSS or "loss" not in name.lower() or other.keys() != own.keys():
                continue
            values, of_loss = [*other.values(), reduced[name]], [*own.values(), reduced[_LOSS]]
            if np.allclose(values, of_loss, atol=0, equal_nan=True):
                return {_LOSS, f"{_LOSS}_std"}
        return set()

    def facts(self) -> dict[str, float]:
        """Return further metrics of the round: counts, norms, standard deviations over clients, bytes.

        ``bytes_up`` and ``bytes_down`` are the mean message of a client, the totals those of all clients:
        the length of the real encoding (`fl_lightning.updates.message`), with header, metrics and the
        data that a correction sends.
        """
        if self.is_withheld:
            return {"round/update_norm": self.update_norm, **self.privacy}
        num_sampled = len(self.finished)
        num_replies = num_sampled - len(self.skipped) - len(self.lost)
        facts = {
            "round/cohort_size": float(num_sampled),
            "round/skipped": float(len(self.skipped)),
            "round/update_norm": self.update_norm,
            "round/seconds": self.seconds,
            "round/bytes_up": (self.total_bytes_up - self.bytes_up_of_absent) / max(1, num_replies),
            "round/bytes_down": self.total_bytes_down / max(1, num_sampled),
            "round/total_bytes_up": float(self.total_bytes_up),
            "round/total_bytes_down": float(self.total_bytes_down),
        }
        if self.ended_at is not None:
            facts["round/lost"] = float(len(self.lost))
            facts["round/virtual_seconds"] = self.ended_at - self.began_at
            facts["round/total_virtual_seconds"] = self.ended_at
        return facts | self.privacy | self.more | self.norms.reduced() | self.means.stds()

    def unprotected_names(self) -> set[str]:
        """Return the names of logged numbers that depend on clients and have no differential-privacy noise."""
        protected = self.privacy.keys() - {"privacy/clip_fraction"} | {"round/update_norm"}
        return (self.metrics().keys() | self.facts().keys()) - protected

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the record as plain numbers, strings and tensors."""
        return {name: _state(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the record from what `state_dict` returned."""
        means, norms = ClientMeans(), ClientMeans()
        means.load_state_dict(state["means"])
        norms.load_state_dict(state["norms"])
        copies = {name: _state(value) for name, value in state.items()}
        vars(self).update(copies | {"means": means, "norms": norms})

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RoundRecord:
        """Return a new record, restored from what `state_dict` returned."""
        record = cls()
        record.load_state_dict(state)
        return record


def _state(value: Any) -> Any:
    if isinstance(value, ClientMeans):
        return value.state_dict()
    return value.copy() if isinstance(value, (list, dict)) else value
