"""What is known of one round: counts, seconds, bytes, norms and the clients' metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fl_lightning.core.metrics import ClientMeans
from fl_lightning.core.update import ClientUpdate


@dataclass
class RoundRecord:
    """Filled while a round runs, logged when it ends.

    Attributes:
        num_sampled: clients that were asked.
        num_skipped: those whose update could not be used.
        seconds: wall time of local training and the server's step.
        bytes_down: sent to clients, all together.
        bytes_up: received from clients, all together.
        update_norm: L2 norm of the aggregate.
        means: per-client metrics.
        pooled: metrics over the examples of all clients together.
    """

    num_sampled: int = 0
    num_skipped: int = 0
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    update_norm: float = 0.0
    means: ClientMeans = field(default_factory=ClientMeans)
    pooled: dict[str, float] = field(default_factory=dict)

    def add(self, update: ClientUpdate) -> None:
        """Take in one client's metrics and the norm of its update."""
        self.means.add(update.metrics, update.num_examples)
        self.means.add({"round/client_update_norm": update.norm}, update.num_examples)

    def facts(self) -> dict[str, float]:
        """Return what is known of the round whatever the model is."""
        return {
            "round/cohort_size": float(self.num_sampled),
            "round/skipped": float(self.num_skipped),
            "round/update_norm": self.update_norm,
            "round/seconds": self.seconds,
            "round/bytes_up": float(self.bytes_up),
            "round/bytes_down": float(self.bytes_down),
        }

    def metrics(self) -> dict[str, float]:
        """Return the clients' metrics: mean over examples and spread over clients."""
        logs = {}
        for name in self.means.names:
            logs[name] = self.means.mean(name)
            logs[f"{name}_spread"] = self.means.spread(name)
        return logs | self.pooled

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and tensors."""
        counts = {key: value for key, value in vars(self).items() if key != "means"}
        return {**counts, "means": self.means.state_dict()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RoundRecord:
        """Return the record that `state_dict` described."""
        record = cls(**{key: value for key, value in state.items() if key != "means"})
        record.means.load_state_dict(state["means"])
        return record
