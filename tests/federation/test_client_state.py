"""What is a client's state: what is averaged, put back and kept, in lists, hooks, failures and resumed runs.

That whatever a step writes, every client is that of a plain loop, is the table in `strange`.
"""

import random
import warnings

import pytest
import torch
from lightning.pytorch import seed_everything
from strange.client_state import BufferThatIsAssigned, MeanTeacher
from strange.rows import Small
from torch.nn import functional as F
from toys import Given, Notes, SaveEverywhere, ToyModule, federated, toy_data, weights

from fl_lightning import ConfigurationError
from fl_lightning.engines import CannotStack
from fl_lightning.federation.clients.fit_clients import FitClients
from fl_lightning.federation.clients.in_slots import SlotEngine
from fl_lightning.server import Mean

SHARDS = [range(20), range(20, 32), range(32, 44), range(44, 60)]


class Base(Small):
    """Trains by the loss alone."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        pass


class Teacher(MeanTeacher, Base):
    """A mean teacher in frozen parameters, moved in the step."""


class Appends(Base):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss * (1 + 0.3 * len(self.outputs))


class Centre(BufferThatIsAssigned, Base):
    """A buffer that is replaced by another tensor, as DINO's centre."""


class ConstantBuffers(Base):
    """Constant buffers, among them one with -inf."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))
        self.register_buffer("table", torch.randn(4, 4), persistent=False)

    def training_step(self, batch, batch_idx):
        attended = (self.net(batch[0] @ self.table) + self.mask).softmax(1)
        return F.mse_loss(attended[:, :2], F.one_hot(batch[1] % 2, 2).to(attended.dtype))


def made(kind, dtype=torch.float64):
    seed_everything(0, verbose=False)
    return kind().to(dtype)


def fit(module, *callbacks, shards=SHARDS, max_epochs=2, ckpt_path=None, **options):
    dtype = next(module.parameters()).dtype
    data = toy_data(len(shards), partition=Given(shards), dtype=dtype, batch_size=20)
    options = {"local_epochs": 3, "seed": 0, "engine": "sequential", **options}
    precision = "64-true" if dtype == torch.float64 else "32-true"
    trainer = {"max_epochs": max_epochs, "precision": precision}
    fitted = federated(
        module, *callbacks, data=data, ckpt_path=ckpt_path, trainer=trainer, **options
    )
    return fitted.federation


def test_lists_hold_what_all_clients_appended_in_their_order():
    class Tells(Appends):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.outputs[-1] = (len(batch[0]), batch_idx)
            return loss

        def on_train_epoch_end(self):
            found.add(list(self.outputs))
            self.outputs.clear()

    found = Notes()
    fit(made(Tells))
    expected = [(len(shard), index) for shard in SHARDS for index in range(3)]
    assert found.read() == [expected, expected]


def test_what_a_skipped_client_appended_is_not_there():
    class Fails(Appends):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if len(batch[0]) == 20 else loss

    module = made(Fails)
    with pytest.warns(UserWarning, match="skipped: round 1, client 0"):
        fit(module, max_epochs=1, on_client_failure="skip")
    assert len(module.outputs) == 3 * 3


def test_hooks_between_rounds_set_what_the_next_clients_begin_with():
    class Anneals(Base):
        scale = 1.0

        def __init__(self):
            super().__init__()
            self.outputs = ["left over"]

        def training_step(self, batch, batch_idx):
            seen.add((self.scale, len(self.outputs)))
            self.outputs.append(1)
            return self.scale * self.loss(batch)

        def on_train_epoch_start(self):
            self.outputs = []

        def on_train_epoch_end(self):
            sizes.add(len(self.outputs))
            self.scale = self.scale / 2

    seen, sizes = Notes(), Notes()
    fit(made(Anneals), max_epochs=3)
    assert [scale for scale, _ in seen.read()] == [1.0] * 12 + [0.5] * 12 + [0.25] * 12
    assert sizes.read() == [12, 12, 12]


def test_frozen_parameters_that_change_are_averaged_and_constants_do_not_travel():
    federation = fit(made(Teacher), max_epochs=1)
    names = federation.rounds.clients.local.buffers.names
    assert names == [f"teacher.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")]
    federation = fit(made(ConstantBuffers), max_epochs=1)
    assert federation.rounds.server.model.buffers.numel() == 0
    lean, masked = (fit(made(kind), max_epochs=1) for kind in (Base, ConstantBuffers))
    sent = [f.rounds.record.total_bytes_up for f in (lean, masked)]
    assert sent[0] == sent[1]


class Norm(ToyModule):
    """Batch norm in evaluation mode, and a buffer of which that is not known."""

    def __init__(self, *, constant=True, dropout=0.0):
        super().__init__(batch_norm=True, dropout=dropout)
        if constant:
            self.register_buffer("weight", torch.ones(3))

    def on_train_start(self):
        self.net[1].eval()


def test_statistics_of_norms_travel_whatever_their_mode():
    federation = fit(made(Norm), max_epochs=1)
    names = federation.rounds.clients.local.buffers.names
    assert names == ["net.1.running_mean", "net.1.running_var"]


def test_the_rehearsal_leaves_nothing_behind():
    class Watched(Norm):
        def __init__(self, *, constant):
            super().__init__(constant=constant, dropout=0.4)
            self.n, self.draws = 0, random.Random(0)

        def training_step(self, batch, batch_idx):
            self.n += 1
            return super().training_step(batch, batch_idx) * self.n * self.draws.random()

    ends, drawn = [], []
    for constant in (False, True):  # without one there is nothing to find out
        seed_everything(0, verbose=False)
        module = Watched(constant=constant)
        fit(module)
        ends.append(weights(module.net))
        drawn.append((float(torch.rand(())), random.random(), module.n, module.draws.random()))
    assert torch.equal(*ends)
    assert drawn[0] == drawn[1]


def test_a_step_that_fails_only_when_it_is_rehearsed_is_told():
    class FailsOnce(Norm):
        def training_step(self, batch, batch_idx):
            if not len(calls):
                calls.add(0)
                raise KeyError("no such thing")
            return super().training_step(batch, batch_idx)

    calls = Notes()
    with pytest.warns(
        UserWarning, match="first steps of client 0 .* raised KeyError: 'no such thing'"
    ):
        fit(FailsOnce(constant=True))


def test_a_round_that_begins_anew_is_not_rehearsed_again(monkeypatch):
    """Only one of several processes may begin anew, and a rehearsal ends in an exchange."""

    right, rehearsed = SlotEngine.train, []

    def train(self, model, work, *rest):
        if work[0].round_index == 1:
            raise CannotStack("it is broken")
        return right(self, model, work, *rest)

    monkeypatch.setattr(FitClients, "find_state", lambda *_: rehearsed.append(1))
    monkeypatch.setattr(SlotEngine, "train", train)
    with pytest.warns(UserWarning, match="engine: sequential from round 2 on, because it is"):
        fit(Base(), engine="slots", max_epochs=2)
    assert len(rehearsed) == 2  # once in every round, as long as no client could be rehearsed


class ChangesLate(Base):
    """A buffer that changes from the second round on."""

    by_data = False

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        if self.current_epoch > 0:
            mean = self.mean.data if self.by_data else self.mean
            mean.mul_(0.9).add_(0.1 * logits.detach().mean(0))
        return F.cross_entropy(logits - self.mean, batch[1])


class ChangesLateByData(ChangesLate):
    by_data = True


def test_a_buffer_that_changes_later_stops_the_run_and_may_be_named():
    with pytest.raises(ConfigurationError, match=r"round 2: a client's training changes mean, .*"):
        fit(made(ChangesLate))
    with pytest.raises(ConfigurationError, match=r"round 2: .* client_state: \[mean\]"):
        fit(made(ChangesLateByData))
    for kind in (ChangesLate, ChangesLateByData):
        module, other = made(kind), made(kind)
        federation = fit(module, client_state=["mea?"])
        assert federation.rounds.clients.local.buffers.names == ["mean"]
        assert module.mean.abs().sum() > 0
        fit(other, client_state=["mean"], shards=SHARDS[::-1])
        torch.testing.assert_close(weights(module), weights(other), rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigurationError, match=r"matches 'means'; available: mean"):
        fit(made(ChangesLate), client_state=["means"])


def test_a_buffer_that_grows_is_refused():
    class Grows(Centre):
        def training_step(self, batch, batch_idx):
            self.centre = torch.cat([self.centre, self.centre])
            return self.loss(batch)

    with pytest.raises(ConfigurationError, match=r"centre got the shape \(24,\)"):
        fit(made(Grows))


def test_a_stopped_run_goes_on_once_the_buffer_is_named(tmp_path):
    whole, module = made(ChangesLate), made(ChangesLate)
    fit(whole, client_state=["mean"])
    with pytest.raises(ConfigurationError, match="client_state"):
        fit(made(ChangesLate), SaveEverywhere(tmp_path))
    fit(module, ckpt_path=tmp_path / "0-end.ckpt", client_state=["mean"])
    assert torch.equal(weights(module), weights(whole))
    fit(made(ChangesLate), SaveEverywhere(tmp_path), max_epochs=1)
    inside = made(ChangesLate)
    options = {"ckpt_path": tmp_path / "0-trained.ckpt"}
    fit(inside, client_state=["mean"], **options)
    assert torch.equal(weights(inside), weights(whole))


def test_slots_leave_a_mean_teacher_to_the_sequential_engine():
    module, expected = made(Teacher, torch.float32), made(Teacher, torch.float32)
    with pytest.warns(
        UserWarning, match="its clients change the frozen parameter teacher.0.weight"
    ):
        fit(module, engine="slots")
    fit(expected)
    assert torch.equal(weights(module), weights(expected))


SEEN = []  # a global of this file


class NotesGlobally(Base):
    def training_step(self, batch, batch_idx):
        SEEN.append(batch_idx)
        return self.loss(batch)


class Weighs(Mean):
    def weight(self, update):
        SEEN.append(update.num_examples)
        return super().weight(update)


class ReadsGlobally(Base):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.seen = len(SEEN)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_globals_are_never_put_back(engine, caplog):
    """Anybody may fill them: an aggregator between clients, or steps, which the run names."""
    SEEN.clear()
    module = made(ReadsGlobally)
    fit(module, max_epochs=2, engine=engine, aggregator=Weighs())
    assert (len(SEEN), module.seen) == (2 * len(SHARDS), 2 * len(SHARDS))
    assert "state:" not in caplog.text
    SEEN.clear()
    with caplog.at_level("INFO"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(made(NotesGlobally), max_epochs=1, engine=engine)
    assert len(SEEN) > len(SHARDS)
    assert "state: training_step changes global SEEN" in caplog.text
    said = " ".join(str(warning.message) for warning in caught)
    assert ("engine: sequential" in said) == (engine == "slots"), said


class CountsInAClosure(Base):
    def __init__(self):
        super().__init__()
        calls = []

        def scale():
            calls.append(None)
            return 0.1 * len(calls)

        self.scale = scale

    def training_step(self, batch, batch_idx):
        return self.scale() * self.loss(batch)


def test_a_closure_that_a_step_changes_is_named(caplog):
    with caplog.at_level("INFO"):
        fit(made(CountsInAClosure), max_epochs=1, engine="sequential")
    assert caplog.text.count("state: training_step changes calls around") == 1


class FailsWhenItRebinds(Base):
    """The client with 20 examples fails, before or after another tensor took a buffer's place."""

    after = False

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def training_step(self, batch, batch_idx):
        fails = len(batch[0]) == 20
        if not fails or self.after:
            self.level = self.level + 1
        if fails:
            raise ValueError("no")
        return self.loss(batch) * self.level


def test_a_client_that_fails_leaves_nothing_in_the_place_of_a_buffer():
    ends = []
    for after in (False, True):
        module = made(FailsWhenItRebinds)
        module.after = after
        with pytest.warns(UserWarning, match="skipped: round 1, client 0"):
            fit(module, max_epochs=1, on_client_failure="skip", client_state=["level"])
        ends.append(torch.cat([weights(module), module.level.reshape(1)]))
    assert torch.equal(*ends)
