"""DP-SGD inside the clients of a run: off is plain, noise is what is accounted, nothing twice."""

import math

import numpy as np
import pytest
import torch
from test_masks import Masked
from test_privacy import facts
from torch.utils.data import DataLoader, WeightedRandomSampler
from toys import Given, SaveEverywhere, ToyData, ToyModule, federated, toy_data, weights

from fl_lightning import (
    ConfigurationError,
    ExampleDP,
    Federation,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client.devices import Devices, LogNormalSpeeds
from fl_lightning.data.cohorts.cohort import AllClients
from fl_lightning.data.cohorts.weighted_cohorts import BySizeCohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.privacy.mechanism import AccountedRun, LocalSampling
from fl_lightning.server.robust.rule import Median
from fl_lightning.updates import TopK

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")
LARGE = 64  # a batch that holds every shard


def run(
    max_epochs=3, *callbacks, module=ToyModule, data=None, batch_size=8, trainer=None, **options
):
    options = {"local_steps": 2, **options}
    options["trainer"] = {"max_epochs": max_epochs, **(trainer or {})}
    data = data or toy_data(batch_size=batch_size)
    return federated(module, *callbacks, data=data, **options)[:2]


def private(**options):
    defaults = {"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3, "secure_noise": False}
    return ExampleDP(**{**defaults, **options})


def still_module():
    torch.manual_seed(1)
    return ToyModule(scheduler=False, momentum=0.0)


def test_gradients_by_example_of_which_none_is_clipped_are_plain_sgds():
    """Batches that hold the whole shard are the same with coins and without; off: `test_families_off`."""
    plain, _ = run(batch_size=LARGE, engine="sequential")
    wide, _ = run(batch_size=LARGE, privacy=private(clip_norm=1e6, noise_multiplier=0.0))
    assert not torch.equal(weights(wide), weights(plain))
    assert torch.allclose(weights(wide), weights(plain), atol=1e-6)


@pytest.mark.parametrize("batch_size", [8, LARGE])
def test_the_noise_has_the_stated_variance(batch_size):
    """With gradients clipped to nothing a client moves by lr · z S / min(B, n) in each step."""
    start, privacy = weights(still_module()), private(clip_norm=1e-3, noise_multiplier=1e6)
    sizes = toy_data().clients.num_examples
    module, trainer = run(1, module=still_module(), batch_size=batch_size, privacy=privacy)
    shares = sizes / sizes.sum() / [min(batch_size, n) for n in sizes]
    expected = 0.1 * math.sqrt(2) * 1e3 * math.sqrt((shares**2).sum())
    assert float((weights(module) - start).std()) == pytest.approx(expected, rel=0.3)
    largest = 1e3 / min(batch_size, sizes.min())
    assert facts(trainer)["privacy/noise_stddev"] == pytest.approx(largest)


def test_a_step_without_examples_is_noise_as_well():
    """Of five examples none is drawn in most steps of expected size one."""
    start, privacy = weights(still_module()), private(noise_multiplier=50.0)
    module, _ = run(1, module=still_module(), batch_size=1, local_steps=20, privacy=privacy)
    assert float((weights(module) - start).std()) > 0.1 * 50 * 0.5


def test_what_is_said_logged_and_accounted(caplog):
    with caplog.at_level("INFO"):
        privacy = private(clip_norm=1.0, log_unprotected=True)
        _, trainer = run(privacy=privacy, cohort=UniformCohort(size=3))
    [said] = [r.message for r in caplog.records if r.message.startswith("privacy: ε")]
    sizes = toy_data().clients.num_examples
    local = LocalSampling(sizes, 8, sizes * 0 + 2)
    made = private().mechanism(AccountedRun(UniformCohort(size=3), 6, 3, seed=4, local=local))
    epsilon = made.epsilon(3)
    known = (
        f"({epsilon:.4g} without amplification by sampling)"  # somebody's batches are all it has
    )
    assert f"ε = {epsilon:.4g} at δ = 0.001 after 3 rounds {known}; unit: example" in said
    logged = facts(trainer)
    assert logged["privacy/epsilon"] == pytest.approx(epsilon, rel=1e-4)
    assert 0 < logged["privacy/clip_fraction"] < 1
    assert 0 < float(trainer.callback_metrics["train/accuracy"]) <= 1
    _, silent = run(1, privacy=private())
    names = {name for name in silent.callback_metrics if not name.startswith(("val", "privacy"))}
    assert names == {"round/update_norm"}
    assert "privacy/clip_fraction" not in facts(silent)


def test_every_step_of_local_epochs_is_accounted():
    sizes = toy_data().clients.num_examples
    local = LocalSampling(sizes, 8, 3 * -(-sizes // 8))
    made = private().mechanism(AccountedRun(UniformCohort(size=3), 6, 2, seed=4, local=local))
    _, trainer = run(
        2,
        privacy=private(),
        cohort=UniformCohort(size=3),
        local_steps=None,
        local_epochs=3,
    )
    assert facts(trainer)["privacy/epsilon"] == pytest.approx(made.epsilon(2), rel=1e-4)


def test_steps_that_nobody_counted_are_refused():
    local = LocalSampling(np.array([10]), 8, np.array([2]))
    rounds = ExampleRounds(private(), AccountedRun(AllClients(), 1, 1, seed=4, local=local))
    _, sizes = rounds.batches(torch.arange(10), 8, 2, 0, 0)
    assert len(sizes) == 2
    with pytest.raises(
        ConfigurationError, match="client 0 would take 3 local steps, and its ε counts 2"
    ):
        rounds.batches(torch.arange(10), 8, 3, 0, 0)


def test_a_budget_ends_the_run_and_noise_is_found_for_one():
    _, trainer = run(50, privacy=private(epsilon=12.0))
    assert 0 < trainer.current_epoch < 50
    assert facts(trainer)["privacy/epsilon"] <= 12.0
    _, longer = run(trainer.current_epoch + 1, privacy=private())
    assert facts(longer)["privacy/epsilon"] > 12.0
    _, found = run(4, privacy=private(noise_multiplier=None, epsilon=3.0))
    assert found.current_epoch == 4
    assert facts(found)["privacy/epsilon"] == pytest.approx(3.0, abs=1e-3)
    with pytest.raises(ConfigurationError, match="one round costs"):
        run(privacy=private(epsilon=0.1))


def test_a_resumed_run_draws_other_noise_and_other_costs_are_refused(tmp_path):
    """No round's noise is that of another: the same model and gradient, moved apart."""
    options = {"privacy": private(clip_norm=1e-6, noise_multiplier=1e5), "module": still_module()}
    start = weights(still_module())
    module, _ = run(2, SaveEverywhere(tmp_path), **options)
    middle = torch.load(tmp_path / "0-end.ckpt", weights_only=True)["state_dict"]
    middle = torch.cat([t.double().flatten() for t in middle.values()])
    one, two = middle - start, weights(module) - middle
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.5
    path = tmp_path / "1-end.ckpt"
    others = ({"privacy": private(noise_multiplier=2.0)}, {"local_steps": 3})
    for other in (*others, {"cohort": UniformCohort(size=1)}):
        with pytest.raises(ConfigurationError, match="privacy cost is therefore another"):
            run(4, ckpt_path=path, **{**options, **other})


def test_secure_noise_and_batches_differ_from_run_to_run():
    one, _ = run(1, privacy=private(secure_noise=True))
    other, _ = run(1, privacy=private(secure_noise=True))
    assert not torch.equal(weights(one), weights(other))


@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": Median()},
        {"updates": [TopK(0.5)]},
        {"correction": Scaffold()},
        {"trainer": {"gradient_clip_val": 1.0}},
        {"devices": Devices(speeds=LogNormalSpeeds(), drop_rate=0.3)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_follows_from_private_updates_is_allowed(options):
    module = ToyModule(momentum=0.0)
    module, trainer = run(1, privacy=private(), module=module, **options)
    assert bool(weights(module).isfinite().all())
    assert facts(trainer)["privacy/epsilon"] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"correction": Scaffold(option="I")}, "Scaffold uses a client's examples"),
        ({"engine": "slots"}, "set engine to sequential"),
        ({"speedups": ["channels_last"]}, "leave speedups out"),
        ({"cohort": BySizeCohort(size=2)}, "set federation.cohort to one of"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_steps_that_nobody_counts_are_refused_at_construction(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        Federation(privacy=private(), **options)


class Mixing(ToyModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + x.flip(0), y


class Looking(ToyModule):
    def on_after_backward(self):
        pass


@pytest.mark.parametrize(
    ("module", "trainer", "reason"),
    [
        (ToyModule(batch_norm=True), {}, r"net\.1 \(BatchNorm1d\) mixes the examples of a batch"),
        (Mixing(), {}, "hooks around batches in module or data module may mix"),
        (Looking(), {}, "Looking defines on_after_backward"),
        (ToyModule(), {"accumulate_grad_batches": 2}, "accumulate_grad_batches to 1"),
        (ToyModule(), {"precision": "bf16-mixed"}, "precision bf16-mixed rounds gradients"),
    ],
)
def test_what_mixes_examples_is_refused_before_training(module, trainer, reason):
    with pytest.raises(ConfigurationError, match=reason):
        run(module=module, trainer=trainer, privacy=private())


@pytest.mark.parametrize("shards", [[[0, 1, 1], [2]], [[0, 1, 2], [2, 3]]])
def test_examples_that_would_count_twice_are_refused(shards):
    data = toy_data(num_clients=2, partition=Given(shards))
    with pytest.raises(ConfigurationError, match="1 examples occur more than once"):
        run(1, data=data, privacy=private())
    run(1, data=toy_data(num_clients=2, partition=Given([[0, 1], [2, 3]])), privacy=private())


def test_draws_by_weight_are_refused():
    class Weighted(ToyData):
        def train_dataloader(self):
            sampler = WeightedRandomSampler([1.0] * 60, 60)
            return DataLoader(self.train, batch_size=8, sampler=sampler)

    data = FederatedDataModule(Weighted(), num_clients=3, seed=0)
    with pytest.raises(ConfigurationError, match="draws examples by weight or with replacement"):
        run(1, data=data, privacy=private())


def test_with_a_mask_only_what_may_move_is_clipped_and_noisy():
    torch.manual_seed(1)
    module = Masked()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    _, trainer = run(2, module=module, privacy=private(clip_norm=1e-3, noise_multiplier=1e4))
    masks = dict(trainer.optimizers[0].masks.items())
    assert masks
    for name, param in module.named_parameters():
        moved = param.detach() != start[name]
        assert torch.equal(moved, masks.get(param, torch.ones_like(moved)))
