"""Batches and loaders of all forms."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.data import (
    TensorDataset,
    default_collate,
)

from strange.rows import BLOBS, Classifies, Examples, Small, X, Y, cut, row


@row(data=Examples(lambda k: {"x": X[k], "y": Y[k]}))
class DictBatch(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


@row(data=Examples(lambda k: {"image": {"x": X[k], "size": 4}, "labels": [Y[k], int(Y[k])]}))
class NestedBatch(Small):
    def training_step(self, batch, batch_idx):
        out = self.net(batch["image"]["x"] / batch["image"]["size"][:, None])
        return F.cross_entropy(out, batch["labels"][0]) + F.cross_entropy(out, batch["labels"][1])


Pair = namedtuple("Pair", "x y")


@row(data=Examples(lambda k: Pair(X[k], Y[k])))
class NamedTupleBatch(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch.x), batch.y)


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def as_dataclass(examples):
    return Batch(*default_collate(examples))


@row(collate=as_dataclass)
class DataclassBatch(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch.x), batch.y)


class PlainObject:
    """Nothing that a framework knows."""

    def __init__(self, examples):
        self.x, self.y = default_collate(examples)


class ReadsAnObject(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch.x.to(self.net[0].weight.dtype)), batch.y)


row(collate=PlainObject)(ReadsAnObject)


@row(data=Examples(lambda k: (X[k], Y[k], f"file-{k}.png")))
class StringsInTheBatch(Classifies):
    pass


@row(data=Examples(lambda k: (X[k], Y[k], "even" if k % 2 == 0 else "odd")))
class StringsThatCount(Small):
    """Texts decide on weights."""

    def training_step(self, batch, batch_idx):
        x, y, names = batch
        weights = torch.tensor([1.0 if name == "even" else 3.0 for name in names])
        return (F.cross_entropy(self.net(x), y, reduction="none") * weights).mean()


def with_none(examples):
    x, y = default_collate(examples)
    return x, None, y


@row(collate=with_none)
class NoneInTheBatch(Small):
    def training_step(self, batch, batch_idx):
        x, mask, y = batch
        return F.cross_entropy(self.net(x if mask is None else x * mask), y)


@row(data=TensorDataset(X, torch.empty(64, 0), Y))
class EmptyTensors(Small):
    """Examples have a part without numbers."""

    def training_step(self, batch, batch_idx):
        x, more, y = batch
        return F.cross_entropy(self.net(torch.cat([x, more], 1)), y) + more.sum()


def with_numbers(examples):
    x, y = default_collate(examples)
    return x, y, float(len(x)), len(x)


@row(collate=with_numbers)
class NumbersInTheBatch(Small):
    """Python's own numbers, which say how large the batch is."""

    def training_step(self, batch, batch_idx):
        x, y, number, _ = batch
        return F.cross_entropy(self.net(x), y, reduction="sum") / (number + 1)


@row(data=TensorDataset(X))
class NoTargets(Small):
    def training_step(self, batch, batch_idx):
        (x,) = batch
        return F.mse_loss(self.net(x), x[:, :3])


@row(data=Examples(lambda k: X[k]))
class ATensorAsBatch(Small):
    def training_step(self, batch):
        return F.mse_loss(self.net(batch), batch[:, :3])


@row(data=TensorDataset(X.double(), Y))
class DoubleInputs(Small):
    """Inputs in double precision, made single by the step."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0].to(self.net[0].weight.dtype)), batch[1])


@row(data=TensorDataset(X.half(), Y))
class HalfInputs(DoubleInputs):
    pass


@row("IntTargets", data=TensorDataset(X, Y.int()))
@row("ShortTargets", data=TensorDataset(X, Y.short()))
@row("ByteTargets", data=TensorDataset(X, Y.to(torch.uint8)))
class TargetsOfOtherTypes(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1].long())


@row(data=TensorDataset(X, Y == 0))
class TrueOrFalse(Small):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])[:, 0]
        return F.binary_cross_entropy_with_logits(out, batch[1].to(out.dtype))


@row(data=TensorDataset(X, F.one_hot(Y, 3).float()))
class OneHotTargets(Classifies):
    pass


@row(data=TensorDataset(X, Y[:, None]))
class TargetsAsAColumn(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1].squeeze())


@row(data=TensorDataset((X * 10).int(), Y))
class WholeNumbersAsInputs(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0] / 10), batch[1])


@row(data=BLOBS, loader={"drop_last": True}, shards=cut(19, 8, 23, 14))
@row("DropLastOfSmallShards", loader={"drop_last": True}, shards=cut(5, 21, 26, 12))
class DropLast(Classifies):
    """Of 14 examples 8 train, yet the client weighs as one of 14."""


@row(batch_size=100)
class BatchLargerThanAShard(Classifies):
    pass


@row(batch_size=1)
class BatchesOfOne(Classifies):
    pass


@row(shards=cut(1, 1, 1, 61))
class ClientsOfOneExample(Classifies):
    pass
