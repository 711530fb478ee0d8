"""What a checkpoint holds of a run: everything but the model, which is among Lightning's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from fl_lightning.client.state.state_tensors import buffer_names
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.checkpoints.run_memory import RunMemory
from fl_lightning.federation.group_training import GroupTraining
from fl_lightning.federation.groups import RoundGroups
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_options import RoundOptions
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.federation.stages.secure_rounds import SecureRounds
from fl_lightning.server.server import Server
from fl_lightning.updates.path import UpdatePath


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The parts of a run that have something to keep, as `RoundRunner` has them."""

    module: LightningModule
    options: RoundOptions
    clients: GroupTraining
    server: Server
    corrector: Corrector
    memory: RunMemory
    groups: RoundGroups
    ranks: Ranks
    path: UpdatePath
    private: PrivateRounds | ExampleRounds | None
    secure: SecureRounds | None

    def state_dict(self, record: RoundRecord) -> dict[str, Any]:
        """Return what they have to keep, and what is known of the present round.

        Of several processes one writes the checkpoint: it leaves out the open round, which is then
        trained again from its start. So does a private run, because the sums of an open round have no
        noise.
        """
        clients, corrector, versions = self.clients, self.corrector, self.options.versions
        is_open, is_private = self.server.is_open, isinstance(self.private, PrivateRounds)
        restarts = is_private or (self.secure is not None and self.secure.aggregator.restarts)
        open_here = is_open and self.ranks.size == 1 and not restarts
        hides_record = is_open and is_private
        state = {
            "space": clients.local.space.fingerprint(),
            "mask": clients.local.space.mask_fingerprint(),
            "seed": self.options.seed,
            "server": self.server.state_dict(with_round=open_here),
            "record": (RoundRecord() if hides_record else record).state_dict(),
            "scaler": clients.scaler.state_dict() if open_here else {},
            "metrics": clients.collector.metric_states(self.module) if open_here else {},
            "prog_bar": sorted(clients.collector.prog_bar),
            "ranks": self.ranks.size,
            "groups": len(self.groups),
            "inside": is_open,
            "engine": clients.engine.state_dict(),
            "client_state": clients.local.state_names,
            "updates": self._on_the_way,
            "personal": clients.personal.state_dict(),
            "memory": self.memory.state_dict(with_round=open_here),
            "population": self.groups.population.state_dict(),
            "versions": None if versions is None else versions.state_dict(),
        }
        if corrector.correction.remembers:
            state["correction"] = corrector.state_dict(with_round=open_here)
        if self.private is not None:
            state["privacy"] = self.private.state_dict()
        return state

    def check(self, state: dict[str, Any]) -> None:
        """Refuse what another run has kept, before anything is taken but which parameters are personal.

        Raises:
            ConfigurationError: saying what differs.
        """
        space, versions = self.clients.local.space, self.options.versions
        self.clients.personal.load_state_dict(state.get("personal"))  # says itself what differs
        _check_same("model", state["space"], space.fingerprint())
        _check_same("mask", state["mask"], space.mask_fingerprint())
        names = state.get("client_state", buffer_names(self.module))  # older runs sent all of them
        if names is not None:
            self.clients.local.settle_state(names)
        _check_same("seed", state["seed"], self.options.seed)
        kind = state.get("correction", {}).get("kind")
        _check_same("correction", kind, self.corrector.kind)
        _check_same("updates", state["updates"], self._on_the_way)
        choice = "choice of federation.asynchronous"
        _check_same(choice, state["versions"] is not None, versions is not None)
        _check_same("privacy", "privacy" in state, self.private is not None)
        if state["inside"]:
            _check_same("number of processes", state["ranks"], self.ranks.size)
            _check_same("number of groups of clients", state["groups"], len(self.groups))

    def load_state_dict(self, state: dict[str, Any], record: RoundRecord) -> None:
        """Have what was kept, once the server has its model and the module as well."""
        clients, versions = self.clients, self.options.versions
        self.server.load_state_dict(state["server"])
        self.corrector.load_state_dict(state.get("correction", {}), self.server.model.params)
        if self.private is not None:
            self.private.load_state_dict(state["privacy"])
        record.load_state_dict(state["record"])
        clients.scaler.load_state_dict(state["scaler"])
        clients.collector.load_metric_states(self.module, state["metrics"])
        clients.collector.prog_bar |= set(state["prog_bar"])
        clients.engine.load_state_dict(state["engine"])
        self.memory.load_state_dict(state.get("memory", {}))
        self.groups.population.load_state_dict(state["population"])
        if versions is not None:
            versions.load_state_dict(state["versions"])

    @property
    def _on_the_way(self) -> list[str]:
        """What happens to updates and to what clients get."""
        return [*self.path.names, "down:", *self.clients.broadcast.names]


def _check_same(what: str, saved: Any, present: Any) -> None:
    if saved != present:
        raise ConfigurationError(
            f"the checkpoint belongs to a run with another {what} ({saved} instead of {present}): "
            "resume with the configuration of the run that wrote it, or start without ckpt_path"
        )
