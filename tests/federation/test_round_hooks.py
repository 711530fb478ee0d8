"""What callbacks keep of batches does not depend on how clients are grouped."""

import copy

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Callback
from toys import SaveEverywhere, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import Federation, UniformCohort

ROUNDS, CLIENTS = 3, 5


class Average(Callback):
    """A moving average of the weights, as one keeps it in a central run; and what it was handed."""

    def __init__(self):
        self.started, self.ended, self.mean = [], [], None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.started.append((trainer.global_step, list(batch), batch_idx))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ended.append((trainer.global_step, list(batch), batch_idx))
        now = weights(module)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now


def fit(*callbacks, together, module=None, ckpt_path=None, **options):
    module = module or ToyModule()
    federation = Federation(
        cohort=UniformCohort(size=CLIENTS),
        clients_per_group=together,
        engine="sequential",
        seed=0,
    )
    trainer = toy_trainer(federation, *callbacks, max_epochs=ROUNDS, **options)
    torch.manual_seed(0)
    trainer.fit(module, datamodule=toy_data(num_clients=9), ckpt_path=ckpt_path)
    return module


def seeded():
    torch.manual_seed(1)
    return ToyModule()


def test_an_average_has_the_same_bits_and_an_update_a_round():
    averages, ends = [], []
    for together in (1, 2, CLIENTS, None):
        average = Average()
        ends.append(weights(fit(average, together=together, module=seeded())))
        averages.append(average)
    first = averages[0]
    assert [step for step, _, _ in first.started] == [0, 1, 2]
    assert [step for step, _, _ in first.ended] == [1, 2, 3]  # when the server has stepped
    assert all(len(clients) == CLIENTS and index == 0 for _, clients, index in first.ended)
    for average, end in zip(averages[1:], ends[1:], strict=True):
        assert torch.equal(average.mean, first.mean)
        assert (average.started, average.ended) == (first.started, first.ended)
        assert torch.equal(end, ends[0])


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 has it"
)
def test_lightnings_own_average_is_of_rounds():
    class OfRounds(lightning_callbacks.EMAWeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    ends = []
    for together in (1, 3, CLIENTS):
        average = OfRounds(decay=0.5)
        ends.append(weights(fit(average, together=together, module=seeded())))
        assert int(average._average_model.n_averaged) == ROUNDS
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    # by hand: the first update takes the model, each later one half of it
    rounds = []

    class Rounds(Callback):
        def on_train_epoch_end(self, trainer, module):
            rounds.append(weights(module))

    fit(Rounds(), together=1, module=seeded())
    expected = 0.5 * (0.5 * rounds[0] + 0.5 * rounds[1]) + 0.5 * rounds[2]
    torch.testing.assert_close(ends[0], expected, rtol=1e-5, atol=1e-7)


def test_a_callback_that_asks_sees_every_group():
    class Groups(Average):
        sees_groups = True

    groups = Groups()
    fit(groups, together=2)
    assert [len(clients) for _, clients, _ in groups.ended] == [2, 2, 1] * ROUNDS
    assert [index for _, _, index in groups.ended] == [0, 1, 2] * ROUNDS


def test_a_round_that_is_resumed_inside_ends_once_with_all_its_clients(tmp_path):
    whole, resumed = Average(), Average()
    end = fit(whole, SaveEverywhere(tmp_path), together=1, module=seeded())
    again = fit(resumed, together=1, module=seeded(), ckpt_path=tmp_path / "1-group2.ckpt")
    assert torch.equal(weights(end), weights(again))
    assert resumed.ended == whole.ended[1:]
    assert resumed.started == whole.started[1:]


def test_callbacks_are_given_back_as_they_were(caplog):
    average = Average()
    average.on_train_batch_end = own = copy.copy(average.on_train_batch_end)
    fit(average, together=1)
    assert "on_train_batch_start" not in vars(average)
    assert average.on_train_batch_end is own
    assert len(average.ended) == ROUNDS
    assert "on_train_batch_end of Average are called once a round" in caplog.text
    caplog.clear()
    fit(SaveNothing(), together=1)
    assert "once a round" not in caplog.text


class SaveNothing(Callback):
    """Without batch hooks."""
