"""Hooks of parameters, modules and optimizers, and steps that act on weights themselves."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.rows import REALS, UNEVEN, Classifies, Small, X, Y, row


class Regresses(Small):
    """Targets of the first client are small, those of the others are not: so are gradients."""

    lr = 0.02

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])


@row(data=REALS)
class ParameterHook(Regresses):
    """Clamps gradients, which never happens on the first client."""

    def __init__(self):
        super().__init__()
        for param in self.parameters():
            param.register_hook(lambda gradient: gradient.clamp(-5, 5))


@row(data=REALS)
class ParameterHookAfterwards(Regresses):
    def __init__(self):
        super().__init__()
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(self.clamp)

    @staticmethod
    def clamp(param):
        param.grad.clamp_(-5, 5)


@row(data=REALS)
class ModuleBackwardHook(Regresses):
    def __init__(self):
        super().__init__()
        self.net[2].register_full_backward_hook(
            lambda module, inward, outward: tuple(
                g if g is None else g.clamp(-1, 1) for g in inward
            )
        )


@row(data=REALS)
class ModuleBackwardPreHook(Regresses):
    def __init__(self):
        super().__init__()
        self.net[0].register_full_backward_pre_hook(
            lambda module, outward: tuple(g if g is None else g.clamp(-1, 1) for g in outward)
        )


@row()
class ForwardHook(Classifies):
    """Changes what a layer gives."""

    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(lambda module, inputs, output: output.clamp(max=0.5))


@row()
class ForwardHookOverTheBatch(Classifies):
    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(lambda module, inputs, output: output - output.mean(0))


@row()
class ForwardHookThatCounts(Classifies):
    def __init__(self):
        super().__init__()
        self.uses = 0
        self.net[0].register_forward_hook(self.scaled)

    def scaled(self, module, inputs, output):
        self.uses += 1
        return output * min(1.0, 0.1 * self.uses)


@row()
class ForwardPreHookThatWrites(Classifies):
    """Weights are renormalised before every use."""

    def __init__(self):
        super().__init__()
        self.net[2].register_forward_pre_hook(self.renormalise)

    @torch.no_grad()
    def renormalise(self, module, inputs):
        module.weight.div_(module.weight.norm(dim=1, keepdim=True).clamp(min=0.5))


def clamp_weights(optimizer, *_):
    """Clip what an optimizer moves, as critics of early GANs had it."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.clamp_(-0.5, 0.5)


@row(data=TensorDataset(X, (X[:, 0] > 0).long()))
class OptimizerPostHook(Classifies):
    lr = 0.5

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(clamp_weights)
        return optimizer


def decay_rate(optimizer, *_):
    """Lower the rate from step to step."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.8


@row()
class OptimizerPreHook(Classifies):
    """The rate falls within a client's round, for every client alike."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(decay_rate)
        return optimizer


@row(data=REALS)
class AfterBackward(Regresses):
    def on_after_backward(self):
        for param in self.parameters():
            param.grad.clamp_(-5, 5)


@row(data=REALS)
class BeforeOptimizerStep(Regresses):
    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_value_(self.parameters(), 5.0)


@row(data=REALS)
class ClipsItself(Regresses):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        nn.utils.clip_grad_norm_(self.parameters(), 5.0)


@row(data=REALS, trainer={"gradient_clip_val": 5.0})
class ClippedByTheTrainer(Regresses):
    pass


@row()
class ClampsInTheStep(Classifies):
    lr = 0.5

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for param in self.parameters():
                param.clamp_(-0.4, 0.4)
        return super().training_step(batch, batch_idx)


@row()
class ClampsByData(Classifies):
    lr = 0.5

    def training_step(self, batch, batch_idx):
        for param in self.parameters():
            param.data.clamp_(-0.4, 0.4)
        return super().training_step(batch, batch_idx)


@row()
class UnusedParameter(Classifies):
    """A head that the loss does not use: no gradient, so no decay."""

    weight_decay, momentum = 1e-2, 0.9

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(8, 3)


@row()
class UnusedAtTimes(Classifies):
    """A head that is used where a batch has few examples, or for odd batches."""

    weight_decay, momentum = 1e-2, 0.9

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.aux(batch[0]).square().mean() if batch_idx % 2 else loss


@row()
class GradientPenalty(Classifies):
    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out[:, 0].sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.5 * (slope.norm(dim=1) - 1).square().mean()


@row()
class AdversarialExamples(Classifies):
    """FGSM; the loss's gradient by the inputs."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self.net(x), batch[1]), x)
        return F.cross_entropy(self.net(batch[0] + 0.1 * slope.tanh()), batch[1])


@row()
class ScaledAdversary(Classifies):
    """The inputs' gradient by its size: that of a mean knows how many examples there are."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self.net(x), batch[1]), x)
        return F.cross_entropy(self.net(batch[0] + slope), batch[1])


@row()
class GradientNormPenalty(Classifies):
    """The size of the loss's own gradient by the weights."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in slopes)


@row()
class BackwardInTheStep(Classifies):
    """An extra backward pass by the inputs alone."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            inner = self.net(x).square().sum()
        inner.backward(inputs=[x])
        return F.cross_entropy(self.net(batch[0] - 0.1 * x.grad), batch[1])


@row()
class HookAtEveryStep(Classifies):
    """Registers and removes a hook within the step."""

    def training_step(self, batch, batch_idx):
        seen = []
        handle = self.net[0].register_forward_hook(lambda m, i, output: seen.append(output))
        out = self.net(batch[0])
        handle.remove()
        return F.cross_entropy(out, batch[1]) + 0.1 * seen[0].square().mean()


@row(data=TensorDataset(torch.cat([0 * X[: UNEVEN[0].stop], X[UNEVEN[0].stop :]]), Y))
class HookOnZeroInputs(Classifies):
    """The first client's inputs are zero: its first layer's gradients are, too."""

    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.sign() * 0.01)
