"""Steps that draw: from Python, NumPy and generators of their own."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import SEQUENTIAL, case, step


def one_more_layer(m):
    m.more = nn.Linear(3, 3)


@step(
    engines=SEQUENTIAL,
    prepare=lambda m: setattr(m, "generator", torch.Generator().manual_seed(0)),
)
def OwnGenerator(self, batch, batch_idx):
    """Draws from a generator of its own, whose state is on the module."""
    noise = torch.randn(batch[0].shape, generator=self.generator)
    return self.loss((batch[0] + 0.1 * noise, batch[1]))


case(
    "OwnPythonGenerator",
    prepare=lambda m: setattr(m, "random", random.Random(0)),
    training_step=lambda m, batch, _: m.loss(batch) * m.random.uniform(0.5, 1.5),
)
case(
    "NumpyRandom",
    training_step=lambda m, batch, _: m.loss(batch) * float(np.random.uniform(0.5, 1.5)),
)


@step(prepare=one_more_layer)
def PythonRandom(self, batch, batch_idx):
    """A layer that is left out one time in five."""
    out = self.net(batch[0])
    if random.random() > 0.2:
        out = out + self.more(out)
    return F.cross_entropy(out, batch[1])


@step(prepare=one_more_layer)
def StochasticDepthOfRows(self, batch, batch_idx):
    """The same by a draw for every example."""
    out = self.net(batch[0])
    kept = (torch.rand(len(out), 1) > 0.3).to(out.dtype) / 0.7
    return F.cross_entropy(out + kept * self.more(out), batch[1])
