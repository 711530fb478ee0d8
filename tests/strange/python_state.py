"""Steps that read or write Python: attributes, counters, lists, generators, epochs."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import WithLoss, row


@row(local_epochs=4)
class PythonCounter(WithLoss):
    """Anneals a weight by counting its steps."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        return self.loss(batch) + min(1.0, self.count / 20) * self.net(batch[0]).square().mean()


@row(local_epochs=4)
class CounterInABuffer(WithLoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        self.count += 1
        weight = (self.count / 20).clamp(max=1)
        return self.loss(batch) + weight * self.net(batch[0]).square().mean()


@row(local_epochs=4)
class CounterInASubmodule(WithLoss):
    """A layer counts how often it was used."""

    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.uses = 0

        def forward(self, x):
            self.uses += 1
            return x * min(1.0, 0.1 * self.uses)

    def __init__(self):
        super().__init__()
        self.net.insert(1, self.Scheduled())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@row()
class PhasesByEpoch(WithLoss):
    """A head whose turn comes later; until then no gradient, so no decay."""

    weight_decay, momentum = 1e-2, 0.9

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        if self.current_epoch < 1:
            return self.loss(batch)
        return F.cross_entropy(self.other(batch[0]), batch[1])


@row()
class WeightByEpoch(WithLoss):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.current_epoch)


@row()
class Curriculum(WithLoss):
    """Longer inputs in later rounds."""

    def training_step(self, batch, batch_idx):
        kept = min(4, 2 + self.current_epoch)
        return self.loss((F.pad(batch[0][:, :kept], (0, 4 - kept)), batch[1]))


@row()
class CurriculumOfExamples(WithLoss):
    """Easy examples first: how many count depends on the round and on values."""

    def training_step(self, batch, batch_idx):
        easy = batch[0].norm(dim=1) < 2 + self.current_epoch
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (losses * easy).sum() / easy.sum().clamp(min=1)


@row()
class WarmUpInTheStep(WithLoss):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * min(1.0, (self.global_step + 1) / 3)


@row()
class WarmUpInTheTrainer(WithLoss):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (self.trainer.global_step + 1) / self.trainer.max_epochs


@row()
class WarmUpOfTheRate(WithLoss):
    """As the documentation of Lightning has it."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)


@row()
class DropoutByEpoch(WithLoss):
    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.0))

    def on_train_epoch_start(self):
        self.net[2].p = 0.2 * self.current_epoch

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@row()
class DropoutInTheStep(WithLoss):
    def training_step(self, batch, batch_idx):
        rate = 0.2 * self.current_epoch
        return self.loss((F.dropout(batch[0], rate), batch[1]))


@row()
class RunningMean(WithLoss):
    """A baseline in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.baseline = torch.tensor(0.0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.baseline = 0.9 * self.baseline + 0.1 * loss.detach()
        return loss * (1 + self.baseline)


@row()
class RunningMeanAsNumber(WithLoss):
    def __init__(self):
        super().__init__()
        self.baseline = 0.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.baseline = 0.9 * self.baseline + 0.1 * loss.item()
        return loss * (1 + self.baseline)


@row()
class Outputs(WithLoss):
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


@row()
class HistoryThatCounts(WithLoss):
    """The list of losses weighs the next one."""

    def __init__(self):
        super().__init__()
        self.history = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.history.append(float(loss))
        return loss * (1 + 0.1 * len(self.history))

    def on_train_epoch_end(self):
        self.history.clear()  # which holds all clients' then


@row()
class EverySecondStep(WithLoss):
    def __init__(self):
        super().__init__()
        self.is_odd = False

    def training_step(self, batch, batch_idx):
        self.is_odd = not self.is_odd
        return self.loss(batch) * (2.0 if self.is_odd else 0.5)


@row(refused="keep a list and a position")
class CycleOfWeights(WithLoss):
    """An iterator on the module."""

    def __init__(self):
        super().__init__()
        self.weights = itertools.cycle([0.2, 1.0, 3.0])

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * next(self.weights)


@row()
class StateInAClosure(WithLoss):
    """A schedule that counts where nobody looks."""

    def __init__(self):
        super().__init__()
        calls = []

        def schedule():
            calls.append(None)
            return 0.1 * len(calls)

        self.schedule, self.calls = schedule, calls

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.schedule()

    def on_train_epoch_end(self):
        self.calls.clear()


@row()
class StateInAnObject(WithLoss):
    """A plain object that is no module."""

    class Schedule:
        def __init__(self):
            self.value = 1.0

        def step(self):
            self.value *= 0.9
            return self.value

    def __init__(self):
        super().__init__()
        self.schedule = self.Schedule()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.schedule.step()


@row()
class DictionaryOfLosses(WithLoss):
    """Tasks are weighed by their last losses, kept by name."""

    def __init__(self):
        super().__init__()
        self.last = {}

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        losses = {"a": F.cross_entropy(out, batch[1]), "b": F.mse_loss(out, batch[0][:, :3])}
        total = sum(loss / self.last.get(name, 1.0) for name, loss in losses.items())
        self.last = {name: loss.detach() for name, loss in losses.items()}
        return total
