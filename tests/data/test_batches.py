"""A batch is what the source's DataLoader makes of the same examples, whatever they and it are."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from toys import LoaderData

from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.partition import IID
from fl_lightning.federation.plan import LocalWork, WorkPlan

LENGTHS = torch.randint(1, 9, (24,), generator=torch.Generator().manual_seed(1)).tolist()
WORDS = [torch.arange(1, length + 1) + 10 * i for i, length in enumerate(LENGTHS)]
ORDER = torch.tensor([7, 3, 20, 0, 11])
Pair = namedtuple("Pair", ["words", "label"])


@dataclass
class Batch:
    """A batch of somebody's own."""

    words: Tensor
    names: list
    extra: dict | None = None

    def __eq__(self, other):
        return type(other) is Batch and same(vars(self), vars(other))


class Examples(Dataset):
    """Examples that a function makes."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return len(WORDS)

    def __getitem__(self, index):
        return self.make(index)


class AtOnce(Examples):
    """Fetches several examples at once, as a DataLoader asks for them."""

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


class Gathering(Examples):
    """Knows how to make a whole batch, which a collate function of one's own does not want."""

    def gather(self, indices):
        raise AssertionError("a whole batch")


def padded(examples):
    words, labels = zip(*examples, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(labels)


def sorted_by_length(examples):
    return padded(sorted(examples, key=lambda example: -len(example[0])))


def words_and_label(index):
    return WORDS[index], index % 3


def same(one, other):
    """Whether two batches are equal to the last bit, in values, types and structure."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def federated(dataset, num_clients=3, partition=None, **loader):
    source = LoaderData(DataLoader(dataset, **loader))
    return FederatedDataModule(source, num_clients=num_clients, partition=partition, seed=0)


class Negated(TensorDataset):
    """A subclass of a data set of tensors, with examples of its own."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return -x, y


class Whole(Examples):
    """Makes whole batches at once."""

    def gather(self, indices):
        return [torch.stack([WORDS[index][:1] for index in indices]), indices % 3]


TENSORS = TensorDataset(torch.rand(24, 2), torch.arange(24))
CASES = {
    "padded": (Examples(words_and_label), padded),
    "sorted and padded": (Examples(words_and_label), sorted_by_length),
    "a subset of a subset": (
        Subset(Subset(Examples(words_and_label), range(23, -1, -1)), list(range(24))),
        padded,
    ),
    "concatenated": (
        ConcatDataset([Subset(Examples(words_and_label), [4, 5]), Examples(words_and_label)]),
        padded,
    ),
    "fetched at once": (AtOnce(words_and_label), padded),
    "a gather that is not asked": (Gathering(words_and_label), padded),
    "strings": (Examples(lambda i: (WORDS[i][:1], f"name {i}")), None),
    "dicts with None": (
        Examples(lambda i: {"x": WORDS[i][:1], "mask": None}),
        lambda examples: {"x": torch.stack([e["x"] for e in examples]), "mask": None},
    ),
    "a dataclass": (
        Examples(words_and_label),
        lambda examples: Batch(padded(examples)[0], [f"w{e[1]}" for e in examples]),
    ),
    "named tuples": (Examples(lambda i: Pair(WORDS[i][:1], i)), None),
    "empty tensors": (Examples(lambda i: (torch.empty(0, 3), i)), None),
    "a list of examples": (Examples(words_and_label), list),
    "a list as data set": ([(WORDS[i][:1], i) for i in range(24)], None),
    "numbers and bools": (Examples(lambda i: (i / 7, i % 2 == 0, i)), None),
    "tensors": (TENSORS, None),
    "one tensor": (TensorDataset(torch.rand(24, 2, dtype=torch.float64)), None),
    "tensors with a collate function": (
        TENSORS,
        lambda examples: {"x": torch.stack([x for x, _ in examples])},
    ),
    "concatenated tensors": (ConcatDataset([TENSORS, TENSORS]), None),
    "a subclass of tensors": (Negated(*TENSORS.tensors), None),
    "whole batches": (Whole(lambda i: (WORDS[i][:1], i % 3)), None),
    **{
        f"a subset by {kind.__name__}": (Subset(TENSORS, kind(list(range(23, -1, -1)))), None)
        for kind in (list, torch.tensor, np.array)
    },
}


@pytest.mark.parametrize(("dataset", "collate"), CASES.values(), ids=CASES)
def test_equals_the_loaders_batch(dataset, collate):
    loader = DataLoader(dataset, batch_sampler=[ORDER.tolist()], collate_fn=collate)
    data = federated(dataset, collate_fn=collate)
    (expected,) = loader
    assert same(data.train_batch(ORDER), expected)
    assert same(data.evaluation_batch(ORDER), expected)


@pytest.mark.parametrize(
    ("num_clients", "batch_size", "drop_last"),
    [(1, 5, False), (1, 5, True), (3, 1, True), (3, 4, True), (5, 8, True), (5, 50, False)],
)
def test_a_clients_pass_is_a_loaders_over_its_shard(num_clients, batch_size, drop_last):
    """Against a plain DataLoader over the client's shard, in the order that the client drew."""
    dataset = Examples(words_and_label)
    options = {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": padded}
    data = federated(dataset, num_clients, IID(), **options)
    plan = WorkPlan(data, LocalWork(None, 2, 1, seed=1))
    for client, shard in enumerate(data.clients):
        work = plan.of((client,), (0,))[0]
        batches = [batch for batch, _ in plan.batches(work)]
        kept = sum(work.sizes) // 2
        places = {index: place for place, index in enumerate(shard.tolist())}
        expected = []
        for order in work.order.split(kept):
            seen = [places[index] for index in order.tolist()]
            unseen = [place for place in range(len(shard)) if place not in seen]
            loader = DataLoader(Subset(dataset, shard), sampler=[*seen, *unseen], **options)
            expected += list(loader)
        if drop_last and len(shard) < batch_size:  # the one case where a client does otherwise
            assert expected == []
            options_of_one = options | {"drop_last": False}
            expected = 2 * list(DataLoader(Subset(dataset, shard), **options_of_one))
        assert same(batches, expected)


def test_examples_on_several_sides_of_a_concatenation_are_not_augmented_in_evaluation():
    class Augmented(Examples):
        def evaluation(self):
            return Examples(lambda i: i)

    part = Augmented(lambda i: -i)
    data = federated(ConcatDataset([part, Subset(part, [5, 6])]))
    assert data.train_batch(torch.tensor([3, 25])).tolist() == [-3, -6]
    assert data.evaluation_batch(torch.tensor([3, 25])).tolist() == [3, 6]
