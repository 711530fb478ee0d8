"""The state of a run in a checkpoint: everything but the model, which is among Lightning's weights.

It does not hold the secret from which cohorts are drawn where ε counts on that:

    cohort of round r:  drawn from BLAKE2b(secret, "cohort", r)

Sampling amplifies privacy towards those who do not know who took part. So these cohorts do not follow from
``federation.seed``, which is in checkpoints and configurations, but from a secret of 256 bits of the
operating system. All processes have the same one, and a resumed run goes on with it: it is in a file
of its own, for its owner alone. Checkpoints hold a hash of it, which names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import secret_seed
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.checkpoints.run_folder import own_run_folder
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import check_same, kind_of

# What a run either has or has not: key of its stage, and how it is called.
_CHOICES = {"versions": "choice of federation.asynchronous", "privacy": "privacy"}
# What a run may be without: key of its stage, whose state says its kind, and how it is called.
_KINDS = {"correction": "correction", "personal": "choice of federation.personal"}


def run_state(rounds: FitRounds) -> dict[str, Any]:
    """Return the state of a run and of its present round.

    Of several processes one writes the checkpoint: it leaves out the open round, which is then
    trained again from its start. So does a private run, because the sums of an open round have no
    noise.
    """
    run, server, stages = rounds.run, rounds.server, rounds.stages
    with_round = server.is_open and run.ranks.size == 1 and not stages.restarts
    record = rounds.record
    if stages.is_private:
        begun = RoundRecord(began_at=record.began_at)
        record = begun if server.is_open else record.without_clients()
    state = {
        "space": run.local.space.fingerprint(),
        "mask": run.local.space.mask_fingerprint(),
        "seed": rounds.options.seed,
        "server": server.state_dict(with_round=with_round),
        "record": record.state_dict(),
        "metrics": run.collector.metric_states(run.module) if with_round else {},
        "prog_bar": sorted(run.collector.prog_bar),
        "ranks": run.ranks.size,
        "groups": len(run.groups),
        "inside": server.is_open,
        "engine": rounds.clients.engine.state_dict(),
        "client_state": run.local.state_names,
        "memory": run.memory.state_dict(with_round=with_round),
        "population": run.groups.population.state_dict(),
    }
    for stage in stages:
        if stage.key is not None:
            state[stage.key] = stage.state_dict(with_round=with_round)
    if not rounds.travelling.is_kept_by_lightning:
        state["model"] = vars(server.model)
    return state


def load_run_state(rounds: FitRounds, state: dict[str, Any]) -> None:
    """Restore a run from a checkpoint, taken between rounds or inside one.

    Raises:
        ConfigurationError: if the checkpoint is of another model or of another seed.
    """
    _check(rounds, state)
    run, server = rounds.run, rounds.server
    rounds.travelling.follow_state()
    if "model" in state:
        server.replace_model(GlobalModel(**state["model"]))
        run.local.restore(server.model)
    if rounds.clients.add_named_state(inside=state["inside"]):
        rounds.travelling.follow_state()
    server.load_state_dict(state["server"])
    for stage in rounds.stages:
        if stage.key is not None:
            stage.load_state_dict(state.get(stage.key), server.model)
    rounds.record.load_state_dict(state["record"])
    run.collector.load_metric_states(run.module, state["metrics"])
    run.collector.prog_bar |= set(state["prog_bar"])
    rounds.clients.engine.load_state_dict(state["engine"])
    run.memory.load_state_dict(state.get("memory", {}))
    run.groups.population.load_state_dict(state["population"])


def _check(rounds: FitRounds, state: dict[str, Any]) -> None:
    """Refuse what another run has kept, before anything is taken but which parameters are personal."""
    run = rounds.run
    for key, what in _CHOICES.items():
        has = any(stage.key == key for stage in rounds.stages)
        check_same(what, state.get(key) is not None, has)
    for stage in rounds.stages:
        if stage.key is not None:
            stage.check(state.get(stage.key))
    for key, what in _KINDS.items():
        if all(stage.key != key for stage in rounds.stages):
            check_same(what, kind_of(state.get(key) or {}), None)
    check_same("model", state["space"], run.local.space.fingerprint())
    check_same("mask", state["mask"], run.local.space.mask_fingerprint())
    names = state["client_state"]
    if names is not None:
        run.local.settle_state(names)
    check_same("seed", state["seed"], rounds.options.seed)
    if state["inside"]:
        check_same("number of processes", state["ranks"], run.ranks.size)
        check_same("number of groups of clients", state["groups"], len(run.groups))


@final
class SecretCohorts:
    """The secret from which a run draws its cohorts; all processes must make theirs together."""

    secret: int

    def __init__(self, run: Run) -> None:
        self._run = run
        self.use(run.ranks.gather(secret_seed())[0])

    def use(self, secret: int) -> None:
        """Draw the coming rounds from a secret."""
        self.secret = self._run.groups.seed = secret

    @property
    def file(self) -> Path:
        """File in which the first process keeps the secret."""
        folder = own_run_folder(self._run.trainer)
        return Path("." if "://" in folder else folder, _name(_hash(self.secret)))

    def announcement(self) -> str:
        """Return in words where the secret is kept."""
        return (
            f"privacy: cohorts are drawn from a secret. {self.file} keeps it once there is a checkpoint: "
            "resuming needs it, and ε does not hold towards who has it"
        )

    def saved(self) -> str:
        """Write the secret to its file, and return its hash for a checkpoint."""
        if self._run.ranks.rank == 0 and not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.file.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as to:
                to.write(f"{self.secret:x}\n")
            os.replace(unfinished, self.file)
        return _hash(self.secret)

    def resume(self, saved: str | None) -> None:
        """Draw from the secret of which a checkpoint holds the hash; refuse if it is not there."""
        if saved is None:
            raise ConfigurationError(
                "federation.privacy: cohorts of the checkpoint's run follow from its seed, so that its ε "
                "does not hold for who knows that: start without ckpt_path"
            )
        read = (_read(path) for path in self._places(_name(saved)))
        found = next((secret for secret in read if _hash(secret) == saved), None)
        if (known := self._run.ranks.gather(found)[0]) is None:
            raise ConfigurationError(
                f"federation.privacy: {_name(saved)} is missing, from which this run drew its cohorts: put "
                f"it into {self.file.parent}, or start without ckpt_path. It was in the folder of the "
                "run that wrote the checkpoint; with other cohorts ε would not be the same"
            )
        self.use(known)

    def _places(self, name: str) -> Iterator[Path]:
        folder = self.file.parent
        if (checkpoint := self._run.trainer.ckpt_path) is not None:
            yield from (parent / name for parent in list(Path(checkpoint).parents)[:2])
        yield folder / name
        yield from folder.parent.glob(f"*/{name}")


def _name(saved: str) -> str:
    return f"cohorts-{saved}.secret"


def _read(path: Path) -> int:
    """Secret in a file; 0 if there is none."""
    with suppress(OSError, ValueError):
        return int(path.read_text(), 16) % 2**256
    return 0


def _hash(secret: int) -> str:
    return blake2b(secret.to_bytes(32, "little"), digest_size=8).hexdigest()
