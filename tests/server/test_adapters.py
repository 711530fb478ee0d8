"""Aggregators of adapters against their formulas in float64, and whole rounds against a loop by hand."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from fl_lightning import ConfigurationError, FederatedDataModule, Federation, Personal
from fl_lightning.client import Devices, GivenSpeeds
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data import Arrays, NaturalPartition
from fl_lightning.server import FedAdam, FedExLoRA, FlexLoRA, FLoRA, HetLoRA, Mean
from fl_lightning.server.adapters import Pair

peft = pytest.importorskip("peft")
RANKS, ROWS, COLUMNS, SCALE = [2, 4, 8], 5, 9, 0.5
EXAMPLES = [3, 5, 8]
SHARES = [n / sum(EXAMPLES) for n in EXAMPLES]
PAIR = Pair(slice(1, 1 + 8 * COLUMNS), slice(1 + 8 * COLUMNS, 1 + 8 * (COLUMNS + ROWS)), 8, SCALE)


def joined(head, a, b):
    return torch.cat([torch.tensor([head], dtype=torch.float64), a.flatten(), b.flatten()])


def padded(rank, generator):
    """Factors of a client of some rank, zero beyond it."""
    a = torch.randn(8, COLUMNS, generator=generator, dtype=torch.float64)
    b = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    a[rank:], b[:, rank:] = 0, 0
    return a, b


@pytest.fixture
def clients():
    generator = torch.Generator().manual_seed(0)
    return [padded(rank, generator) for rank in RANKS]


def aggregated(aggregator, ends):
    """Return the new head, A, B and the change of the weight, from where clients end."""
    generator = torch.Generator().manual_seed(1)
    a, b = padded(8, generator)
    start = joined(1.0, a, b)
    aggregator.pairs = [PAIR]
    aggregator.start_round(0)
    aggregator.open(start)
    for client in (2, 0, 1):  # in any order
        begin = start.clone()[None]
        PAIR.keep(begin, [RANKS[client] if aggregator.ranks else 8])
        delta = begin[0] - joined(float(client), *ends[client])
        aggregator.add(ClientUpdate(client, delta, torch.empty(0), EXAMPLES[client], 1))
    new = start - aggregator.close()
    a, b = (factor[0] for factor in PAIR.factors(new[None]))
    [change] = aggregator.take_changes()
    assert aggregator.take_changes() == []
    return new[0], a, b, change


def mean_product(ends):
    return sum(p * b @ a for p, (a, b) in zip(SHARES, ends, strict=True))


def test_hetlora_weighs_by_the_size_of_products(clients):
    head, a, b, change = aggregated(HetLoRA(RANKS), clients)
    sizes = [float((b @ a).norm()) for a, b in clients]
    weights = [size / sum(sizes) for size in sizes]
    torch.testing.assert_close(a, sum(w * a for w, (a, _) in zip(weights, clients, strict=True)))
    torch.testing.assert_close(b, sum(w * b for w, (_, b) in zip(weights, clients, strict=True)))
    assert float(head) == pytest.approx(weights[1] + 2 * weights[2])
    assert change is None


def test_flexlora_is_the_best_approximation_of_the_mean_of_products(clients):
    # of rank 5 at most, so that all of it fits into rank 8
    head, a, b, change = aggregated(FlexLoRA(RANKS), clients)
    torch.testing.assert_close(b @ a, mean_product(clients))
    assert float(head) == pytest.approx(SHARES[1] + 2 * SHARES[2])
    assert change is None
    u, values, vt = torch.linalg.svd(mean_product(clients), full_matrices=False)
    for rank in (1, 2, 4):  # what a client of that rank gets, by the theorem of Eckart and Young
        best = u[:, :rank] * values[:rank] @ vt[:rank]
        torch.testing.assert_close(b[:, :rank] @ a[:rank], best)


def test_fedex_is_exact_with_its_change_of_the_weight(clients):
    _, a, b, change = aggregated(FedExLoRA(), clients)
    torch.testing.assert_close(a, sum(p * a for p, (a, _) in zip(SHARES, clients, strict=True)))
    torch.testing.assert_close(change + SCALE * b @ a, SCALE * mean_product(clients))
    assert float((b @ a - mean_product(clients)).norm()) > 1  # the bias of FedIT


def test_flora_adds_the_stacked_product_to_the_weight(clients):
    _, a, b, change = aggregated(FLoRA(RANKS), clients)
    stacked_a = torch.cat([p * a[:r] for p, (a, _), r in zip(SHARES, clients, RANKS, strict=True)])
    stacked_b = torch.cat([b[:, :r] for (_, b), r in zip(clients, RANKS, strict=True)], dim=1)
    torch.testing.assert_close(change, SCALE * stacked_b @ stacked_a)
    assert not b.any()
    assert 0.2 < float(a.abs().max()) <= COLUMNS**-0.5


def test_a_client_whose_last_ranks_shrink_is_pruned(clients):
    aggregator = HetLoRA(RANKS, prune=0.5)
    a, b = clients[2]
    small = torch.ones(8, dtype=torch.float64)
    small[4:] = 1e-3
    larger = [(9 * a, b) for a, b in clients[:2]]
    aggregated(aggregator, [*larger, (a * small[:, None], b * small)])
    assert [aggregator.rank_of(client) for client in (0, 1, 2, 5)] == [2, 4, 4, 8]
    resumed = HetLoRA(RANKS, prune=0.5)
    resumed.memory = aggregator.memory
    assert resumed.rank_of(2) == 4


class Regression(LightningModule):
    """A linear layer with an adapter of rank 8 and a bias, in float64; loss 1/2 mean of squares."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, 1))
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["0"], **options)
        self.network = peft.get_peft_model(layers, config).double()
        torch.manual_seed(4)
        self.network.base_model.model[0].lora_B["default"].weight.data.normal_(std=0.3)

    def loss_of(self, batch):
        inputs, targets = batch
        return (self.network(inputs.double())[:, 0] - targets).square().mean() / 2

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)

    @property
    def layer(self):
        return self.network.base_model.model[0]

    @property
    def weight(self):
        """The weight with its adapter."""
        a, b = (getattr(self.layer, n)["default"].weight for n in ("lora_A", "lora_B"))
        return (self.layer.base_layer.weight + 2 * b @ a).detach()


INPUTS = torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(5))
TARGETS = INPUTS[:, 0] * 2 - INPUTS[:, 1] * INPUTS[:, 2]
OWNERS = [0] * 3 + [1] * 5 + [2] * 8


def fit(module, aggregator, rounds=1, path=None, **options):
    source = Arrays(
        INPUTS.numpy(),
        TARGETS.double().numpy(),
        clients=OWNERS,
        batch_size=16,
        val_fraction=0.0,
        test_fraction=0.0,
        target_type="number",
    )
    data = FederatedDataModule(source, partition=NaturalPartition("clients"), seed=0)
    federation = Federation(
        local_steps=3, aggregator=aggregator, seed=0, engine="sequential", **options
    )
    trainer = Trainer(
        max_epochs=rounds,
        callbacks=[federation],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return trainer


def by_hand(module, rank, rows):
    """Return the factors after three steps of a client of some rank."""
    client = copy.deepcopy(module)
    a, b = (getattr(client.layer, n)["default"].weight for n in ("lora_A", "lora_B"))
    a.data[rank:], b.data[:, rank:] = 0, 0
    for _ in range(3):
        for parameter in (a, b):
            parameter.grad = None
        client.loss_of((INPUTS[rows], TARGETS[rows])).backward()
        for parameter in (a, b):
            parameter.data -= 0.3 * parameter.grad
    assert not a[rank:].any()
    assert not b[:, rank:].any()
    return a.detach(), b.detach()


@pytest.mark.parametrize(
    ("aggregator", "devices"),
    [
        (HetLoRA(RANKS), None),
        (HetLoRA(RANKS), Devices(speeds=GivenSpeeds([1.0, 9.0, 3.0]))),
        (FlexLoRA(RANKS), None),
        (FLoRA(RANKS), None),
        (FedExLoRA(), None),
    ],
    ids=lambda some: type(some).__name__,
)
def test_a_round_ends_where_a_loop_by_hand_does(aggregator, devices):
    module = Regression()
    base = module.layer.base_layer.weight.clone()
    rows = [slice(0, 3), slice(3, 8), slice(8, 16)]
    ranks = RANKS if aggregator.ranks else [8] * 3
    if devices is not None:  # the slowest has the first rank
        ranks = [8, 2, 4]
    ends = [by_hand(module, rank, some) for rank, some in zip(ranks, rows, strict=True)]
    weights = SHARES
    if isinstance(aggregator, HetLoRA):
        sizes = [float((b @ a).norm()) for a, b in ends]
        weights = [size / sum(sizes) for size in sizes]
        a, b = (
            sum(w * f for w, f in zip(weights, some, strict=True))
            for some in zip(*ends, strict=True)
        )
        wanted = base + 2 * b @ a
    else:
        wanted = base + 2 * mean_product(ends)
    fit(module, aggregator, devices=devices)
    torch.testing.assert_close(module.weight, wanted.detach(), rtol=1e-9, atol=1e-9)


def test_smaller_ranks_send_and_receive_less(tmp_path):
    both = [fit(Regression(), aggregator).callback_metrics for aggregator in (Mean(), HetLoRA([2]))]
    numbers = 6 * (ROWS + COLUMNS)  # of the six ranks that are missing
    for name in ("round/bytes_up", "round/bytes_down"):
        assert float(both[0][name] - both[1][name]) == pytest.approx(8 * numbers, abs=40)


def test_changed_weights_resume_to_the_bit(tmp_path):
    whole, first, resumed = (Regression() for _ in range(3))
    fit(whole, FedExLoRA(), rounds=3)
    fit(first, FedExLoRA(), rounds=2).save_checkpoint(tmp_path / "some.ckpt")
    fit(resumed, FedExLoRA(), rounds=3, path=tmp_path / "some.ckpt")
    assert torch.equal(whole.weight, resumed.weight)
    assert not torch.equal(whole.layer.base_layer.weight, Regression().layer.base_layer.weight)


def test_fedsa_shares_a_and_keeps_b_at_the_client():
    """FedSA-LoRA is Personal: A is the mean, B stays."""
    module = Regression()
    start_b = module.layer.lora_B["default"].weight.clone()
    rows = [slice(0, 3), slice(3, 8), slice(8, 16)]
    ends = [by_hand(module, 8, some) for some in rows]
    trainer = fit(module, None, personal=OF_B)
    mean_a = sum(p * a for p, (a, _) in zip(SHARES, ends, strict=True))
    torch.testing.assert_close(module.layer.lora_A["default"].weight.detach(), mean_a)
    assert torch.equal(module.layer.lora_B["default"].weight, start_b)  # as in the paper's round 0
    memory = trainer.callbacks[0].rounds.run.memory
    for client, (_, b) in enumerate(ends):
        torch.testing.assert_close(memory.get("personal", client).view_as(b), b)


OF_B = Personal(parameters=["*lora_B*"])


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("plain", {"aggregator": HetLoRA([16])}, "ranks must be at most 8"),
        ("plain", {"aggregator": FedExLoRA(), "server_optimizer": FedAdam}, "server_optimizer out"),
        ("plain", {"aggregator": FLoRA([8]), "personal": OF_B}, "both factors"),
        ("dora", {"aggregator": FlexLoRA([8])}, "leave use_dora out"),
        ("half", {"aggregator": FLoRA([8])}, "bfloat16 would round away"),
        ("half", {"aggregator": FedExLoRA()}, "bfloat16 would round away"),
    ],
)
def test_what_does_not_go_together_is_said(kind, options, words):
    module = Regression(use_dora=kind == "dora")
    if kind == "half":
        module.layer.base_layer.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match=words):
        fit(module, **options)


@pytest.mark.parametrize("ranks", [[], [0, 2], 3])
def test_ranks_are_a_list_of_positive_numbers(ranks):
    with pytest.raises(ConfigurationError, match="ranks must be a list"):
        HetLoRA(ranks)
