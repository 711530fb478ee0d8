"""The record of one round: counts, seconds, bytes, norms and the clients' metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.core.metrics import ClientMeans
from fl_lightning.core.update import Updates

_LOSS = "train/loss"


@dataclass
class RoundRecord:
    """Filled while a round runs, logged when it ends.

    Attributes:
        finished: clients that were asked and have ended, in the order in which they did.
        skipped: why the update of those could not be used that have none, by client.
        lost: clients whose update never came, or not in time, where devices are simulated.
        durations: virtual seconds that each client took, where devices are simulated.
        began_at: virtual time when the round began, in seconds.
        ended_at: virtual time when it ended; None where there is no such time.
        seconds: wall time of local training and the server's step.
        total_bytes_down: sent to the clients, all together.
        total_bytes_up: received from the clients, all together.
        update_norm: L2 norm of the aggregate.
        means: per-client metrics.
        norms: L2 norm of each client's update.
        pooled: metrics over the examples of all clients together.
        privacy: what a private round has cost.
        more: what stages have to say of the round, by name, e.g. seconds that hiding updates took.
        bytes_up_of_absent: of the bytes up, those of clients whose update is not in the aggregate.
        is_withheld: whether nothing else is known that depends on clients.
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

    def add(self, updates: Updates, *, num_bytes: int, error: Tensor | None = None) -> None:
        """Add clients' metrics, and the norms and sizes of their updates.

        Args:
            updates: as the clients made them.
            num_bytes: of each one's message.
            error: how far what arrived of a single update is from it, as a part of it; None if
                updates arrive as they are.
        """
        self.total_bytes_up += num_bytes * len(updates.client_ids)
        counts, clients, norms = updates.num_examples, updates.client_ids, {}
        if updates.deltas.shape[1]:  # else nobody here has seen the update
            norms["round/client_update_norm"] = updates.norms
        if error is not None:
            norms["round/compression_error"] = error
        self.means.add_rows(updates.metrics, counts, clients)
        self.norms.add_rows(norms, counts, clients)

    def merge(self, other: RoundRecord) -> None:
        """Merge the record of another process of the same round."""
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
        """Forget everything about clients that no noise covers."""
        vars(self).update(vars(RoundRecord(update_norm=self.update_norm, is_withheld=True)))

    def without_clients(self) -> RoundRecord:
        """Numbers of the round, without those that tell who took part."""
        nobody = RoundRecord()
        names = "finished", "skipped", "lost", "durations", "means", "norms"
        return replace(self, **{name: getattr(nobody, name) for name in names})

    def metrics(self) -> dict[str, float]:
        """Return the clients' metrics, each a mean over examples, or a sum, minimum or maximum."""
        return self.means.reduced() | self.pooled

    def twins(self) -> set[str]:
        """Names of the loss that training returned, if the module logs the same numbers under its own name."""
        own = self.means.by_client(_LOSS)
        names = (name for name in self.means.names if name != _LOSS and "loss" in name.lower())
        others = map(self.means.by_client, names)
        is_twin = any(
            other.keys() == own.keys() and np.allclose([*other.values()], [*own.values()], atol=0)
            for other in others
        )
        return {_LOSS, f"{_LOSS}_std"} if is_twin else set()

    def facts(self) -> dict[str, float]:
        """Further numbers of the round: counts, norms, spreads over clients, bytes.

        ``bytes_up`` and ``bytes_down`` are the message of one client, the totals those of all: the
        length of the real encoding (`fl_lightning.updates.message`), with its header and metrics, and
        the numbers that a correction sends besides.
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
        """Return the names of metrics and facts that depend on clients and have no noise."""
        protected = self.privacy.keys() - {"privacy/clip_fraction"} | {"round/update_norm"}
        return (self.metrics().keys() | self.facts().keys()) - protected

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and tensors, which do not change with the record."""
        return {name: _state(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the record that `state_dict` described."""
        means, norms = ClientMeans(), ClientMeans()
        means.load_state_dict(state["means"])
        norms.load_state_dict(state["norms"])
        copies = {name: _state(value) for name, value in state.items()}
        vars(self).update(copies | {"means": means, "norms": norms})

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RoundRecord:
        """Return the record that `state_dict` described."""
        record = cls()
        record.load_state_dict(state)
        return record


def _state(value: Any) -> Any:
    if isinstance(value, ClientMeans):
        return value.state_dict()
    return value.copy() if isinstance(value, (list, dict)) else value
