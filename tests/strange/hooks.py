"""Hooks of parameters, modules and optimizers, and steps that act on weights themselves."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.rows import REALS, UNEVEN, Small, X, Y, case, step


class Regresses(Small):
    """Targets of the first client are small, those of the others are not: so are gradients."""

    lr = 0.02

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])


def clamped(gradients):
    return tuple(g if g is None else g.clamp(-1, 1) for g in gradients)


def clamp_gradients(parameters):
    nn.utils.clip_grad_value_(parameters, 5.0)


# Clamping never happens on the first client
case(
    "ParameterHook",
    Regresses,
    data=REALS,
    prepare=lambda m: [p.register_hook(lambda g: g.clamp(-5, 5)) for p in m.parameters()],
)
case(
    "ParameterHookAfterwards",
    Regresses,
    data=REALS,
    prepare=lambda m: [
        p.register_post_accumulate_grad_hook(clamp_gradients) for p in m.parameters()
    ],
)
case(
    "ModuleBackwardHook",
    Regresses,
    data=REALS,
    prepare=lambda m: m.net[2].register_full_backward_hook(lambda _, g, outward: clamped(g)),
)
case(
    "ModuleBackwardPreHook",
    Regresses,
    data=REALS,
    prepare=lambda m: m.net[0].register_full_backward_pre_hook(lambda _, g: clamped(g)),
)
case(
    "AfterBackward",
    Regresses,
    data=REALS,
    on_after_backward=lambda m: clamp_gradients(m.parameters()),
)
case(
    "BeforeOptimizerStep",
    Regresses,
    data=REALS,
    on_before_optimizer_step=lambda m, optimizer: clamp_gradients(m.parameters()),
)
case("ClippedByTheTrainer", Regresses, data=REALS, trainer={"gradient_clip_val": 5.0})


def clip(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    nn.utils.clip_grad_norm_(self.parameters(), 5.0)


case("ClipsItself", Regresses, data=REALS, configure_gradient_clipping=clip)


def scaled(self, module, inputs, output):
    self.uses += 1
    return output * min(1.0, 0.1 * self.uses)


def counts_uses(m):
    m.uses = 0
    m.net[0].register_forward_hook(m.scaled)


@torch.no_grad()
def renormalise(module, inputs):
    """Weights are renormalised before every use."""
    module.weight.div_(module.weight.norm(dim=1, keepdim=True).clamp(min=0.5))


def centred(layer, inputs, output):
    return output - output.mean(0)


case("ForwardHookOverTheBatch", prepare=lambda m: m.net[0].register_forward_hook(centred))
case("ForwardHookThatCounts", prepare=counts_uses, scaled=scaled)
case(
    "ForwardPreHookThatWrites",
    prepare=lambda m: m.net[2].register_forward_pre_hook(renormalise),
)


def clamp_weights(optimizer, *_):
    """Clip what an optimizer moves, as critics of early GANs had it."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.clamp_(-0.5, 0.5)


def decay_rate(optimizer, *_):
    """Lower the rate from step to step of a client's round, for every client alike."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.8


def hooked(register, hook):
    """Return what makes SGD with a hook."""

    def configure(m):
        optimizer = torch.optim.SGD(m.parameters(), lr=m.lr)
        register(optimizer, hook)
        return optimizer

    return configure


SGD = torch.optim.SGD
case(
    "OptimizerPostHook",
    data=TensorDataset(X, (X[:, 0] > 0).long()),
    lr=0.5,
    configure_optimizers=hooked(SGD.register_step_post_hook, clamp_weights),
)
case("OptimizerPreHook", configure_optimizers=hooked(SGD.register_step_pre_hook, decay_rate))


@step(lr=0.5)
def ClampsInTheStep(self, batch, batch_idx):
    with torch.no_grad():
        for param in self.parameters():
            param.clamp_(-0.4, 0.4)
    return self.loss(batch)


@step(lr=0.5)
def ClampsByData(self, batch, batch_idx):
    for param in self.parameters():
        param.data.clamp_(-0.4, 0.4)
    return self.loss(batch)


def has_another_head(m):
    m.aux = nn.Linear(4, 3)


# A head that the loss does not use: no gradient, so no decay
DECAYS = {"weight_decay": 1e-2, "momentum": 0.9, "prepare": has_another_head}
case("UnusedParameter", **DECAYS)


@step(**DECAYS)
def UnusedAtTimes(self, batch, batch_idx):
    """The head is used for odd batches."""
    loss = self.loss(batch)
    return loss + self.aux(batch[0]).square().mean() if batch_idx % 2 else loss


@step()
def AdversarialExamples(self, batch, batch_idx):
    """FGSM; the inputs' gradient knows, by its size, how many examples a mean is over."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(self.net(x), batch[1]), x)
    return F.cross_entropy(self.net(batch[0] + slope), batch[1])


@step()
def GradientNormPenalty(self, batch, batch_idx):
    """The size of the loss's own gradient by the weights."""
    loss = self.loss(batch)
    slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in slopes)


@step()
def BackwardInTheStep(self, batch, batch_idx):
    """An extra backward pass by the inputs alone."""
    x = batch[0].clone().requires_grad_()
    with torch.enable_grad():
        inner = self.net(x).square().sum()
    inner.backward(inputs=[x])
    return F.cross_entropy(self.net(batch[0] - 0.1 * x.grad), batch[1])


@step()
def HookAtEveryStep(self, batch, batch_idx):
    """Registers and removes a hook within the step."""
    seen = []
    handle = self.net[0].register_forward_hook(lambda m, i, output: seen.append(output))
    out = self.net(batch[0])
    handle.remove()
    return F.cross_entropy(out, batch[1]) + 0.1 * seen[0].square().mean()


case(  # the first client's inputs are zero: its first layer's gradients are, too
    "HookOnZeroInputs",
    data=TensorDataset(torch.cat([0 * X[: UNEVEN[0].stop], X[UNEVEN[0].stop :]]), Y),
    prepare=lambda m: m.net[0].weight.register_hook(lambda g: g.sign() * 0.01),
)
