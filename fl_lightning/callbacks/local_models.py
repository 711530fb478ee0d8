"""Clients' models as local training left them, on the common test set, round by round.

local model of client k = what it was sent - Δ_k,  with what it has for itself, if anything
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import (
    ClientExamples,
    Federation,
    Ranks,
    Run,
    Stage,
    Upload,
    common_test_examples,
    evaluate_clients,
    personal_models,
    run_folder,
)

TABLE = "local_models.csv"
GLOBAL = "global"  # in the column of clients


class KeptLocalModels(Stage):
    """Keeps the local models of a round, in memory, until the next one begins."""

    traits = Stage.traits | Traits(
        needs={Trait.SIMULATION: "evaluates the models of simulated clients"}
    )

    def __init__(self) -> None:
        self.models: dict[int, tuple[Tensor, Tensor]] = {}
        self._run: Run | None = None

    def enter(self, run: Run) -> None:
        """Learn into what models are put."""
        self._run = run

    def open(self, round_index: int, model: object) -> None:
        """Forget those of the round before."""
        self.models.clear()

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Keep what clients have when they are about to send."""
        model = upload.start.model
        for update in upload.made:
            # clients may keep their buffers, or send some of them
            has_buffers = update.buffers.numel() == model.buffers.numel()
            buffers = update.buffers if has_buffers else model.buffers
            self.models[update.client_id] = (model.params - update.delta, buffers.clone())
        return (upload,)

    @contextmanager
    def of(self, client: int) -> Iterator[None]:
        """Loads a client's local model into the module inside this block."""
        assert self._run is not None
        local, personal = self._run.local, personal_models(self._run.trainer)
        before = local.read()
        with nullcontext() if personal is None else personal.of(client):
            try:
                params, buffers = self.models[client]
                local.space.write(params)
                local.buffers.write(buffers)
                yield
            finally:
                local.space.write(before.params)
                local.buffers.write(before.buffers)


class LocalModels:
    """Evaluates local models, and the global one after them, and keeps the figures in a table.

    Args:
        every_n_rounds: how often, ≥ 1.
    """

    def __init__(self, every_n_rounds: int) -> None:
        self._every = every_n_rounds
        self._kept = KeptLocalModels()

    def take_part(self, trainer: Trainer) -> None:
        """Ask a fit's federation for local models.

        Raises:
            ConfigurationError: if there is no federation, or no data with clients.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        federation = next((c for c in callbacks if isinstance(c, Federation)), None)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if federation is None or not isinstance(data, FederatedDataModule):
            raise ConfigurationError(
                "ClientEvaluation(local_models=True) evaluates what clients of a federation have trained: "
                "add a Federation, or leave local_models out"
            )
        self._kept = KeptLocalModels()
        federation.add(self._kept)

    def begin(self, trainer: Trainer) -> None:
        """Set the test set up, and learn where the table is."""
        trainer.datamodule.setup("test")  # type: ignore[attr-defined]
        folder = Path(run_folder(trainer))  # which processes agree on: all must ask
        self._path = folder / TABLE if _keeps_files(trainer) else None
        self._has_begun = False

    def report(self, trainer: Trainer) -> None:
        """Evaluate the models of the round that has ended, if it is an n-th one."""
        number = trainer.current_epoch + 1
        if number % self._every:
            return
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        examples = common_test_examples(trainer, data)
        # the same set for every client, also for those that have no examples left to train
        found = self._evaluated(trainer, examples, sorted(self._kept.models), local=True)
        clients = dict(sorted(p for share in Ranks(trainer).gather(found) for p in share.items()))
        if not trainer.is_global_zero:
            return
        whole = self._evaluated(trainer, examples, [-1], local=False).get(-1, {})
        self._tell(trainer, number, clients, whole)

    def _evaluated(
        self, trainer: Trainer, examples: ClientExamples, clients: list[int], *, local: bool
    ) -> dict[int, dict[str, Tensor]]:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        having = self._kept.of if local else None
        ids = np.array(clients, np.int64)
        return evaluate_clients(trainer, data, "test", ids, having, examples, is_shared=False)

    def _tell(
        self,
        trainer: Trainer,
        number: int,
        clients: Mapping[int, Mapping[str, Tensor]],
        whole: Mapping[str, Tensor],
    ) -> None:
        logs = {f"{GLOBAL}/{name}": float(value) for name, value in whole.items()}
        for name, value in whole.items():
            values = torch.stack([own[name] for own in clients.values() if name in own]).double()
            mean, std = float(values.mean()), float(values.std(correction=0))
            logs |= {f"local/{name}_mean": mean, f"local/{name}_std": std}
            rank_zero_info(
                f"round {number}, common test set: {name} of {len(values)} local models mean "
                f"{mean:.4f}, std {std:.4f}; of the global model {float(value):.4f}"
            )
        for logger in trainer.loggers:
            logger.log_metrics(logs, step=trainer.global_step - 1)
        if self._path is not None:
            named = {**{str(client): own for client, own in clients.items()}, GLOBAL: whole}
            rows = [
                {"round": str(number), "client": c} | {n: str(float(v)) for n, v in own.items()}
                for c, own in named.items()
            ]
            if not self._has_begun and self._path.exists():  # rounds that are trained again
                _write(self._path, [r for r in _rows(self._path) if int(r["round"]) < number])
            self._has_begun = True
            _append(self._path, rows)


def _keeps_files(trainer: Trainer) -> bool:
    return trainer.logger is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _append(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows after those of a table; a new column makes it anew."""
    known = _columns(path)
    if known and all(row.keys() <= set(known) for row in rows):
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, known).writerows(rows)
        return
    _write(path, [*(_rows(path) if known else []), *rows])


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def _columns(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if (row.get("round") or "").isdecimal()]
