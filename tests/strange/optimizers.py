"""Optimizers of all kinds, and modules that step by hand."""

import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import SEQUENTIAL, Classifies, row


@row()
class Adam(Classifies):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)


@row()
class AdamW(Classifies):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


@row()
class Adagrad(Classifies):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


@row()
class Nesterov(Classifies):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


@row()
class Maximises(Classifies):
    def training_step(self, batch, batch_idx):
        return -super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5, maximize=True)


@row()
class RateAsTensor(Classifies):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))


@row()
class GroupsOfTheirOwn(Classifies):
    """No decay of biases; one group has no gradients."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(2, 2)

    def configure_optimizers(self):
        named = list(self.net.named_parameters())
        groups = [
            {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.3},
            {"params": self.aux.parameters()},
        ]
        return torch.optim.SGD(groups, lr=0.1)


@row()
class LineSearch(Classifies):
    """LBFGS evaluates its closure several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class _SharpnessAware(torch.optim.Optimizer):
    """SAM: ascend, take the gradient there, come back, step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "rho": 0.05})

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * (self.param_groups[0]["rho"] / norm) for p in params]
        with torch.no_grad():
            for param, move in zip(params, moves, strict=True):
                param.add_(move)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for param, move in zip(params, moves, strict=True):
                param.sub_(move).add_(param.grad, alpha=-self.param_groups[0]["lr"])
        return loss


@row("SharpnessAwareAndClipped", trainer={"gradient_clip_val": 100.0})
@row()
class SharpnessAware(Classifies):
    def configure_optimizers(self):
        return _SharpnessAware(self.parameters())


@row(refused="Lookahead|Ahead changes a tensor in its attribute slow")
class Lookahead(Classifies):
    """An optimizer with weights of its own, in attributes."""

    class Ahead(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.2)
            self.num_steps = 0
            self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

        def step(self, closure=None):
            loss = super().step(closure)
            self.num_steps += 1
            if self.num_steps % 2 == 0:
                params = [p for g in self.param_groups for p in g["params"]]
                with torch.no_grad():
                    for slow, param in zip(self.slow, params, strict=True):
                        param.copy_(slow.lerp_(param, 0.5))
            return loss

    def configure_optimizers(self):
        return self.Ahead(self.parameters())


@row()
class PlateauOfRates(Classifies):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda r: 1 / (1 + r))
        return [optimizer], [schedule]


class ByHand(Classifies):
    """Steps itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@row(engines=SEQUENTIAL)
class OneOptimizerByHand(ByHand):
    momentum = 0.9

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()


@row(engines=SEQUENTIAL)
class TwoStepsByHand(ByHand):
    """Two steps on every batch."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()


@row(engines=SEQUENTIAL)
class AccumulatesByHand(ByHand):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


@row(engines=SEQUENTIAL)
class ClosureByHand(ByHand):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@row(engines=SEQUENTIAL)
class SchedulesByHand(ByHand):
    """The rate falls within a client's round, for every client alike."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Adversaries(ByHand):
    """A generator and a critic of four numbers."""

    def __init__(self):
        super().__init__()
        self.net, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def draw(self, number):
        return self.net(torch.randn(number, 2))

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters(), lr=0.01)
        return first, torch.optim.Adam(self.critic.parameters(), lr=0.02)


def real_or_not(scores, is_real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


@row(engines=SEQUENTIAL)
class GAN(Adversaries):
    """Both step on every batch; each backward pass leaves gradients in the other."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        loss = real_or_not(self.critic(self.draw(len(batch[0]))), True)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        fake = self.draw(len(batch[0])).detach()
        loss = real_or_not(self.critic(batch[0]), True) + real_or_not(self.critic(fake), False)
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        self.log_dict({"loss": loss})


@row(engines=SEQUENTIAL)
class GANWithToggles(Adversaries):
    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        self.manual_backward(real_or_not(self.critic(self.draw(len(batch[0]))), True))
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        fake = self.draw(len(batch[0]))
        loss = real_or_not(self.critic(batch[0]), True) + real_or_not(self.critic(fake), False)
        self.manual_backward(loss)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)


@row(engines=SEQUENTIAL)
class CriticStepsMore(Adversaries):
    """WGAN-GP: the generator steps on every third batch, with a penalty on the critic's slope."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        x, fake = batch[0], self.draw(len(batch[0]))
        mixed = torch.lerp(x, fake.detach(), torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        loss = self.critic(fake.detach()).mean() - self.critic(x).mean()
        critic.zero_grad()
        self.manual_backward(loss + (slope.norm(dim=1) - 1).square().mean())
        critic.step()
        if batch_idx % 3 == 2:
            generator.zero_grad()
            self.manual_backward(-self.critic(fake).mean())
            generator.step()


@row(refused="automatic_optimization|optimizers")
class TwoOptimizersWithoutHands(Classifies):
    """Lightning itself refuses it."""

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]
