"""Steps that write to frozen parameters, to buffers and to tensors on the module."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import WithLoss, row


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
class MeanTeacherByData(MeanTeacher):
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data


@row()
class HiddenTeacher(MeanTeacher):
    """One that neither the optimizer nor a checkpoint finds."""

    def __init__(self):
        super().__init__()
        self.hidden = [self.teacher]
        del self.teacher

    teacher = property(lambda self: self.hidden[0])

    def _apply(self, fn):
        self.hidden[0]._apply(fn)
        return super()._apply(fn)


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


class _Shadow:
    def __init__(self, params):
        self.values = [param.detach().clone() for param in params]

    def update(self, params):
        for value, param in zip(self.values, params, strict=True):
            value.lerp_(param.detach().to(value.dtype), 0.1)


@row()
class KeepsAnObject(WithLoss):
    """A plain object with tensors that pull."""

    def __init__(self):
        super().__init__()
        self.shadow = _Shadow(self.net.parameters())

    def training_step(self, batch, batch_idx):
        self.shadow.update(self.net.parameters())
        pairs = zip(self.net.parameters(), self.shadow.values, strict=True)
        return self.loss(batch) + 0.1 * sum((p - value).square().sum() for p, value in pairs)


@row()
class Toggles(WithLoss):
    """Freezes a layer and leaves it in another mode from its second step on."""

    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(self.net.training)
        loss = self.loss(batch)
        self.net.eval()
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
