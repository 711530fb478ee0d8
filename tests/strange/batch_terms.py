"""Steps in which the examples of a batch meet."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.rows import FIRST_HAS_ONE, SENTENCES, WORDS, Small, X, Y, row


@row(shards=FIRST_HAS_ONE)
class SupervisedContrastive(Small):
    """With one example there is no pair."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = F.normalize(self.net(x), dim=1)
        scores = z @ z.T / 0.5
        same = (y[:, None] == y[None]) & ~torch.eye(len(x), dtype=torch.bool)
        logs = scores - scores.logsumexp(1, keepdim=True)
        return F.cross_entropy(self.net(x), y) - 0.5 * (logs * same).sum() / len(x)


@row(shards=FIRST_HAS_ONE)
class Contrastive(Small):
    """Two noisy views; an example's other view among all of the batch (SimCLR)."""

    def training_step(self, batch, batch_idx):
        one, two = (self.net(batch[0] + 0.1 * torch.randn_like(batch[0])) for _ in range(2))
        scores = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T / 0.5
        return F.cross_entropy(scores, torch.arange(len(scores)))


@row()
class HardTriplets(Small):
    """The furthest of the same class, the nearest of another."""

    def training_step(self, batch, batch_idx):
        z, y = self.net(batch[0]), batch[1]
        apart = (z[:, None] - z[None]).square().sum(2)
        same = y[:, None] == y[None]
        furthest = apart.masked_fill(~same, 0).amax(1)
        nearest = apart.masked_fill(same, 1e3).amin(1)
        return F.relu(furthest - nearest + 1).mean()


@row()
class TripletsByMining(Small):
    """Pairs found by `nonzero`: how many there are depends on values."""

    def training_step(self, batch, batch_idx):
        z, y = self.net(batch[0]), batch[1]
        left, right = torch.triu(y[:, None] != y[None]).nonzero(as_tuple=True)
        if not len(left):
            return F.cross_entropy(z, y)
        return F.cross_entropy(z, y) + F.relu(1 - (z[left] - z[right]).norm(dim=1)).mean()


@row(shards=FIRST_HAS_ONE)
class VarianceAndCovariance(Small):
    """VICReg's terms."""

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        centred = z - z.mean(0)
        covariance = centred.T @ centred / len(z)
        spread = (z.var(0, unbiased=False) + 1e-2).sqrt()
        return F.relu(1 - spread).mean() + covariance.fill_diagonal_(0).square().sum()


@row(shards=FIRST_HAS_ONE)
class BarlowTwins(Small):
    def training_step(self, batch, batch_idx):
        one, two = (self.net(batch[0] + 0.1 * torch.randn_like(batch[0])) for _ in range(2))
        one, two = (z / (z.square().mean(0) + 1e-2).sqrt() for z in (one, two))
        return (one.T @ two / len(one) - torch.eye(3)).square().sum()


class OnFeatures(Small):
    """Cross-entropy of features that `meet` changes."""

    def meet(self, z):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.meet(self.net(batch[0])), batch[1])


@row(shards=FIRST_HAS_ONE)
class Centred(OnFeatures):
    def meet(self, z):
        return z - z.mean(0)


@row(shards=FIRST_HAS_ONE)
class CentredByAConstant(OnFeatures):
    """No gradient goes through the mean."""

    def meet(self, z):
        return z - z.mean(0).detach()


@row(shards=FIRST_HAS_ONE)
class Standardised(OnFeatures):
    def meet(self, z):
        return (z - z.mean(0)) / (z.var(0, unbiased=False) + 0.1).sqrt()


@row()
class Rolled(OnFeatures):
    def meet(self, z):
        return z + 0.3 * z.roll(1, 0)


@row()
class Flipped(OnFeatures):
    def meet(self, z):
        return z + 0.3 * z.flip(0)


@row()
class RunningSum(OnFeatures):
    def meet(self, z):
        return z + 0.1 * z.cumsum(0)


@row()
class SortedFeatures(OnFeatures):
    def meet(self, z):
        return z + z.sort(0).values


@row()
class MinusTheFirst(OnFeatures):
    def meet(self, z):
        return z - 0.5 * z[0]


@row(shards=FIRST_HAS_ONE)
class SoftmaxOverTheBatch(OnFeatures):
    """The wrong dimension, as it happens."""

    def meet(self, z):
        return z + z.softmax(0)


@row(shards=FIRST_HAS_ONE)
class QuantileNormalised(OnFeatures):
    def meet(self, z):
        low, middle, high = torch.quantile(z, torch.tensor([0.25, 0.5, 0.75]), dim=0)
        return (z - middle) / (high - low + 0.5)


@row(shards=FIRST_HAS_ONE)
class RanksAsFeatures(OnFeatures):
    def meet(self, z):
        return z + z.argsort(0).argsort(0) / len(z)


@row(shards=FIRST_HAS_ONE)
class NormOfTheBatch(OnFeatures):
    def meet(self, z):
        return z / (z.norm() + 1)


@row(shards=FIRST_HAS_ONE)
class Extremes(OnFeatures):
    def meet(self, z):
        return (z - z.amin(0)) / (z.amax(0) - z.amin(0) + 1)


@row(shards=FIRST_HAS_ONE)
class Fourier(OnFeatures):
    def meet(self, z):
        return z + torch.fft.fft(z, dim=0).abs() / len(z)


@row()
class EveryOther(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0][::2]), batch[1][::2])


@row()
class FirstHalf(Small):
    """Half of the batch has labels."""

    def training_step(self, batch, batch_idx):
        half = -(-len(batch[0]) // 2)
        with_labels = F.cross_entropy(self.net(batch[0][:half]), batch[1][:half])
        return with_labels + self.net(batch[0]).square().mean()


@row()
class OneRowMore(Small):
    """A row of zeros is appended to the batch."""

    def training_step(self, batch, batch_idx):
        x = F.pad(batch[0], (0, 0, 0, 1))
        return F.cross_entropy(self.net(x), F.pad(batch[1], (0, 1)))


@row()
class BatchAsChannels(Small):
    """The batch is the channel dimension of a convolution that mixes nothing, and one that does."""

    def training_step(self, batch, batch_idx):
        x = batch[0].T[None]
        smoothed = F.avg_pool1d(F.pad(x, (1, 1)), 3, stride=1)[0].T
        return F.cross_entropy(self.net(batch[0] + smoothed), batch[1])


@row(data=SENTENCES)
class AttentionOverTheBatch(Small):
    """``batch_first`` was forgotten: examples attend to each other."""

    batch_first = False

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.net = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=self.batch_first)
        self.out = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.net(self.words(batch[0])).mean(1)), batch[1])


@row(data=SENTENCES)
class AttentionOverTime(AttentionOverTheBatch):
    batch_first = True


@row()
class MixUp(Small):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share, other = np.random.beta(0.4, 0.4), torch.randperm(len(x))
        out = self.net(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])


@row()
class MixUpByFlipping(Small):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share = torch.rand(len(x), 1)
        out = self.net(share * x + (1 - share) * x.flip(0))
        losses = [F.cross_entropy(out, target, reduction="none") for target in (y, y.flip(0))]
        return (share[:, 0] * losses[0] + (1 - share[:, 0]) * losses[1]).mean()


@row()
class RDrop(Small):
    """Two passes with dropout agree with each other."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        one, two = (self.net(batch[0]).log_softmax(1) for _ in range(2))
        apart = F.kl_div(one, two, reduction="batchmean", log_target=True)
        return F.nll_loss(one, batch[1]) + F.nll_loss(two, batch[1]) + apart


@row()
class SmallRateBelow(Small):
    """A term over the batch acts on layers whose rate is small: an error there hides."""

    def training_step(self, batch, batch_idx):
        hidden = self.net[1](self.net[0](batch[0]))
        centred = hidden - hidden.mean(0)
        alike = (centred.T @ centred).fill_diagonal_(0)
        return F.cross_entropy(self.net[2](hidden), batch[1]) + 0.1 * alike.square().mean()

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters(), "lr": 1e-3},
            {"params": self.net[2].parameters(), "lr": 0.5},
        ]
        return torch.optim.SGD(groups)


@row()
class FirstBatchIsSpecial(Small):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if batch_idx else 0.1 * loss


@row()
class LateBatchTerm(Small):
    """From the second round on the examples of a batch meet."""

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        loss = F.cross_entropy(z, batch[1])
        if self.current_epoch >= 1:
            loss = loss - 0.05 * (z - z.mean(0)).square().mean()
        return loss


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
