"""Examples of different lengths, collate functions that do more, and samplers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import (
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from strange.rows import BLOBS, UNEVEN, WORDS, Classifies, Examples, Small, X, Y, cut, drawn, row

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
