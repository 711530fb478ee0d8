"""A compiled training step has the loss, gradients, buffers and logs of the plain one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torchmetrics import MeanMetric

from fl_lightning.engines.compiler.compiled_gradients import CompiledGradients
from fl_lightning.engines.compiler.compiling import NotCompiled
from fl_lightning.engines.compiler.speedups import FasterStep


class Net(nn.Module):
    """A convolutional network with batch norm, dropout, a large dense layer and one never used."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.dense, self.unused = nn.Linear(392, 300), nn.Linear(3, 3)
        self.head = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(300, 5))
        self.logged = []

    def log(self, name, value, *args, **options):
        self.logged.append((name, float(torch.as_tensor(value).detach()), args, options))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.head(self.dense(self.features(x))), y)
        self.log("loss", loss, True)
        self.log("index", index, batch_size=3)
        self.log("constant", 0.1)
        return {"loss": loss}


def batches(size=6, count=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64)
        yield x, torch.randint(5, (size,), generator=generator)


def sgd(net):
    return SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


@pytest.mark.slow
def test_the_same_training_until_shapes_change():
    torch.manual_seed(0)
    net = Net().double()
    plain, optimizer = copy.deepcopy(net), sgd(net)
    graph = CompiledGradients(net, net.training_step)
    speedups = ("fused_optimizer", "compiled")
    faster = FasterStep(net, optimizer, speedups, graph)
    torch.manual_seed(2)
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        assert faster.gradients(batch, index) is not None
        faster.step()
    torch.manual_seed(2)
    optimizer = sgd(plain)
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        plain.training_step(batch, index)["loss"].backward()
        optimizer.step()
    for p, q in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)
    for one, other in zip(net.logged, plain.logged, strict=True):
        assert one == (other[0], pytest.approx(other[1]), *other[2:])
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(NotCompiled, match="what it reads has changed"):
        assert faster.gradients(next(batches(size=4)), 0) is None
    assert graph.is_given_up
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())


@pytest.mark.parametrize("use", ["once", "twice", "penalty", "another place"])
def test_gradients_of_weights_used_in_other_ways(use):
    torch.manual_seed(0)
    net, x = nn.Linear(6, 2).double(), torch.randn(4, 6, dtype=torch.float64)

    def run(batch, index):
        out = net(batch)
        if use == "twice":
            out = out + net(batch.square())
        if use == "another place":
            other = {"weight": 2 * net.weight, "bias": net.bias}
            out = out + torch.func.functional_call(net, other, (batch,))
        return out.square().sum() + (net.weight.square().sum() if use == "penalty" else 0)

    run(x, 0).backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with torch.compiler.set_stance("force_eager"):
        assert CompiledGradients(net, run)(x, 0) is not None
    for param, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient)


class Odd(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.mean, self.way = nn.Linear(2, 1), MeanMetric(), way

    def log(self, name, value):
        pass

    def training_step(self, batch, index):
        loss = self.layer(batch).sum()
        if self.way == "updates":
            self.mean(loss)
        if self.way == "logs":
            self.log("mean", self.mean)
        if self.way == "branches" and loss > 0:
            return 2 * loss
        return None if self.way == "skips" else loss


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("updates", "updates the torchmetrics object 'mean'"),
        ("logs", "logs a torchmetrics object as 'mean'"),
        ("skips", "no loss"),
        ("branches", "ata-dependent|Graph break"),
    ],
)
def test_what_cannot_be_compiled_is_named_and_leaves_nothing_behind(way, reason):
    net = Odd(way)
    graph = CompiledGradients(net, net.training_step)
    draws = torch.random.get_rng_state()
    with pytest.warns(NotCompiled, match=reason):
        assert graph(torch.ones(3, 2), 0) is None
    assert graph.is_given_up
    assert net.mean.update_count == 0
    assert all(p.grad is None for p in net.parameters())
    assert "log" not in vars(net)
    assert torch.equal(torch.random.get_rng_state(), draws)
