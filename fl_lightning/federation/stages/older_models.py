"""The models that clients at work began from: older versions, kept as long as they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.client.state.round_start import Options
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import GlobalModel, Updates
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Sent, Stage, Start
from fl_lightning.federation.stages.schedule import Arrivals
from fl_lightning.server.staleness import AsyncRule

if TYPE_CHECKING:
    from fl_lightning.federation.run import Run

MASKS_CHANGE = (
    "federation: asynchronous does not work with masks that change during the run: clients at work would "
    "send other entries than the server expects"
)


def counted(updates: Updates, start: Start, rule: AsyncRule) -> Updates:
    """Return updates as the server takes them in, which are as stale as their start.

    Args:
        updates: of clients.
        start: what they began from.
        rule: how stale updates count.
    """
    drift = start.present.params - start.model.params if start.staleness else None
    deltas, buffers = rule.weighed(updates.whole, start.staleness, drift), updates.buffers
    if (
        buffers.numel()
    ):  # the present ones, with as much of these as counts: variances stay positive
        share = rule.weighed(buffers.new_ones(()), start.staleness, None)
        buffers = torch.lerp(start.present.buffers.expand_as(buffers), buffers, share)
    return replace(updates, deltas=deltas, buffers=buffers)


def older_start(kept: GlobalModel, start: Start, staleness: int) -> Start:
    """Return what clients began from that were started some steps ago.

    Args:
        kept: the model of then, which out of a checkpoint is on the CPU.
        start: of now.
        staleness: how many steps, ≥ 1.
    """
    present = start.present
    model = GlobalModel(kept.params.to(present.params), kept.buffers.to(present.buffers))
    return start._replace(model=model, staleness=staleness)


class StaleUpdates(Stage):
    """Has updates count less, the staler they are.

    Args:
        rule: by how much.
    """

    def __init__(self, rule: AsyncRule) -> None:
        self._rule = rule

    def up(self, sent: Sent, start: Start) -> Iterable[Sent]:
        """Return updates as the server takes them in."""
        return (sent._replace(arrived=counted(sent.arrived, start, self._rule)),)


class Versions(Stage):
    """The versions of the global model that an asynchronous run still needs.

    Args:
        arrivals: who arrives when, and from which version.
    """

    key = "versions"

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._models: dict[int, GlobalModel] = {}
        self._options: dict[int, Options] = {}  # of clients' optimizers, by version as well
        self._present = 0

    def enter(self, run: Run) -> None:
        """Learn whose optimizers they are."""
        self._local = run.local

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Keep the present version if it will be needed later, and forget what will not."""
        version = self._present = round_index
        step = self._arrivals.step(version)
        if version in step.in_flight:
            self._models[version] = GlobalModel(model.params.clone(), model.buffers.clone())
            self._options[version] = self._local.round_start.options
        needed = step.in_flight | set(step.versions.values())
        self._models = {v: kept for v, kept in self._models.items() if v in needed}
        self._options = {v: kept for v, kept in self._options.items() if v in needed}

    def versions(self, clients: Sequence[int], rounds: list[int]) -> list[int]:
        """Return from which version each client was started."""
        began = self._arrivals.step(rounds[0]).versions if rounds else {}
        pairs = zip(clients, rounds, strict=True)
        return [began.get(client, present) for client, present in pairs]

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return the older models from which clients began, those together that began alike."""
        return [
            (self._start(version, start), work.where(work.rounds == version))
            for version in sorted(set(work.rounds.tolist()))
        ]

    def _start(self, version: int, start: Start) -> Start:
        if version == self._present:
            return start
        older = older_start(self._models[version], start, self._present - version)
        return older._replace(options=self._options.get(version))

    def settle(self, record: RoundRecord) -> None:
        """Let virtual time go on until the server's step."""
        step = self._arrivals.step(self._present)
        record.durations, record.ended_at = dict(step.durations), step.seconds
        record.more["round/staleness"] = step.staleness(self._present)

    def relocate(self, positions: Tensor) -> None:
        """Refuse other coordinates while clients are at work.

        Raises:
            ConfigurationError: if there are such clients.
        """
        if self._models:
            raise ConfigurationError(MASKS_CHANGE)

    def state_dict(self, *, with_round: bool) -> dict[str, Any]:
        """Return the models that are kept, by version, and who arrived last."""
        return {
            "models": {version: dict(vars(model)) for version, model in self._models.items()},
            "options": dict(self._options),
            "present": self._present,
            "arrived": dict(self._arrivals.step(self._present).versions),
            "in_flight": sorted(self._arrivals.step(self._present).in_flight),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: GlobalModel) -> None:
        """Go on from there.

        Raises:
            ConfigurationError: if others would have arrived by now.
        """
        if "present" not in state:
            raise ConfigurationError(
                "the checkpoint is of an asynchronous run over a network, whose clients are still at work at "
                "their sites: resume it there, or simulate it from its start with RecordedArrivals"
            )
        step = self._arrivals.step(state["present"])
        if (step.versions, sorted(step.in_flight)) != (state["arrived"], state["in_flight"]):
            raise ConfigurationError(
                "the checkpoint belongs to a run with other devices or another asynchronous rule: "
                "resume with the configuration of the run that wrote it"
            )
        self._present = state["present"]
        self._models = {version: GlobalModel(**kept) for version, kept in state["models"].items()}
        self._options = dict(state.get("options", {}))
