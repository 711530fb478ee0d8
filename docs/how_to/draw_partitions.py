"""Draws every partition of the digits over 20 clients: python docs/how_to/draw_partitions.py FOLDER."""

import sys
from pathlib import Path

from fl_lightning import FederatedDataModule, partition_figure
from fl_lightning.data import (
    IID,
    Digits,
    DirichletPerClass,
    DirichletPerClient,
    DirichletSizes,
    LabelShards,
    McMahanShards,
    PowerLawSizes,
)

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
partitions = [IID(), LabelShards(classes_per_client=2), McMahanShards(shards_per_client=2)]
partitions += [DirichletPerClient(alpha=0.5), DirichletPerClass(alpha=0.5)]
partitions += [DirichletSizes(alpha=0.5), PowerLawSizes(exponent=1.0)]
for partition in partitions:
    data = FederatedDataModule(Digits(), num_clients=20, partition=partition, seed=0)
    data.setup("fit")
    figure = partition_figure(data.summary().table())
    figure.savefig(folder / f"{type(partition).__name__}.png", dpi=70)
