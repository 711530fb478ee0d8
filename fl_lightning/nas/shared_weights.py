"""What `Supernet` and `OneShot` have in common: LightningModules in whose weights many networks live.

Batches are images (B, in_channels, H, W) and labels (B,). Each says by `_evaluate` what a validation and a test
log. A schedule sets the learning rate of the weights over rounds, i.e. epochs.
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
    """The base.

    Args:
        schedule: the learning rate of the weights; None leaves it constant.
        recalibration_examples: training examples that give the statistics of an evaluation, of all clients
            together, at least 2; None for all.
        seed: of draws that are the same for all; the run's seed if None.
        rules: what must hold of the module's other settings, by the message that refuses them.

    Attributes:
        seed: of draws that are the same for all.

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
        """Log ``stage/loss``, ``stage/accuracy`` and what else there is to say of a batch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log val/loss and val/accuracy, and accuracies of further networks."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log test/loss and test/accuracy, and accuracies of further networks."""
        self._evaluate("test", batch)

    def _scheduler(self, optimizer: Optimizer) -> LambdaLR | None:
        """Return what sets the learning rate of an optimizer; None without a schedule."""
        schedule = self._schedule
        if schedule is None:
            return None
        num_rounds = self.trainer.max_epochs or -1  # Lightning's own number for "no end"
        return LambdaLR(optimizer, lambda round: schedule.factor(round, num_rounds))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the share of right answers in a batch."""
    return (logits.argmax(dim=1) == labels).float().mean()


def batch_norms(network: nn.Module) -> Iterator[Any]:
    """Yield the batch normalisations of a network."""
    return (layer for layer in network.modules() if isinstance(layer, _BatchNorm))
