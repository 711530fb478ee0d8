"""Batches and loaders of all forms."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import (
    Dataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from strange.rows import BLOBS, UNEVEN, WORDS, Small, X, Y, cut, drawn, row


class Examples(Dataset):
    """Examples made by a function of their index."""

    def __init__(self, make, number=64):
        self.make, self.number = make, number
        self.targets = Y[:number].tolist()

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return self.make(index)


class Classifies(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


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


SORTED = [
    (torch.randint(1, 12, (7 if k < UNEVEN[0].stop else k % 9 + 2,), generator=drawn(k)), int(Y[k]))
    for k in range(64)
]


def padded(examples):
    words, labels = zip(*examples, strict=True)
    return pad_sequence(list(words), batch_first=True), torch.tensor(labels)


def padded_by_length(examples):
    return padded(sorted(examples, key=lambda pair: len(pair[0]), reverse=True))


class OfWords(Small):
    def __init__(self):
        super().__init__()
        self.words, self.net = nn.Embedding(12, 8), nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(self.words(batch[0]).mean(1)), batch[1])


@row(data=Examples(SORTED.__getitem__), collate=padded)
class PaddedAndAveraged(OfWords):
    """The mean is over the padding, too, whose length is that of the batch's longest."""


@row("PaddedBySortedLength", data=Examples(SORTED.__getitem__), collate=padded_by_length)
@row(data=Examples(SORTED.__getitem__), collate=padded)
class PaddedAndMasked(OfWords):
    def training_step(self, batch, batch_idx):
        mask = (batch[0] > 0)[..., None]
        mean = (self.words(batch[0]) * mask).sum(1) / mask.sum(1)
        return F.cross_entropy(self.net(mean), batch[1])


def packed(examples):
    words, labels = zip(*examples, strict=True)
    return pack_sequence(list(words), enforce_sorted=False), torch.tensor(labels)


@row(data=Examples(SORTED.__getitem__), collate=packed)
class PackedSequences(OfWords):
    def __init__(self):
        super().__init__()
        self.memory = nn.GRU(8, 8)

    def training_step(self, batch, batch_idx):
        words = batch[0]._replace(data=self.words(batch[0].data))
        _, state = self.memory(words)
        return F.cross_entropy(self.net(state[0]), batch[1])


def in_a_list(examples):
    words, labels = zip(*examples, strict=True)
    return list(words), torch.tensor(labels)


@row(data=Examples(SORTED.__getitem__), collate=in_a_list)
class ListOfTensors(OfWords):
    """As detection models have it: examples of their own shapes."""

    def training_step(self, batch, batch_idx):
        means = torch.stack([self.words(words).mean(0) for words in batch[0]])
        return F.cross_entropy(self.net(means), batch[1])


def flattened(examples):
    words, labels = zip(*examples, strict=True)
    offsets = torch.tensor([0, *(len(w) for w in words[:-1])]).cumsum(0)
    return torch.cat(words), offsets, torch.tensor(labels)


@row(data=Examples(SORTED.__getitem__), collate=flattened)
class WordsAndOffsets(OfWords):
    """The first dimension is that of words, not of examples."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(12, 8)

    def training_step(self, batch, batch_idx):
        words, offsets, labels = batch
        return F.cross_entropy(self.net(self.words(words, offsets)), labels)


def with_noise(examples):
    x, y = default_collate(examples)
    return x + 0.1 * torch.randn(x.shape, dtype=torch.float32), y


@row(collate=with_noise)
class CollateThatDraws(Classifies):
    pass


@row(data=Examples(lambda k: (X[k] + 0.1 * torch.randn(4, dtype=torch.float32), Y[k])))
class ExamplesThatDraw(Classifies):
    """Augmentation by the global generator."""


def doubled(examples):
    """Return two rows for every example."""
    x, y = default_collate(examples)
    return torch.cat([x, -x]), torch.cat([y, y])


@row(collate=doubled)
class TwoRowsForEveryExample(Classifies):
    pass


def one_row(examples):
    """Return the mean example: one row for a batch."""
    x, y = default_collate(examples)
    return x.mean(0, keepdim=True), F.one_hot(y, 3).float().mean(0, keepdim=True)


@row(collate=one_row)
class OneRowForTheBatch(Classifies):
    pass


@row(
    data=Subset(Subset(BLOBS, list(range(63, -1, -1))), list(range(3, 63))),
    shards=cut(19, 8, 23, 10),
)
class SubsetOfASubset(Classifies):
    pass


@row(data=TensorDataset(X.to_sparse_coo().to_dense(), Y))
class SparseInTheStep(Small):
    """The inputs are made sparse by the step."""

    def training_step(self, batch, batch_idx):
        hidden = torch.sparse.mm(batch[0].relu().to_sparse(), self.net[0].weight.T)
        return F.cross_entropy(self.net[2](hidden.tanh()), batch[1])


@row(data=TensorDataset(WORDS.float() * torch.tensor([1, -1, 1, -1, 1, -1.0]), Y))
class InputsInTheHook(Small):
    """The module changes batches on their way."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0][:, :4] / 10, batch[1]]

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


# two thirds are drawn; the others are NaN, so that whoever trains on one of them is found out
IS_DRAWN = torch.arange(64) % 3 < 2
HOLED = TensorDataset(X.masked_fill(~IS_DRAWN[:, None], torch.nan), Y)
BY_WEIGHT = WeightedRandomSampler(IS_DRAWN * (1.0 + Y), 64)
SOME = SubsetRandomSampler(IS_DRAWN.nonzero().flatten().tolist())
DRAWN = {"data": HOLED, "shards": cut(12, 8, 13, 10)}  # of the 43 that are drawn


@row(**DRAWN, loader={"sampler": BY_WEIGHT, "shuffle": False})
class WeightedSampler(Classifies):
    """Clients draw by its weights, of which a third is 0."""


@row(**DRAWN, loader={"sampler": SOME, "shuffle": False})
class SubsetSampler(Classifies):
    """Only some of the examples are to train."""


class EvenFirst(Sampler):
    """An order of its own."""

    def __iter__(self):
        return iter([*range(0, 64, 2), *range(1, 64, 2)])

    def __len__(self):
        return 64


@row(loader={"sampler": EvenFirst(), "shuffle": False}, refused="EvenFirst")
class OwnSampler(Classifies):
    pass
