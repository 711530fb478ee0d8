"""The vision transformer space of AutoFormer: features, depth, and heads and MLP ratio of each block.

Features are the same in all blocks (the residual stream); a head has 64 of its own in every block.
Source: Chen et al. 2021, ICCV (AutoFormer), table 1 ("supernet-tiny"); Dosovitskiy et al. 2021.
Differs: without relative positions; the class token is read, as in the original transformer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost
from fl_lightning.nas.spaces.networks.vit import Shape, ViTNetwork, network_cost
from fl_lightning.nas.spaces.parts import Part, Size
from fl_lightning.nas.spaces.settings import settle
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture


@final
@dataclass(frozen=True)
class ViT(SizeSpace):
    """The space.

    Attributes:
        image_side: of the images, in pixels.
        patch: side of a patch, which divides it.
        features: to choose from for the network.
        heads: to choose from for a block.
        ratios: to choose from for a block: features inside its MLP for each outside.
        depths: to choose from.
        head_features: of a head.

    Example:
        >>> space = ViT(depths=(1, 2))
        >>> space.size, str(space.smallest)
        (60, 'd192:h3m3.5')
        >>> space = ViT(image_side=224, patch=16)
        >>> space.cost(space.smallest, side=224, num_classes=1000).params
        5273896
    """

    name: ClassVar[str] = "vit"

    image_side: int = 32
    patch: int = 4
    features: tuple[int, ...] = (192, 216, 240)
    heads: tuple[int, ...] = (3, 4)
    ratios: tuple[float, ...] = (3.5, 4.0)
    depths: tuple[int, ...] = (12, 13, 14)
    head_features: int = 64

    def __post_init__(self) -> None:
        settle(self)
        if self.image_side % self.patch:
            raise ConfigurationError(
                f"{self.name}: patch must divide image_side, got {self.patch} and {self.image_side}"
            )
        self.named_sizes  # noqa: B018 - refuses options that do not rise

    @property
    def parts(self) -> tuple[Part, ...]:
        """One: all blocks have the same features."""
        own = (Size("features", "d", self.features),)
        block = (Size("heads", "h", self.heads), Size("ratio", "m", self.ratios))
        return (Part("network", own, Size("depth", "", self.depths), block),)

    def shape(self, architecture: Architecture) -> Shape:
        """Return the sizes of a network."""
        (part,) = self.sizes(architecture)
        blocks = tuple((int(heads), float(ratio)) for heads, ratio in part.blocks)
        return Shape(self.image_side, self.patch, int(part.own[0]), self.head_features, blocks)

    def network(
        self, architecture: Architecture, *, num_classes: int, in_channels: int, elastic: bool
    ) -> ViTNetwork:
        """Return the network of an architecture, of plain layers or of elastic ones."""
        return ViTNetwork(self, self.shape(architecture), num_classes, in_channels, elastic=elastic)

    def cost(
        self,
        architecture: Architecture,
        *,
        side: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> Cost:
        """Return what one image costs, by formulas.

        Raises:
            ConfigurationError: if images have another side than the space is for.
        """
        if side != self.image_side:
            raise ConfigurationError(
                f"{self.name} is for images of {self.image_side} pixels, got {side}: set image_side"
            )
        return network_cost(self.shape(architecture), in_channels, num_classes)


def small_vit() -> ViT:
    """Return a space that trains on a laptop: 32 pixels, heads of 16 features, up to 6 blocks."""
    return ViT(
        features=(32, 48, 64),
        heads=(2, 3, 4),
        ratios=(1.0, 2.0),
        depths=(2, 4, 6),
        head_features=16,
    )
