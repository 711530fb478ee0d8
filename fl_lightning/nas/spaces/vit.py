"""Vision transformer space of AutoFormer: features, depth, and heads and MLP ratio of each block.

    network: patches, class token and positions, blocks, norm, classifier of the class token
    block: x <- x + attention(norm(x)),   x <- x + W₂ gelu(W₁ norm(x))

All blocks have the same number of features (the residual stream), and every head has 64. Parameters have
the names of timm's `VisionTransformer`, except that queries, keys and values have a layer each, and that the
class token and the positions are in `tokens`.
Source: Chen et al. 2021, ICCV (AutoFormer), table 1 ("supernet-tiny"); Dosovitskiy et al. 2021.
Differs: no relative positions; the classifier reads the class token, as in the original transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost, Piece
from fl_lightning.nas.spaces.choices import Size, most, pick, size_of
from fl_lightning.nas.spaces.elastic import (
    Attention,
    ElasticConv2d,
    ElasticLayerNorm,
    ElasticLinear,
    fitting,
)
from fl_lightning.nas.spaces.sizes import SizedNetwork
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.nas.spaces.stages import (
    Pieces,
    StagedSpace,
    finish_settings,
    repeated,
)
from fl_lightning.nas.spaces.subnetwork import Channels


@final
@dataclass(frozen=True)
class ViT(StagedSpace):
    """Vision transformer search space of AutoFormer: features and depth; heads and MLP ratio per block.

    Attributes:
        image_side: height and width of the images, in pixels.
        patch: height and width of a patch in pixels; divides `image_side`.
        features: numbers of features to choose from, equal in all blocks.
        heads: numbers of heads to choose from, per block.
        ratios: MLP ratios to choose from, per block: inner features of the MLP divided by features.
        depths: numbers of blocks to choose from.
        head_features: number of features per head.

    Example:
        >>> space = ViT(depths=(1, 2))
        >>> space.size, str(space.smallest)
        (60, 'd192:h3m3.5')
        >>> space = ViT(image_side=224, patch=16)
        >>> space.cost(space.smallest, side=224, num_classes=1000).params
        5273896
    """

    name: ClassVar[str] = "vit"
    letters: ClassVar[Mapping[str, str]] = {"features": "d", "heads": "h", "ratio": "m"}

    image_side: int = 32
    patch: int = 4
    features: tuple[int, ...] = (192, 216, 240)
    heads: tuple[int, ...] = (3, 4)
    ratios: tuple[float, ...] = (3.5, 4.0)
    depths: tuple[int, ...] = (12, 13, 14)
    head_features: int = 64

    def __post_init__(self) -> None:
        sizes = {"features": self.features, "heads": self.heads, "ratio": self.ratios}
        finish_settings(self, **sizes, depth=self.depths)
        if self.image_side % self.patch:
            raise ConfigurationError(
                f"{self.name}: patch must divide image_side, got {self.patch} and {self.image_side}"
            )

    @property
    def patches(self) -> int:
        """Number of patches per image."""
        return (self.image_side // self.patch) ** 2

    @override
    def pieces(self, num_classes: int, in_channels: int) -> Pieces:
        width = pick(self.features, "network features")  # one part: all blocks have the same

        def block(index: int) -> Piece:
            heads = pick(self.heads, f"network block {index + 1} heads")
            ratio = pick(self.ratios, f"network block {index + 1} ratio")
            return TransformerBlock, width, heads, self.head_features, ratio

        return {
            "patch_embed": (PatchEmbedding, in_channels, width, self.patch),
            "tokens": (Tokens, width, self.patches),
            "blocks": repeated(pick(self.depths, "network depth"), block),
            "norm": (fitting_norm, width),
            "first": (FirstToken,),
            "head": (fitting, ElasticLinear, width, num_classes),
        }

    @override
    def network(self, **shape: int) -> SizedNetwork:
        network = super().network(**shape)
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        return network

    @override
    def counted(self, architecture: Architecture, networks: Networks) -> Cost:
        if networks.side != self.image_side:
            raise ConfigurationError(
                f"{self.name}: image_side of the space is {self.image_side} pixels, and images have {networks.side}: "
                "set both to the same number"
            )
        return super().counted(architecture, networks)


def small_vit() -> ViT:
    """Return a ViT space that trains on a laptop: 32 pixels, heads of 16 features, up to 6 blocks."""
    return ViT(
        features=(32, 48, 64),
        heads=(2, 3, 4),
        ratios=(1.0, 2.0),
        depths=(2, 4, 6),
        head_features=16,
    )


def fitting_norm(features: Size) -> nn.LayerNorm:
    """Return a layer norm with timm's epsilon; its number of features may be a choice."""
    norm: nn.LayerNorm = fitting(ElasticLayerNorm, features, eps=1e-6)
    return norm


class Mlp(nn.Module):
    """MLP of a transformer block: two linear layers with a GELU between them."""

    def __init__(self, features: Size, hidden: Size) -> None:
        super().__init__()
        self.fc1 = fitting(ElasticLinear, features, hidden)
        self.act = nn.GELU()
        self.fc2 = fitting(ElasticLinear, hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, in the shape of x."""
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Transformer block: attention, then MLP, each with a layer norm before it and a shortcut around it."""

    def __init__(self, features: Size, heads: Size, head_features: int, ratio: Size) -> None:
        super().__init__()
        self.norm1 = fitting_norm(features)
        self.attn = Attention(features, heads, head_features)
        self.norm2 = fitting_norm(features)
        self.mlp = Mlp(features, size_of(lambda width, times: int(width * times), features, ratio))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in the shape of x, (batch, tokens, features)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    def residual_branches(self) -> list[nn.Module]:
        """Return the modules of the residual branches: attention and MLP, whose outputs are added to the tokens."""
        return [self.attn, self.mlp]

    def hidden_channels(self) -> list[Channels]:
        """Return the block's groups of sortable channels: attention heads, and inner features of the MLP."""
        attn = self.attn
        heads = (attn.query, attn.key, attn.value), (attn.proj,), attn.head_features
        return [Channels(*heads), Channels((self.mlp.fc1,), (self.mlp.fc2,))]


class PatchEmbedding(nn.Module):
    """Layer that embeds the non-overlapping patches of an image as tokens."""

    def __init__(self, channels: int, features: Size, patch: int) -> None:
        super().__init__()
        self.proj = fitting(ElasticConv2d, channels, features, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """Return one token per patch, (batch, patches, features)."""
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Layer that puts a class token before the patches, and adds learned positions to all tokens."""

    def __init__(self, features: Size, patches: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, most(features)))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, most(features)))
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with class token and positions, (batch, patches + 1, features)."""
        width = x.shape[2]
        first = self.cls_token[..., :width].expand(len(x), -1, -1)
        return torch.cat([first, x], 1) + self.pos_embed[..., :width]


class FirstToken(nn.Module):
    """Layer that keeps only the first token (the class token), for the classifier."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the first token, (batch, features)."""
        return x[:, 0]
