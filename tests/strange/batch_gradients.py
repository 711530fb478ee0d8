"""Gradients in which the examples of a batch meet, and what stops or changes them."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.batch_features import OnFeatures, Standardised
from strange.rows import FIRST_HAS_ONE, WORDS, Small, X, Y, row


@row()
class BootstrapYourOwnLatent(Small):
    """BYOL: the target network follows in the step."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.predictor = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        one, two = (batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2))
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)
            wanted = self.target(two)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.net(one)), wanted).mean()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


class _NormalisedGradients(torch.autograd.Function):
    """The identity; its backward divides by the gradients' spread over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.square().sum(0, keepdim=True).sqrt() + 0.1)


@row(shards=FIRST_HAS_ONE)
class BackwardMixesRows(OnFeatures):
    def meet(self, z):
        return _NormalisedGradients.apply(z)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@row()
class ReversedGradients(Small):
    """Ganin & Lempitsky 2015: features from which a second head learns nothing."""

    def __init__(self):
        super().__init__()
        self.adversary = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        hidden = self.net[1](self.net[0](batch[0]))
        domain = (batch[0][:, 3:] > 0).to(hidden.dtype)
        guess = self.adversary(_Reversed.apply(hidden))
        loss = F.cross_entropy(self.net[2](hidden), batch[1])
        return loss + F.binary_cross_entropy_with_logits(guess, domain)


@row(shards=FIRST_HAS_ONE)
class HookOnActivations(Small):
    """A hook on activations divides their gradient by its norm over the batch."""

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        z.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        return F.cross_entropy(z, batch[1])


@row()
class StraightThrough(OnFeatures):
    def meet(self, z):
        return z + (z.round() - z).detach()


@row()
class ThroughSomeRows(OnFeatures):
    """No gradient goes through rows that are above the batch's mean."""

    def meet(self, z):
        return torch.where(z > z.mean(0), z.detach(), z)


@row(data=TensorDataset(torch.cat([torch.zeros(19, 4), X[19:]]), Y))
class ConstantInputs(Standardised):
    """The first client's inputs are all the same."""


@row()
class StandardisedTargets(Small):
    def training_step(self, batch, batch_idx):
        y = batch[0][:, :3]
        return F.mse_loss(self.net(batch[0]), (y - y.mean(0)) / (y.std(0, unbiased=False) + 0.1))


@row()
class GraphOfTheBatch(Small):
    """Examples are nodes; their edges lead to the next one of the same class."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        source = torch.arange(len(x))
        summed = torch.zeros_like(x).index_add_(0, y % len(x), x[source])
        return F.cross_entropy(self.net(x + 0.1 * summed), y)


@row()
class PairedReshape(Small):
    """Neighbours in the batch share a row where their number is even."""

    def training_step(self, batch, batch_idx):
        x = batch[0]
        if len(x) % 2 == 0:
            x = x.view(-1, 2, 4)
            x = (x + 0.3 * x.flip(1)).view(-1, 4)
        return F.cross_entropy(self.net(x), batch[1])


@row(data=TensorDataset(WORDS, Y))
class DistinctWords(Small):
    """`unique` over the batch: a shape that depends on values."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 4)

    def training_step(self, batch, batch_idx):
        used, where = batch[0].unique(return_inverse=True)
        loss = F.cross_entropy(self.net(self.words(used)[where].mean(1)), batch[1])
        return loss + 0.1 * self.words(used).square().mean()


@row()
class InnerLoop(Small):
    """Meta-learning: a step on one half of the batch, the loss of the other."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        params = dict(self.net.named_parameters())
        first = F.cross_entropy(torch.func.functional_call(self.net, params, (x[::2],)), y[::2])
        slopes = torch.autograd.grad(first, list(params.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(params.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)
