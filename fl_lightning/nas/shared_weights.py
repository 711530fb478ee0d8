"""Base of `Supernet` and `OneShot`: LightningModules whose weights are shared by many networks.

A batch is images (B, in_channels, H, W) and labels (B,). Running statistics of batch norm would mix
networks. So every evaluation first recalibrates: it computes the statistics of each network that it runs from
sums over training examples, which are added over clients (`recalibrated`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fl_lightning.core.errors import ConfigurationError, check_range, raise_together
from fl_lightning.core.seeds import run_seed
from fl_lightning.data.federated import STATISTICS
from fl_lightning.data.shards import FlatShards
from fl_lightning.federation import ExampleOwners, clients_as_owners, federation_options
from fl_lightning.models.schedule import Schedule
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.sub_networks.evaluation import (
    Sums,
    TrainingExamples,
    batch_norms,
    has_statistics,
    normalised_by,
    recalibrated,
    sums_of_owners,
)
from fl_lightning.reports.progress import federation_of

Batch = tuple[Tensor, Tensor]
RemoteSums = Callable[..., Iterator[list[Sums]]]  # see `FederatedDataModule.summed_by`
_NUM_BLANK = 2  # number of blank images, with whose sums those of remote clients are compared


class SharedWeights(LightningModule):
    """LightningModule in which many networks share weights, with their evaluation; see `network` and `shown`.

    Args:
        networks: networks that share the weights, of at least 2 classes.
        schedule: schedule of the weights' learning rate over rounds (epochs); constant if None.
        recalibration_examples: number of training examples, over all clients, for the batch norm
            statistics of an evaluation, at least 2; None for all.
        seed: seed of draws that are equal for all clients; the run's seed if None.
        ranges: value and allowed range of further options, by name, see `check_range`.

    Attributes:
        seed: seed of draws that are equal for all clients.

    Raises:
        ConfigurationError: for values out of range; the message names all of them.
    """

    def __init__(
        self,
        *,
        networks: Networks,
        schedule: Schedule | None,
        recalibration_examples: int | None,
        seed: int | None,
        ranges: Mapping[str, tuple[float | None, str]],
    ) -> None:
        every: dict[str, tuple[float | None, str]] = {
            **{name: (number, "at least 1") for name, number in networks.shape.items()},
            "num_classes": (networks.shape["num_classes"], "at least 2"),
            "image_size": (networks.side, "at least 1 pixel"),
            "recalibration_examples": (recalibration_examples, "at least 2"),
            **ranges,
        }
        raise_together(*(partial(check_range, name, *given) for name, given in every.items()))
        super().__init__()
        self.networks = networks
        self.schedule, self.recalibration_examples = schedule or Schedule(), recalibration_examples
        self.seed = run_seed(seed)
        self._sums: dict[str, Sums] = {}

    network: nn.Module

    @property
    @abstractmethod
    def shown(self) -> dict[str, Any]:
        """Networks to evaluate, by name, as second arguments of `network`'s forward; the main network comes last."""

    @abstractmethod
    def checked(self, batch: Any) -> Batch:
        """Check a training batch's form, and return its images and labels.

        Raises:
            ConfigurationError: if the batch has another form.
        """

    def check_batch(self, batch: Any) -> None:
        """Raise ConfigurationError if a batch does not fit the network; `Federation` calls this before training."""
        _check_labels(self.networks.shape["num_classes"], self.checked(batch)[1])

    def on_validation_epoch_start(self) -> None:
        """Recompute the batch norm statistics before an evaluation."""
        self.recalibrate()

    on_test_epoch_start = on_validation_epoch_start

    def recalibrate(self) -> None:
        """Recompute the batch norm statistics of the networks to evaluate; every process must call this."""
        self._sums, trainer = {}, self.trainer
        examples = None if trainer.sanity_checking else self._training_examples()
        if examples is None:
            return
        with torch.no_grad():
            shown = self.shown
        remote = getattr(trainer.datamodule, "summed_by", None)  # type: ignore[attr-defined]
        given = self.network, list(shown.values()), examples
        of_remote = None if remote is None else partial(self._remote_sums, remote, shown)
        sums, num_bytes = recalibrated(trainer, *given, remote=of_remote)
        self._sums = dict(zip(shown, sums, strict=True))
        if federation_of(trainer) is not None and not trainer.predicting:
            self.log("recalibration/bytes_up", float(num_bytes), rank_zero_only=True)

    def _training_examples(self) -> TrainingExamples | None:
        most = self.recalibration_examples
        return TrainingExamples.of(self.trainer, max_examples=most, seed=self.seed)

    def _remote_sums(
        self, remote: RemoteSums, shown: Mapping[str, Any], asked: Mapping[int, int]
    ) -> Iterator[list[Sums]]:
        """Yield remote clients' sums for batch norm statistics, after checks against the sums of blank images."""
        images = torch.zeros(self.networks.images(_NUM_BLANK).shape)
        batch = images, torch.zeros(_NUM_BLANK, dtype=torch.long)
        owners = ExampleOwners(FlatShards.of([range(_NUM_BLANK)]), lambda _: batch, _NUM_BLANK)
        blank = TrainingExamples(owners, {0: _NUM_BLANK}, self.seed)
        [own] = sums_of_owners(self.trainer, self.network, list(shown.values()), blank, [0])
        expected = dict(zip(shown, own, strict=True))

        def read(told: dict[str, Tensor], num_examples: int) -> list[Sums]:
            if told.keys() != _by_place(expected).keys():
                raise ValueError(
                    f"its answer has no batch norm sums of {num_examples} examples, or those of other layers"
                )
            found = _by_network(told)
            for name, sums in found.items():
                _check_sums(sums, expected[name], num_examples / _NUM_BLANK)
            return [found.get(name, {}) for name in expected]

        options = federation_options(self.trainer)
        skips = options is not None and options.on_client_failure == "skip"
        return remote(STATISTICS, asked, read, skips=skips)

    def client_sums(self, counts: Mapping[int, int]) -> Iterator[dict[str, Tensor]]:
        """Yield, client by client, sums for the evaluated networks' batch norm statistics over its examples.

        Args:
            counts: number of examples by client.
        """
        owners = clients_as_owners(self.trainer.datamodule)  # type: ignore[attr-defined]
        examples = TrainingExamples(owners, counts, self.seed)
        with torch.no_grad():
            shown = self.shown
        given = self.network, list(shown.values()), examples, counts
        for found in sums_of_owners(self.trainer, *given):
            yield _by_place(dict(zip(shown, found, strict=True)))

    def statistics(self) -> dict[str, Tensor]:
        """Return the sums for batch norm statistics, with keys ``network/layer``, to send them to sites."""
        return _by_place(self._sums)

    def use_statistics(self, told: Mapping[str, Tensor]) -> None:
        """Use, in the next evaluation, the sums for batch norm statistics that the server sent (see `statistics`)."""
        self._sums = _by_network(told)

    @property
    def recomputed(self) -> list[str]:
        """Names of the batch norm buffers that `recalibrate` writes; server and sites may have different values."""
        names = (name for name, _ in batch_norms(self.network))
        return [f"network.{n}.{b}" for n in names for b in ("running_mean", "running_var")]

    def normalised(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which batch norms use the statistics of one evaluated network, if they are known."""
        return normalised_by(self.network, self._sums.get(name, {}))

    def _evaluate(self, stage: str, batch: Batch) -> None:
        """Log the main network's loss and accuracy, and the accuracies of the other evaluated networks."""
        images, labels = batch
        shown = list(self.shown.items())
        if has_statistics(self.network) and not self._sums:
            shown = shown[-1:]  # without training data only the main one has statistics
        values: dict[str, Tensor] = {}
        for name, chosen in shown:
            with self.normalised(name):
                logits = self.network(images, chosen)
            values[f"{stage}/{name}_accuracy"] = accuracy(logits, labels)
        values[f"{stage}/accuracy"] = values.pop(f"{stage}/{name}_accuracy")
        values[f"{stage}/loss"] = functional.cross_entropy(logits, labels)
        self.log_dict(values, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log val/loss and val/accuracy of the main network, and accuracies of the other evaluated networks."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log test/loss and test/accuracy of the main network, and accuracies of the other evaluated networks."""
        self._evaluate("test", batch)

    def _scheduler(self, optimizer: Optimizer) -> LambdaLR:
        num_rounds = self.trainer.max_epochs or -1  # -1 is Lightning's "no end"
        return LambdaLR(optimizer, lambda round: self.rate_factor(round, num_rounds))

    def rate_factor(self, round_: int, num_rounds: int) -> float:
        """Return the factor on the learning rate in a round (epoch); `num_rounds` is -1 in a run without end."""
        return self.schedule.factor(round_, num_rounds)


def _by_place(every: Mapping[str, Sums]) -> dict[str, Tensor]:
    """Merge several networks' sums for batch norm statistics into one mapping with keys ``network/layer``."""
    return {f"{name}/{layer}": own for name, sums in every.items() for layer, own in sums.items()}


def _by_network(told: Mapping[str, Tensor]) -> dict[str, Sums]:
    """Split sums for batch norm statistics by network: from keys ``network/layer``, the inverse of `_by_place`."""
    found: dict[str, Sums] = {}
    for place, own in told.items():
        name, _, layer = place.partition("/")
        found.setdefault(name, {})[layer] = own
    return found


def _check_sums(told: Sums, blank: Sums, ratio: float) -> None:
    """Raise ValueError if a remote client's sums for batch norm have wrong sizes or counts, or no valid variance.

    Args:
        told: sums of one sub-network, of the same layers as ``blank``.
        blank: sums of the same sub-network over blank images.
        ratio: number of the client's examples, divided by that of blank images.
    """
    for name, own in blank.items():
        sums = told[name]
        if (sums.shape, sums.dtype) != (own.shape, own.dtype) or not sums.isfinite().all():
            raise ValueError(
                f"its sums of {name} must be finite float64 of shape {tuple(own.shape)}, got {sums.dtype} of "
                f"{tuple(sums.shape)}"
            )
        if not torch.equal(sums[0], own[0] * ratio):
            raise ValueError(
                f"its batch norm sums of {name} count {sums[0, 0]:g} numbers per channel, but square images of "
                f"model.image_size have {own[0, 0] * ratio:g}: set model.image_size to the size of its images"
            )
        mean, square = sums[1:] / sums[0]
        if (square * (1 + 1e-9) < mean.square()).any() or not square.float().isfinite().all():
            raise ValueError(
                f"its sums of {name} have a variance below 0, or one that float32 cannot represent"
            )


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of correct predictions in a batch, a scalar."""
    return (logits.argmax(dim=1) == labels).float().mean()


def check_image_size(side: int, images: Tensor) -> None:
    """Raise ConfigurationError if the images' height and width both differ from the size assumed for costs."""
    if images.ndim == 4 and side not in images.shape[2:]:
        given = " x ".join(map(str, images.shape[2:]))
        raise ConfigurationError(
            f"model.image_size is {side}, and the images are {given} pixels: set image_size to the size of the "
            "images, for which costs are computed"
        )


def _check_labels(num_classes: int, labels: Tensor) -> None:
    """Raise ConfigurationError if a label is above the network's last class."""
    if len(labels) and int(labels.max()) >= num_classes:
        raise ConfigurationError(
            f"model.num_classes is {num_classes}, but the data have the label {int(labels.max())}: set "
            f"num_classes to the number of classes, at least {int(labels.max()) + 1}"
        )
