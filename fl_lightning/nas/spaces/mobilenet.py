"""The MobileNetV3 space of Once-for-All: depth of a stage, kernel and expansion of each block.

Five stages of 2, 3 or 4 blocks, kernels of 3, 5, 7, expansions of 3, 4, 6: 9² + 9³ + 9⁴ = 7,371 choices
a stage, 2.18·10¹⁹ networks. Widths and strides are the space's parameters; as published they are for
images of 224 pixels.
Source: Cai et al. 2020, ICLR (Once-for-All), section 3.1, and its released code (`OFAMobileNetV3`);
Howard et al. 2019 (MobileNetV3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost
from fl_lightning.nas.spaces.networks.mobilenet import (
    Chosen,
    MobileNetNetwork,
    Plan,
    network_cost,
    plan_stages,
)
from fl_lightning.nas.spaces.parts import Part, PartSizes, Size
from fl_lightning.nas.spaces.settings import settle
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture


@final
@dataclass(frozen=True)
class MobileNet(SizeSpace):
    """The space.

    Attributes:
        kernels: to choose from, odd.
        expansions: to choose from: how many times more channels inside a block than before it.
        depths: to choose from, of every stage.
        widths: channels of the stem, of the first block, of the stages, then of the last
            convolution and of the layer before the classifier.
        strides: of the stem, then of the stages.
        squeeze: for the first block and for each stage, whether blocks have squeeze-and-excitation.
        swish: the same, whether they have hard swish; else ReLU.

    Example:
        >>> space = MobileNet()
        >>> f"{space.size:.3g}"
        '2.18e+19'
        >>> str(space.smallest)
        'k3e3-k3e3|k3e3-k3e3|k3e3-k3e3|k3e3-k3e3|k3e3-k3e3'
        >>> space = small_mobilenet()
        >>> space.cost(space.largest, side=32).flops > 4 * space.cost(space.smallest, side=32).flops
        True
    """

    name: ClassVar[str] = "mobilenet"

    kernels: tuple[int, ...] = (3, 5, 7)
    expansions: tuple[int, ...] = (3, 4, 6)
    depths: tuple[int, ...] = (2, 3, 4)
    widths: tuple[int, ...] = (16, 16, 24, 40, 80, 112, 160, 960, 1280)
    strides: tuple[int, ...] = (2, 2, 2, 2, 1, 2)
    squeeze: tuple[bool, ...] = (False, False, True, False, True, True)
    swish: tuple[bool, ...] = (False, False, False, True, True, True)

    def __post_init__(self) -> None:
        settle(self)
        stages = len(self.widths) - 4
        if (
            stages < 1
            or not len(self.strides) == len(self.squeeze) == len(self.swish) == stages + 1
        ):
            raise ConfigurationError(
                f"{self.name}: for n stages give n + 4 widths and n + 1 strides, squeeze and swish, got "
                f"{len(self.widths)}, {len(self.strides)}, {len(self.squeeze)} and {len(self.swish)}"
            )
        if any(kernel % 2 == 0 for kernel in self.kernels):
            raise ConfigurationError(f"{self.name}: kernels must be odd, got {self.kernels}")
        self.named_sizes  # noqa: B018 - refuses options that do not rise

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stages."""
        block = (Size("kernel", "k", self.kernels), Size("expansion", "e", self.expansions))
        depth = Size("depth", "", self.depths)
        return tuple(
            Part(f"stage {number}", (), depth, block) for number in range(1, len(self.widths) - 3)
        )

    def plan(self, stages: Sequence[PartSizes]) -> Plan:
        """Return the layers of a network with blocks of these sizes."""
        blocks = [[Chosen(int(k), float(e)) for k, e in stage.blocks] for stage in stages]
        settings = zip(self.strides[1:], self.squeeze[1:], self.swish[1:], strict=True)
        return plan_stages(
            self.widths, self.strides[0], self.squeeze[0], self.swish[0], list(settings), blocks
        )

    def network(
        self, architecture: Architecture, *, num_classes: int, in_channels: int, elastic: bool
    ) -> MobileNetNetwork:
        """Return the network of an architecture; ``elastic``: with all kernels of the space."""
        plan = self.plan(self.sizes(architecture))
        kernels = self.kernels if elastic else None
        return MobileNetNetwork(self, plan, num_classes, in_channels, kernels)

    def cost(
        self,
        architecture: Architecture,
        *,
        side: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> Cost:
        """Return what one image costs, by formulas."""
        plan = self.plan(self.sizes(architecture))
        return network_cost(plan, side, in_channels, num_classes)


def small_mobilenet() -> MobileNet:
    """Return the space for images of 32 pixels: a third of the channels, sides 32, 32, 16, 8, 8, 4."""
    return MobileNet(
        widths=(16, 16, 16, 24, 32, 40, 56, 160, 256),
        strides=(1, 1, 2, 2, 1, 2),
    )
