"""Networks of the workloads.

Each is built from torch alone (ResNet and ViT from timm), so that a rival's environment, which has no
`fl_lightning`, trains exactly the same one. Where possible they are plain sequences of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it


def logistic_regression(in_features: int, num_classes: int) -> nn.Module:
    """Return one dense layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, num_classes))


def mlp() -> nn.Module:
    """Return 784-200-200-10, the "2NN" of McMahan et al. 2017: 199,210 parameters."""
    return nn.Sequential(nn.Flatten(), *_dense(784, 200), *_dense(200, 200), nn.Linear(200, 10))


def mcmahan_cnn() -> nn.Module:
    """Return the CNN of McMahan et al. 2017 for 28×28×1 images: 1,663,370 parameters."""
    return nn.Sequential(
        *_pooled(1, 32, padding=2),
        *_pooled(32, 64, padding=2),
        nn.Flatten(),
        *_dense(64 * 7 * 7, 512),
        nn.Linear(512, 10),
    )


def lenet5() -> nn.Module:
    """Return LeNet-5 for 32×32×1 images, with ReLU and max-pooling: 61,706 parameters."""
    return nn.Sequential(
        *_pooled(1, 6),
        *_pooled(6, 16),
        nn.Flatten(),
        *_dense(16 * 5 * 5, 120),
        *_dense(120, 84),
        nn.Linear(84, 10),
    )


def wide_lenet() -> nn.Module:
    """Return a wider, shallower LeNet for 32×32×3 images: 215,730 parameters."""
    return nn.Sequential(
        *_pooled(3, 20),
        *_pooled(20, 50),
        nn.Flatten(),
        *_dense(50 * 5 * 5, 150),
        nn.Linear(150, 10),
    )


def pfl_cnn(
    *, dropout: bool, channels: int = 3, side: int = 32, num_classes: int = 10
) -> nn.Module:
    """Return the ``simple_cnn`` of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters.

    Source: apple/pfl-research, benchmarks/model/pytorch/cnn.py: two unpadded 3×3 convolutions, one
    pooling, dropout 0.25 before and 0.5 after the dense layer, Glorot-uniform weights. With the images and
    the 62 classes of EMNIST it is the CNN of Reddi et al. 2021 and FedJAX: 1,206,590 parameters.

    Args:
        channels: of an image.
        side: of an image, in pixels.
        num_classes: of the labels.
        dropout: with its dropouts. Engines that train several clients at once draw other random
            numbers than a plain loop, so that only without them results can be compared.
    """
    network = nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *([nn.Dropout(0.25)] if dropout else []),
        nn.Flatten(),
        *_dense(64 * (side // 2 - 2) ** 2, 128),
        *([nn.Dropout(0.5)] if dropout else []),
        nn.Linear(128, num_classes),
    )
    for layer in network:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
    return network


def resnet18_gn() -> nn.Module:
    """Return a ResNet-18 with group norm for 32×32×3 images and 100 classes: 11,220,132 parameters.

    Source: Hsieh et al. 2020 (1910.00189): groups of two channels in place of batch norm; a first
    convolution of 3×3 without pooling, as is usual for such images.
    """
    import timm

    network: nn.Module = timm.create_model(
        "resnet18", num_classes=100, norm_layer=lambda size, **_: nn.GroupNorm(size // 2, size)
    )
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return network


def tiny_vit(depth: int = 12) -> nn.Module:
    """Return a ViT-tiny for 32×32×3 images and 100 classes: patches of 4, width 192, 3 heads.

    Source: Touvron et al. 2021 (2012.12877), table 1, with smaller patches for smaller images: 5,380,132
    parameters.
    """
    import timm

    network: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=4,
        embed_dim=192,
        depth=depth,
        num_heads=3,
        num_classes=100,
    )
    return network


class TabularNetwork(nn.Module):
    """Columns of categories as embeddings, beside columns of numbers, then 128-64-2.

    Args:
        categories: values of each column of categories; these come first in a row, as whole numbers.
        num_numbers: other columns.
        width: of an embedding.
        depth: layers of attention over the embedded columns; TabTransformer (Huang et al. 2020,
            2012.06678, section 2) has 6 of width 32 with 8 heads.
    """

    def __init__(
        self, categories: Sequence[int], num_numbers: int, width: int, depth: int = 0
    ) -> None:
        super().__init__()
        self.columns = nn.ModuleList([nn.Embedding(count, width) for count in categories])
        layers = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        ]
        self.attention = nn.Sequential(*layers)
        inputs = len(categories) * width + num_numbers
        self.head = nn.Sequential(*_dense(inputs, 128), *_dense(128, 64), nn.Linear(64, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits, shape (B, 2)."""
        count = len(self.columns)
        values = rows[:, :count].long().unbind(1)
        embedded = torch.stack([e(v) for e, v in zip(self.columns, values, strict=True)], 1)
        mixed = self.attention(embedded).flatten(1)
        logits: Tensor = self.head(torch.cat([mixed, rows[:, count:]], 1))
        return logits


class LetterNetwork(nn.Module):
    """Two LSTMs that predict the next of 90 letters at every position: 822,570 parameters.

    Source: Reddi et al. 2021 (2003.00295), appendix C.2 (Shakespeare): embeddings of 8 numbers, 2 × 256
    units. Differs: PyTorch's LSTM has two biases, TensorFlow's one (820,522 parameters).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 90)

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits, shape (B, 90, T), of letters, shape (B, T)."""
        states, _ = self.lstm(self.embedding(letters))
        logits: Tensor = self.head(states).transpose(1, 2)
        return logits


class LowRankLanguageModel(nn.Module):
    """Causal language model whose low-rank additions train: 24,576 of 14,092,288 parameters.

    Source: Pythia-14m (Biderman et al. 2023, 2304.01373): 6 layers of width 128 with 4 heads, attention and
    MLP in parallel, 50,304 tokens. LoRA of rank 8 beside the product of queries, keys and values (Hu et al.
    2021, 2106.09685). Differs: no rotary positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50_304, 128), nn.Linear(128, 50_304, bias=False)
        self.blocks = nn.Sequential(*[_LowRankBlock(128, num_heads=4, rank=8) for _ in range(6)])
        self.norm = nn.LayerNorm(128)
        for name, param in self.named_parameters():
            param.requires_grad_(name.endswith(("down", "up")))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (B, 50304, T), of tokens, shape (B, T)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens)))).transpose(1, 2)
        return logits


class _LowRankBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, rank: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.norm_of_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.zeros(3 * width, rank))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        mixed = self.attention(normed) + F.linear(F.linear(normed, self.down), self.up)
        heads = mixed.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind(0)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        out += self.mlp(self.norm_of_mlp(x))
        return out


def _dense(in_features: int, out_features: int) -> tuple[nn.Module, ...]:
    return nn.Linear(in_features, out_features), nn.ReLU()


def _pooled(in_channels: int, out_channels: int, padding: int = 0) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=5, padding=padding)
    return convolution, nn.ReLU(), nn.MaxPool2d(2)
