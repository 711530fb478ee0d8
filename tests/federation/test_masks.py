"""Masked optimizers in a federation: vectors hold what may move, and nothing else ever moves."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from toys import SaveEverywhere, ToyModule, federated, toy_data, toy_trainer, weights

from fl_lightning import ConfigurationError, Federation, MaskCalibration, UniformCohort
from fl_lightning.data import Cohort
from fl_lightning.federation import Stage
from fl_lightning.server.means.mean import OverlapMean
from fl_lightning.server.robust.rule import Median
from fl_lightning.sparsity import SparseSGDM

DECAY = 0.01


def some_masks(module, seed=0, density=0.4):
    """Return a random mask of every parameter but the last bias, which stays dense."""
    generator = torch.Generator().manual_seed(seed)
    params = list(module.named_parameters())[:-1]
    return {name: torch.rand(p.shape, generator=generator) < density for name, p in params}


class Masked(ToyModule):
    """Moves what the masks allow."""

    def __init__(self, masks=some_masks, **options):
        super().__init__(**options)
        self.masks = masks(self)

    def configure_optimizers(self):
        return SparseSGDM(
            self.named_parameters(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=DECAY,
            masks=self.masks,
        )


class GradientsZeroed(Masked):
    """The same by torch's own SGD over all entries: no gradient and no decay where frozen."""

    def configure_optimizers(self):
        for name, p in self.named_parameters():
            mask = self.masks.get(name, torch.ones((), dtype=torch.bool))
            # with alpha, as torch's SGD does: some processors then round once, not twice
            p.register_hook(lambda g, p=p, mask=mask: g.add(p.detach(), alpha=DECAY) * mask)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Plain(ToyModule):
    def configure_optimizers(self):
        return torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=DECAY
        )


def run(kind, *callbacks, engine="sequential", ckpt_path=None, federation=None, **options):
    defaults = {
        "cohort": UniformCohort(size=3),
        "local_epochs": 2,
        "engine": engine,
        "server_optimizer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5),
    }
    seed_everything(0, verbose=False)
    module = kind()
    before = weights(module)
    given = {"data": toy_data(batch_size=4), "ckpt_path": ckpt_path, "trainer": options}
    _, trainer, block = federated(module, ahead=callbacks, **given, **defaults | (federation or {}))
    return module, before, block.rounds, trainer


def allowed(module):
    """Return which of `weights` may move."""
    parts = [
        module.masks.get(name, torch.ones_like(p, dtype=torch.bool)).flatten()
        for name, p in module.named_parameters()
    ]
    return torch.cat(parts)


def test_a_run_in_fewer_coordinates_has_the_bits_of_one_in_all():
    module, before, rounds, trainer = run(Masked)
    other, _, others_rounds, _ = run(GradientsZeroed)
    assert torch.equal(weights(module), weights(other))
    assert not torch.equal(weights(module), before)
    assert torch.equal(weights(module)[~allowed(module)], before[~allowed(module)])

    active = int(allowed(module).sum())
    assert active < len(before) / 2
    assert rounds.server.model.params.shape == (active,)
    (state,) = rounds.server.optimizer.state.values()
    assert state["momentum_buffer"].shape == (active,)
    dense = others_rounds.record.facts()["round/bytes_up"]
    saved = 4 * (len(before) - active)
    assert trainer.callback_metrics["round/bytes_up"] == dense - saved


@pytest.mark.parametrize(
    ("engine", "precision"), [("sequential", "bf16-mixed"), ("slots", "32-true")]
)
def test_frozen_entries_keep_their_bits(engine, precision):
    module, before, _, _ = run(Masked, engine=engine, precision=precision)
    after = weights(module)
    assert torch.equal(after[~allowed(module)], before.to(after.dtype)[~allowed(module)])
    assert (after != before)[allowed(module)].float().mean() > 0.9


def test_with_all_entries_it_is_sgd():
    def ones(module):
        return {n: torch.ones_like(p, dtype=torch.bool) for n, p in module.named_parameters()}

    module, *_ = run(lambda: Masked(masks=ones))
    assert torch.equal(weights(module), weights(run(Plain)[0]))


def test_a_tensor_that_is_frozen_as_a_whole_needs_no_gradient():
    class Frozen(Masked):
        def configure_optimizers(self):
            self.net[0].requires_grad_(False)
            return super().configure_optimizers()

    module, before, rounds, _ = run(Frozen)
    assert torch.equal(weights(module)[:40], before[:40])
    assert rounds.server.model.params.shape == (int(allowed(module)[40:].sum()),)


class NewMasks(Callback):
    """Sets other masks in every second round, as a recalibration does; knows them when resumed."""

    def __init__(self):
        self.version = 0

    def on_fit_start(self, trainer, module):
        trainer.optimizers[0].set_masks(some_masks(module, seed=self.version))

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch and trainer.current_epoch % 2 == 0:
            self.version = trainer.current_epoch
            self.on_fit_start(trainer, module)

    def state_dict(self):
        return {"version": self.version}

    def load_state_dict(self, state):
        self.version = state["version"]


def test_masks_may_change_between_rounds():
    module, before, rounds, _ = run(Masked, NewMasks(), max_epochs=5)
    ever = torch.zeros_like(allowed(module))
    for version in (0, 2, 4):
        module.masks = some_masks(module, seed=version)
        ever |= allowed(module)
    after = weights(module)
    assert torch.equal(after[~ever], before[~ever])
    assert (after != before)[ever].float().mean() > 0.9
    assert rounds.server.model.params.shape == (int(allowed(module).sum()),)


class Values(Callback, Stage):
    """Notes the server's model before a round, and in it."""

    def __init__(self):
        self.before, self.inside = [], []

    def note(self, where):
        rounds = self.block.rounds
        where.append((rounds.clients.local.space, rounds.server.model.params.clone()))

    def on_train_epoch_start(self, trainer, module):
        self.note(self.before)

    def open(self, round_index, model):
        self.note(self.inside)


def test_entries_that_stay_keep_the_bits_that_a_half_precision_module_lacks():
    values = Values()
    values.block = block = Federation(cohort=UniformCohort(size=3), seed=4, stages=[values])
    trainer = toy_trainer(values, NewMasks(), block, precision="bf16-true")
    trainer.fit(Masked(), datamodule=toy_data(batch_size=4))
    (old_space, old), (new_space, new) = values.before[2], values.inside[2]
    positions = new_space.positions_in(old_space)
    stays = positions >= 0
    kept = old[positions[stays]]
    assert 0 < len(kept) < len(new)
    assert not torch.equal(kept, kept.bfloat16().float())
    assert torch.equal(new[stays], kept)


def test_a_checkpoint_with_another_mask_is_refused(tmp_path):
    run(Masked, SaveEverywhere(tmp_path), max_epochs=1)
    with pytest.raises(ConfigurationError, match="another mask"):
        run(
            lambda: Masked(masks=lambda m: some_masks(m, seed=1)),
            ckpt_path=tmp_path / "0-end.ckpt",
        )


@dataclass(frozen=True)
class Only(Cohort):
    """The cohort of one client."""

    client: int

    def sample(self, round_index, population, seed):
        return np.array([self.client])

    def expected_size(self, num_clients):
        return 1


class OwnMasks(Callback):
    """Every client may move what its own random mask allows; `allowed` is the union."""

    def __init__(self, num_clients=6):
        self.num_clients = num_clients

    def on_fit_start(self, trainer, module):
        self.masks = [some_masks(module, seed=c, density=0.2) for c in range(self.num_clients)]
        module.masks = {
            name: torch.stack([masks[name] for masks in self.masks]).any(0)
            for name in self.masks[0]
        }
        trainer.optimizers[0].set_masks(module.masks)

    def client_masks(self):
        return self.masks.__getitem__


def test_a_coordinate_is_averaged_over_the_clients_that_may_move_it():
    seed_everything(0, verbose=False)
    module, data, own = Masked(), toy_data(batch_size=4), OwnMasks()
    start = copy.deepcopy(module)
    block = Federation(local_epochs=1, seed=4)  # aggregates with OverlapMean
    toy_trainer(own, block, max_epochs=1).fit(module, datamodule=data)

    sums, counts = torch.zeros(2, len(weights(start)), dtype=torch.float64)
    for client in range(6):  # each alone, as if it were the only one
        alone = copy.deepcopy(start)
        alone.masks = own.masks[client]
        only = Federation(cohort=Only(client), local_epochs=1, seed=4)
        toy_trainer(only, max_epochs=1).fit(alone, datamodule=toy_data(batch_size=4))
        may = allowed(alone).double() * int(data.clients.num_examples[client])
        sums += may * (weights(start) - weights(alone))
        counts += may
    expected = weights(start) - sums / counts.clamp(min=1)
    assert torch.allclose(weights(module), expected, rtol=1e-5, atol=1e-7)
    untouched = counts == 0
    assert untouched.any()
    assert torch.equal(weights(module)[untouched], weights(start)[untouched])


def test_only_a_clients_own_coordinates_travel():
    _, _, rounds, trainer = run(Masked, OwnMasks(), federation={"aggregator": OverlapMean()})
    active = [
        int(rounds.clients.local.space.coordinates(m).sum()) for m in trainer.callbacks[0].masks
    ]
    chosen = rounds.record.finished
    mean = 4 * sum(active[client] for client in chosen) / len(chosen)
    all_coordinates = 4 * rounds.server.model.params.numel()
    header = trainer.callback_metrics["round/bytes_down"] - mean
    assert 0 < header < 400
    assert mean < 0.7 * all_coordinates


def test_other_aggregators_are_refused():
    with pytest.raises(ConfigurationError, match="set aggregator to OverlapMean"):
        run(Masked, OwnMasks(), federation={"aggregator": Median()})


def test_clients_find_their_masks_by_the_model_they_are_sent():
    """A mask for every client, calibrated when it first takes part; processes change nothing."""

    class Tiny(ToyModule):
        def forward(self, x):
            return self.net(x)

        def configure_optimizers(self):
            return SparseSGDM(self.parameters(), lr=self.lr, momentum=self.momentum)

    ends = []
    for options in ({}, {"devices": 2}):
        calibration = MaskCalibration(
            density=0.3, rounds=2, per_client=True, include=["net.0.*"], head_name="net.4"
        )
        module, before, _, _ = run(Tiny, calibration, **options)
        ends.append(weights(module))
    assert torch.allclose(*ends, rtol=1e-4, atol=1e-6)
    moved = (ends[0] != before)[:40].float().mean()
    assert 0.3 < moved < 1.0  # the union of masks that differ


def test_clients_with_masks_of_their_own_train_one_after_the_other(caplog):
    with pytest.warns(UserWarning, match="clients have masks of their own"):
        run(Masked, OwnMasks(), engine="slots")
