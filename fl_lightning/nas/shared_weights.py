"""Base of `Supernet` and `OneShot`: LightningModules whose weights are shared by many networks.

Batches are images (B, in_channels, H, W) and labels (B,).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import run_seed
from fl_lightning.models.schedule import Schedule

Batch = tuple[Tensor, Tensor]


class SharedWeights(LightningModule):
    """A LightningModule of shared weights; subclasses define `_evaluate`.

    Args:
        num_classes: length of the output, at least 2.
        schedule: schedule of the weights' learning rate over rounds (epochs); constant if None.
        recalibration_examples: number of training examples, of all clients together, for the statistics
            of an evaluation, at least 2; None for all.
        seed: seed of draws that are equal for all clients; the run's seed if None.
        rules: conditions on the module's other settings, by error message.

    Attributes:
        seed: seed of draws that are equal for all clients.

    Raises:
        ConfigurationError: for values out of range, all of them.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        schedule: Schedule | None,
        recalibration_examples: int | None,
        seed: int | None,
        rules: Mapping[str, bool],
    ) -> None:
        least = recalibration_examples
        every = {
            f"num_classes must be at least 2, got {num_classes}": num_classes >= 2,
            **rules,
            f"recalibration_examples must be at least 2, got {least}": least is None or least >= 2,
        }
        broken = [message for message, holds in every.items() if not holds]
        if broken:
            raise ConfigurationError("; ".join(broken))
        super().__init__()
        self._schedule, self.recalibration_examples = schedule, recalibration_examples
        self.seed = run_seed(seed)

    @abstractmethod
    def _evaluate(self, stage: str, batch: Batch) -> None:
        """Log ``stage/loss``, ``stage/accuracy`` and further metrics of a batch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log val/loss and val/accuracy, and accuracies of further networks."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log test/loss and test/accuracy, and accuracies of further networks."""
        self._evaluate("test", batch)

    def _scheduler(self, optimizer: Optimizer) -> LambdaLR | None:
        """Return the learning rate scheduler of an optimizer, or None without a schedule."""
        schedule = self._schedule
        if schedule is None:
            return None
        num_rounds = self.trainer.max_epochs or -1  # -1 is Lightning's "no end"
        return LambdaLR(optimizer, lambda round: schedule.factor(round, num_rounds))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of correct predictions in a batch, a scalar."""
    return (logits.argmax(dim=1) == labels).float().mean()


def batch_norms(network: nn.Module) -> Iterator[Any]:
    """Yield the batch normalisations of a network."""
    return (layer for layer in network.modules() if isinstance(layer, _BatchNorm))
