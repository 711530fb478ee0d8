"""Steps that write to frozen parameters, to buffers and to tensors on the module."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import Small, case, insert, row, step


class WithTeacher(Small):
    lr = 0.3

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self):
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)

    def loss(self, batch):
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return super().loss(batch) + F.mse_loss(self.net(batch[0]), wanted)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


@step(WithTeacher)
def MeanTeacher(self, batch, batch_idx):
    """Frozen parameters follow in the step."""
    self.follow()
    return self.loss(batch)


def follow_by_data(self):
    for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
        old.data = 0.9 * old.data + 0.1 * new.data


case("MeanTeacherInTheHook", WithTeacher, on_train_batch_end=lambda m, *given: m.follow())
case("MeanTeacherByData", MeanTeacher, follow=follow_by_data)
# as the older BYOL implementations do it
case("MeanTeacherBeforeZeroGrad", WithTeacher, on_before_zero_grad=lambda m, _: m.follow())
case("TeacherPerRound", WithTeacher)  # the last round's model; no step writes to it


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


def has_centre(m):
    m.register_buffer("centre", torch.zeros(3))


@step(prepare=has_centre)
def EMAInBuffers(self, batch, batch_idx):
    out = self.net(batch[0])
    with torch.no_grad():
        self.centre.mul_(0.9).add_(out.mean(0), alpha=0.1)
    return F.cross_entropy(out - self.centre, batch[1])


@step(prepare=has_centre)
def BufferThatIsAssigned(self, batch, batch_idx):
    """Another tensor takes the buffer's place."""
    out = self.net(batch[0])
    self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
    return F.cross_entropy(out - self.centre, batch[1])


def has_queue(m):
    m.register_buffer("queue", torch.eye(6, 3))
    m.register_buffer("place", torch.tensor(0))


@step(prepare=has_queue)
def QueueOfKeys(self, batch, batch_idx):
    """MoCo: a buffer of features and a place in it."""
    out = F.normalize(self.net(batch[0]), dim=1)
    scores = out @ self.queue.clone().T
    with torch.no_grad():
        self.queue[int(self.place)] = out[0]
        self.place.copy_((self.place + 1) % 6)
    return F.cross_entropy(out, batch[1]) + 0.1 * scores.logsumexp(1).mean()


@step(prepare=lambda m: setattr(m, "previous", None))
def PreviousBatch(self, batch, batch_idx):
    """Keeps the last features on itself; a term pulls the next ones to them."""
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


@step(prepare=lambda m: setattr(m, "shadow", _Shadow(m.net.parameters())))
def KeepsAnObject(self, batch, batch_idx):
    """A plain object with tensors that pull."""
    self.shadow.update(self.net.parameters())
    pairs = zip(self.net.parameters(), self.shadow.values, strict=True)
    return self.loss(batch) + 0.1 * sum((p - value).square().sum() for p, value in pairs)


@step()
def Toggles(self, batch, batch_idx):
    """Freezes a layer and leaves it in another mode from its second step on."""
    self.net[0].requires_grad_(self.net.training)
    loss = self.loss(batch)
    self.net.eval()
    return loss


@step()
def KeepsATensor(self, batch, batch_idx):
    """For a callback that may look at it; no step reads it."""
    self.last_logits = self.net(batch[0])
    return F.cross_entropy(self.last_logits, batch[1])


@step(prepare=lambda m: setattr(m, "cache", {}))
def CacheByShape(self, batch, batch_idx):
    """Makes a mask once for every size of batch; a cache changes no numbers."""
    size = len(batch[0])
    if size not in self.cache:
        self.cache[size] = torch.linspace(0.5, 1.5, size)
    losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
    return (losses * self.cache[size]).mean()


case(  # the hook at the start of a round sets an attribute that steps read
    "LossWeightFromOutside",
    on_train_epoch_start=lambda m: setattr(m, "weight", 1.0 / (1 + m.current_epoch)),
    training_step=lambda m, batch, _: m.loss(batch) * m.weight,
)


@step(prepare=insert(2, lambda: nn.Dropout(0.3)))
def EvalWithinTheStep(self, batch, batch_idx):
    """Pseudo-labels from the model without dropout."""
    self.net.eval()
    with torch.no_grad():
        wanted = self.net(batch[0]).argmax(1)
    self.net.train()
    return self.loss(batch) + 0.2 * F.cross_entropy(self.net(batch[0]), wanted)


case(  # a part of it never drops
    "BackboneInEval",
    prepare=insert(1, lambda: nn.Dropout(0.5)),
    on_train_epoch_start=lambda m: m.net[1].eval(),
)
case(
    "GradualUnfreezing",
    refused="frozen or unfrozen during the run",
    prepare=lambda m: m.net[0].requires_grad_(False),
    on_train_epoch_start=lambda m: m.net[0].requires_grad_(m.current_epoch > 0),
)


def halved(m):
    optimizer = torch.optim.SGD(m.parameters(), lr=m.lr)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@step(configure_optimizers=halved)
def LogsTheRate(self, batch, batch_idx):
    self.log("rate", self.optimizers().param_groups[0]["lr"])
    self.log("round", float(self.current_epoch))
    return self.loss(batch)
