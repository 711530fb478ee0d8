"""The models that clients at work began from: older versions, kept as long as they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client.local_training import GlobalModel
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import Updates
from fl_lightning.federation.stages.schedule import Arrivals, ServerStep
from fl_lightning.server.staleness import AsyncRule


@dataclass(frozen=True)
class Start:
    """What clients begin from, and how their updates count.

    Attributes:
        model: what they are sent.
        present: the server's model when their updates arrive.
        staleness: how many steps the server took between; 0 in a synchronous round.
        rule: how stale updates count; None leaves them as they are.
    """

    model: GlobalModel
    present: GlobalModel
    staleness: int = 0
    rule: AsyncRule | None = None

    def counted(self, updates: Updates) -> Updates:
        """Return updates as the server takes them in."""
        if self.rule is None:
            return updates
        deltas = self.rule.weighed(updates.whole, self.staleness, self._drift())
        return replace(updates, deltas=deltas, buffers=self._mixed(updates.buffers))

    def _mixed(self, buffers: Tensor) -> Tensor:
        """Return the present buffers with as much of these as counts; variances stay positive."""
        if self.rule is None or not buffers.numel():
            return buffers
        share = self.rule.weighed(buffers.new_ones(()), self.staleness, None)
        return torch.lerp(self.present.buffers.expand_as(buffers), buffers, share)

    def _drift(self) -> Any:
        return self.present.params - self.model.params if self.staleness else None


class Versions:
    """The versions of the global model that an asynchronous run still needs.

    Args:
        rule: how stale updates count.
        arrivals: who arrives when, and from which version.
    """

    def __init__(self, rule: AsyncRule, arrivals: Arrivals) -> None:
        self._rule, self._arrivals = rule, arrivals
        self._models: dict[int, GlobalModel] = {}
        self._present = 0

    def open_round(self, version: int, model: GlobalModel) -> None:
        """Keep the present version if it will be needed later, and forget what will not."""
        self._present, step = version, self._arrivals.step(version)
        if version in step.in_flight:
            self._models[version] = GlobalModel(model.params.clone(), model.buffers.clone())
        needed = step.in_flight | set(step.versions.values())
        self._models = {v: kept for v, kept in self._models.items() if v in needed}

    @property
    def keeps_any(self) -> bool:
        """Whether clients are at work that began from an older version."""
        return bool(self._models)

    def step(self, version: int) -> ServerStep:
        """Return what the server's step from a version takes in."""
        return self._arrivals.step(version)

    def start(self, version: int, present_version: int, present: GlobalModel) -> Start:
        """Return what clients began from that were started at a version."""
        model = present
        if version != present_version:
            kept = self._models[version]  # out of a checkpoint it is on the CPU
            params, buffers = kept.params.to(present.params), kept.buffers.to(present.buffers)
            model = GlobalModel(params, buffers)
        return Start(model, present, present_version - version, self._rule)

    def state_dict(self) -> dict[str, Any]:
        """Return the models that are kept, by version, and who arrived last."""
        return {
            "models": {version: dict(vars(model)) for version, model in self._models.items()},
            "present": self._present,
            "arrived": dict(self._arrivals.step(self._present).versions),
            "in_flight": sorted(self._arrivals.step(self._present).in_flight),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigurationError: if others would have arrived by now.
        """
        step = self._arrivals.step(state["present"])
        if (step.versions, sorted(step.in_flight)) != (state["arrived"], state["in_flight"]):
            raise ConfigurationError(
                "the checkpoint belongs to a run with other devices or another asynchronous rule: "
                "resume with the configuration of the run that wrote it"
            )
        self._present = state["present"]
        self._models = {version: GlobalModel(**kept) for version, kept in state["models"].items()}
