"""Optimizers that ask for a closure, or hold another optimizer: the same in all settings."""

import pytest
import torch
from lightning.pytorch import Callback
from test_manual_optimization import far, new
from toys import Ordered, ToyModule, federated, toy_data, weights

from fl_lightning import (
    APFL,
    ClientFailure,
    ConfigurationError,
    FedDyn,
    Mean,
)
from fl_lightning.client.local_step import PlainStep
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.optimizers import takes_closure
from fl_lightning.client.personal import FineTuned
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.sparsity import SparseSGDM

RHO = 0.05


class SAM(torch.optim.Optimizer):
    """Foret et al. 2021: the gradient of a base optimizer is that at a perturbed point."""

    def __init__(self, params, lr, rho=RHO, momentum=0.9):
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=momentum)
        self.param_groups = self.base.param_groups
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure):
        self.num_steps += 1
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params]))
        moved = [p.grad * (RHO / (norm + 1e-12)) for p in params]
        for p, by in zip(params, moved, strict=True):
            p.add_(by)
        closure()
        for p, by in zip(params, moved, strict=True):
            p.sub_(by)
        self.base.step()
        return loss


class Asserting(SAM):
    """Says only when it is called that it needs one, as well-known implementations do."""

    def step(self, closure=None):
        assert closure is not None, "needs a closure"
        return super().step(closure)


class Sharp(ToyModule):
    def __init__(self, kind=Asserting, **options):
        super().__init__(**options)
        self.kind = kind

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=self.lr, momentum=self.momentum)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Idle(Callback):
    """An overridden hook that does nothing forces Lightning's full chain."""

    def on_after_backward(self, trainer, pl_module):
        pass


def fit(module, *callbacks, **options):
    return federated(module, *callbacks, **{"local_epochs": 2, "engine": "sequential"} | options)


def test_lightnings_full_chain_gives_the_same_bits():
    ends = []
    for callbacks in ([], [Idle()]):
        data = toy_data(batch_size=4, drop_last=True)
        ends.append(fit(new(Sharp, dropout=0.3, batch_norm=True), *callbacks, data=data))
    (module, trainer, _), (other, full, _) = ends
    assert torch.equal(weights(module), weights(other))
    assert trainer.callback_metrics["train/loss"] == full.callback_metrics["train/loss"]


def test_speedups_go_with_closures():
    """The small layers of the toy are computed in another way, with the same result."""
    ends = [
        weights(fit(new(Sharp), speedups=speedups).module) for speedups in ([], ["direct_layers"])
    ]
    assert far(*ends) < 1e-5


class Counting(SAM):
    """Its steps become smaller with their number, which is no part of its state."""

    def step(self, closure):
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.num_steps)
        return super().step(closure)


def test_what_an_optimizer_holds_starts_fresh_for_every_client():
    """The momentum of the one inside, and a number."""
    ends = [
        weights(fit(new(Sharp, Counting), cohort=Ordered(order), aggregator=Mean(exact=True))[0])
        for order in (1, -1)
    ]
    assert torch.equal(*ends)


def test_batch_hooks_hear_of_a_step_once():
    calls = []

    class Hooked(Sharp):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            calls.append(batch_idx)

    for callbacks in ([], [Idle()]):
        calls.clear()
        one = {"data": toy_data(num_clients=1), "trainer": {"max_epochs": 1}}
        fit(new(Hooked), *callbacks, **one, local_epochs=None, local_steps=3)
        assert calls == [0, 1, 2]


class NoClosure(torch.optim.Optimizer):
    """Takes none at all."""

    def __init__(self, params, lr, momentum):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=momentum)
        self.param_groups = self.base.param_groups

    def step(self):
        self.base.step()


class Lone(torch.optim.SGD):
    """Its own class, and torch's step."""


class Own(torch.optim.SGD):
    """Takes a closure and does what torch's does."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(("kind", "takes"), [(NoClosure, False), (Lone, False), (Own, True)])
def test_other_peoples_optimizers_are_torchs_if_they_do_the_same(kind, takes):
    module = new(Sharp, kind)
    assert takes_closure(module.configure_optimizers()[0][0]) == takes
    assert torch.equal(weights(fit(module).module), weights(fit(new(ToyModule)).module))


def test_masked_optimizers_need_none():
    assert not takes_closure(SparseSGDM(ToyModule().named_parameters(), lr=0.1))


def test_a_skipped_batch_is_skipped():
    class Skips(Sharp):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    ends = [fit(new(Skips, Own), *callbacks).module for callbacks in ([], [Idle()])]
    assert torch.equal(*map(weights, ends))


def test_without_a_trainer():
    """`PlainStep` gives a closure as well."""
    ends = []
    for kind in (torch.optim.SGD, Own):
        module, collector = new(Sharp, kind), LogCollector()
        optimizer = kind(module.parameters(), lr=0.1, momentum=0.9)
        trainer = LocalTrainer(
            module, optimizer, PlainStep(module, optimizer, collector), collector
        )
        x, y = torch.ones(3, 4), torch.tensor([0, 1, 2])
        batches = [[((x, y), 3)], [((2 * x, y), 3)]]
        with collector.listening_to(module):
            update = trainer.train(trainer.read(), client_id=0, num_examples=3, batches=batches)
        ends.append(update.delta)
    assert torch.equal(*ends)


def test_fine_tuning_gives_a_closure():
    ends = []
    for kind in (torch.optim.SGD, Own, Asserting):
        tuned = FineTuned(local_steps=2)
        none = {"max_epochs": 0}
        module, _, federation = fit(new(Sharp, kind), trainer=none, personal=tuned)
        before = weights(module)
        with federation.personal_models(module.trainer).of(0):
            ends.append(weights(module))
        assert torch.equal(weights(module), before)
        assert not torch.equal(ends[-1], before)
    assert torch.equal(ends[0], ends[1])
    assert 0 < far(ends[2], ends[0]) < 0.1


class Inside(ToyModule):
    """Steps by hand, and not the optimizer but the one that it holds."""

    def __init__(self, kind):
        super().__init__()
        self.automatic_optimization = False
        self.kind = kind

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        getattr(optimizer, "base", optimizer).step()
        return loss

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1, momentum=0.9)


def test_a_step_of_an_inner_optimizer_is_one_of_the_outer():
    ends = [
        weights(fit(new(Inside, kind), correction=FedDyn(alpha=0.1))[0])
        for kind in (torch.optim.SGD, NoClosure, SAM)
    ]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_what_takes_one_gradient_per_step_says_so():
    private = ExampleDP(noise_multiplier=1.0, clip_norm=1.0)
    with pytest.raises(ConfigurationError, match="and SAM computes several by a closure"):
        fit(new(Sharp, SAM), privacy=private, local_epochs=1)
    with pytest.raises(ConfigurationError, match="evaluates its closure several times"):
        fit(new(Sharp), personal=APFL())


def test_a_failing_closure_names_the_client():
    class Broken(Sharp):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

    with pytest.raises(ClientFailure, match="client 0: ValueError: no"):
        fit(new(Broken))
