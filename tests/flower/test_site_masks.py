"""Masks over sites: what is asked, what is told, and what neither side takes from the other."""

import sys

import pytest
import torch
from flower.site_processes import configuration, over_network, three_sites
from flower.test_same_bits import MASKED, built
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from fl_lightning import CentralDP, Federation, LocalDP, Mean, PoissonCohort
from fl_lightning.callbacks.calibration.mask_calibration import MaskCalibration
from fl_lightning.cli.network.server import _check_calibration
from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.messages import Answer, ClientAnswer, Order, OrderRefused, digest
from fl_lightning.flower.packing import (
    SUMS,
    RunMask,
    hold_model,
    mask_of,
    mask_tensors,
    model_tensors,
)
from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.server.elsewhere import CalibrationAtSites
from fl_lightning.flower.server.greeting import ClientsAtSites, Counted, Greeting
from fl_lightning.flower.site.ledger import PrivacyBudget
from fl_lightning.flower.site.memory import SiteMemory
from fl_lightning.secure import SecureMean
from fl_lightning.sparsity import LinearHead, RidgeHead
from fl_lightning.sparsity.masks.mask import Mask

SITE_OF = {0: "a", 1: "b", 2: "a", 3: "c"}
MASK = Mask({"weight": torch.tensor([[True, False], [False, True]])})


def network():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def order(**given):
    given = {"kind": "hello", "run": "a" * 32, "configuration": "b" * 64, "round": 0} | given
    return Order.from_bytes(Order(**given).to_bytes(), limit=10**6)


def test_a_module_holds_all_of_another():
    one, other = network(), network()
    for _ in range(3):
        one(torch.randn(4, 2))
    hold_model(other, order(tensors=model_tensors(one)).tensors)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("change", ["shape", "type", "name"])
def test_a_model_that_does_not_fit_changes_nothing(change):
    module, before = network(), network()
    before.load_state_dict(module.state_dict())
    tensors = {name: tensor + 1 for name, tensor in model_tensors(module).items()}
    name = "stage/model/1.running_var"  # not the first
    tensor = tensors.pop(name)
    if change == "shape":
        tensors[name] = tensor.repeat(2)
    elif change == "type":
        tensors[name] = tensor.double()
    else:
        tensors[f"{name}s"] = tensor
    with pytest.raises(OrderRefused, match=r"no 1\.running_var"):
        hold_model(module, tensors)
    assert all(map(torch.equal, module.state_dict().values(), before.state_dict().values()))


def test_a_mask_arrives_with_its_number():
    options, tensors = mask_tensors(RunMask(MASK, 3))
    assert mask_of(order(options=options, tensors=tensors)) == RunMask(MASK, 3)
    assert mask_of(order()) is None


@pytest.mark.parametrize("damage", ["bits", "shape", "hash", "none"])
def test_a_damaged_mask_is_refused(damage):
    options, tensors = mask_tensors(RunMask(MASK, 0))
    if damage == "bits":
        tensors = {name: tensor ^ 2 for name, tensor in tensors.items()}
    elif damage == "shape":
        options["mask"]["shapes"] = {"weight": [2, 3]}
    elif damage == "hash":
        options["mask"]["hash"] = "0" * 32
    else:
        options["mask"] = None
    with pytest.raises(OrderRefused, match="the order has no mask"):
        mask_of(order(options=options, tensors=tensors))


def memory_under(folder, number):
    """Return a site's memory of one client under a mask."""
    memory = SiteMemory(folder)
    memory.serve(ClientMemory())
    memory.follow_mask(RunMask(MASK, number))
    return memory


def test_a_site_that_missed_a_mask_says_so_if_its_clients_remember(tmp_path):
    memory = memory_under(tmp_path, 2)
    memory.check_mask(RunMask(MASK, 9))  # nobody remembers anything
    memory._memory.put("feedback", 0, torch.ones(2))
    memory.check_mask(RunMask(MASK, 3))
    for number in (0, 2, 4):
        with pytest.raises(ConfigurationError, match="missed masks in between"):
            memory.check_mask(RunMask(MASK, number))


def test_the_mask_of_what_is_remembered_is_on_disk(tmp_path):
    memory_under(tmp_path, 2)
    assert SiteMemory(tmp_path).mask == RunMask(MASK, 2)


class Sites:
    """A channel to sites whose clients send their id, the last site first."""

    def __init__(self, change=lambda sent: sent):
        self.waiting, self.change, self.asked = [], change, []

    def sites(self):
        return sorted(set(SITE_OF.values()))

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=10**6)
        self.asked.append((site, order.clients))
        sent = {client: torch.full((2,), float(client)) for client in order.clients}
        sent = self.change(sent)
        examples = dict(order.options["examples"])
        answer = Answer(
            site=site,
            order=digest(message),
            clients=tuple(
                ClientAnswer(client=client, num_examples=examples[client]) for client in sent
            ),
            tensors={f"{client}/{SUMS}weight": tensor for client, tensor in sent.items()},
        )
        self.waiting.insert(0, (site, answer.to_bytes()))

    def receive(self, seconds):
        waiting, self.waiting = self.waiting, []
        return waiting


def calibration(channel, module=None, **options):
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module or LightningModule())
    greeting = Greeting("seed_everything: 0", Counted("a" * 32), trainer, lambda: None)
    remote = ClientsAtSites(Correspondence(channel), greeting, SITE_OF)
    return CalibrationAtSites(remote, trainer, **options)


def scores(channel, asked):
    values = {"weight": torch.zeros(2)}
    return list(calibration(channel).scores(values, (0, 0), asked))


def test_scores_come_in_the_order_of_the_clients_whichever_site_is_first():
    channel = Sites()
    found = scores(channel, {3: 5, 0: 7, 2: 1})
    assert [(each.sums["weight"].tolist(), each.num_examples) for each in found] == [
        ([3.0, 3.0], 5),
        ([0.0, 0.0], 7),
        ([2.0, 2.0], 1),
    ]
    assert channel.asked == [("c", (3,)), ("a", (0, 2))]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda sent: {}, r"client 1 at site b: its site's answer has nothing of it"),
        (
            lambda sent: {client: tensor[:1] for client, tensor in sent.items()},
            "client 1 at site b: its scores are not of these entries",
        ),
        *(
            (lambda sent, bad=bad: dict.fromkeys(sent, bad), "its scores are no finite numbers ≥ 0")
            for bad in (
                torch.ones(2).bfloat16(),
                torch.ones(2, dtype=torch.complex64),
                torch.tensor([1.0, torch.inf]),
                torch.tensor([1.0, -1.0]),
            )
        ),
    ],
)
def test_a_client_without_usable_scores_is_named(change, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        scores(Sites(change), {1: 4})


# what is refused at the server's door

DP = {"clip_norm": 1.0, "noise_multiplier": 1.0}
PLAIN = Mean(weight_by_examples=False)


@pytest.mark.parametrize(
    ("options", "federation", "sentence"),
    [
        ({"head": LinearHead()}, {}, "head LinearHead exchanges sums many times"),
        ({}, {"privacy": LocalDP(**DP), "aggregator": PLAIN}, "would reach the server in clear"),
        ({}, {"aggregator": SecureMean()}, "the mask found from clients' scores would reach"),
        (
            {"mask_file": "m", "head": RidgeHead()},
            {"aggregator": SecureMean()},
            "the head fitted to clients' examples would reach",
        ),
    ],
)
def test_what_would_show_single_clients_is_refused(options, federation, sentence):
    masks = MaskCalibration(**({"density": 0.1} | options))
    with pytest.raises(ConfigurationError, match=sentence):
        _check_calibration(masks, Federation(**federation))


@pytest.mark.parametrize(
    ("options", "federation"),
    [
        ({"head": RidgeHead()}, {}),
        ({"mask_file": "m"}, {"aggregator": SecureMean()}),
        (
            {},
            {
                "privacy": CentralDP(**DP),
                "aggregator": PLAIN,
                "cohort": PoissonCohort(fraction=0.1),
            },
        ),
    ],
)
def test_what_hides_nothing_or_shows_nothing_is_not(options, federation):
    _check_calibration(MaskCalibration(**({"density": 0.1} | options)), Federation(**federation))
    _check_calibration(None, Federation(**federation))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_site_that_bounds_epsilon_scores_for_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    central = {
        "federation__privacy": built("CentralDP", clip_norm=0.5, noise_multiplier=1.0),
        "federation__aggregator": built("Mean", weight_by_examples=False),
        "federation__cohort": built("PoissonCohort", fraction=0.7),
    }
    config = configuration(**MASKED, **central)
    with (
        three_sites(config, most_epsilon=PrivacyBudget(epsilon=1e9)) as sites,
        pytest.raises(ConfigurationError, match=r"calibration: site .: the site does not allow"),
    ):
        over_network(sites, config, tmp_path / "network")
