"""Whether a network of all sizes ranks its sub-networks as training them alone does.

    python -m benchmarks.one_shot_rank --root cifar10 --seed 0

A MobileNetV3 network at 32 pixels and half of the published widths trains by the sandwich rule. Then random
sub-networks, with batch norm statistics of their own, are ranked by their accuracy on held-out images, and the same
networks are trained alone for as many steps. Printed is a line of JSON: the Spearman correlation of both accuracies,
that of multiply-adds with the accuracy alone, and the accuracies of the largest network.
Source: Yu et al. 2020, ICLR, "Evaluating the search phase of neural architecture search".
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from fl_lightning import ImageClassifier
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data import ImageFolder
from fl_lightning.models.schedule import Schedule
from fl_lightning.nas import MobileNet, Network, OneShot
from fl_lightning.nas.cost.latency_measurement import rank_correlation
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.evaluation import SubNetworkScore

SPACE = MobileNet(widths=(8, 8, 8, 12, 16, 20, 28, 96, 128), strides=(2, 1, 2, 2, 1, 2))
_ROUND = 50  # steps between two steps of the learning rate's schedule


class Alone(nn.Module):
    """A network that is called like a network of all sizes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, architecture: Architecture) -> Tensor:
        """Return logits (B, num_classes)."""
        return self.network(images)  # type: ignore[no-any-return]


def main() -> None:
    """Train the network of all sizes and some of its parts alone, and print correlations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of images, <root>/{train,test}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=40, help="random sub-networks")
    parser.add_argument("--steps", type=int, default=1000, help="of training, of each network")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data: Any = ImageFolder(
        args.root, image_size=32, batch_size=32, val_fraction=0.1, seed=args.seed
    )
    data.setup()
    held_out = list(data.val_dataloader())

    def accuracy(
        module: LightningModule, network: nn.Module, of: list[Architecture]
    ) -> list[float]:
        seed_everything(args.seed, verbose=False)
        Trainer(
            max_epochs=max(1, args.steps // _ROUND),
            limit_train_batches=min(_ROUND, args.steps),
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, datamodule=data)
        statistics = list(islice(data.train_dataloader(), 32))
        score = SubNetworkScore(network, lambda: statistics, lambda: held_out)
        return [score(one) for one in of]

    generator = torch_generator(args.seed, "random sub-networks")
    drawn = [SPACE.sample(generator) for _ in range(args.num)]
    every = [*drawn, SPACE.largest]
    shape: Any = {"num_classes": 10, "image_size": 32, "schedule": Schedule("cosine")}
    seed_everything(args.seed, verbose=False)
    shared = OneShot(SPACE, recalibration_examples=64, seed=args.seed, **shape)
    in_shared = accuracy(shared, shared.network, every)
    alone = []
    for one in every:
        seed_everything(args.seed, verbose=False)
        network = Network(SPACE, str(one), num_classes=10)
        sgd: Any = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
        module = ImageClassifier(network, optimizer=sgd, **shape)
        alone += accuracy(module, Alone(network), [one])
    costs = [float(SPACE.cost(one, side=32, num_classes=10).flops) for one in drawn]
    result = {
        "seed": args.seed,
        "steps": args.steps,
        "networks": args.num,
        "correlation": round(rank_correlation(in_shared[:-1], alone[:-1]), 3),
        "correlation_of_flops": round(rank_correlation(costs, alone[:-1]), 3),
        "largest_shared": round(in_shared[-1], 3),
        "largest_alone": round(alone[-1], 3),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
