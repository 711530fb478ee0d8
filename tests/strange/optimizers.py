"""Optimizers of all kinds, and modules that step by hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from strange.rows import SEQUENTIAL, Small, case, step


def by(kind, lr, **options):
    """Return what makes an optimizer of a kind."""
    return lambda m: kind(m.parameters(), lr=lr, **options)


def groups(m):
    """No decay of biases; one group has no gradients."""
    named = list(m.net.named_parameters())
    weights, biases = ([p for n, p in named if ("bias" in n) == is_bias] for is_bias in (0, 1))
    return torch.optim.SGD(
        [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "weight_decay": 0.0, "lr": 0.3},
            {"params": m.aux.parameters()},
        ],
        lr=0.1,
    )


def scheduled(kind, *options):
    """Return what makes SGD with a schedule."""

    def configure(m):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        return [optimizer], [kind(optimizer, *options)]

    return configure


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


class _Ahead(torch.optim.SGD):
    """Lookahead: weights of its own, in attributes."""

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


OF_ITS_OWN = "Lookahead|Ahead changes a tensor in its attribute slow"
HALVES = lambda m: [torch.optim.SGD(m.net[place].parameters(), lr=0.1) for place in (0, 2)]
SHARP = lambda m: _SharpnessAware(m.parameters())
# name, what makes the optimizer, and what differs from a row that either engine may train
OPTIMIZERS = [
    ("Adam", by(torch.optim.Adam, 0.01, amsgrad=True), {}),
    ("AdamW", by(torch.optim.AdamW, 0.01, weight_decay=0.1), {}),
    ("Adagrad", by(torch.optim.Adagrad, 0.05), {}),
    ("Nesterov", by(torch.optim.SGD, 0.05, momentum=0.9, nesterov=True), {}),
    (
        "Maximises",
        by(torch.optim.SGD, 0.05, momentum=0.5, maximize=True),
        {"loss": lambda m, batch: -F.cross_entropy(m.net(batch[0]), batch[1])},
    ),
    ("RateAsTensor", by(torch.optim.Adam, torch.tensor(0.01, dtype=torch.float64)), {}),
    ("GroupsOfTheirOwn", groups, {"prepare": lambda m: setattr(m, "aux", nn.Linear(2, 2))}),
    ("LineSearch", by(torch.optim.LBFGS, 0.1, max_iter=2), {}),  # evaluates its closure twice
    ("SharpnessAware", SHARP, {}),
    ("SharpnessAwareAndClipped", SHARP, {"trainer": {"gradient_clip_val": 100.0}}),
    ("Lookahead", lambda m: _Ahead(m.parameters()), {"refused": OF_ITS_OWN}),
    ("PlateauOfRates", scheduled(LambdaLR, lambda round_: 1 / (1 + round_)), {}),
    # Lightning itself refuses it
    ("TwoOptimizersWithoutHands", HALVES, {"refused": "automatic_optimization|optimizers"}),
]
for name, make, apart in OPTIMIZERS:
    case(name, configure_optimizers=make, **apart)


class ByHand(Small):
    """Steps itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@step(ByHand, engines=SEQUENTIAL, momentum=0.9)
def OneOptimizerByHand(self, batch, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
    optimizer.step()


@step(ByHand, engines=SEQUENTIAL)
def TwoStepsByHand(self, batch, batch_idx):
    """Two steps on every batch."""
    optimizer = self.optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@step(ByHand, engines=SEQUENTIAL)
def AccumulatesByHand(self, batch, batch_idx):
    optimizer = self.optimizers()
    self.manual_backward(self.loss(batch) / 2)
    if batch_idx % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()


@step(ByHand, engines=SEQUENTIAL)
def ClosureByHand(self, batch, batch_idx):
    optimizer = self.optimizers()

    def closure():
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


@step(ByHand, engines=SEQUENTIAL, configure_optimizers=scheduled(ExponentialLR, 0.9))
def SchedulesByHand(self, batch, batch_idx):
    """The rate falls within a client's round, for every client alike."""
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    optimizer.step()
    self.lr_schedulers().step()


class Adversaries(ByHand):
    """A generator and a critic of four numbers."""

    def __init__(self):
        super().__init__()
        self.net, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def draw(self, number):
        return self.net(torch.randn(number, 2))

    def criticised(self, real, fake):
        return real_or_not(self.critic(real), True) + real_or_not(self.critic(fake), False)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters(), lr=0.01)
        return first, torch.optim.Adam(self.critic.parameters(), lr=0.02)


def real_or_not(scores, is_real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


@step(Adversaries, engines=SEQUENTIAL)
def GAN(self, batch, batch_idx):
    """Both step on every batch; each backward pass leaves gradients in the other."""
    generator, critic = self.optimizers()
    loss = real_or_not(self.critic(self.draw(len(batch[0]))), True)
    generator.zero_grad()
    self.manual_backward(loss)
    generator.step()
    loss = self.criticised(batch[0], self.draw(len(batch[0])).detach())
    critic.zero_grad()
    self.manual_backward(loss)
    critic.step()
    self.log_dict({"loss": loss})


@step(Adversaries, engines=SEQUENTIAL)
def GANWithToggles(self, batch, batch_idx):
    generator, critic = self.optimizers()
    self.toggle_optimizer(generator)
    self.manual_backward(real_or_not(self.critic(self.draw(len(batch[0]))), True))
    generator.step()
    generator.zero_grad()
    self.untoggle_optimizer(generator)
    self.toggle_optimizer(critic)
    self.manual_backward(self.criticised(batch[0], self.draw(len(batch[0]))))
    critic.step()
    critic.zero_grad()
    self.untoggle_optimizer(critic)


@step(Adversaries, engines=SEQUENTIAL)
def CriticStepsMore(self, batch, batch_idx):
    """WGAN-GP: the generator steps on every third batch, with a penalty on the critic's slope."""
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


@step(prepare=lambda m: setattr(m, "other", nn.Linear(4, 3)))
def OptimizerOfItsOwn(self, batch, batch_idx):
    """A second optimizer, which Lightning does not know, trains another part."""
    self.own.zero_grad()
    F.cross_entropy(self.other(batch[0]), batch[1]).backward()
    self.own.step()
    return self.loss(batch)


def with_its_own(m):
    m.own = torch.optim.SGD(m.other.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.SGD(m.net.parameters(), lr=0.1)


OptimizerOfItsOwn.configure_optimizers = with_its_own


def with_a_schedule_of_its_own(m):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.2)
    m.schedule = LambdaLR(optimizer, lambda number: 1 / (1 + number))
    return optimizer


case(
    "ScheduleOfItsOwn",
    configure_optimizers=with_a_schedule_of_its_own,
    on_train_batch_end=lambda m, *given: m.schedule.step(),
)
