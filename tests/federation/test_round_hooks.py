"""To callbacks a round is one batch."""

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Callback
from toys import ToyModule, toy_data, toy_trainer, weights

from fl_lightning import Federation, UniformCohort

ROUNDS, CLIENTS = 3, 5


class Average(Callback):
    """A moving average of the weights, as one keeps it in a central run; and what it was handed."""

    def __init__(self):
        self.started, self.ended, self.models = [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.started.append((trainer.global_step, list(batch), batch_idx))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ended.append((trainer.global_step, list(batch), batch_idx))
        self.models.append(weights(module))


def fit(*callbacks):
    torch.manual_seed(1)
    module = ToyModule()
    federation = Federation(cohort=UniformCohort(size=CLIENTS), engine="sequential", seed=0)
    trainer = toy_trainer(federation, *callbacks, max_epochs=ROUNDS)
    trainer.fit(module, datamodule=toy_data(num_clients=9))
    return module


def test_a_batch_is_all_clients_of_a_round():
    average = Average()
    end = weights(fit(average))
    assert [step for step, _, _ in average.started] == [0, 1, 2]
    assert [step for step, _, _ in average.ended] == [1, 2, 3]  # when the server has stepped
    assert all(len(clients) == CLIENTS and index == 0 for _, clients, index in average.ended)
    assert torch.equal(average.models[-1], end)


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 has it"
)
def test_lightnings_own_average_is_of_rounds():
    class OfRounds(lightning_callbacks.EMAWeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    average, rounds = OfRounds(decay=0.5), Average()
    end = weights(fit(average, rounds))
    assert int(average._average_model.n_averaged) == ROUNDS
    # by hand: the first update takes the model, each later one half of it
    first, second, third = rounds.models
    expected = 0.5 * (0.5 * first + 0.5 * second) + 0.5 * third
    torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-7)
