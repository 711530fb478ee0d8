"""Image classification with any network of timm, or one of our two small CNNs.

    loss = cross entropy(network(images), labels), with label smoothing in training only

A plain LightningModule, independent of federations. Its steps are functions of parameters, buffers and
batch, without `.item()` and without branches on data, so that they also run under `torch.func.vmap` for
many clients together.

Source of the default: DINO's ViT-S/16, Caron et al. 2021, ICCV, under its timm name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError, check_range, raise_together
from fl_lightning.models.checkpoints import load_backbone
from fl_lightning.models.cnn import SmallCNN
from fl_lightning.models.networks import build_network, freeze
from fl_lightning.models.schedule import Schedule, scheduled

Batch = tuple[Tensor, Tensor]

# A patch embedding of larger images would not fit into memory.
MOST_PIXELS = 16_384


class ImageClassifier(LightningModule):
    """Lightning module for image classification, for batches of images (B, in_chans, H, W) and labels (B,).

    Freezing only stops parameters from training: dropout in a frozen block stays active, and a frozen
    batch norm still updates its running statistics.

    Args:
        network: a name of timm, ``"lenet"`` or ``"mcmahan_cnn"``; or a module of your own from images
            to logits, for which `pretrained`, `drop_rate` and `network_kwargs` are not available.
        num_classes: length of the output, at least 2.
        in_chans: channels of the images.
        image_size: height and width in pixels, for networks that are built for one size (ViTs, our
            CNNs); others ignore it. None is the network's default size.
        pretrained: whether timm downloads the weights of this name.
        checkpoint_path: path of a file with the weights of the backbone; see `load_backbone`.
        drop_rate: dropout rate before the classifier, in [0, 1).
        label_smoothing: label smoothing of the training loss, in [0, 1).
        freeze_blocks: number of first blocks of a vision transformer to freeze; if above 0, embeddings too.
        freeze_backbone: whether to freeze all but the classifier.
        network_kwargs: further arguments of the network, e.g. embed_dim, depth, num_heads.
        optimizer: makes the optimizer of the trainable parameters; SGD with rate 0.01 and momentum 0.9
            if None. A class named in YAML has its own defaults.
        schedule: schedule of the learning rate over rounds (epochs); constant if None.

    Raises:
        ConfigurationError: if an argument is out of range, there is no such network, or weights are not
            available or do not fit.

    Example:
        >>> model = ImageClassifier("lenet", num_classes=10)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    loss_is_mean = True  # the loss is a mean over examples, so that slots may pad batches

    def __init__(
        self,
        network: str | nn.Module = "vit_small_patch16_224.dino",
        *,
        num_classes: int,
        in_chans: int = 3,
        image_size: int | None = None,
        pretrained: bool = False,
        checkpoint_path: str | None = None,
        drop_rate: float = 0.0,
        label_smoothing: float = 0.0,
        freeze_blocks: int = 0,
        freeze_backbone: bool = False,
        network_kwargs: dict[str, Any] | None = None,
        optimizer: OptimizerCallable | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        raise_together(
            lambda: check_range("num_classes", num_classes, "at least 2"),
            lambda: check_range("drop_rate", drop_rate, "in [0, 1)"),
            lambda: check_range("label_smoothing", label_smoothing, "in [0, 1)"),
            lambda: check_range("in_chans", in_chans, "at least 1 channel"),
            lambda: check_range("image_size", image_size, f"from 1 to {MOST_PIXELS} pixels"),
            lambda: check_range("freeze_blocks", freeze_blocks, "at least 0"),
        )
        if pretrained and checkpoint_path is not None:
            raise ConfigurationError(
                "model.pretrained and model.checkpoint_path are two sources of weights: leave one out"
            )
        named = {"num_classes": num_classes, "in_chans": in_chans, "drop_rate": drop_rate}
        arguments = _merge(named, network_kwargs or {})
        if isinstance(network, nn.Module):
            if pretrained or drop_rate or network_kwargs:
                raise ConfigurationError(
                    "pretrained, drop_rate and network_kwargs are for networks by name, and model.network is a "
                    "module: leave them out, and give them to the module itself"
                )
            self.network = network
        else:
            self.network = build_network(network, pretrained, image_size, arguments)
        if checkpoint_path is not None:
            load_backbone(self.network, checkpoint_path)
        freeze(self.network, freeze_blocks, freeze_backbone)
        self._num_classes, self._in_chans, self._image_size = num_classes, in_chans, image_size
        self._label_smoothing = label_smoothing
        # no default of the argument: YAML that names another class would be merged with it
        self._optimizer = optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9)
        self._schedule = schedule

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images, shape (B, num_classes)."""
        logits: Tensor = self.network(images)
        return logits

    def features(self, batch: Batch) -> Tensor:
        """Return the features of a batch: the inputs of the network's last layer, shape (B, …)."""
        network: Any = self.network
        images = batch[0]
        if isinstance(network, SmallCNN):
            features: Tensor = network.features(images)
        else:
            features = network.forward_head(network.forward_features(images), pre_logits=True)
        return features

    def check_batch(self, batch: Any) -> None:
        """Raise ConfigurationError if a batch's images or labels do not fit the model; called before training."""
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            return
        images, labels = batch
        if not (isinstance(images, Tensor) and images.ndim == 4 and isinstance(labels, Tensor)):
            return
        problems = []
        if images.shape[1] != self._in_chans:
            problems.append(
                f"model.in_chans is {self._in_chans}, and the images have {images.shape[1]} channels"
            )
        size = self._image_size
        # other networks of timm accept images of any size
        embedding = getattr(self.network, "patch_embed", None)
        is_fixed = isinstance(self.network, SmallCNN) or getattr(
            embedding, "strict_img_size", False
        )
        if size is not None and is_fixed and tuple(images.shape[2:]) != (size, size):
            given = " x ".join(map(str, images.shape[2:]))
            problems.append(f"model.image_size is {size}, and the images are {given}")
        if not labels.is_floating_point() and int(labels.max()) >= self._num_classes:
            problems.append(
                f"model.num_classes is {self._num_classes}, but the data have the label {int(labels.max())}"
            )
        if problems:
            raise ConfigurationError(f"{'; '.join(problems)}: set these options to fit the data")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the batch's mean loss, and log the training accuracy of the round."""
        images, labels = batch
        logits = self(images)
        accuracy = _accuracy(logits, labels)
        self.log("train/accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(labels))
        return functional.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log val/loss and val/accuracy."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log test/loss and test/accuracy."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the class probabilities of a batch's images, shape (B, num_classes)."""
        images, _ = batch
        return self(images).softmax(dim=1)  # type: ignore[no-any-return]

    def _evaluate(self, stage: str, batch: Batch) -> None:
        images, labels = batch
        logits = self(images)
        loss, accuracy = functional.cross_entropy(logits, labels), _accuracy(logits, labels)
        values = {f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}
        self.log_dict(values, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer of the trainable parameters, with the learning-rate schedule if one is set."""
        return scheduled(self, self._optimizer, self._schedule)


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


def _merge(named: dict[str, Any], network_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    ours = {*named, "pretrained", "img_size", "image_size", "checkpoint_path"}
    if twice := sorted(ours & network_kwargs.keys()):
        raise ConfigurationError(
            f"network_kwargs must not hold {', '.join(twice)}: give it to the model itself "
            "(img_size as image_size)"
        )
    return named | dict(network_kwargs)
