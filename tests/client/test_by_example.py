"""Which losses are proved to be means over examples."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.engines.by_example.functions import FunctionRecorder
from fl_lightning.engines.by_example.proof import Recorder, reason_against
from fl_lightning.engines.by_example.seen import Differs

NETWORK = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def recorded(loss, size, network=NETWORK, inputs=None):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 4, generator=generator) if inputs is None else inputs(size, generator)
    y = torch.randint(3, (size,), generator=generator)
    params = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    with Recorder(size, [x, y]) as recorder, FunctionRecorder(size) as functions:
        z = torch.func.functional_call(network, params, (x,))
        value = loss(z, x, y, params)
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        outputs = {"loss": value} | dict(zip(params, grads, strict=True))
        for name, tensor in outputs.items():
            recorder.record.outputs[name] = None if tensor is None else recorder.source(tensor)
    return recorder.record, functions.functions


def reason(loss, size=8, others=(3, 1, 5), **options):
    (record, functions), *seen = [recorded(loss, s, **options) for s in (size, *others)]
    if why := reason_against(record, seen[0][0]):
        return why
    try:
        for _, of_other in seen:
            functions.check(of_other)
    except Differs as difference:
        return str(difference)
    return None


class MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 1

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


def hooked(z, function):
    z = z * 1
    z.register_hook(function)
    return z


def penalty(params):
    return sum(p.square().sum() for p in params.values())


MEANS = {
    "cross entropy": lambda z, x, y, p: F.cross_entropy(z, y),
    "label smoothing": lambda z, x, y, p: F.cross_entropy(z, y, label_smoothing=0.1),
    "squared error": lambda z, x, y, p: F.mse_loss(z, x[:, :3]),
    "absolute error": lambda z, x, y, p: (z - x[:, :3]).abs().mean(),
    "Huber": lambda z, x, y, p: F.smooth_l1_loss(z, x[:, :3]),
    "pinball": lambda z, x, y, p: torch.maximum(
        0.3 * (x[:, 0] - z[:, 0]), 0.7 * (z[:, 0] - x[:, 0])
    ).mean(),
    "binary": lambda z, x, y, p: F.binary_cross_entropy_with_logits(z[:, 0], (y > 0).float()),
    "focal": lambda z, x, y, p: (
        (1 - z.softmax(1).gather(1, y[:, None])[:, 0]) ** 2
        * F.cross_entropy(z, y, reduction="none")
    ).mean(),
    "sum over the length": lambda z, x, y, p: F.cross_entropy(z, y, reduction="sum") / len(y),
    "by position": lambda z, x, y, p: -z.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "with a penalty": lambda z, x, y, p: F.cross_entropy(z, y) + 1e-2 * penalty(p),
    "variational": lambda z, x, y, p: (z.exp() + z.square() - 1 - z).sum(1).mean(),
    "dot products": lambda z, x, y, p: (z * x[:, :3]).sum(1).mean(),
    "distillation": lambda z, x, y, p: F.kl_div(
        z.log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"
    ),
    "detached weights of each": lambda z, x, y, p: (
        z.detach().sigmoid()[:, 0] * F.cross_entropy(z, y, reduction="none")
    ).mean(),
    "clamped gradient of each, scaled": lambda z, x, y, p: F.cross_entropy(
        hooked(z, lambda g: 2 * g), y
    ),
    "learnt weight": lambda z, x, y, p: F.cross_entropy(z, y) * p["0.bias"].exp().sum(),
    "time first": lambda z, x, y, p: (
        F.linear(z.view(-1, 3, 1).transpose(0, 1), p["2.bias"][:, None])
        .mean(0)
        .square()
        .sum(1)
        .mean()
    ),
    "products of tensors": lambda z, x, y, p: torch.einsum("bi,bi->b", z, x[:, :3]).mean(),
    "two losses": lambda z, x, y, p: 0.3 * F.cross_entropy(z, y) + F.l1_loss(z, x[:, :3]),
}

NOT_MEANS = {
    "sum": lambda z, x, y, p: F.cross_entropy(z, y, reduction="sum"),
    "class weights": lambda z, x, y, p: F.cross_entropy(
        z, y, weight=torch.tensor([1.0, 5.0, 20.0])
    ),
    "class weights by hand": lambda z, x, y, p: (
        (torch.tensor([1.0, 5.0, 20.0])[y] * F.cross_entropy(z, y, reduction="none")).sum()
        / torch.tensor([1.0, 5.0, 20.0])[y].sum()
    ),
    "targets that are there": lambda z, x, y, p: (
        (z.square() * (x[:, :3] > 0)).sum() / (x[:, :3] > 0).sum().clamp(min=1)
    ),
    "flooding": lambda z, x, y, p: (F.cross_entropy(z, y) - 0.3).abs() + 0.3,
    "free bits": lambda z, x, y, p: z.square().mean(0).clamp(min=0.05).sum(),
    "root of the mean": lambda z, x, y, p: F.mse_loss(z, x[:, :3]).sqrt(),
    "contrastive": lambda z, x, y, p: F.cross_entropy(z @ z.T, torch.arange(len(z))),
    "variance": lambda z, x, y, p: F.cross_entropy(z, y) + z.var(0, correction=0).mean(),
    "centred": lambda z, x, y, p: (z - z.mean(0)).square().mean(),
    "largest": lambda z, x, y, p: F.cross_entropy(z, y, reduction="none").max(),
    "hardest half": lambda z, x, y, p: (
        F.cross_entropy(z, y, reduction="none").topk(2 if len(z) > 1 else 1)[0].mean()
    ),
    "every second": lambda z, x, y, p: F.cross_entropy(z[::2], y[::2]),
    "mixup": lambda z, x, y, p: F.mse_loss(0.7 * z + 0.3 * z.flip(0), x[:, :3]),
    "rolled": lambda z, x, y, p: (z * z.roll(1, 0)).mean(),
    "batch norm": lambda z, x, y, p: (
        F.batch_norm(z, None, None, training=True).square().sum(1).mean()
        if len(z) > 1
        else z.square().sum(1).mean()
    ),
    "softmax over the batch": lambda z, x, y, p: (z.softmax(0) * x[:, :3]).mean(),
    "gradients meet in a backward pass": lambda z, x, y, p: F.cross_entropy(
        MixingBackward.apply(z), y
    ),
    "gradients meet in a hook": lambda z, x, y, p: F.cross_entropy(
        hooked(z, lambda g: g / g.norm()), y
    ),
    "gradients of each are clamped": lambda z, x, y, p: F.cross_entropy(
        hooked(z, lambda g: g.clamp(-0.01, 0.01)), y
    ),
    "other for one": lambda z, x, y, p: (
        F.cross_entropy(z, y) if len(z) == 1 else F.cross_entropy(2 * z, y)
    ),
    "grows with the length": lambda z, x, y, p: F.cross_entropy(z, y) * len(z),
    "exponent of the length": lambda z, x, y, p: F.cross_entropy(z, y) * 0.9 ** len(z),
    "by numbers of the length": lambda z, x, y, p: (
        F.cross_entropy(z, y, reduction="none") * torch.linspace(1, 2, len(z))
    ).mean(),
    "examples and time are taken for each other": lambda z, x, y, p: (
        z.t().reshape(-1) * z.reshape(-1)
    ).mean(),
    "cumulative": lambda z, x, y, p: z.cumsum(0).mean(),
    "squared mean": lambda z, x, y, p: z.mean().square(),
    "mean of another mean": lambda z, x, y, p: (z * z.mean()).mean(),
    "a matrix of examples": lambda z, x, y, p: torch.cdist(z, z).mean(),
    "embedding by frequency": lambda z, x, y, p: F.embedding(
        y, p["2.weight"], scale_grad_by_freq=True
    ).mean(),
    "unbiased": lambda z, x, y, p: F.mse_loss(z, x[:, :3], reduction="sum") / max(1, len(z) - 1),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_examples_is_proved(name):
    assert reason(MEANS[name]) is None


@pytest.mark.parametrize("name", NOT_MEANS)
def test_what_is_no_mean_is_not(name):
    assert reason(NOT_MEANS[name])
