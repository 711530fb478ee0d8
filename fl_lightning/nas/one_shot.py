"""`OneShot`: training of one network whose sub-networks share weights: Once-for-All, BigNAS, AttentiveNAS.

A space of sizes defines the largest network; sub-networks are parts of it. A method chooses the
sub-networks and the loss of a step. `OneShot` is an ordinary LightningModule: with a ``federation`` block
each client trains the sub-networks that it can afford (`capability`), and a coordinate is averaged over the
clients that trained it.

Batch norm uses the statistics of the batch in training and keeps no running ones, because sub-networks
differ in their statistics. They are recalibrated for each evaluated sub-network, see `SubNetworkRounds`.
Sources: Cai et al. 2020 (Once-for-All); Yu et al. 2020 (BigNAS); Wang et al. 2021 (AttentiveNAS).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.core.traits import Traits
from fl_lightning.models.schedule import Schedule
from fl_lightning.nas.checks import ALL_SIZES_TRAITS, check_image_size
from fl_lightning.nas.shared_weights import Batch, SharedWeights, accuracy
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.capability import Capability, CostOf
from fl_lightning.nas.sub_networks.evaluation import apply_sums, batch_norms, has_statistics
from fl_lightning.nas.sub_networks.methods import Method, Sandwich, Step, step_generator
from fl_lightning.nas.sub_networks.rounds import ClientAtWork, SubNetworkRounds


class OneShot(SharedWeights):
    """Trains all sub-networks of a space of sizes in shared weights; batches are images and labels.

    Images have shape (B, in_channels, H, W), labels (B,).

    Args:
        space: space of sizes.
        method: method that chooses the sub-networks of a step; `Sandwich` (BigNAS) if None.
        num_classes: length of the output, at least 2.
        in_channels: channels of the images.
        image_size: height and width in pixels, for costs.
        label_smoothing: label smoothing of the cross entropy, in [0, 1); a sandwich applies it to the
            largest network only.
        drop_rate: dropout rate before the classifier of the largest network, in [0, 1).
        capability: budget of each client; None if all clients can afford the largest network. With
            budgets the clients' optimizer must support masks (`SparseSGDM`, `SparseAdamW`).
        same_draws: whether all clients draw the same sub-networks in the same local step.
        recalibration_examples: number of training examples, over all clients, for recalibrated batch norm
            statistics, at least 2; None for all.
        optimizer: optimizer of the weights; SGD with rate 0.05 and momentum 0.9 if None.
        schedule: schedule of the learning rate over rounds (epochs); constant if None.
        seed: seed of all draws; the run's seed if None.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> net = OneShot(small_resnet(), num_classes=10, seed=0)
        >>> net(torch.zeros(2, 3, 32, 32), net.space.smallest).shape
        torch.Size([2, 10])
    """

    federation_traits: ClassVar[Traits] = ALL_SIZES_TRAITS

    def __init__(
        self,
        space: SizeSpace,
        method: Method | None = None,
        *,
        num_classes: int,
        in_channels: int = 3,
        image_size: int = 32,
        label_smoothing: float = 0.0,
        drop_rate: float = 0.0,
        capability: Capability | None = None,
        same_draws: bool = False,
        recalibration_examples: int | None = 2048,
        optimizer: OptimizerCallable | None = None,
        schedule: Schedule | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            shape={"num_classes": num_classes, "in_channels": in_channels},
            image_size=image_size,
            schedule=schedule,
            recalibration_examples=recalibration_examples,
            seed=seed,
            ranges={
                "label_smoothing": (label_smoothing, "in [0, 1)"),
                "drop_rate": (drop_rate, "in [0, 1)"),
            },
        )
        self.space, self.method = space, method or Sandwich()
        self.method.check(space)
        self.network = space.supernet(**self.shape)
        for _, norm in batch_norms(self.network):
            norm.momentum = 0.0  # running statistics do not change in training
        self.costs = CostOf("flops", image_size, in_channels, num_classes)
        self.capability = capability
        self._label_smoothing, self._drop_rate = label_smoothing, drop_rate
        self._same_draws = same_draws
        # no default of the argument: YAML that names another class would be merged with it
        self._optimizer = optimizer or partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    @property
    def shown(self) -> dict[str, Architecture]:
        """Sub-networks that an evaluation runs: the smallest, a middle one and the largest."""
        middle = [(len(decision.options) - 1) // 2 for decision in self.space.decisions]
        return {
            "smallest": self.space.smallest,
            "middle": self.space.architecture(middle),
            "largest": self.space.largest,
        }

    def forward(self, images: Tensor, architecture: Architecture | None = None) -> Tensor:
        """Return logits (B, num_classes) of a sub-network; of the largest if None."""
        logits: Tensor = self.network(images, architecture)
        return logits

    # Training.

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of the method; logs the accuracy of the first sub-network that learns."""
        images, labels = self.checked(batch)
        current = self._client
        accuracies: list[Tensor] = []

        def labels_loss(logits: Tensor) -> Tensor:
            if logits.requires_grad:
                accuracies.append(accuracy(logits, labels))
            return functional.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)

        def whole(architecture: Architecture) -> Tensor:
            with self._dropout():
                return self(images, architecture)  # type: ignore[no-any-return]

        step = Step(
            limit=self.space.largest if current is None else current.limit,
            round_=self.current_epoch,
            num_rounds=max(0, self.trainer.max_epochs or 0),
            generator=self._generator(current, int(batch_idx)),
            seed=self.seed,
            cost=self.costs,
            logits=lambda architecture: self(images, architecture),
            labels_loss=labels_loss,
            whole=whole,
        )
        loss = self.method.loss(step)
        self.log(
            "train/accuracy", accuracies[0], on_step=False, on_epoch=True, batch_size=len(labels)
        )
        return loss

    @property
    def _client(self) -> ClientAtWork | None:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(c for c in callbacks if isinstance(c, SubNetworkRounds)).client

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _generator(self, current: ClientAtWork | None, step: int) -> torch.Generator:
        """Return the generator of a step: own draws per client, or equal draws for all clients."""
        client = None if current is None or self._same_draws else current.client
        return step_generator(self.seed, round_=self.current_epoch, client=client, step=step)

    @contextmanager
    def _dropout(self) -> Iterator[None]:
        """Context in which the inputs of the classifier get dropout."""
        if not self._drop_rate:
            yield
            return
        heads = head_names(self.network)
        if not heads:
            raise ConfigurationError(
                "model.drop_rate: dropout is before the classifier, which this network does not name: give "
                "its module a method get_classifier(), or set drop_rate to 0"
            )
        drop = lambda _, inputs: (functional.dropout(inputs[0], self._drop_rate), *inputs[1:])
        handle = self.network.get_submodule(heads[0]).register_forward_pre_hook(drop)
        try:
            yield
        finally:
            handle.remove()

    @override
    def checked(self, batch: Any) -> Batch:
        if isinstance(batch, dict):
            raise ConfigurationError(
                "OneShot learns from all training examples: leave data.search_fraction at 0"
            )
        check_image_size(self.image_size, batch[0])
        return batch  # type: ignore[no-any-return]

    # Evaluation.

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return class probabilities (B, num_classes) of the largest network."""
        return self(batch[0]).softmax(dim=1)  # type: ignore[no-any-return]

    def recalibrate(self) -> None:
        """Recompute statistics of the `shown` networks, and write those of the largest into the network."""
        if has_statistics(self.network):
            super().recalibrate()
            apply_sums(self.network, self._sums.get("largest", {}))

    # Set up.

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, and its learning rate schedule if there is one."""
        optimizer = self._optimizer(list(self.network.parameters()))
        scheduler = self._scheduler(optimizer)
        if scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"},
        }

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that applies client budgets and recalibrates statistics."""
        return [SubNetworkRounds()]
