"""A row of the table: a module, its data and who owns which example; and what rows have in common.

A module enters the table by `case`, its training step by the decorator `step`, a class by `row`. The
table holds what is odd about it and nothing else: networks of 4 inputs, 8 hidden units and 3 classes, 64 examples, 4 clients of unequal size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROUNDS = 2  # of every run
BOTH = frozenset({"slots", "sequential"})
SLOTS = frozenset({"slots"})
SEQUENTIAL = frozenset({"sequential"})

Shards = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: of the row, unique.
        make: builds the module anew.
        data: the training examples.
        shards: whose they are, one list of indices per client.
        batch_size: examples per local batch.
        local_epochs: of a client in a round.
        collate: makes a batch of examples; None for the default one.
        loader: further options of the training loader.
        trainer: further options of the Trainer.
        engines: which may train it where slots are asked for.
        refused: what is said where it does not train at all; None where it does.
        tolerance: of the update's relative difference to the plain loop, in float32.
        is_slow: whether the row takes seconds.
    """

    name: str
    make: Callable[[], LightningModule]
    data: Dataset[Any]
    shards: Shards
    batch_size: int = 8
    local_epochs: int = 1
    collate: Callable[[list[Any]], Any] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    engines: frozenset[str] = BOTH
    refused: str | None = None
    tolerance: float = 1e-5
    is_slow: bool = False


ROWS: list[Row] = []
FIELDS = frozenset(f.name for f in fields(Row)) - {"name", "make"}


def row(name: str | None = None, **options: Any) -> Callable[[type], type]:
    """Return the decorator that puts a module into the table; rows of one class have names."""

    def put(kind: type) -> type:
        given = {"data": BLOBS, "shards": UNEVEN} | options
        ROWS.append(Row(name or kind.__name__, kind, **given))
        return kind

    return put


class Small(LightningModule):
    """A network of two layers, trained by SGD on the cross-entropy of a batch's two parts."""

    lr, momentum, weight_decay = 0.1, 0.0, 0.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.parameters(), self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )


def case(
    name: str, kind: type = Small, prepare: Callable[[Any], object] | None = None, **given: Any
) -> type:
    """Put a class of a kind into the table and return it.

    Args:
        name: of the row and of the class.
        kind: the class that it extends.
        prepare: changes a module when it is built.
        given: fields of `Row`, and what else stands in the body of the class: methods, numbers.
    """
    body = {key: value for key, value in given.items() if key not in FIELDS}
    if prepare is not None:

        def build(self: Any) -> None:
            kind.__init__(self)
            prepare(self)

        body["__init__"] = build
    # families of rows are known by their files
    body["__module__"] = sys._getframe(1).f_globals["__name__"]
    made = type(name, (kind,), body)
    return row(**{key: given[key] for key in FIELDS & given.keys()})(made)


def step(kind: type = Small, **given: Any) -> Callable[[Callable[..., Any]], type]:
    """Return the decorator by which a function is the training step of a row of its name."""

    def put(function: Callable[..., Any]) -> type:
        made = case(function.__name__, kind, training_step=function, **given)
        made.__module__ = function.__module__
        return made

    return put


def insert(place: int, layer: Callable[[], nn.Module]) -> Callable[[Any], object]:
    """Return what puts a new layer into a module's network."""
    return lambda m: m.net.insert(place, layer())


class Source(LightningDataModule):
    """The training examples of a row."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self._row = row

    def train_dataloader(self) -> DataLoader[Any]:
        row = self._row
        options = {"batch_size": row.batch_size, "collate_fn": row.collate, "shuffle": True}
        return DataLoader(row.data, **(options | row.loader))


class Examples(Dataset):
    """Examples made by a function of their index."""

    def __init__(self, make, number=64):
        self.make, self.number = make, number
        self.targets = Y[:number].tolist()

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return self.make(index)


def cut(*sizes: int) -> list[range]:
    """Return neighbouring ranges of these sizes."""
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def first_has(chosen: torch.Tensor, num_first: int) -> list[list[int]]:
    """Return shards of which the first has examples that are chosen, shape (n,), and no others."""
    wanted = chosen.nonzero().flatten().tolist()[:num_first]
    rest = [k for k in range(len(chosen)) if k not in wanted]
    return [wanted, rest[0::3], rest[1::3], rest[2::3]]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(64, 4, generator=drawn(1))
Y = ((X @ torch.randn(4, 3, generator=drawn(2))).argmax(1) + (torch.arange(64) % 5 == 0)) % 3
BLOBS = TensorDataset(X, Y)
UNEVEN = cut(19, 8, 23, 14)  # full batches and smaller ones
FIRST_HAS_ONE = cut(1, 21, 26, 16)
FULL = cut(16, 8, 24, 16)  # full batches only
FIRST_HAS_ONE_CLASS = first_has(Y == 0, 12)
WORDS = torch.randint(1, 12, (64, 6), generator=drawn(3))
TOKENS = TensorDataset(WORDS, torch.randint(0, 12, (64, 6), generator=drawn(4)))
SENTENCES = TensorDataset(WORDS, Y)
REALS = TensorDataset(X, X[:, 0] * torch.where(torch.arange(64) < UNEVEN[0].stop, 1.0, 20.0))
