"""Masks over sites: what is asked, what is told, and what neither side takes from the other."""

from functools import partial

import pytest
import torch
from flower.site_processes import configuration, over_network, three_sites
from flower.test_same_bits import MASKED, built
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from fl_lightning.callbacks.calibration.scores import _checked
from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.messages import Answer, ClientAnswer, Order, OrderRefused, digest
from fl_lightning.flower.packing import (
    SUMS,
    RunMask,
    copy_model,
    mask_of,
    mask_tensors,
    model_tensors,
)
from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.server.remote_clients import ClientsAtSites, Counted
from fl_lightning.flower.site.ledger import PrivacyBudget
from fl_lightning.flower.site.memory import SiteMemory
from fl_lightning.sparsity.masks.mask import Mask

SITE_OF = {0: "a", 1: "b", 2: "a", 3: "c"}
MASK = Mask({"weight": torch.tensor([[True, False], [False, True]])})


def network():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def order(**given):
    given = {"kind": "hello", "run": "a" * 32, "configuration": "b" * 64, "round": 0} | given
    return Order.from_bytes(Order(**given).to_bytes(), limit=10**6)


def test_a_module_holds_all_of_another_and_nothing_of_one_that_does_not_fit():
    one, module = network(), network()
    for _ in range(3):
        one(torch.randn(4, 2))
    copy_model(module, order(tensors=model_tensors(one)).tensors)
    assert all(map(torch.equal, one.state_dict().values(), module.state_dict().values()))
    name = "stage/model/1.running_var"  # not the first
    for change in ("shape", "type", "name"):
        tensors = {name: tensor + 1 for name, tensor in model_tensors(one).items()}
        tensor = tensors.pop(name)
        if change == "shape":
            tensors[name] = tensor.repeat(2)
        elif change == "type":
            tensors[name] = tensor.double()
        else:
            tensors[f"{name}s"] = tensor
        with pytest.raises(OrderRefused, match=r"no 1\.running_var"):
            copy_model(module, tensors)
        assert all(map(torch.equal, module.state_dict().values(), one.state_dict().values()))


def test_a_mask_arrives_with_its_number_and_a_damaged_one_is_refused():
    options, tensors = mask_tensors(RunMask(MASK, 3))
    assert mask_of(order(options=options, tensors=tensors)) == RunMask(MASK, 3)
    assert mask_of(order()) is None
    for damage in (lambda told: told ^ 2, lambda told: told[:-1], torch.Tensor.float):
        damaged = {name: damage(tensor) for name, tensor in tensors.items()}
        with pytest.raises(OrderRefused, match="the order's mask cannot be read"):
            mask_of(order(options=options, tensors=damaged))


def test_a_site_that_missed_a_mask_says_so_if_its_clients_remember(tmp_path):
    memory = SiteMemory(tmp_path)
    memory.load_into(ClientMemory())
    memory.follow_mask(RunMask(MASK, 2))
    assert SiteMemory(tmp_path).mask == RunMask(MASK, 2)  # which is on its disk
    memory.check_mask(RunMask(MASK, 9))  # nobody remembers anything
    memory._memory.put("feedback", 0, torch.ones(2))
    memory.check_mask(RunMask(MASK, 3))
    for number in (0, 2, 4):
        with pytest.raises(ConfigurationError, match="without the masks in between"):
            memory.check_mask(RunMask(MASK, number))


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


def clients_of(channel, module=None):
    """Return clients at the sites of a channel, and the Trainer of their server."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module or LightningModule())
    about = "seed_everything: 0", Counted("a" * 32), trainer, lambda: None
    clients = ClientsAtSites(Correspondence(channel), *about)
    clients.site_of |= SITE_OF
    return clients, trainer


def scores(channel, asked):
    values = {"weight": torch.zeros(2)}
    clients, _ = clients_of(channel)
    return list(clients.sums("scores", asked, partial(_checked, values), values=values))


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
    "bad",
    [
        torch.ones(2).bfloat16(),
        torch.ones(2, dtype=torch.complex64),
        torch.tensor([1.0, torch.inf]),
        torch.tensor([1.0, -1.0]),
    ],
)
def test_a_client_without_usable_scores_is_named(bad):
    said = "its scores are no finite numbers ≥ 0"
    for change, sentence in (
        (lambda sent: dict.fromkeys(sent, bad), said),
        (lambda sent: {}, r"client 1 at site b: the answer of its site does not contain it"),
        (
            lambda sent: dict.fromkeys(sent, torch.ones(1)),
            "1 at site b: its scores are not of these",
        ),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            scores(Sites(change), {1: 4})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_site_that_bounds_epsilon_scores_for_nobody(tmp_path):
    central = {
        "federation__privacy": built("CentralDP", clip_norm=0.5, noise_multiplier=1.0),
        "federation__aggregator": built("Mean", weight_by_examples=False),
        "federation__cohort": built("PoissonCohort", fraction=0.7),
    }
    config = configuration(**MASKED, **central)
    with (
        three_sites(config, most_epsilon=PrivacyBudget(epsilon=1e9)) as sites,
        pytest.raises(
            ConfigurationError, match=r"calibration: client . at site .: the site.s policy forbids"
        ),
    ):
        over_network(sites, config, tmp_path / "network")
