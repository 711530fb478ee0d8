"""Two small convolutional networks of many federated experiments: McMahan's CNN and LeNet.

    McMahanCNN: conv 5x5, 32 - pool - conv 5x5, 64 - pool - dense 512 - classes
    LeNet:      conv 5x5, 6 - pool - conv 5x5, 16 - pool - dense 120 - dense 84 - classes

with a ReLU after each convolution and each dense layer but the last, and 2x2 max-pooling.

Sources: McMahan et al. 2017, AISTATS, section 3 (1,663,370 parameters on 28x28x1 and 10 classes:
its convolutions keep the size); LeCun et al. 1998 in the form of the NIID-Bench experiments, Li et
al. 2022, ICDE (62,006 parameters on 32x32x3 and 10 classes: no padding).
Differs: any image size and number of channels; an optional dropout before the classifier. Both have
layers `features` and `head`, and timm's `get_classifier`.
"""

from __future__ import annotations

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError


class SmallCNN(nn.Module):
    """Base class of the small convolutional networks: ``head(dropout(features(images)))``."""

    def __init__(
        self, features: nn.Sequential, width: int, num_classes: int, drop_rate: float
    ) -> None:
        super().__init__()
        self.features = features
        # no layer if it is off, because even a dropout of 0 is a random operation for torch.func.vmap
        self.drop = nn.Dropout(drop_rate) if drop_rate else nn.Identity()
        self.head = nn.Linear(width, num_classes)

    def get_classifier(self) -> nn.Module:
        """Return the classifier (last layer), by a method of the same name as timm's networks have."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) of images (B, in_chans, image_size, image_size)."""
        logits: Tensor = self.head(self.drop(self.features(images)))
        return logits


class McMahanCNN(SmallCNN):
    """The convolutional network of the FedAvg paper (McMahan et al.) for MNIST.

    Args:
        num_classes: length of the output.
        in_chans: channels of the images.
        image_size: height and width of the images, in pixels, at least 4.
        drop_rate: dropout before the classifier, a fraction in [0, 1).

    Raises:
        ConfigurationError: if the image is too small for two poolings.

    Example:
        >>> sum(p.numel() for p in McMahanCNN().parameters())
        1663370
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        image_size: int = 28,
        *,
        drop_rate: float = 0.0,
    ) -> None:
        _check_image_size("McMahanCNN", image_size, smallest=4)
        side = image_size // 2 // 2
        features = nn.Sequential(
            *_convolution(in_chans, 32, padding=2),
            *_convolution(32, 64, padding=2),
            nn.Flatten(),
            *_dense(64 * side**2, 512),
        )
        super().__init__(features, 512, num_classes, drop_rate)


class LeNet(SmallCNN):
    """LeNet-5 with ReLU and max-pooling, as in federated benchmarks on CIFAR-10.

    Args:
        num_classes: length of the output.
        in_chans: channels of the images.
        image_size: height and width of the images, in pixels, at least 16.
        drop_rate: dropout before the classifier, a fraction in [0, 1).

    Raises:
        ConfigurationError: if the image is too small for two unpadded convolutions and poolings.

    Example:
        >>> sum(p.numel() for p in LeNet().parameters())
        62006
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        image_size: int = 32,
        *,
        drop_rate: float = 0.0,
    ) -> None:
        _check_image_size("LeNet", image_size, smallest=16)
        side = ((image_size - 4) // 2 - 4) // 2
        features = nn.Sequential(
            *_convolution(in_chans, 6, padding=0),
            *_convolution(6, 16, padding=0),
            nn.Flatten(),
            *_dense(16 * side**2, 120),
            *_dense(120, 84),
        )
        super().__init__(features, 84, num_classes, drop_rate)


def _check_image_size(network: str, image_size: int, *, smallest: int) -> None:
    if image_size < smallest:
        raise ConfigurationError(
            f"image_size must be at least {smallest} for {network}, got {image_size}: nothing would "
            "be left after its two poolings. Enlarge the images."
        )


def _convolution(in_chans: int, out_chans: int, *, padding: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(in_chans, out_chans, kernel_size=5, padding=padding)
    return convolution, nn.ReLU(), nn.MaxPool2d(2)


def _dense(in_features: int, out_features: int) -> tuple[nn.Module, ...]:
    return nn.Linear(in_features, out_features), nn.ReLU()
