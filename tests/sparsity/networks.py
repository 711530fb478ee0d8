"""Small networks that the tests score."""

import timm
import torch
from torch import nn


def tiny_vit(**options):
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
        | {"in_chans": 1, "num_classes": 4, **options},
    )


def two_layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def examples(*shape, classes=4):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*shape, generator=generator)
    return x, torch.randint(classes, (shape[0],), generator=generator)
