"""Steps that read or write Python: attributes, counters, lists, generators, epochs."""

import copy
import itertools
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import SEQUENTIAL, Small, row


class WithLoss(Small):
    """Gives its steps the cross-entropy."""

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])


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
        if self.current_epoch < 2:
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


@row()
class EverySecondStep(WithLoss):
    def __init__(self):
        super().__init__()
        self.is_odd = False

    def training_step(self, batch, batch_idx):
        self.is_odd = not self.is_odd
        return self.loss(batch) * (2.0 if self.is_odd else 0.5)


@row()
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

        self.schedule = schedule

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.schedule()


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


@row(engines=SEQUENTIAL)
class OwnGenerator(WithLoss):
    """Draws from a generator of its own, whose state is on the module."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        noise = torch.randn(batch[0].shape, generator=self.generator)
        return self.loss((batch[0] + 0.1 * noise, batch[1]))


@row()
class OwnPythonGenerator(WithLoss):
    def __init__(self):
        super().__init__()
        self.random = random.Random(0)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.random.uniform(0.5, 1.5)


@row()
class PythonRandom(WithLoss):
    """A layer that is left out one time in five."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        if random.random() > 0.2:
            out = out + self.more(out)
        return F.cross_entropy(out, batch[1])


@row()
class NumpyRandom(WithLoss):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * float(np.random.uniform(0.5, 1.5))


@row()
class StochasticDepth(WithLoss):
    """A layer is left out by a draw for every batch."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        if torch.rand(()).item() > 0.3:
            out = out + self.more(out)
        return F.cross_entropy(out, batch[1])


@row()
class StochasticDepthOfRows(StochasticDepth):
    """The same by a draw for every example."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        kept = (torch.rand(len(out), 1) > 0.3).to(out.dtype) / 0.7
        return F.cross_entropy(out + kept * self.more(out), batch[1])


class WithTeacher(WithLoss):
    lr = 0.3

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self):
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)

    def taught(self, batch):
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return self.loss(batch) + F.mse_loss(self.net(batch[0]), wanted)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


@row()
class MeanTeacher(WithTeacher):
    """Frozen parameters follow in the step."""

    def training_step(self, batch, batch_idx):
        self.follow()
        return self.taught(batch)


@row()
class MeanTeacherInTheHook(WithTeacher):
    def training_step(self, batch, batch_idx):
        return self.taught(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.follow()


@row()
class MeanTeacherBeforeZeroGrad(WithTeacher):
    """As the older BYOL implementations do it."""

    def training_step(self, batch, batch_idx):
        return self.taught(batch)

    def on_before_zero_grad(self, optimizer):
        self.follow()


@row()
class TeacherPerRound(WithTeacher):
    """The teacher is the last round's model; no step writes to it."""

    def training_step(self, batch, batch_idx):
        return self.taught(batch)


@row()
class EMAInBuffers(WithLoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        with torch.no_grad():
            self.centre.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return F.cross_entropy(out - self.centre, batch[1])


@row()
class BufferThatIsAssigned(EMAInBuffers):
    """Another tensor takes the buffer's place."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return F.cross_entropy(out - self.centre, batch[1])


@row()
class QueueOfKeys(WithLoss):
    """MoCo: a buffer of features and a place in it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.eye(6, 3))
        self.register_buffer("place", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        out = F.normalize(self.net(batch[0]), dim=1)
        scores = out @ self.queue.clone().T
        with torch.no_grad():
            self.queue[int(self.place)] = out[0]
            self.place.copy_((self.place + 1) % 6)
        return F.cross_entropy(out, batch[1]) + 0.1 * scores.logsumexp(1).mean()


@row()
class Codebook(WithLoss):
    """VQ-VAE: codes are running means of what is near them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.eye(3))

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        nearest = F.one_hot(torch.cdist(out, self.codes).argmin(1), 3).to(out.dtype)
        wanted = nearest @ self.codes
        with torch.no_grad():
            share = nearest.sum(0).clamp(min=1)[:, None]
            seen = (nearest.T @ out) / share
            self.codes.lerp_(torch.where(nearest.sum(0)[:, None] > 0, seen, self.codes), 0.2)
        return F.cross_entropy(out, batch[1]) + F.mse_loss(out, wanted)


@row()
class PreviousBatch(WithLoss):
    """Keeps the last features on itself; a term pulls the next ones to them."""

    def __init__(self):
        super().__init__()
        self.previous = None

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if self.previous is not None:
            loss = loss + 0.1 * (out.mean(0) - self.previous).square().sum()
        self.previous = out.detach().mean(0)
        return loss


@row()
class KeepsATensor(WithLoss):
    """For a callback that may look at it; no step reads it."""

    def training_step(self, batch, batch_idx):
        self.last_logits = self.net(batch[0])
        return F.cross_entropy(self.last_logits, batch[1])


@row()
class CacheByShape(WithLoss):
    """Makes a mask once for every size of batch; a cache changes no numbers."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def training_step(self, batch, batch_idx):
        size = len(batch[0])
        if size not in self.cache:
            self.cache[size] = torch.linspace(0.5, 1.5, size)
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (losses * self.cache[size]).mean()


@row()
class LossWeightFromOutside(WithLoss):
    """The hook at the start of a round sets an attribute that steps read."""

    def on_train_epoch_start(self):
        self.weight = 1.0 / (1 + self.current_epoch)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.weight


@row()
class EvalWithinTheStep(WithLoss):
    """Pseudo-labels from the model without dropout."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        self.net.eval()
        with torch.no_grad():
            wanted = self.net(batch[0]).argmax(1)
        self.net.train()
        return self.loss(batch) + 0.2 * F.cross_entropy(self.net(batch[0]), wanted)


@row()
class BackboneInEval(WithLoss):
    """A part of it never drops."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), nn.Linear(8, 3))

    def on_train_epoch_start(self):
        self.net[0].eval()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@row(refused="frozen or unfrozen during the run")
class GradualUnfreezing(WithLoss):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@row()
class LogsTheRate(WithLoss):
    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("round", float(self.current_epoch))
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
