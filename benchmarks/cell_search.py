"""What searches of cells find on NAS-Bench-201: central, over IID clients, over clients of two classes each.

    python -m benchmarks.cell_search --root cifar10 --table table.csv --seeds 6 7 8

The settings of `configs/experiments/nas_bench_201.yaml` in one process, without logs and evaluations, on images
that are read once. Each found cell is looked up in a table of NAS-Bench-201. A line of JSON is printed per run,
at the end a table in Markdown: mean and standard deviation over seeds of the table's accuracy on CIFAR-10.
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
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, Federation, UniformCohort
from fl_lightning.data import ImageFolder, LabelShards
from fl_lightning.models import Schedule
from fl_lightning.nas import HardGumbel, NASBench201, PartialChannels, Reward, SinglePath, Supernet
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201Table

_EPOCHS, _STEPS_OF_AN_EPOCH = 4, 80  # in one place
_SIDE, _ROUNDS, _CLIENTS, _STEPS, _BATCH = 16, 7, 3, 10, 32
# As published, the end is the best of many cells that are drawn by α.
_ENAS = {"rule": SinglePath, "learn": partial(Reward, best_of=100), "alpha_draws": 15}
# Once weights have learned, gradients of single paths prefer skips and pools: weights stay random, and the mean decides.
_GDAS: dict[str, Any] = {
    "rule": partial(HardGumbel, 10.0, 10.0, others="all"),
    "alpha_draws": 2,
    "alpha_held": True,
    "alpha_from": 0.0,
    "architecture_optimizer": partial(torch.optim.SGD, lr=1.0),
    "optimizer": partial(torch.optim.SGD, lr=0.0),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "DARTS": {},
    "DARTS-PT": {"selection": "perturbation"},
    "PC-DARTS": {"rule": PartialChannels},
    "GDAS": _GDAS,
    "ENAS": _ENAS,
}
# Over clients the mean gradient at equal weights decides; in one place α moves from the first step.
_HELD: dict[str, Any] = {
    "architecture_optimizer": partial(torch.optim.SGD, lr=1.0),
    "alpha_held": True,
    "alpha_from": 0.5,
}
# With 8 channels a quarter, as published, is two channels; over IID clients half of them is searched.
_IID: dict[str, dict[str, Any]] = {"PC-DARTS": {"rule": partial(PartialChannels, part=2)}}
_MOVING: dict[str, Any] = {
    "architecture_optimizer": partial(
        torch.optim.Adam, lr=0.01, betas=(0.5, 0.999), weight_decay=1e-3
    ),
    "schedule": Schedule("cosine"),
}
CLIENTS = ("IID", "2 labels", "central")


class Images(LightningDataModule):
    """The training images of a folder, in memory.

    Args:
        root: folder of images, <root>/{train,test}.
    """

    def __init__(self, root: str) -> None:
        super().__init__()
        source: Any = ImageFolder(root, image_size=_SIDE, batch_size=_BATCH, val_fraction=0.01)
        source.setup()
        images, labels = zip(*source.train_dataloader().dataset, strict=True)
        self._examples = TensorDataset(torch.stack(images), torch.tensor(labels))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the examples in random order."""
        return DataLoader(self._examples, batch_size=_BATCH, shuffle=True)


def found(search: str, clients: str, images: Images, seed: int) -> Supernet:
    """Return a supernet after its search.

    Args:
        search: one of `SEARCHES`.
        clients: one of `CLIENTS`.
        images: the training images.
        seed: of the partition and of all draws.
    """
    seed_everything(seed, verbose=False)
    partition = LabelShards(classes_per_client=2) if clients == "2 labels" else None
    data = FederatedDataModule(
        images, num_clients=10, partition=partition, search_fraction=0.5, seed=seed
    )
    given = SEARCHES[search]
    if clients == "IID":
        given = given | _IID.get(search, {})
    made = {name: given[name]() for name in ("rule", "learn") if name in given}
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=3e-4)
    where = _MOVING if clients == "central" else _HELD
    module = Supernet(
        NASBench201(),
        num_classes=10,
        image_size=_SIDE,
        channels=8,
        cells=1,
        seed=seed,
        **({"optimizer": sgd} | where | given | made),
    )
    where = {"limit_train_batches": _STEPS_OF_AN_EPOCH, "max_epochs": _EPOCHS}
    if clients != "central":
        cohort = UniformCohort(fraction=_CLIENTS / 10)
        federation = Federation(cohort=cohort, local_steps=_STEPS, seed=seed)
        where = {"callbacks": [federation], "max_epochs": _ROUNDS}
    trainer = Trainer(
        **where,
        limit_val_batches=0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module


def main() -> None:
    """Run the searches, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of images, <root>/{train,test}")
    parser.add_argument("--table", required=True, help="CSV file of NAS-Bench-201")
    parser.add_argument("--seeds", type=int, nargs="+", default=[6, 7, 8])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table, images = NASBench201Table.read(args.table), Images(args.root)
    accuracies: dict[tuple[str, str], list[float]] = {}
    for seed in args.seeds:
        for search in args.searches:
            for clients in args.clients:
                began = time.process_time()
                module = found(search, clients, images, seed)
                truth = table.lookup(module.architecture)
                accuracies.setdefault((search, clients), []).append(truth["cifar10"])
                result: dict[str, Any] = {"search": search, "clients": clients, "seed": seed}
                result.update(truth.items())
                result |= {"standard_errors": round(module.signal.standard_errors, 2)}
                result |= {"seconds": round(time.process_time() - began, 1)}
                print(json.dumps(result | {"cell": str(module.architecture)}), flush=True)
    print("| search | " + " | ".join(args.clients) + " |\n|---" + "|---" * len(args.clients) + "|")
    for search in args.searches:
        cells = [torch.tensor(accuracies[search, clients]) for clients in args.clients]
        said = [f"{values.mean():.1f} ± {values.std(correction=0):.1f}" for values in cells]
        print(f"| {search} | " + " | ".join(said) + " |")


if __name__ == "__main__":
    main()
