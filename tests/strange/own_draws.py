"""Steps that draw: from Python, NumPy and generators of their own."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import SEQUENTIAL, WithLoss, row


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
