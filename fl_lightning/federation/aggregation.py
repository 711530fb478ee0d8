"""Which aggregator a run has: the one that was asked for, made to fit masks and attackers."""

from __future__ import annotations

from lightning.pytorch import Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.federation.stages.client_masks import client_masks
from fl_lightning.privacy.protected import Protected
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.means.overlap_mean import OverlapMean
from fl_lightning.server.robust.collect import Collected, RobustRule
from fl_lightning.server.server import as_aggregator


def run_aggregator(
    trainer: Trainer, given: Aggregator | RobustRule | None, attackers: Attackers | None
) -> Aggregator:
    """Return what folds the updates of a run.

    Args:
        trainer: set up; its callbacks say whether clients have masks of their own.
        given: what was asked for; None for the mean that fits.
        attackers: who send something else.

    Raises:
        ConfigurationError: for a rule that means nothing under masks of the clients' own, or with
            their optimizer.
    """
    if isinstance(given, Protected):
        return given  # `SecureRounds` refuses such masks
    masks_differ = client_masks(trainer) is not None
    aggregator = OverlapMean() if masks_differ and given is None else as_aggregator(given)
    if masks_differ and not aggregator.takes_masks:
        raise ConfigurationError(f"federation: {_why_not(aggregator)}")
    for optimizer in trainer.optimizers[:1]:
        aggregator = aggregator.of_clients(optimizer)
    if attackers is None:
        return aggregator
    num_clients = len(trainer.datamodule.clients)  # type: ignore[attr-defined]
    return attackers.wrap(aggregator, num_clients)


def _why_not(aggregator: Aggregator) -> str:
    """Return why a mean that does not know of masks means nothing under the clients' own."""
    if isinstance(aggregator, Collected):
        return (
            "robust rules compare whole updates, and with masks of the clients' own "
            "they have different coordinates: share one mask, or set aggregator to OverlapMean"
        )
    return (
        f"with masks of the clients' own, {type(aggregator).__name__} "
        "counts a client that may not move an entry as one that wants it to stay: set "
        "aggregator to OverlapMean, or leave it out"
    )
