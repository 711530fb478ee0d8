"""Evaluation of the clients' models after local training, on the common test set.

    local model of client k = model at the start of the round - Δ_k

It includes the client's personal parameters, if there are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.processes import write_whole
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import (
    Ranks,
    Run,
    Stage,
    Upload,
    common_test_examples,
    evaluate_clients,
    run_folder,
)
from fl_lightning.reports.progress import federation_of

TABLE = "local_models.csv"
GLOBAL = "global"  # in the column of clients, for the global model


class LocalModels(Stage):
    """Evaluates each client's model after local training, and the new global model, on the common test set.

    Args:
        every_n_rounds: number of rounds between two evaluations, ≥ 1.
    """

    traits = Stage.traits | Traits(
        needs={Trait.SIMULATION: "evaluates the models of simulated clients"}
    )

    def __init__(self, every_n_rounds: int) -> None:
        self._every = every_n_rounds
        self._is_due = False  # whether the current round is evaluated
        self._models: dict[int, tuple[Tensor, Tensor]] = {}

    def join(self, trainer: Trainer) -> None:
        """Add this evaluation to a Trainer's federation, so that it receives the clients' updates.

        Raises:
            ConfigurationError: if there is no federation, or the data have no clients.
        """
        federation = federation_of(trainer)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if federation is None or not isinstance(data, FederatedDataModule):
            raise ConfigurationError(
                "ClientEvaluation(local_models=True) evaluates the clients' models, and this run has no "
                "clients: add a Federation and a FederatedDataModule, or leave local_models out"
            )
        federation.add(self)

    def begin(self, trainer: Trainer) -> None:
        """Read the test set, and drop later rounds from ``local_models.csv``; every process must call this."""
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        data.setup("test")
        self._examples = common_test_examples(trainer, data)
        folder = Path(run_folder(trainer))  # a collective operation: every process must call it
        keeps = trainer.logger is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._path = folder / TABLE if keeps else None
        if trainer.is_global_zero and self._path is not None and self._path.exists():
            _write(self._path, trainer.current_epoch)

    @override
    def enter(self, run: Run) -> None:
        self._run = run  # with the module that local models are loaded into

    @override
    def open(self, round_index: int, model: object) -> None:
        self._models.clear()
        self._is_due = (round_index + 1) % self._every == 0

    @override
    def up(self, upload: Upload) -> Iterable[Upload]:
        # this stage comes before compression
        model = upload.start.model
        for update in upload.made if self._is_due else ():
            # clients may keep all buffers, or send a part
            has_buffers = update.buffers.numel() == model.buffers.numel()
            buffers = update.buffers if has_buffers else model.buffers
            self._models[update.client_id] = (model.params - update.delta, buffers.clone())
        return (upload,)

    @contextmanager
    def _loaded(self, client: int) -> Iterator[None]:
        """Load a client's local model into the module for the duration of a ``with`` block."""
        local, federation = self._run.local, federation_of(self._run.trainer)
        assert federation is not None
        personal = federation.personal_models(self._run.trainer)
        before = local.read()
        with nullcontext() if personal is None else personal.of(client):
            try:
                params, buffers = self._models[client]
                local.space.write(params)
                local.buffers.write(buffers)
                yield
            finally:
                local.space.write(before.params)
                local.buffers.write(before.buffers)

    def report(self, trainer: Trainer) -> None:
        """Evaluate the local models of the round that has ended, if this is due (every n-th round)."""
        if not self._is_due:
            return
        number = trainer.current_epoch + 1
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        # the common test set serves every client, also one without training examples
        evaluated = partial(
            evaluate_clients,
            *(trainer, data, "test"),
            examples=self._examples,
            is_shared=False,
        )
        found = evaluated(np.array(sorted(self._models), np.int64), having=self._loaded)
        clients = dict(sorted(p for share in Ranks(trainer).gather(found) for p in share.items()))
        if trainer.is_global_zero:
            whole = evaluated(np.array([-1])).get(-1, {})
            self._tell(trainer, number, clients, whole)

    def _tell(
        self,
        trainer: Trainer,
        number: int,
        clients: Mapping[int, Mapping[str, Tensor]],
        whole: Mapping[str, Tensor],
    ) -> None:
        logs = {f"{GLOBAL}/{name}": float(value) for name, value in whole.items()}
        for name, value in whole.items():
            found = [own[name] for own in clients.values() if name in own]
            if not found:  # a round without updates
                continue
            values = torch.stack(found).double()
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
                {"round": number, "client": c} | {n: float(v) for n, v in own.items()}
                for c, own in named.items()
            ]
            _write(self._path, number - 1, rows)


def _write(path: Path, completed: int, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Rewrite a CSV file: keep the rows of the first ``completed`` rounds, and append the given rows."""
    import pandas  # half a second to import

    tables = [pandas.DataFrame(rows)] if rows else []
    if path.exists():
        before = pandas.read_csv(path, dtype=str)  # as text, so that digits do not change
        tables.insert(0, before[before["round"].astype(int) <= completed])
    write_whole(path, pandas.concat(tables).to_csv(index=False))
