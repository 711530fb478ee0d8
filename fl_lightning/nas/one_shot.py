"""`OneShot`: training of one network whose sub-networks share weights: Once-for-All, BigNAS, AttentiveNAS.

A space of sizes defines the largest network; sub-networks are parts of it. A method chooses the
sub-networks of a step and its loss. `OneShot` is an ordinary LightningModule: with a ``federation`` block
each client trains the sub-networks that it can afford (`capability`), and a coordinate is averaged over the
clients that trained it.

In training batch norm uses the statistics of the batch and keeps no running ones, which would mix those of
different sub-networks. An evaluation recalibrates them for every sub-network, see `SharedWeights`.
Sources: Cai et al. 2020 (Once-for-All); Yu et al. 2020 (BigNAS); Wang et al. 2021 (AttentiveNAS).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.core.seeds import torch_generator
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.models.schedule import Schedule
from fl_lightning.nas.shared_weights import Batch, SharedWeights, accuracy, check_image_size
from fl_lightning.nas.spaces.elastic import Repeat
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.nas.sub_networks.capability import Capability
from fl_lightning.nas.sub_networks.evaluation import apply_sums, batch_norms, has_statistics
from fl_lightning.nas.sub_networks.methods import Method, Sandwich, Shrinking, Step
from fl_lightning.nas.sub_networks.rounds import SubNetworkRounds

_TRAITS = Traits(
    needs={
        Trait.ALL_PARAMETERS: "allows no mask but those of its clients' capability: a mask of the largest network "
        "leaves smaller ones with parts missing",
    },
    instead={
        Trait.ALL_PARAMETERS: "train it without MaskCalibration, then mask the network that was chosen",
    },
)
# of training with a frozen teacher
FROZEN = Traits(
    needs={Trait.SIMULATION: "has a frozen teacher, whose weights are not sent to sites"},
    instead={Trait.SIMULATION: "set largest of model.method to learns"},
)
# of a network with batch norm
SUMMED = Traits(
    needs={Trait.CLEAR_SUMS: "needs sums of each client's activations, for batch norm statistics"},
    instead={
        Trait.CLEAR_SUMS: "use a space without batch norm (fl_lightning.nas.ViT), or Mean without LocalDP and "
        "DistributedDP",
    },
)


class OneShot(SharedWeights):
    """LightningModule that trains all sub-networks of a space of layer sizes in shared weights.

    A batch is images (B, in_channels, H, W) and labels (B,).

    Args:
        space: space of sizes.
        method: method that chooses the sub-networks of a step and its loss; `Sandwich` (BigNAS) if None.
        num_classes: length of the output, at least 2.
        in_channels: channels of the images.
        image_size: height and width in pixels, for costs.
        label_smoothing: label smoothing of the cross entropy, in [0, 1); a sandwich applies it to the
            largest network only.
        drop_rate: dropout rate before the classifier of the largest network, in [0, 1).
        drop_connect: rate in [0, 1) at which an example skips the residual branch of a block, in the last
            two stages of the largest network; it rises in proportion to the number of the block.
        zero_gamma: whether the last batch norm of every residual branch starts with a scale of 0, so that
            blocks start as shortcuts.
        decay_weights_only: whether biases, and scales and shifts of norms, are exempt from weight decay.
        capability: budget of each client; None if all clients can afford the largest network. With
            budgets the clients' optimizer must support masks (`SparseSGDM`, `SparseAdamW`).
        same_draws: whether all clients draw the same sub-networks in the same local step.
        recalibration_examples: number of training examples, over all clients, for recalibrated batch norm
            statistics, at least 2; None for all.
        optimizer: optimizer of the weights; SGD with rate 0.05 and momentum 0.9 if None.
        schedule: schedule of the learning rate over rounds (epochs); constant if None.
        seed: seed of all draws; the run's seed if None.

    Attributes:
        most_of_clients: largest sub-network that a client's site allows, by client; `capability` may limit
            the client further.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> net = OneShot(small_resnet(), num_classes=10, seed=0)
        >>> net(torch.zeros(2, 3, 32, 32), net.space.smallest).shape
        torch.Size([2, 10])
    """

    federation_traits: Traits = _TRAITS

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
        drop_connect: float = 0.0,
        zero_gamma: bool = False,
        decay_weights_only: bool = False,
        capability: Capability | None = None,
        same_draws: bool = False,
        recalibration_examples: int | None = 2048,
        optimizer: OptimizerCallable | None = None,
        schedule: Schedule | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            networks=Networks(
                space, image_size, {"num_classes": num_classes, "in_channels": in_channels}
            ),
            schedule=schedule,
            recalibration_examples=recalibration_examples,
            seed=seed,
            ranges={
                "label_smoothing": (label_smoothing, "in [0, 1)"),
                "drop_rate": (drop_rate, "in [0, 1)"),
                "drop_connect": (drop_connect, "in [0, 1)"),
            },
        )
        self.space, self.method = space, method or Sandwich()
        self.method.check(space)
        self.network = space.supernet(**self.networks.shape)
        for _, norm in batch_norms(self.network):
            norm.momentum = 0.0  # running statistics do not change in training
        self._branches = residual_branches(self.network)
        norms = [branch for branch, _ in self._branches if isinstance(branch, nn.BatchNorm2d)]
        if (zero_gamma and not norms) or (drop_connect and not self._branches):
            raise ConfigurationError(
                f"model.{'zero_gamma' if zero_gamma else 'drop_connect'} applies to residual branches, and no block of "
                f"{space.name} names any: leave it out, or give your blocks a method residual_branches()"
            )
        for norm in norms if zero_gamma else ():
            nn.init.zeros_(norm.weight)
        if has_statistics(self.network):
            self.federation_traits |= SUMMED
        if isinstance(self.method, Shrinking) and self.method.largest == "frozen":
            self.federation_traits |= FROZEN
        self.capability, self.most_of_clients = capability, dict[int, Architecture]()
        self._label_smoothing, self._drop_rate = label_smoothing, drop_rate
        self._drop_connect, self._decay_weights_only = drop_connect, decay_weights_only
        self._same_draws = same_draws
        # no default of the argument: YAML that names another class would be merged with it
        self._optimizer = optimizer or partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    @property
    def shown(self) -> dict[str, Architecture]:
        """Sub-networks to evaluate: the smallest, a middle and the largest one."""
        middle = [(len(decision.options) - 1) // 2 for decision in self.space.decisions]
        return {
            "smallest": self.space.smallest,
            "middle": self.space.architecture(middle),
            "largest": self.space.largest,
        }

    def forward(self, images: Tensor, architecture: Architecture | None = None) -> Tensor:
        """Return logits (B, num_classes) of one sub-network; of the largest by default."""
        logits: Tensor = self.network(images, architecture)
        return logits

    # Training.

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the training method's loss on a batch, and log the first trained sub-network's accuracy."""
        images, labels = self.checked(batch)
        client = self._rounds.client
        accuracies: list[Tensor] = []

        def labels_loss(logits: Tensor) -> Tensor:
            if logits.requires_grad:
                accuracies.append(accuracy(logits, labels))
            return functional.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)

        def whole(architecture: Architecture) -> Tensor:
            with self._dropout():
                return self(images, architecture)  # type: ignore[no-any-return]

        def frozen(architecture: Architecture) -> Tensor:
            weights = self._rounds.teacher
            assert weights is not None, "the first phase has ended"
            logits: Tensor = functional_call(self.network, weights, (images, architecture))
            return logits

        step = Step(
            limit=self._rounds.limit_of(client),
            round_=self.current_epoch,
            num_rounds=max(0, self.trainer.max_epochs or 0),
            generator=self._generator(client, int(batch_idx)),
            seed=self.seed,
            networks=self.networks,
            logits=lambda architecture: self(images, architecture),
            labels_loss=labels_loss,
            whole=whole,
            frozen=frozen,
        )
        loss = self.method.loss(step)
        self.log(
            "train/accuracy", accuracies[0], on_step=False, on_epoch=True, batch_size=len(labels)
        )
        return loss

    @property
    def _rounds(self) -> SubNetworkRounds:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(c for c in callbacks if isinstance(c, SubNetworkRounds))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _generator(self, client: int | None, step: int) -> torch.Generator:
        """Return the random generator of a training step; all clients have the same one if `same_draws`."""
        own = 0 if client is None or self._same_draws else client + 1
        return torch_generator(self.seed, "sub-networks", self.current_epoch, own, step)

    @contextmanager
    def _dropout(self) -> Iterator[None]:
        """Return a context with dropout before the classifier and drop-connect, for the largest network."""
        handles = []
        if self._drop_rate:
            heads = head_names(self.network)
            if not heads:
                raise ConfigurationError(
                    "model.drop_rate is dropout before the classifier, which this network does not name: set it to "
                    "0, or give your module a method get_classifier()"
                )
            drop = lambda _, inputs: (functional.dropout(inputs[0], self._drop_rate), *inputs[1:])
            handles.append(self.network.get_submodule(heads[0]).register_forward_pre_hook(drop))
        for branch, share in self._branches if self._drop_connect else ():
            skip = partial(_skipped, self._drop_connect * share)
            handles.append(branch.register_forward_hook(skip))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @override
    def checked(self, batch: Any) -> Batch:
        if isinstance(batch, dict):
            raise ConfigurationError(
                "OneShot trains on all training examples, and data.search_fraction sets some apart: set it to 0"
            )
        check_image_size(self.networks.side, batch[0])
        return batch  # type: ignore[no-any-return]

    # Evaluation.

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return class probabilities (B, num_classes) of the largest network."""
        return self(batch[0]).softmax(dim=1)  # type: ignore[no-any-return]

    def recalibrate(self) -> None:
        """Recompute batch norm statistics of the evaluated sub-networks; the network keeps those of the largest."""
        if has_statistics(self.network):
            super().recalibrate()
            apply_sums(self.network, self._sums.get("largest", {}))

    # Set up.

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the weights' optimizer and its learning rate schedule."""
        params: list[Any] = list(self.network.parameters())
        if self._decay_weights_only:  # biases, and the scales and shifts of norms, are vectors
            groups = [
                [p for p in params if (p.ndim > 1) == is_weight] for is_weight in (True, False)
            ]
            params = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
        optimizer = self._optimizer(params)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._scheduler(optimizer), "interval": "epoch"},
        }

    @override
    def rate_factor(self, round_: int, num_rounds: int) -> float:
        return self.method.factor(self.schedule, self.space, round_, num_rounds)

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that applies client budgets and recalibrates batch norm statistics."""
        return [SubNetworkRounds()]


def residual_branches(network: nn.Module) -> list[tuple[nn.Module, float]]:
    """Return modules whose output is added to a shortcut, each with its fraction of the drop-connect rate.

    The fraction of block l of L, counted from 0, is l / L in the last two stages, and 0 before them.
    Source: Huang et al. 2016 for the line; Wang et al. 2021 (AttentiveNAS), released code, for the stages.
    """
    stages = [module for module in network.modules() if isinstance(module, Repeat)]
    late = {block for stage in stages[-2:] for block in stage}
    blocks: list[Any] = [m for m in network.modules() if hasattr(m, "residual_branches")]
    return [
        (branch, number / len(blocks) if block in late else 0.0)
        for number, block in enumerate(blocks)
        for branch in block.residual_branches()
    ]


def _skipped(rate: float, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return the output with each example set to zero with probability `rate`; other examples are scaled up."""
    if not rate:
        return output
    shape = (len(output), *[1] * (output.ndim - 1))
    return output * functional.dropout(torch.ones(shape).to(output), rate)
