"""Success rate of a backdoor: share of images with the trigger that are classified as the target.

    success = |{i : y_i ≠ target, argmax f(x_i with the patch) = target}| / |{i : y_i ≠ target}|

over the validation or test images. Images of the target class do not count. Accuracy does not reveal a
backdoor, because the model is right on images without the patch.

Sources: Bagdasaryan et al. 2020, How to Backdoor Federated Learning (backdoor accuracy); Wang et al.
2020, Attack of the Tails (without images of the target class).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.client_examples import Trigger, is_pair


class BackdoorSuccess(Callback):
    """Logs ``val/backdoor_success`` (or ``test/…``): fraction of triggered images classified as the target.

    Every evaluation batch passes through the module a second time, with the trigger. In a run without
    attackers it measures the effect of the trigger on a clean model.

    Args:
        trigger: trigger of the attackers; its ``share`` is ignored.

    Raises:
        ConfigurationError: during evaluation, if a batch is not a pair of images and labels, or the
            module's ``forward`` does not return one score per class.

    Example:
        >>> class LastPixel(torch.nn.Module):
        ...     def forward(self, images):
        ...         return torch.stack([images[:, 0, -1, -1], torch.full((len(images),), 0.5)], 1)
        >>> success = BackdoorSuccess(Trigger(target=0, size=1))
        >>> success.count(LastPixel(), [torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1])]).tolist()
        [2.0, 2.0]
    """

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger
        self._counts = torch.zeros(2)

    def count(self, module: torch.nn.Module, batch: Any) -> Tensor:
        """Return (hits, all) for a batch's images of non-target classes, with the trigger; float64, shape (2,)."""
        if not is_pair(batch):
            raise ConfigurationError(
                f"BackdoorSuccess needs batches of images and labels, got {type(batch).__name__}"
            )
        images, labels = batch
        others = labels != self.trigger.target
        scores = module(self.trigger.change(images, labels)[0])
        if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(images):
            raise ConfigurationError(
                f"BackdoorSuccess needs one score per class, shape (B, C), from "
                f"{type(module).__name__}.forward(images): have it return the logits"
            )
        if self.trigger.target >= scores.shape[1]:
            raise ConfigurationError(
                f"BackdoorSuccess: target must be a class from 0 to {scores.shape[1] - 1}, as the module "
                f"scores, got {self.trigger.target}"
            )
        hits = (scores.argmax(1) == self.trigger.target) & others
        return torch.stack([hits.sum(), others.sum()]).double().cpu()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counts of images and of hits."""
        self._counts = torch.zeros(2, dtype=torch.float64)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the images of a batch, and how many of them the trigger turns into the target class."""
        with trainer.precision_plugin.forward_context():
            self._counts += self.count(pl_module, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the attack's success rate, unless all images are of the target class."""
        counts = self._counts.to(pl_module.device)
        hits, others = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        if others:
            stage = "test" if trainer.testing else "val"
            pl_module.log(f"{stage}/backdoor_success", hits / others)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
