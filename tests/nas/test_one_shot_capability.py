"""Clients train what they can afford: masks, bytes, and a mean over those who hold a coordinate."""

from functools import partial

import pytest
import torch
from test_one_shot import MOBILENET, SPACES, data, fitted, images, one_shot, weights
from toys import toy_trainer

from fl_lightning import ConfigurationError, Federation, MaskCalibration, OverlapMean
from fl_lightning.core.update import ClientUpdate
from fl_lightning.nas import BudgetTable, DeviceClasses, RandomPath
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.sub_networks.capability import Budget, limits, reach, within
from fl_lightning.nas.sub_networks.rounds import SubNetworkRounds
from fl_lightning.sparsity import SparseSGDM

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
SPARSE = partial(SparseSGDM, lr=0.05, momentum=0.9, weight_decay=1e-2)
SHAPE = {"num_classes": 4, "in_channels": 1}
WEAK = DeviceClasses([0.6, 1.0], [0.5, 0.5], seed=0)


def test_a_coordinate_is_averaged_over_those_who_held_it():
    """The vector of Once-for-All over clients."""
    deltas = [[2.0, 4, 0, 0], [1, 1, 3, 0], [3, 1, 1, 8]]
    masks = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    mean = OverlapMean()
    mean.open(torch.empty(4, dtype=torch.float64))
    for delta, mask, weight in zip(deltas, masks, (10, 10, 20), strict=True):
        values = torch.tensor(delta, dtype=torch.float64), torch.empty(0), weight, 1
        mean.add(ClientUpdate(0, *values, active=torch.tensor(mask) > 0))
    assert mean.close().tolist() == pytest.approx([2.25, 1.75, 5 / 3, 8], abs=1e-6)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_what_is_in_reach_is_what_sub_networks_inside_the_limit_move(space):
    net = space.supernet(num_classes=4, in_channels=1).double()
    limit = limits(DeviceClasses([0.6]), Networks(space, 8, SHAPE), 1)[0]
    assert limit != space.largest
    masks = reach(space, net, limit)
    moved = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    x = images(6).tensors[0].double()
    drawn = [within(space.sample(torch.Generator().manual_seed(i)), limit) for i in range(60)]
    for network in [limit, *drawn]:
        net.zero_grad()
        net(x, network).square().sum().backward()
        for name, param in net.named_parameters():
            if param.grad is not None:
                moved[name] |= param.grad != 0
    for name, mask in masks.items():
        assert not (moved[name] & ~mask).any(), name
    reached = sum(int(mask.sum()) for mask in masks.values())
    assert sum(int(m.sum()) for m in moved.values()) > 0.8 * reached
    assert reached < sum(mask.numel() for mask in masks.values())


def test_classes_have_their_shares_and_a_table_is_read(tmp_path):
    budgets = DeviceClasses([1.0, 2.0, 3.0], [0.5, 0.3, 0.2], relative=False, seed=3).budgets(10)
    assert [budgets.count(Budget(b)) for b in (1.0, 2.0, 3.0)] == [5, 3, 2]
    assert budgets != DeviceClasses([1.0, 2.0, 3.0], [0.5, 0.3, 0.2], seed=4).budgets(10)
    path = tmp_path / "budgets.csv"
    path.write_text("client,budget\n1,5e5\n0,2e5\n")
    assert BudgetTable(str(path)).budgets(2) == [Budget(2e5), Budget(5e5)]
    with pytest.raises(ConfigurationError, match="no row for client 2: give one for each of the 3"):
        BudgetTable(str(path)).budgets(3)
    path.write_text("client,flops\n1,5e5\n")
    with pytest.raises(ConfigurationError, match="must be a CSV with the columns client"):
        BudgetTable(str(path)).budgets(1)


def test_if_all_afford_the_largest_it_is_plain_averaging_bit_for_bit():
    plain = fitted(one_shot(optimizer=SPARSE), data(3), Federation(local_steps=2))
    all_largest = one_shot(optimizer=SPARSE, capability=DeviceClasses([1.0]))
    assert torch.equal(
        weights(fitted(all_largest, data(3), Federation(local_steps=2))), weights(plain)
    )


def test_what_nobody_can_afford_stays_and_does_not_travel():
    module = one_shot(optimizer=SPARSE, capability=DeviceClasses([0.6]))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = toy_trainer(Federation(local_steps=2), max_epochs=1)
    trainer.fit(module, datamodule=data(4))
    limit = limits(DeviceClasses([0.6]), Networks(MOBILENET, 8, SHAPE), 1)[0]
    masks = reach(MOBILENET, module.network, limit)
    for name, param in module.network.named_parameters():
        outside = ~masks[name]
        assert torch.equal(param[outside], before[f"network.{name}"][outside]), name
    held = sum(int(mask.sum()) for mask in masks.values())
    per_client = float(trainer.callback_metrics["round/bytes_up"])
    assert 4 * held <= per_client <= 4 * held + 500
    assert held < 0.8 * sum(p.numel() for p in module.parameters())


def test_a_client_keeps_to_its_own_limit():
    module = one_shot(method=RandomPath(2), optimizer=SPARSE, capability=WEAK)
    run = []

    class Noting(type(module)):
        def forward(self, x, architecture=None):
            client = self._rounds.client
            if client is not None and self.training:
                run.append((client, self._rounds.limit_of(client), architecture))
            return super().forward(x, architecture)

    module.__class__ = Noting
    fitted(module, data(4), Federation(local_steps=2), rounds=1)
    assert {client for client, *_ in run} == {0, 1, 2, 3}
    assert len({limit for _, limit, _ in run}) == 2
    assert all(within(network, limit) == network for _, limit, network in run)


def test_a_run_with_capabilities_goes_on_in_the_same_bits(tmp_path):
    def module():
        return one_shot(optimizer=SPARSE, capability=WEAK)

    whole = fitted(module(), data(4), Federation(local_steps=2), rounds=3)
    trainer = toy_trainer(Federation(local_steps=2), max_epochs=1)
    trainer.fit(module(), datamodule=data(4))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = module()
    trainer = toy_trainer(Federation(local_steps=2), max_epochs=3)
    trainer.fit(again, datamodule=data(4), ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(weights(again), weights(whole))


def test_refusals():
    with pytest.raises(ConfigurationError, match=r"within .*: the smallest, .* costs"):
        fitted(one_shot(optimizer=SPARSE, capability=DeviceClasses([1e-6])), data(2), Federation())
    with pytest.raises(ConfigurationError, match="masks need a masked optimizer"):
        fitted(one_shot(capability=WEAK), data(2), Federation(local_steps=1))
    with pytest.raises(ConfigurationError, match="shares must be 2 numbers of at least 0"):
        DeviceClasses([0.1, 0.2], [0.5, 0.6])
    with pytest.raises(ConfigurationError, match=r"measure must be one of .flops."):
        DeviceClasses([0.1], measure="watts")


@pytest.mark.parametrize("budget", ["nan", "inf", "-1", "0"])
def test_a_budget_that_is_no_amount_is_refused(budget, tmp_path):
    with pytest.raises(ConfigurationError, match="must be one number per class, above 0"):
        DeviceClasses([float(budget), 1.0])
    path = tmp_path / "budgets.csv"
    path.write_text(f"client,budget\n0,1\n1,{budget}\n")
    with pytest.raises(
        ConfigurationError, match=f"above 0 and finite, and that of client 1 is {budget}"
    ):
        BudgetTable(str(path)).budgets(2)


@pytest.mark.parametrize("options", [{}, {"capability": WEAK}], ids=["all sizes", "capability"])
def test_a_mask_of_the_largest_network_is_refused(options):
    mask = MaskCalibration(density=0.5)
    with pytest.raises(ConfigurationError, match="OneShot allows no mask but"):
        fitted(one_shot(optimizer=SPARSE, **options), data(2), mask, Federation(local_steps=1))


def test_statistics_of_clients_are_named_to_privacy():
    rounds = SubNetworkRounds()
    module = one_shot()
    rounds.setup(toy_trainer(), module, "test")
    assert "batch norm" in rounds.unprotected
