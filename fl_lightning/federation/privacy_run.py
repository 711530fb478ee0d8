"""A Trainer's run as a privacy mechanism sees it."""

from __future__ import annotations

from lightning.pytorch import Trainer

from fl_lightning.data.cohort import CohortSampler
from fl_lightning.server.privacy.run import LocalSampling, Run


def private_run(
    trainer: Trainer,
    cohort: CohortSampler,
    seed: int,
    *,
    local: LocalSampling | None = None,
    fewest_survivors: int | None = None,
) -> Run:
    """Return who takes part when.

    Args:
        trainer: set up for fitting.
        cohort: who takes part.
        seed: the run's.
        local: how clients draw their batches.
        fewest_survivors: with fewer replies there is no sum that anybody sees.
    """
    rounds, params = trainer.max_epochs, trainer.lightning_module.parameters()
    return Run(
        cohort,
        num_clients=len(trainer.datamodule.clients),  # type: ignore[attr-defined]
        num_rounds=None if rounds is None or rounds < 0 else rounds,
        seed=seed,
        num_coordinates=sum(p.numel() for p in params if p.requires_grad),
        fewest_survivors=fewest_survivors,
        local=local,
    )
