"""The round without a Trainer gives the Trainer's bits, whatever else happens in it."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from toys import ToyModule, toy_data, toy_trainer, weights

from fl_lightning import (
    ClientFailure,
    ConfigurationError,
    FedDyn,
    Federation,
    FedProx,
    Mean,
    NormalisedMean,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.federation import SimpleFederation, Stage
from fl_lightning.federation.stages.client_masks import MaskedClients
from fl_lightning.federation.stages.personaliser import Personaliser
from fl_lightning.secure import SecureMean
from fl_lightning.server import FedAdam, FLTrust, Krum, QFedAvg
from fl_lightning.updates import QSGD, ErrorFeedback, PowerSGD, TopK

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


def simple(module, masked=False, **options):
    clients, stages = data(), []
    clients.setup("fit")
    if masked:
        stages.append(MaskedClients(lambda client: {}))
    optimizer = module.configure_optimizers()
    return SimpleFederation(module, optimizer, clients, stages, seed=5, **options)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_it_gives_the_bits_of_a_fit(options):
    kind = {"dropout": 0.3, "batch_norm": True} if options else {}
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
    assert len(federation.round.record.finished) == 6


REFUSED = {
    "a server that rescales": {
        "correction": FedDyn(alpha=0.1),
        "server_optimizer": partial(FedAdam, lr=0.01),
    },
    "compressed, and summed": {"updates": [TopK(0.3)], "aggregator": SecureMean()},
    "tensors, and masks of clients' own": {"updates": [PowerSGD(1)], "masks": True},
    "too few for the rule": {"cohort": THREE, "aggregator": Krum(num_attackers=2)},
    "a client that is often left out": {"cohort": THREE, "aggregator": FLTrust(trusted_client=0)},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_what_a_fit_refuses_is_refused(options):
    options = dict(options)
    masks = options.pop("masks", False)
    with pytest.raises(ConfigurationError) as own:
        simple(toy(), masked=masks, **options)
    if masks:
        assert "gives clients masks of their own" in str(own.value)
        return
    with pytest.raises(ConfigurationError):
        toy_trainer(Federation(**options), precision="64-true").fit(toy(), datamodule=data())


def test_after_a_failed_round_the_module_holds_the_global_model():
    class Fails(ToyModule):
        num_left = 9

        def training_step(self, batch, batch_idx):
            self.num_left -= 1
            return super().training_step(batch, batch_idx) * (torch.nan if self.num_left < 0 else 1)

    module = Fails(scheduler=False).double()
    before, federation = weights(module), simple(module)
    module.num_left = 3
    with pytest.raises(ClientFailure, match="client 0: its training loss is nan"):
        federation.run(rounds=1)
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize("aggregator", [NormalisedMean, QFedAvg])
def test_rules_that_ask_for_clients_optimizer_get_it(aggregator):
    own, fitted = toy(momentum=0.0), toy(momentum=0.0)
    simple(own, aggregator=aggregator()).run(rounds=2)
    federation = Federation(seed=5, engine="sequential", aggregator=aggregator())
    toy_trainer(federation, max_epochs=2, precision="64-true").fit(fitted, datamodule=data())
    assert torch.equal(weights(own), weights(fitted))


def test_a_stage_that_needs_a_trainer_says_so():
    stage = Personaliser(Personal(["net.4.*"]), is_corrected=False)
    clients, module = data(), toy()
    clients.setup("fit")
    with pytest.raises(ConfigurationError, match=r"Personaliser needs one \(counts\)"):
        SimpleFederation(module, module.configure_optimizers(), clients, [stage])


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
