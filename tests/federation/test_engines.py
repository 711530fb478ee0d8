"""The engine is a matter of speed: the same rounds come out, and what slots cannot run is named."""

import logging
import os
import re
import signal
import time
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import timm
import torch
import torchmetrics
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from toys import SaveEverywhere, SaveOnException, ToyModule, toy, toy_data, toy_trainer, weights

from fl_lightning import (
    ClientFailure,
    Federation,
    Mean,
    UniformCohort,
)
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import Interrupted
from fl_lightning.core.metrics import metrics_of
from fl_lightning.federation.clients import choice, trial
from fl_lightning.federation.clients.in_slots import fitting_slots
from fl_lightning.federation.processes.interruption import Interruption
from fl_lightning.kernels.layers import reason_against_direct_layers

COHORT = UniformCohort(size=4)
# GroupNorm asks for its input's layout, which older versions do not know within vmap
KNOWS_LAYOUTS = TorchVersion(torch.__version__) >= (2, 14)


def run(module, engine="slots", *callbacks, data=None, max_epochs=2, ckpt=None, trainer=None, **o):
    options = {"cohort": COHORT, "seed": 0, "local_epochs": 2, "slots": 3} | o
    federation = Federation(engine=engine, **options)
    trainer = toy_trainer(federation, *callbacks, max_epochs=max_epochs, **(trainer or {}))
    trainer.fit(module, datamodule=data or toy_data(), ckpt_path=ckpt)
    return trainer


class Conv(ToyModule):
    """Reads the four numbers as an image of two by two."""

    def __init__(self, **options):
        super().__init__(**options)
        conv = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU())
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), conv, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6, 3)
        )


class Wide(ToyModule):
    """Has a dense layer whose gradient slots never write out."""

    def __init__(self, **options):
        super().__init__(**options)
        self.net = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("train/accuracy", (logits.argmax(1) == y).float().mean())
        return F.cross_entropy(logits, y)


class Attention(ToyModule):
    """Reads the four numbers as a sequence."""

    def __init__(self, **options):
        super().__init__(**options)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(
            nn.Unflatten(1, (4, 1)), nn.Linear(1, 8), block, nn.Flatten(), nn.Linear(32, 3)
        )


class VisionTransformer(ToyModule):
    """Reads the four numbers as pixels; drops whatever can be dropped."""

    def __init__(self, **options):
        super().__init__(lr=0.01, **options)
        rates = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
        sizes = {"img_size": 4, "patch_size": 2, "embed_dim": 8, "depth": 2, "num_heads": 2}
        transformer = timm.models.VisionTransformer(
            in_chans=1, num_classes=3, **sizes, **dict.fromkeys(rates, 0.2)
        )
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Unflatten(1, (1, 4, 4)), transformer)


def assert_same_logs(first, second):
    assert first.callback_metrics.keys() == second.callback_metrics.keys()
    for name, value in first.callback_metrics.items():
        if name != "round/seconds":
            assert float(second.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4)


def assert_agree(kind, *, rtol=1e-5, atol=1e-6, slots=3, data=toy_data, **options):
    """Train in both engines, and return both Trainers; options are the block's but for those of `run`."""
    (one, first), (many, second) = (
        (module := toy(kind), run(module, engine, slots=slots, data=data(), **options))
        for engine in ("sequential", "slots")
    )
    torch.testing.assert_close(weights(one), weights(many), rtol=rtol, atol=atol)
    assert_same_logs(first, second)
    return first, second


def slots_of(trainer):
    """Return how the slots of a run train; None where clients train one after the other."""
    return trainer.callbacks[0].state_dict()["engine"]["slots"]


def test_slots_and_sequence_agree_where_gradients_are_clipped_that_are_never_written_out():
    """All kinds of layers: rows of `strange`; in double precision: `test_every_way`."""
    assert_agree(Wide, max_epochs=4, trainer={"gradient_clip_val": 0.2})


class WidensTheBound(Callback):
    def on_train_epoch_start(self, trainer, module):
        trainer.gradient_clip_val = 0.05 * (1 + trainer.current_epoch)


def test_slots_end_where_a_callback_changes_the_bound_of_gradients():
    trainer = {"gradient_clip_val": 0.05}
    run(one := toy(), "sequential", WidensTheBound(), trainer=trainer)
    with pytest.warns(UserWarning, match="from round 2 on, because trainer.gradient_clip_val has"):
        run(many := toy(), "slots", WidensTheBound(), trainer=trainer)
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Wide, Conv, Attention])
def test_slots_and_sequence_agree_in_half_precision(kind):
    moves = {}
    start = weights(toy(kind)).clone()
    for engine, precision in product(("sequential", "slots"), ("32-true", "bf16-mixed")):
        module, trainer = toy(kind), {"precision": precision}
        run(module, engine, trainer=trainer, pad_batches=True, max_epochs=1)
        moves[engine, precision] = weights(module) - start
    rounded = moves["slots", "bf16-mixed"]
    assert (rounded - moves["sequential", "bf16-mixed"]).norm() < 0.03 * rounded.norm()
    # the trial's two clients are not all: every step of every round was rounded
    assert not torch.equal(rounded, moves["slots", "32-true"])


class Adamant(VisionTransformer):
    """Steps by signs, at first: either way where a gradient is nothing but rounding."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def test_what_rounding_decides_is_no_reason_against_slots():
    module = toy(Adamant)
    trainer = run(module, max_epochs=1, trainer={"precision": "bf16-mixed"})
    assert slots_of(trainer) is not None


class Unstable(ToyModule):
    """Has gradients in which rounding grows by ten million."""

    def training_step(self, batch, batch_idx):
        chaotic = 1e-6 * torch.sin(1e7 * self.net(batch[0])).mean()
        return super().training_step(batch, batch_idx) + chaotic


def test_training_too_unstable_to_compare_is_not_taken_on_trust():
    with pytest.warns(UserWarning, match="training is too unstable to tell why"):
        trainer = run(toy(Unstable))
    assert slots_of(trainer) is None


class Viewing(Conv):
    """Looks at a convolution's result in the order in which PyTorch's own has it in memory."""

    def __init__(self, **options):
        super().__init__(**options)
        self.net[1].insert(1, View())


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1).view(x.shape)


@pytest.mark.skipif(
    reason_against_direct_layers(nn.Conv2d(1, 1, 1)) is not None, reason="no compiler"
)
@pytest.mark.parametrize(
    ("kind", "direct"), [(Conv, KNOWS_LAYOUTS), (Viewing, False), (ToyModule, True)]
)
def test_layers_are_direct_where_the_model_lets_them(kind, direct):
    assert slots_of(assert_agree(kind)[1])["direct"] is direct


@pytest.mark.parametrize("slots", [1, 3])
def test_they_drop_the_same(slots):
    assert_agree(VisionTransformer, slots=slots)


class Measured(ToyModule):
    """Logs torchmetrics objects in all the ways there are."""

    def __init__(self, **options):
        super().__init__(**options)
        classes = {"task": "multiclass", "num_classes": 3}
        self.macro = torchmetrics.Accuracy(**classes, average="macro")
        self.curve = torchmetrics.AUROC(**classes, thresholds=20)  # has a buffer
        self.mean = torchmetrics.MeanMetric()
        self.both = torchmetrics.MetricCollection(
            {"p": torchmetrics.Precision(**classes), "r": torchmetrics.Recall(**classes)}
        )

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.macro(logits, batch[1])
        self.log("macro", self.macro, on_step=True, on_epoch=True, prog_bar=True)
        self.curve.update(logits, target=batch[1])
        self.log("curve", self.curve)
        self.mean.update(loss.detach())
        self.log("mean", self.mean)
        self.both(logits, batch[1])
        self.log_dict(self.both)
        return {"loss": loss}


def full_batches():
    return toy_data(batch_size=4, drop_last=True)


@pytest.mark.parametrize(
    ("options", "data", "tolerance"),
    [({"dropout": 0.2}, toy_data, 1e-5), ({"batch_norm": True}, full_batches, 1e-4)],
)
def test_torchmetrics_objects_hold_the_same_examples(options, data, tolerance):
    """Slots train full batches where there is batch norm, and others one after the other."""
    trainers = assert_agree(partial(Measured, **options), data=data, rtol=tolerance, atol=1e-5)
    assert {"macro_epoch", "curve", "mean", "p", "r"} <= trainers[0].callback_metrics.keys()
    assert all(metric.update_count == 0 for metric in metrics_of(trainers[1].lightning_module))


def test_a_full_batch_has_no_more_examples_than_the_largest_client():
    """Slots are as wide as a full batch: a million places for ten examples would take minutes."""
    _, trainer = assert_agree(ToyModule, data=partial(toy_data, batch_size=10**6), rtol=1e-4)
    assert trainer.datamodule.full_batch == trainer.datamodule.clients.num_examples.max()


class Weighted(ToyModule):
    """A mean with class weights, which is none over examples."""

    loss_is_mean = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, torch.tensor([1.0, 2.0, 5.0]))


class SmallDiffers(ToyModule):
    """A mean in all batches but those of one size."""

    loss_is_mean = True

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + (len(batch[0]) == 2))


class Declared(ToyModule):
    """Says what is true."""

    loss_is_mean = True

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Inherits(Declared):
    """What the class above says does not hold for a step of its own."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "options", "padded", "said"),
    [
        (Declared, {}, True, ""),
        (Declared, {"pad_batches": False}, False, ""),
        (ToyModule, {"pad_batches": True}, True, ""),
        (Inherits, {}, False, ""),
        (Weighted, {}, False, "of whole batches because a trial client's update differs"),
        (SmallDiffers, {}, False, "of whole batches because a trial client's update differs"),
        (
            partial(ToyModule, batch_norm=True),
            {"pad_batches": True},
            False,
            "of whole batches because a batch of another size fails",
        ),
    ],
)
def test_batches_are_padded_where_the_loss_is_said_to_be_a_mean(
    kind, options, padded, said, caplog
):
    data = partial(toy_data, batch_size=4, drop_last=kind not in (Weighted, SmallDiffers))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        _, trainer = assert_agree(kind, data=data, rtol=1e-4, atol=1e-5, **options)
    assert slots_of(trainer)["padded"] is padded
    assert said in caplog.text


class LogsEveryStep(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", 2 * loss, on_step=True, on_epoch=True)
        return loss


def test_a_loss_of_the_modules_own_stands_beside_ours():
    logged = assert_agree(LogsEveryStep)[1].callback_metrics
    assert float(logged["train/loss_epoch"]) == pytest.approx(2 * float(logged["train/loss"]))


class LogsNaN(ToyModule):
    def training_step(self, batch, batch_idx):
        self.log("train/loss", torch.nan)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_a_logged_loss_that_is_not_finite_fails_no_client(engine):
    plain, logging_nan = toy(), toy(LogsNaN)
    run(plain, "sequential")
    trainer = run(logging_nan, engine)
    assert trainer.callback_metrics["train/loss"].isnan()
    torch.testing.assert_close(weights(plain), weights(logging_nan), rtol=1e-4, atol=1e-5)


class Item(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 if loss.item() > -1 else 2.0)


class Branch(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > -1 else 2 * loss


class Index(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 == 0 else 2 * loss


class Recurrent(ToyModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.lstm(batch[0].unsqueeze(2))[0][:, -1, :3], batch[1])


class Shuffling(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + 0.1 * x[torch.randperm(len(x))], y), batch_idx)


class Valued(ToyModule):
    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("metric", self.metric(loss.detach()))
        return loss


class Smoothed(ToyModule):
    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        return loss * self.metric.compute()


class Hooked(ToyModule):
    def on_after_backward(self):
        pass


class TooLarge(ToyModule):
    """Raises what a GPU does, unless clients train one after the other."""

    def training_step(self, batch, batch_idx):
        if torch._C._functorch.is_functorch_wrapped_tensor(batch[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return super().training_step(batch, batch_idx)


class Lion(ToyModule):
    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Shuffling, "draws by randperm"),
        (Item, r"\.item\(\)"),
        (Branch, "data-dependent control flow"),
        (Index, "data-dependent control flow"),
        (Recurrent, "lstm"),
        (Valued, "a batch's MeanMetric as 'metric', not the MeanMetric object"),
        (Smoothed, "uses compute of MeanMetric 'metric'"),
        (Hooked, "Hooked defines on_after_backward"),
        (Lion, "RMSprop"),
        (TooLarge, "too little memory for so many slots"),
    ],
)
def test_what_slots_cannot_run_is_named_and_trained_in_sequence(module, reason):
    with pytest.warns(UserWarning, match=f"engine: sequential, not slots.*({reason})"):
        assert_agree(module, rtol=0, atol=0, max_epochs=1)


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ({"precision": "bf16-true"}, "slots do not support trainer.precision bf16-true"),
        ({"accumulate_grad_batches": 2}, "accumulates"),
    ],
)
def test_precision_and_accumulation_are_reasons_too(trainer, reason):
    with pytest.warns(UserWarning, match=reason):
        run(toy(), trainer=trainer, max_epochs=1)


ONE_STEP = {"local_epochs": None, "local_steps": 1}


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "options", "says"),
    [
        (3, -1, {}, "local steps do not repay a trial"),
        (-1, 2, {}, "local steps do not repay a trial"),  # of rounds
        (
            1,
            -1,
            ONE_STEP | {"cohort": UniformCohort(size=1)},
            "1 local step does not repay a trial",
        ),
    ],
)
def test_auto_does_not_compile_for_a_short_run(max_epochs, max_steps, options, says, caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        limit = {"max_steps": max_steps}
        run(toy(), "auto", slots=None, max_epochs=max_epochs, trainer=limit, **options)
    assert re.search(f"engine: sequential, because .*{says}", caplog.text)


def test_who_else_has_the_processor_does_not_count():
    """What the thread itself computes is timed, not what it waits for."""

    def wait_or_compute(client, model):
        return torch.randn(2_000_000).sort() if client.client_id else time.sleep(0.2)

    step = SimpleNamespace(speedups=())
    measured = trial.Trial(toy_trainer(), None, step, None, [], wait_or_compute)
    ways = [trial.Way([ClientWork(i, 1, torch.zeros(1), [1])]) for i in range(2)]
    waiting, busy = measured.seconds(*ways)
    assert waiting < 0.1
    assert busy > 0.01


class UsesLate(ToyModule):
    """From the third round on its loss has another parameter, in batches that no graph is for."""

    def __init__(self):
        super().__init__()
        self.late = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) < 4 and self.current_epoch > 1:
            return loss * (1 + self.late)
        return loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:engine. sequential")
def test_steps_without_a_graph_are_looked_at_in_every_round(monkeypatch):
    monkeypatch.setattr(choice, "SHORT_RUN_STEPS", 0)  # compiled
    options = {"pad_batches": False, "spot_check": 0.0, "max_epochs": 3}
    one, _ = assert_agree(UsesLate, data=partial(toy_data, batch_size=4), **options)
    assert one.lightning_module.late != 0


class Breaking(ToyModule):
    """Does what slots can and no graph."""

    def training_step(self, batch, batch_idx):
        torch._dynamo.graph_break()
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:the local step of many clients is not compiled")
@pytest.mark.parametrize(
    ("kind", "compiler_seconds", "how"),
    [
        pytest.param(ToyModule, 0.0, r"compiled in \d+ s", marks=pytest.mark.slow),
        (Breaking, 0.0, r"not compiled, tried for \d+ s"),
        (ToyModule, 1e9, r"not compiled, for \d+ s of training"),
    ],
)
def test_auto_takes_slots_that_are_faster(kind, compiler_seconds, how, monkeypatch, caplog):
    monkeypatch.setattr(choice, "SPEEDUP_SECONDS", 1e9)
    monkeypatch.setattr(choice, "LEAST_STEPS", 0)
    monkeypatch.setattr(choice, "COMPILED_SLOTS_SECONDS", compiler_seconds)
    monkeypatch.setattr(choice, "LEAST_BY_SLOTS", 1e-9)  # whatever the machine does meanwhile
    # each way that is tried is faster than the one before
    shortest, measure = iter([8.0, 4.0, 2.0, 1.0]), trial.Trial.seconds
    monkeypatch.setattr(
        trial.Trial,
        "seconds",
        lambda self, *ways, **options: [next(shortest) for _ in measure(self, *ways, **options)],
    )
    one, many = toy(), toy(kind)
    first = run(one, "sequential")
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        second = run(many, "auto", slots=None, pad_batches=True)
    said = rf"engine: 4 slots, measured at [\d.]+ times the sequential speed, {how}"
    assert re.search(said, caplog.text)
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-5, atol=1e-6)
    assert_same_logs(first, second)


@pytest.mark.parametrize(
    ("rule", "size", "slots", "compiled"),
    [
        (torch.optim.SGD, 2_000_000, 4, 1),
        (partial(torch.optim.SGD, momentum=0.9), 200_000, 16, 4),
        (torch.optim.SGD, 48_670, 64, 16),
        (torch.optim.SGD, 100, 128, 32),
    ],
)
def test_slots_that_are_not_compiled_are_four_times_as_many(rule, size, slots, compiled):
    trainer = toy_trainer()
    trainer.strategy.optimizers = [rule(nn.Linear(1, 1).parameters(), lr=0.1)]
    assert fitting_slots(trainer, size, compiled=False) == slots
    assert fitting_slots(trainer, size, compiled=True) == compiled


class Dropped:
    """Something that is asked to end the process when it goes, where Python drops what is raised."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


class EndsInTrial(ToyModule):
    """Meets SIGTERM in its first step, and takes its time for the others."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def training_step(self, batch, batch_idx):
        if self.path.exists():
            self.path.unlink()
            Dropped()
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_in_a_trial_ends_the_run(tmp_path):
    path = tmp_path / "run"
    path.touch()
    with pytest.raises(Interrupted):
        run(EndsInTrial(path), "auto", Interruption(), max_epochs=10)
    assert not path.exists()


class Poisoned(ToyModule):
    """Its loss is NaN where the first number of an example is one of the given."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total.update(batch[0])
        self.log("total", self.total)
        hit = (batch[0][:, :1] == self.bad).any()
        return loss * torch.where(hit, torch.nan, 1.0)


class PoisonedWide(Poisoned, Wide):
    """The same, where a slot's next client must not meet what the last one left."""


class Steep(PoisonedWide):
    """Its loss stays finite there, its gradient does not."""

    def training_step(self, batch, batch_idx):
        loss = Wide.training_step(self, batch, batch_idx)
        self.total.update(batch[0])
        self.log("total", self.total)
        hit = (batch[0][:, :1] == self.bad).any()
        return loss + torch.where(hit, 0 * loss, 1.0).sqrt()


def poisoned(client, kind=Poisoned):
    data = toy_data()
    data.setup("fit")
    return toy(kind, bad=data.train_dataset.tensors[0][data.clients[client], 0]), data


def test_a_client_with_nan_is_named():
    module, data = poisoned(2)
    with pytest.raises(ClientFailure, match="round 1, client 2: its training loss is nan"):
        run(module, data=data, cohort=None, trainer={"precision": "bf16-mixed"})
    assert torch.equal(weights(module)[:-6], weights(toy(Poisoned, bad=module.bad))[:-6])


def test_a_client_whose_gradient_alone_is_nan_is_named():
    module, data = poisoned(2, Steep)
    with pytest.raises(ClientFailure, match="round 1, client 2: its update holds NaN"):
        run(module, data=data, cohort=None, **ONE_STEP)


@pytest.mark.parametrize(
    ("kind", "work"),
    [(Poisoned, ONE_STEP), (PoisonedWide, {}), (PoisonedWide, ONE_STEP), (Steep, {})],
)
def test_a_client_with_nan_is_skipped_and_the_others_count(kind, work):
    one, data = poisoned(2, kind)
    skipping = {"cohort": None, "on_client_failure": "skip", "max_epochs": 1, **work}
    with pytest.warns(UserWarning, match="skipped: round 1, client 2"):
        first = run(one, "sequential", data=data, **skipping)
    many, data = poisoned(2, kind)
    with pytest.warns(UserWarning, match="skipped: round 1, client 2"):
        second = run(many, "slots", data=data, **skipping)
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-5, atol=1e-6)
    for trainer in (first, second):
        assert trainer.callback_metrics["round/skipped"] == 1
        assert trainer.callback_metrics["round/cohort_size"] == 6
    total = first.callback_metrics["total"]
    assert float(second.callback_metrics["total"]) == pytest.approx(float(total), rel=1e-5)


class Stop(Exception):
    """Ends a run in the middle of what it does."""


class Stopping(Mean):
    """Breaks off in the second round, when it has taken in the first of two groups."""

    groups = 0

    def receive(self, updates):
        super().receive(updates)  # raises where a client is not finite
        self.groups += len(updates.client_ids) == 2  # one in each round
        if self.groups == 2:
            raise Stop


def test_a_run_that_is_stopped_while_a_group_comes_again_resumes_to_the_same_bits(tmp_path):
    options = {"cohort": None, "on_client_failure": "skip", **ONE_STEP}

    def ended(*callbacks, aggregator, ckpt=None):
        module, data = poisoned(2, Steep)
        more = options | {"aggregator": aggregator}
        trainer = run(module, "slots", *callbacks, data=data, ckpt=ckpt, **more)
        return weights(module), trainer

    with pytest.warns(UserWarning, match=r"skipped: round ., client 2"):
        whole, first = ended(aggregator=Mean())
    with pytest.raises(Stop), pytest.warns(UserWarning, match=r"skipped: round ., client 2"):
        ended(SaveOnException(tmp_path / "stopped.ckpt"), aggregator=Stopping())
    with pytest.warns(UserWarning, match=r"skipped: round ., client 2"):
        resumed, second = ended(aggregator=Mean(), ckpt=tmp_path / "stopped.ckpt")
    assert torch.equal(whole, resumed)
    assert_same_logs(first, second)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (Conv, "32-true"),
        (Viewing, "bf16-mixed"),
        (partial(Measured, dropout=0.5), "bf16-mixed"),
    ],
)
def test_a_resumed_run_keeps_to_its_slots(kind, precision, tmp_path):
    whole, more = toy(kind), {"trainer": {"precision": precision}}
    first = run(whole, "slots", SaveEverywhere(tmp_path), **more)
    resumed = toy(kind)
    second = run(resumed, "slots", slots=None, ckpt=tmp_path / "0-end.ckpt", **more)
    assert torch.equal(weights(whole), weights(resumed))
    assert_same_logs(first, second)


def test_a_resumed_run_follows_a_changed_engine(tmp_path):
    first = run(toy(Conv), "auto", SaveEverywhere(tmp_path), slots=None)
    assert slots_of(first) is None  # too short for a trial
    second = run(toy(Conv), "slots", slots=2, ckpt=tmp_path / "0-end.ckpt")
    assert slots_of(second)["num_slots"] == 2


class Scaled(ToyModule):
    """A parameter that is a scalar."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.scale * self.net(x), y)


@pytest.mark.parametrize("local_steps", [1, 3])
def test_slots_train_parameters_that_are_scalars(local_steps):
    work = {"local_epochs": None, "local_steps": local_steps, "data": full_batches}
    _, trainer = assert_agree(Scaled, trainer={"gradient_clip_val": 0.5}, **work)
    assert slots_of(trainer) is not None


class DroppingImages(ToyModule):
    """Drops numbers of images, which direct layers lay out in another order."""

    def __init__(self, **options):
        super().__init__(**options)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Upsample(scale_factor=4), nn.Conv2d(1, 6, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(54, 16), nn.Dropout(0.5),
            nn.Linear(16, 3),
        )  # fmt: skip


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.skipif(
    reason_against_direct_layers(nn.Conv2d(1, 1, 1)) is not None, reason="no compiler"
)
def test_a_network_with_dropout_has_direct_layers_and_the_numbers_that_it_draws_alone(pads):
    assert slots_of(assert_agree(DroppingImages, pad_batches=pads)[1])["direct"] is True
