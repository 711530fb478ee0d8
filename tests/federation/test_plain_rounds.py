"""The round without a Trainer gives the Trainer's bits."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from toys import ToyModule, toy_data, toy_trainer, weights

from fl_lightning import Federation, Mean, UniformCohort
from fl_lightning.federation import plain_rounds
from fl_lightning.server import FedAdam, Krum


def toy(**options):
    seed_everything(0, verbose=False)
    return ToyModule(scheduler=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cohort": UniformCohort(size=3), "local_epochs": 2},
        {"aggregator": Mean(exact=True), "server_optimizer": partial(FedAdam, lr=0.01)},
        {"aggregator": Krum(num_attackers=1)},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.parametrize("kind", [{}, {"dropout": 0.3, "batch_norm": True}], ids=["lean", "odd"])
def test_it_gives_the_bits_of_a_fit(kind, options):
    own = toy(**kind)
    data = toy_data(batch_size=4, drop_last=True)
    data.setup("fit")
    optimizer = own.configure_optimizers()
    model = plain_rounds(own, optimizer, data, rounds=3, seed=5, **options)
    fitted, federation = toy(**kind), Federation(seed=5, engine="sequential", **options)
    toy_trainer(federation, max_epochs=3).fit(
        fitted, datamodule=toy_data(batch_size=4, drop_last=True)
    )
    assert torch.equal(weights(own), weights(fitted))
    assert torch.equal(model.params, federation.rounds.server.model.params)
    assert torch.equal(model.buffers, federation.rounds.server.model.buffers)
    with torch.no_grad():
        assert not torch.equal(weights(own), weights(toy(**kind)))  # it has trained


def test_a_module_that_is_no_lightning_module_trains():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return torch.nn.functional.cross_entropy(self.net(x), y)

    module, data = Plain(), toy_data(batch_size=4, drop_last=True)
    data.setup("fit")
    before = weights(module)
    plain_rounds(module, torch.optim.SGD(module.parameters(), lr=0.1), data, rounds=1)
    assert not torch.equal(weights(module), before)
