"""Examples of different lengths, collate functions that do more, and samplers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import (
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from strange.rows import UNEVEN, WORDS, Examples, Small, X, Y, case, cut, drawn

SORTED = [
    (torch.randint(1, 12, (7 if k < UNEVEN[0].stop else k % 9 + 2,), generator=drawn(k)), int(Y[k]))
    for k in range(64)
]


def collated(form):
    """Return a row's data of words and how they become a batch: words in some form, labels."""

    def collate(examples):
        words, labels = zip(*examples, strict=True)
        return form(list(words)), torch.tensor(labels)

    return {"data": Examples(SORTED.__getitem__), "collate": collate}


def padded(words):
    return pad_sequence(words, batch_first=True)


def flattened(words):
    return torch.cat(words), torch.tensor([0, *(len(w) for w in words[:-1])]).cumsum(0)


class OfWords(Small):
    """Classifies what ``read`` makes of the words."""

    def __init__(self):
        super().__init__()
        self.words, self.net = nn.Embedding(12, 8), nn.Linear(8, 3)

    def loss(self, batch):
        return F.cross_entropy(self.net(self.read(batch[0])), batch[1])


def masked(m, words):
    mask = (words > 0)[..., None]
    return (m.words(words) * mask).sum(1) / mask.sum(1)


PADDED = collated(padded)
case("PaddedAndMasked", OfWords, **PADDED, read=masked)
case(
    "PackedSequences",
    OfWords,
    **collated(lambda words: pack_sequence(words, enforce_sorted=False)),
    prepare=lambda m: setattr(m, "memory", nn.GRU(8, 8)),
    read=lambda m, words: m.memory(words._replace(data=m.words(words.data)))[1][0],
)
case(  # as detection models have it: examples of their own shapes
    "ListOfTensors",
    OfWords,
    **collated(list),
    read=lambda m, words: torch.stack([m.words(one).mean(0) for one in words]),
)
case(  # the first dimension is that of words, not of examples
    "WordsAndOffsets",
    OfWords,
    **collated(flattened),
    prepare=lambda m: setattr(m, "words", nn.EmbeddingBag(12, 8)),
    read=lambda m, words: m.words(*words),
)


def noise(*shape):
    return 0.1 * torch.randn(shape, dtype=torch.float32)


def with_noise(examples):
    x, y = default_collate(examples)
    return x + noise(*x.shape), y


def doubled(examples):
    """Return two rows for every example."""
    x, y = default_collate(examples)
    return torch.cat([x, -x]), torch.cat([y, y])


def one_row(examples):
    """Return the mean example: one row for a batch."""
    x, y = default_collate(examples)
    return x.mean(0, keepdim=True), F.one_hot(y, 3).float().mean(0, keepdim=True)


case("CollateThatDraws", collate=with_noise)
case("ExamplesThatDraw", data=Examples(lambda k: (X[k] + noise(4), Y[k])))  # augmentation
case("TwoRowsForEveryExample", collate=doubled)
case("OneRowForTheBatch", collate=one_row)


case(  # the module changes batches on their way
    "InputsInTheHook",
    data=TensorDataset(WORDS.float() * torch.tensor([1, -1, 1, -1, 1, -1.0]), Y),
    on_after_batch_transfer=lambda m, batch, _: [batch[0][:, :4] / 10, batch[1]],
)


class EvenFirst(Sampler):
    """An order of its own."""

    def __iter__(self):
        return iter([*range(0, 64, 2), *range(1, 64, 2)])

    def __len__(self):
        return 64


def by_sampler(sampler):
    return {"loader": {"sampler": sampler, "shuffle": False}}


# two thirds are drawn, 43; the others are NaN, so that whoever trains on one of them is found out
IS_DRAWN = torch.arange(64) % 3 < 2
HOLED = TensorDataset(X.masked_fill(~IS_DRAWN[:, None], torch.nan), Y)
DRAWN = {"data": HOLED, "shards": cut(12, 8, 13, 10)}
SOME = SubsetRandomSampler(IS_DRAWN.nonzero().flatten().tolist())
# clients draw by the weights of a weighted sampler, of which a third is 0
case("WeightedSampler", **DRAWN, **by_sampler(WeightedRandomSampler(IS_DRAWN * (1.0 + Y), 64)))
case("SubsetSampler", **DRAWN, **by_sampler(SOME))
case("OwnSampler", **by_sampler(EvenFirst()), refused="EvenFirst")
