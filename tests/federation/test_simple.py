"""The round without a Trainer gives the Trainer's bits, whatever else happens in it."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from toys import ToyModule, toy_data, toy_trainer, weights

from fl_lightning import FedDyn, Federation, FedProx, Mean, Scaffold, UniformCohort
from fl_lightning.federation import SimpleFederation, Stage
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.transport import Transport
from fl_lightning.server import FedAdam, Krum
from fl_lightning.updates import QSGD, ErrorFeedback, TopK

THREE = UniformCohort(size=3)
FEEDBACK = [ErrorFeedback([TopK(0.3)])]
# Options of a round, and those that are stages where there is no Trainer.
CASES = {
    "FedAvg": {},
    "FedAvg, 2 epochs": {"cohort": THREE, "local_epochs": 2},
    "FedProx": {"correction": FedProx(mu=0.1)},
    "Scaffold": {"correction": Scaffold(), "cohort": THREE},
    "FedDyn": {"correction": FedDyn(alpha=0.1)},
    "top-k with feedback": {"updates": FEEDBACK},
    "QSGD": {"updates": [QSGD()]},
    "Scaffold + top-k + Krum": {
        "correction": Scaffold(),
        "updates": FEEDBACK,
        "aggregator": Krum(num_attackers=1),
    },
    "FedAdam": {"server_optimizer": partial(FedAdam, lr=0.01)},
    "exact FedAdam": {
        "aggregator": Mean(exact=True),
        "server_optimizer": partial(FedAdam, lr=0.01),
    },
}


def toy(**options):
    seed_everything(0, verbose=False)
    return ToyModule(scheduler=False, **options).double()


def data():
    return toy_data(batch_size=4, drop_last=True, dtype=torch.float64)


def simple(module, correction=None, updates=(), **options):
    clients, stages = data(), []
    clients.setup("fit")
    if correction is not None:
        stages.append(Corrector(correction, exact=isinstance(options.get("aggregator"), Krum)))
    if updates:
        stages.append(Transport(updates, [], seed=5))
    optimizer = module.configure_optimizers()
    return SimpleFederation(module, optimizer, clients, stages, seed=5, **options)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", [{}, {"dropout": 0.3, "batch_norm": True}], ids=["lean", "odd"])
def test_it_gives_the_bits_of_a_fit(kind, options):
    own = toy(**kind)
    model = simple(own, **options).run(rounds=3)
    fitted, federation = toy(**kind), Federation(seed=5, engine="sequential", **options)
    trainer = toy_trainer(federation, max_epochs=3, precision="64-true")
    trainer.fit(fitted, datamodule=data())
    assert torch.equal(weights(own), weights(fitted))
    assert torch.equal(model.params, federation.rounds.server.model.params)
    assert torch.equal(model.buffers, federation.rounds.server.model.buffers)
    assert not torch.equal(weights(own), weights(toy(**kind)))  # it has trained


def test_a_stage_of_ones_own_takes_part():
    class HalfTheWay(Stage):
        def on_server(self, aggregate):
            return aggregate / 2

    start, module = weights(toy()), toy()
    federation = simple(module)
    federation.run(rounds=1)
    whole = weights(module)
    module = toy()
    clients = data()
    clients.setup("fit")
    optimizer = module.configure_optimizers()
    SimpleFederation(module, optimizer, clients, [HalfTheWay()], seed=5).run(rounds=1)
    torch.testing.assert_close(weights(module), (start + whole) / 2, rtol=1e-12, atol=1e-12)
    assert federation.round.record.num_sampled == 6


def test_a_module_that_is_no_lightning_module_trains():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return torch.nn.functional.cross_entropy(self.net(x), y)

    module, clients = Plain(), toy_data(batch_size=4, drop_last=True)
    clients.setup("fit")
    before = weights(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    SimpleFederation(module, optimizer, clients).run(rounds=1)
    assert not torch.equal(weights(module), before)
