"""What searches find that train every network they look at: random search and evolution.

    python -m benchmarks.trained_search --root cifar10 --table table.csv --clients iid --seed 0

The baselines of `configs/experiments/nas_bench_201.yaml`, at the cost of its DARTS. Each network trains
on one half of the training images; its score is its accuracy on the other half, which DARTS tunes α on.
The best one is looked up in a table of NAS-Bench-201. A step of DARTS runs all operations twice and costs
9 to 10 steps of a cell's network: 20 networks of 120 steps, and their scores, cost what its 320 steps cost. One line of JSON
is printed.
Source: Li & Talwalkar 2019; Real et al. 2019, on what a search is to be compared with.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.data import ImageFolder, LabelShards
from fl_lightning.models import ImageClassifier, Schedule
from fl_lightning.nas import NASBench201, Network
from fl_lightning.nas.search.problem import Problem
from fl_lightning.nas.search.strategies import RandomSearch, RegularizedEvolution, Strategy
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201Table
from fl_lightning.nas.spaces.space import Architecture

STRATEGIES: dict[str, Strategy] = {
    "random": RandomSearch(),
    "evolution": RegularizedEvolution(population=8),
}
_LOCAL_STEPS = 2
_NUM_CLIENTS = 10


def score(cell: Architecture, data: Any, *, steps: int, over_clients: bool, seed: int) -> float:
    """Return the validation accuracy of a cell's network after training from scratch.

    Args:
        cell: of the space.
        data: a `FederatedDataModule`.
        steps: of training, of all clients together.
        over_clients: whether clients train it, two steps a round; else all data in one place.
        seed: of its weights.
    """
    seed_everything(seed, verbose=False)
    network = Network(NASBench201(), str(cell), num_classes=10, channels=8, cells=1)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=3e-4)
    module = ImageClassifier(
        network, num_classes=10, image_size=16, optimizer=optimizer, schedule=Schedule("cosine")
    )
    a_round = _LOCAL_STEPS * _NUM_CLIENTS
    options: dict[str, Any] = (
        {"callbacks": [Federation(local_steps=_LOCAL_STEPS, seed=seed)]}
        if over_clients
        else {"limit_train_batches": a_round}
    )
    rounds = max(1, steps // a_round)
    trainer = Trainer(
        **options,
        max_epochs=rounds,
        check_val_every_n_epoch=rounds,
        num_sanity_val_steps=0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["val/accuracy"])


def _no_costs(cell: Architecture) -> dict[str, float]:
    return {}


def main() -> None:
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of images, <root>/{train,test}")
    parser.add_argument("--table", required=True, help="CSV file of NAS-Bench-201")
    parser.add_argument("--strategy", choices=STRATEGIES, default="random")
    parser.add_argument("--clients", choices=["central", "iid", "two_labels"], default="iid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--networks", type=int, default=20, help="to train")
    parser.add_argument("--steps", type=int, default=120, help="of each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    began = time.process_time()
    table = NASBench201Table.read(args.table)
    source = ImageFolder(args.root, image_size=16, batch_size=32, val_fraction=0.5, seed=args.seed)
    partition = LabelShards(classes_per_client=2) if args.clients == "two_labels" else None
    data = FederatedDataModule(
        source, num_clients=_NUM_CLIENTS, partition=partition, seed=args.seed
    )
    over = args.clients != "central"
    rate = partial(score, data=data, steps=args.steps, over_clients=over, seed=args.seed)
    problem = Problem(NASBench201(), rate, _no_costs)
    best = STRATEGIES[args.strategy].search(problem, args.networks, args.seed).best
    result: dict[str, Any] = {
        "strategy": args.strategy,
        "clients": args.clients,
        "seed": args.seed,
        "score": best.score,
        "seconds": round(time.process_time() - began, 1),
        "cell": str(best.architecture),
    }
    result |= {str(data): value for data, value in table.lookup(best.architecture).items()}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
