"""Batches and loaders of all forms."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from strange.rows import Examples, X, Y, case, cut

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class PlainObject:
    """Nothing that a framework knows."""

    def __init__(self, x, y):
        self.x, self.y = x, y


def collated(function):
    """Return a row's collate function: the two parts of a batch go into another form."""

    def collate(examples):
        return function(*default_collate(examples))

    return {"collate": collate}


def made(function):
    """Return a row's data: a function of an example's number."""
    return {"data": Examples(function)}


def stored(*tensors):
    return {"data": TensorDataset(*tensors)}


def nested(m, batch):
    out = m.net(batch["image"]["x"] / batch["image"]["size"][:, None])
    return F.cross_entropy(out, batch["labels"][0]) + F.cross_entropy(out, batch["labels"][1])


def weighed_by_texts(m, batch):
    x, y, names = batch
    weights = torch.tensor([1.0 if name == "even" else 3.0 for name in names])
    return (F.cross_entropy(m.net(x), y, reduction="none") * weights).mean()


def of_every_type(m, batch):
    """Inputs and targets of every type, each of which counts."""
    double, half, whole, *numbers, is_zero, rows = batch
    out = in_its_type(m, double) + in_its_type(m, half) + in_its_type(m, whole / 10)
    losses = [F.cross_entropy(out, y.long()) for y in numbers] + [F.cross_entropy(out, rows)]
    right = F.binary_cross_entropy_with_logits(out[:, 0], is_zero.to(out.dtype))
    return sum(losses) + right


def in_its_type(m, x):
    """Inputs in the type of the weights."""
    return m.net(x.to(m.net[0].weight.dtype))


def by_number(m, batch):
    """Python's own numbers say how large the batch is."""
    x, y, number, _ = batch
    return F.cross_entropy(m.net(x), y, reduction="sum") / (number + 1)


ONE_HOT = F.one_hot(Y, 3).float()
OF_EVERY_TYPE = (
    *(X.double(), X.half(), (X * 10).int()),
    *(Y.int(), Y.short(), Y.to(torch.uint8), Y == 0, ONE_HOT),
)
entropy = F.cross_entropy
# name, data or collate function, loss of a batch
FORMS = [
    ("NestedBatch", made(lambda k: {"image": {"x": X[k], "size": 4}, "labels": [Y[k], int(Y[k])]}),
     nested),
    ("NamedTupleBatch", made(lambda k: Pair(X[k], Y[k])), lambda m, b: entropy(m.net(b.x), b.y)),
    ("DataclassBatch", collated(Batch), lambda m, b: entropy(m.net(b.x), b.y)),
    ("ReadsAnObject", collated(PlainObject), lambda m, b: entropy(in_its_type(m, b.x), b.y)),
    ("StringsThatCount", made(lambda k: (X[k], Y[k], ("even", "odd")[k % 2])), weighed_by_texts),
    ("NoneInTheBatch", collated(lambda x, y: (x, None, y)),
     lambda m, batch: entropy(m.net(batch[0]), batch[2])),
    ("EmptyTensors", stored(X, torch.empty(64, 0), Y),
     lambda m, batch: entropy(m.net(torch.cat(batch[:2], 1)), batch[2]) + batch[1].sum()),
    ("NumbersInTheBatch", collated(lambda x, y: (x, y, float(len(x)), len(x))), by_number),
    ("NoTargets", stored(X), lambda m, batch: F.mse_loss(m.net(batch[0]), batch[0][:, :3])),
    ("EveryType", stored(*OF_EVERY_TYPE), of_every_type),
    ("TargetsAsAColumn", stored(X, Y[:, None]), lambda m, b: entropy(m.net(b[0]), b[1].squeeze())),
]  # fmt: skip
for name, form, loss in FORMS:
    case(name, **form, loss=loss)
case(
    "ATensorAsBatch",
    **made(lambda k: X[k]),
    training_step=lambda m, batch: F.mse_loss(m.net(batch), batch[:, :3]),
)
# of 14 examples 8 train, yet the client weighs as one of 14
case("DropLast", loader={"drop_last": True})
case("DropLastOfSmallShards", loader={"drop_last": True}, shards=cut(5, 21, 26, 12))
case("BatchLargerThanAShard", batch_size=100)
case("BatchesOfOne", batch_size=1)
case("ClientsOfOneExample", shards=cut(1, 1, 1, 61))
