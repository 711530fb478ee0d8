"""Steps that read or write Python: attributes, counters, lists, generators, epochs."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import Small, case, insert, row, step


def has(name, make):
    """Return what puts a new value into an attribute."""
    return lambda m: setattr(m, name, make())


@step(local_epochs=4, prepare=has("count", int))
def PythonCounter(self, batch, batch_idx):
    """Anneals a weight by counting its steps."""
    self.count += 1
    return self.loss(batch) + min(1.0, self.count / 20) * self.net(batch[0]).square().mean()


@step(local_epochs=4, prepare=lambda m: m.register_buffer("count", torch.tensor(0)))
def CounterInABuffer(self, batch, batch_idx):
    self.count += 1
    weight = (self.count / 20).clamp(max=1)
    return self.loss(batch) + weight * self.net(batch[0]).square().mean()


class _Uses(nn.Module):
    """A layer that counts how often it was used."""

    def __init__(self):
        super().__init__()
        self.uses = 0

    def forward(self, x):
        self.uses += 1
        return x * min(1.0, 0.1 * self.uses)


case("CounterInASubmodule", local_epochs=4, prepare=insert(1, _Uses))


@step(weight_decay=1e-2, momentum=0.9, prepare=has("other", lambda: nn.Linear(4, 3)))
def PhasesByEpoch(self, batch, batch_idx):
    """A head whose turn comes later; until then no gradient, so no decay."""
    if self.current_epoch < 1:
        return self.loss(batch)
    return F.cross_entropy(self.other(batch[0]), batch[1])


@step()
def Curriculum(self, batch, batch_idx):
    """Longer inputs in later rounds."""
    kept = min(4, 2 + self.current_epoch)
    return self.loss((F.pad(batch[0][:, :kept], (0, 4 - kept)), batch[1]))


@step()
def RateByEpochInTheStep(self, batch, batch_idx):
    """Sets in the first round what the optimizer has anyway."""
    self.optimizers().param_groups[0]["lr"] = self.lr / (1 + self.current_epoch)
    return self.loss(batch)


@step()
def RateFallsInTheStep(self, batch, batch_idx):
    self.optimizers().param_groups[0]["lr"] *= 0.9
    return self.loss(batch)


# what the loss is multiplied by, or what is done to the inputs
case(
    "WarmUpInTheStep",
    training_step=lambda m, batch, _: m.loss(batch) * min(1.0, (m.global_step + 1) / 3),
)
case(
    "WarmUpInTheTrainer",
    training_step=lambda m, batch, _: (
        m.loss(batch) * (m.trainer.global_step + 1) / m.trainer.max_epochs
    ),
)
case(
    "DropoutByEpoch",
    prepare=insert(2, lambda: nn.Dropout(0.0)),
    on_train_epoch_start=lambda m: setattr(m.net[2], "p", 0.2 * m.current_epoch),
)


def warm_up(self, epoch, batch_idx, optimizer, optimizer_closure):
    for group in optimizer.param_groups:
        group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 3)
    optimizer.step(closure=optimizer_closure)


case("WarmUpOfTheRate", optimizer_step=warm_up)  # as the documentation of Lightning has it


@step(prepare=has("baseline", lambda: torch.tensor(0.0)))
def RunningMean(self, batch, batch_idx):
    """A baseline in a plain attribute."""
    loss = self.loss(batch)
    self.baseline = 0.9 * self.baseline + 0.1 * loss.detach()
    return loss * (1 + self.baseline)


@step(prepare=has("baseline", float))
def RunningMeanAsNumber(self, batch, batch_idx):
    loss = self.loss(batch)
    self.baseline = 0.9 * self.baseline + 0.1 * loss.item()
    return loss * (1 + self.baseline)


@row()
class Outputs(Small):
    """What everybody writes since Lightning 2."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


# the list holds all clients' losses at the end of a round
@step(prepare=has("history", list), on_train_epoch_end=lambda m: m.history.clear())
def HistoryThatCounts(self, batch, batch_idx):
    """The list of losses weighs the next one."""
    loss = self.loss(batch)
    self.history.append(float(loss))
    return loss * (1 + 0.1 * len(self.history))


@step(prepare=has("is_odd", bool))
def EverySecondStep(self, batch, batch_idx):
    self.is_odd = not self.is_odd
    return self.loss(batch) * (2.0 if self.is_odd else 0.5)


case(  # an iterator on the module
    "CycleOfWeights",
    refused="keep a list and a position",
    prepare=has("weights", lambda: itertools.cycle([0.2, 1.0, 3.0])),
    training_step=lambda m, batch, _: m.loss(batch) * next(m.weights),
)


def counts_in_a_closure(m):
    """A schedule that counts where nobody looks."""
    calls = []

    def schedule():
        calls.append(None)
        return 0.1 * len(calls)

    m.schedule, m.calls = schedule, calls


case(
    "StateInAClosure",
    prepare=counts_in_a_closure,
    training_step=lambda m, batch, _: m.loss(batch) * m.schedule(),
    on_train_epoch_end=lambda m: m.calls.clear(),
)


class _Schedule:
    """A plain object that is no module."""

    def __init__(self):
        self.value = 1.0

    def step(self):
        self.value *= 0.9
        return self.value


case(
    "StateInAnObject",
    prepare=has("schedule", _Schedule),
    training_step=lambda m, batch, _: m.loss(batch) * m.schedule.step(),
)


@step(prepare=has("last", dict))
def DictionaryOfLosses(self, batch, batch_idx):
    """Tasks are weighed by their last losses, kept by name."""
    out = self.net(batch[0])
    losses = {"a": F.cross_entropy(out, batch[1]), "b": F.mse_loss(out, batch[0][:, :3])}
    total = sum(loss / self.last.get(name, 1.0) for name, loss in losses.items())
    self.last = {name: loss.detach() for name, loss in losses.items()}
    return total
