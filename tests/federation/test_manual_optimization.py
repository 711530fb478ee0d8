"""Modules that step one or several optimizers by hand: their reductions, and what is refused."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from test_masks import DECAY, some_masks
from torch import nn
from torch.nn import functional as F
from toys import Ordered, SaveEverywhere, ToyModule, federated, toy_data, weights

from fl_lightning import (
    APFL,
    ConfigurationError,
    Ditto,
    FedDyn,
    FedProx,
    Mean,
    Moon,
    NormalisedMean,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client.personal import FineTuned
from fl_lightning.core.seeds import derive_seed
from fl_lightning.data import IID
from fl_lightning.data.cohorts.availability import AvailableCohort, Stretches
from fl_lightning.data.cohorts.weighted_cohorts import PowerOfChoiceCohort
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.server.means.fair_means import QFedAvg
from fl_lightning.sparsity import SparseSGDM

SEED = 4


class GAN(LightningModule):
    """Two networks, two optimizers, two schedules, of which one is stepped inside a client."""

    def __init__(self, toggles=True, clip=None):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.toggles, self.clip = toggles, clip

    def training_step(self, batch, batch_idx):
        x, _ = batch
        generator, critic = self.optimizers()
        within, _ = self.lr_schedulers()
        real, fake = x.new_ones(len(x), 1), x.new_zeros(len(x), 1)
        bce = F.binary_cross_entropy_with_logits
        made = self.g(torch.randn(len(x), 2, dtype=x.dtype))
        if self.toggles:
            self.toggle_optimizer(generator)
        g_loss = bce(self.d(made), real)
        generator.zero_grad()
        self.manual_backward(g_loss)
        if self.clip:
            self.clip_gradients(generator, gradient_clip_val=self.clip)
        generator.step()
        if self.toggles:
            self.untoggle_optimizer(generator)
        with critic.toggle_model():
            d_loss = bce(self.d(x), real) + bce(self.d(made.detach()), fake)
            critic.zero_grad()
            self.manual_backward(d_loss)
            critic.step()
        within.step()
        self.log_dict({"train/g": g_loss, "train/d": d_loss})

    def validation_step(self, batch, batch_idx):
        self.log("val/d", self.d(batch[0]).mean(), batch_size=len(batch[0]))

    def on_train_epoch_end(self):
        self.lr_schedulers()[1].step()

    def configure_optimizers(self):
        one = torch.optim.Adam(self.g.parameters(), lr=0.02, betas=(0.5, 0.9))
        other = torch.optim.Adam(self.d.parameters(), lr=0.03)
        steps = torch.optim.lr_scheduler
        return [one, other], [steps.StepLR(one, 2, 0.5), steps.ExponentialLR(other, 0.7)]


def fit(module, *callbacks, **options):
    return federated(module, *callbacks, **{"local_epochs": 2, "engine": "sequential"} | options)


def new(kind, *args, **options):
    """Return a module whose first weights are always the same."""
    seed_everything(0, verbose=False)
    return kind(*args, **options)


def far(found, expected):
    return float((found - expected).norm() / expected.norm())


class Pulled(GAN):
    """A pull to where a client began, as a term of each loss."""

    def on_train_epoch_start(self):
        self.begin = [p.detach().clone() for p in self.parameters()]

    def manual_backward(self, loss):
        pairs = zip(self.parameters(), self.begin, strict=True)
        trained = ((p, x) for p, x in pairs if p.requires_grad)
        super().manual_backward(loss + 0.25 * sum((p - x).square().sum() for p, x in trained))


@pytest.mark.parametrize("toggles", [True, False])
def test_a_pull_is_a_term_of_each_loss(toggles):
    """GANs without one against a plain loop: rows of `strange.optimizers`."""

    def end(kind, **options):
        module = new(kind, toggles=toggles, clip=0.1).double()
        data, double = toy_data(dtype=torch.float64), {"precision": "64-true"}
        return fit(module, data=data, trainer=double, **options)[:2]

    (expected, _), (module, trainer) = end(Pulled), end(GAN, correction=FedProx(mu=0.5))
    assert far(weights(module), weights(expected)) < 1e-12
    assert (trainer.global_step, trainer.current_epoch) == (3, 3)
    assert {"train/g", "train/d"} <= trainer.callback_metrics.keys()
    assert "train/loss" not in trainer.callback_metrics
    assert all(p.requires_grad for p in module.parameters())


class SaveLast(SaveEverywhere, Checkpoint):
    """Lightning asks it after the module's own hooks, as it does `ModelCheckpoint`."""


class Constant(GAN):
    """Lightning does not call `on_train_epoch_end` after resuming from inside a round."""

    def on_train_epoch_end(self):
        pass


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using .ckpt_path"
)  # not all callbacks resume
def test_it_resumes_to_the_same_bits_and_counts_rounds(tmp_path):
    """From inside a round: `test_every_way`."""
    trainer = {"enable_checkpointing": True, "limit_val_batches": 1.0}
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_train_steps=1)
    whole = new(GAN)
    fit(whole, SaveLast(tmp_path), saving, trainer=trainer | {"logger": CSVLogger(tmp_path)})
    for moment in ("0-end", "1-validation"):
        path = tmp_path / f"{moment}.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        assert [state["state"] for state in checkpoint["optimizer_states"]] == [{}, {}]
        assert checkpoint["lr_schedulers"][0]["last_epoch"] == 0  # it is stepped inside clients
        validated = {"limit_val_batches": 1.0}
        module, resumed, _ = fit(new(GAN), ckpt_path=path, trainer=validated)
        assert torch.equal(weights(module), weights(whole)), moment
        assert (resumed.global_step, resumed.current_epoch) == (3, 3)
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("step")
    assert [row.split(",")[column] for row in rows[1:]] == ["0", "0", "1", "1", "2", "2"]
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt", "epoch=2-step=3.ckpt"]


class ByHand(ToyModule):
    """Does by hand just what automatic optimization does."""

    def __init__(self, clip=None, raw=False, closure=False, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.clip, self.raw, self.closure = clip, raw, closure

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        found = []

        def closure():
            optimizer.zero_grad()
            loss = ToyModule.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip)
            found.append(loss)
            return loss

        if self.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        return found[0]

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


@pytest.mark.parametrize(
    ("correction", "clip", "way"),
    [
        (None, 0.05, {}),
        (FedProx(mu=0.5), 0.05, {"closure": True}),
        (FedProx(mu=0.5), None, {"raw": True, "closure": True}),
        (Scaffold(), 0.05, {"raw": True}),
        (FedDyn(alpha=0.1), None, {}),
    ],
)
def test_corrections_are_those_of_automatic_optimization(correction, clip, way):
    """Clipping by hand is what the Trainer's is, of gradients with their correction."""
    clipped = {"gradient_clip_val": clip}
    make = partial(new, dropout=0.2)
    module, trainer, _ = fit(make(ToyModule), trainer=clipped, correction=correction)
    by_hand, other, _ = fit(make(ByHand, clip=clip, **way), correction=correction)
    assert torch.equal(weights(by_hand), weights(module))
    assert other.callback_metrics.keys() == trainer.callback_metrics.keys()
    assert other.callback_metrics["train/loss"] == trainer.callback_metrics["train/loss"]


class TwoByHand(ByHand):
    """One optimizer for each layer."""

    def training_step(self, batch, batch_idx):
        loss = ToyModule.training_step(self, batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return {"loss": loss}

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step()

    def make(self, layer, rate):
        return torch.optim.SGD(layer.parameters(), lr=rate, momentum=self.momentum)

    def configure_optimizers(self):
        optimizers = [self.make(self.net[0], 0.1), self.make(self.net[4], 0.05)]
        step = torch.optim.lr_scheduler.StepLR
        return optimizers, [step(optimizer, 1, 0.9) for optimizer in optimizers]


class TwoGroups(ToyModule):
    def configure_optimizers(self):
        layers = [(self.net[0], 0.1), (self.net[4], 0.05)]
        groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in layers]
        optimizer = torch.optim.SGD(groups, momentum=self.momentum)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@pytest.mark.parametrize("correction", [FedProx(mu=0.5), Scaffold()])
def test_two_optimizers_are_one_with_two_groups(correction):
    ends = [fit(new(kind), correction=correction).module for kind in (TwoGroups, TwoByHand)]
    assert torch.equal(*map(weights, ends))


class Critics(TwoByHand):
    """The second optimizer takes three steps where the first takes one."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizers = self.optimizers()
        for optimizer in (optimizers[1], optimizers[1], optimizers[1], optimizers[0]):
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(x), y)
            self.manual_backward(loss)
            optimizer.step()
        return loss


def test_scaffold_knows_how_many_steps_each_optimizer_took():
    """c_i ← c_i - c + (x - y) / (K η), where K and η are those of the layer's optimizer."""
    module, data, rounds = new(Critics, momentum=0.0), toy_data(), 3
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    is_first = torch.arange(len(start)) < 4 * 8 + 8  # of the first layer, then those of the second
    rates = torch.where(is_first, 0.1, 0.05)
    found, *_ = fit(module, data=data, correction=Scaffold(), local_epochs=1)
    plain, x, y = new(Critics, momentum=0.0), *data.train_dataset.tensors
    assert torch.equal(start, vector(plain))

    def end(model, shift, shard, round_index, client):
        """Return where a client ends, and its number of local steps."""
        nn.utils.vector_to_parameters(model.clone(), plain.parameters())
        order = torch.Generator().manual_seed(derive_seed(SEED, "shuffle", round_index, client))
        seen = shard[torch.randperm(len(shard), generator=order)] if len(shard) > 8 else shard
        for batch in seen.split(8):
            for moves in (~is_first, ~is_first, ~is_first, is_first):
                plain.zero_grad()
                F.cross_entropy(plain.net(x[batch]), y[batch]).backward()
                gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
                after = vector(plain) - rates * 0.9**round_index * (gradient + shift) * moves
                nn.utils.vector_to_parameters(after, plain.parameters())
        return vector(plain), len(seen.split(8))

    model, mean, own = start, torch.zeros_like(start), torch.zeros(6, len(start))
    shares = torch.tensor([len(shard) for shard in data.clients]) / 60
    for r in range(rounds):
        ends = [end(model, mean - own[k], s, r, k) for k, s in enumerate(data.clients)]
        deltas = torch.stack([model - y for y, _ in ends])
        counts = torch.tensor([count for _, count in ends])[:, None]
        travels = torch.where(is_first, counts, 3 * counts) * rates * 0.9**r
        own = own - mean + deltas / travels
        mean, model = own.mean(0), model - shares @ deltas
    assert far(vector(found), model) < 1e-6


def vector(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class MaskedByHand(TwoByHand):
    def __init__(self, **options):
        super().__init__(**options)
        self.masks = some_masks(self)

    def make(self, layer, rate):
        named = [
            (n, p) for n, p in self.named_parameters() if any(p is q for q in layer.parameters())
        ]
        masks = {n: self.masks[n] for n, _ in named if n in self.masks}
        options = {"momentum": self.momentum, "weight_decay": DECAY}
        return SparseSGDM(named, lr=rate, masks=masks, **options)


class MaskedGroups(MaskedByHand):
    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = True

    training_step = ToyModule.training_step
    on_train_epoch_end = LightningModule.on_train_epoch_end

    def configure_optimizers(self):
        groups = [
            {"params": [(n, p) for n, p in self.named_parameters() if n.startswith(name)], "lr": lr}
            for name, lr in (("net.0", 0.1), ("net.4", 0.05))
        ]
        options = {"momentum": self.momentum, "weight_decay": DECAY}
        optimizer = SparseSGDM(groups, lr=0.1, masks=self.masks, **options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@pytest.mark.parametrize("correction", [None, FedDyn(alpha=0.1)])
def test_masks_of_several_optimizers(correction):
    ends = []
    for kind in (MaskedGroups, MaskedByHand):
        module = new(kind)
        start = {n: p.detach().clone() for n, p in module.named_parameters()}
        _, _, federation = fit(module, correction=correction)
        ends.append((weights(module), federation.rounds.clients.local.space.size))
        for name, mask in module.masks.items():
            moved = module.get_parameter(name) != start[name]
            assert not moved[~mask].any()
            assert moved.any()
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] == sum(int(m.sum()) for m in module.masks.values()) + 3


def test_two_optimizers_of_one_masked_parameter_are_refused():
    class Both(MaskedByHand):
        def configure_optimizers(self):
            return [self.make(self.net[0], 0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    with pytest.raises(ConfigurationError, match="SGD, would move: give a masked parameter to one"):
        fit(new(Both))


class Freezing(GAN):
    """Freezes the critic, as many do, and leaves it so."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        generator, critic = self.optimizers()
        for optimizer, net in ((critic, self.d), (generator, self.g)):
            self.d.requires_grad_(net is self.d)
            sign = 1 if net is self.d else -1
            loss = sign * (self.d(self.g(x[:, :2])) - self.d(x)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_what_a_step_freezes_is_put_back():
    module, _, federation = fit(new(Freezing))
    assert all(p.requires_grad for p in module.parameters())
    assert federation.rounds.clients.local.space.num_entries == sum(
        p.numel() for p in module.parameters()
    )


def test_what_was_frozen_stays_so():
    module = new(Freezing)
    module.d[0].requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"d\.0\.weight was frozen when the run started"):
        fit(module)


@pytest.mark.filterwarnings("ignore:skipped:UserWarning")
def test_a_client_that_fails_in_the_middle_leaves_nothing_behind():
    class Failing(GAN):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if len(batch[0]) == self.bad_size:
                self.toggle_optimizer(self.optimizers()[0])
                raise ValueError("a bad batch")

    sizes = [len(shard) % 8 for shard in started(toy_data()).clients]
    bad = next(size for size in sizes if size and sizes.count(size) == 1)
    ends = []
    for order in (1, -1):
        module = new(Failing)
        module.bad_size = bad
        module, _, federation = fit(
            module,
            cohort=Ordered(order),
            on_client_failure="skip",
            aggregator=Mean(exact=True),
        )
        assert len(federation.rounds.record.skipped) == 1
        ends.append(weights(module))
    assert torch.equal(*ends)


def started(data):
    data.setup("fit")
    return data


class Accumulating(ByHand):
    """Steps on every second batch, on the gradients of both."""

    def training_step(self, batch, batch_idx):
        loss = ToyModule.training_step(self, batch, batch_idx)
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_accumulating_by_hand_is_accumulating():
    data = toy_data(3, num_examples=48, batch_size=4, partition=IID())
    options = {"data": data, "correction": Scaffold(), "local_epochs": None}
    twice = {"accumulate_grad_batches": 2}
    automatic = fit(new(ToyModule), **options, local_steps=2, trainer=twice).module
    by_hand = fit(new(Accumulating), **options, local_steps=4).module
    assert torch.equal(weights(by_hand), weights(automatic))


def test_lbfgs_by_hand_is_lbfgs():
    class Searching:
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def on_train_epoch_end(self):
            pass

    ends = []
    for parent, options in ((ToyModule, {}), (ByHand, {"closure": True})):
        module = new(type("Searching", (Searching, parent), {}), **options)
        fit(module, correction=FedProx(mu=0.5), local_epochs=1)
        ends.append(weights(module))
    assert torch.equal(*ends)


def test_fp16_scales_by_hand_as_it_does_by_itself():
    ends = []
    for module in (new(ToyModule), new(ByHand)):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        fit(module, correction=FedProx(mu=0.5), trainer={"plugins": [plugin]})
        ends.append(weights(module))
    assert torch.equal(*ends)


@pytest.mark.parametrize("personal", [Personal(["d.2.*"]), Ditto(pull=0.1)], ids=str)
def test_personal_parts(personal):
    ends = [
        weights(
            fit(new(GAN), cohort=Ordered(order), personal=personal, aggregator=Mean(exact=True))[0]
        )
        for order in (1, -1)
    ]
    assert torch.equal(*ends)


def test_auto_says_why_and_slots_warn(caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        _, _, federation = fit(new(GAN), engine="auto")
    assert "engine: sequential, because GAN steps its optimizers by hand" in caplog.text
    assert federation.rounds.clients.engine.slots is None
    with pytest.warns(
        UserWarning, match="not slots as asked for, because GAN steps its optimizers by hand"
    ):
        fit(new(GAN), engine="slots")


REFUSED = {
    "ExampleDP": {"privacy": ExampleDP(noise_multiplier=1.0, clip_norm=1.0)},
    "Moon": {"correction": Moon()},
    "option I": {"correction": Scaffold("I")},
    "APFL": {"personal": APFL()},
    "own_epochs": {"personal": Personal(["d.2.*"], own_epochs=1)},
    "FineTuned": {"personal": FineTuned()},
    "PowerOfChoiceCohort": {"cohort": PowerOfChoiceCohort(size=2, num_candidates=4)},
    "NormalisedMean": {"aggregator": NormalisedMean()},
    "QFedAvg": {"aggregator": QFedAvg(q=1.0)},
    "speedups": {"speedups": ["fused_optimizer"]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_says_so(name):
    with pytest.raises(ConfigurationError, match=name):
        fit(new(GAN), **REFUSED[name])


def test_who_is_available_needs_no_loss():
    there = AvailableCohort(UniformCohort(size=2), Stretches(fraction=0.9))
    _, _, federation = fit(new(GAN), cohort=there)
    assert federation.rounds.server.round_index == 2


def test_a_step_that_returns_something_else_is_refused():
    class Odd(GAN):
        def training_step(self, batch, batch_idx):
            return "loss"

    with pytest.raises(ConfigurationError, match="must return a tensor, a dict or nothing"):
        fit(new(Odd))


def test_hooks_see_what_lightning_shows_them():
    calls = []

    class Hooked(ByHand):
        def on_after_backward(self):
            calls.append("backward")

        def on_before_optimizer_step(self, optimizer):
            calls.append(type(optimizer).__name__)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            calls.append((outputs["loss"].requires_grad, batch_idx))

    once = {"trainer": {"max_epochs": 1}, "cohort": UniformCohort(size=1)}
    fit(new(Hooked), **once, local_epochs=None, local_steps=2)
    assert calls == ["backward", "SGD", (False, 0), "backward", "SGD", (False, 1)]
