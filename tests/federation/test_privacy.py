"""Private rounds: off is exactly off, the noise is what was asked for, nothing is spent twice."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from toys import SaveEverywhere, ToyData, ToyModule, federated, toy_data, toy_trainer, weights

from fl_lightning import (
    BandedMatrixDP,
    CentralDP,
    ConfigurationError,
    DistributedDP,
    ExampleDP,
    FederatedDataModule,
    Federation,
    FedProx,
    LocalDP,
    PoissonCohort,
    RoundFailure,
    UniformCohort,
)
from fl_lightning.data import FederatedNormalize
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.stages.private_rounds import kept_secret
from fl_lightning.privacy.accounting.accountant import Accountant, Sampling
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.banded import BandedGaussian
from fl_lightning.privacy.mechanism import AccountedRun
from fl_lightning.privacy.noise.grid import GRID_COST
from fl_lightning.privacy.private_mean import AdaptiveClip
from fl_lightning.server.server import Server
from fl_lightning.updates import ErrorFeedback, RandomK, TopK

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")


def run(
    max_epochs=3,
    callbacks=(),
    ckpt_path=None,
    module=ToyModule,
    data=None,
    devices=1,
    limit_val_batches=0,
    **options,
):
    limits = {"devices": devices, "limit_val_batches": limit_val_batches}
    trainer = {"max_epochs": max_epochs, **limits}
    options = {"engine": "sequential", **options}
    given = {"data": data, "ckpt_path": ckpt_path, "trainer": trainer}
    return federated(module, *callbacks, **given, **options)[:2]


def private(**options):
    defaults = {"clip_norm": 0.1, "noise_multiplier": 1.0, "delta": 1e-3, "secure_noise": False}
    return CentralDP(**{**defaults, **options})


def facts(trainer):
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("privacy/")}


def test_an_empty_round_releases_noise_over_the_expected_cohort():
    """Nobody replies in ten rounds: the model has moved by ten draws of known spread."""
    cohort = PoissonCohort(fraction=1e-9)
    start = weights(still_module())
    privacy = private(clip_norm=1e-8, noise_multiplier=3.0)
    module, trainer = run(10, privacy=privacy, cohort=cohort, module=still_module())
    moved = weights(module) - start
    stddev = 3.0 * 1e-8 / (6 * 1e-9)
    assert facts(trainer)["privacy/noise_stddev"] == pytest.approx(stddev)
    assert float(moved.std()) == pytest.approx(stddev * math.sqrt(10), rel=0.3)


def still_module():
    torch.manual_seed(1)
    return ToyModule(scheduler=False)


def test_what_is_logged():
    _, trainer = run(privacy=private(epsilon=50.0), cohort=PoissonCohort(fraction=0.5))
    logged = facts(trainer)
    assert logged["privacy/clip_norm"] == pytest.approx(0.1)
    assert logged["privacy/noise_stddev"] == pytest.approx(0.1 / 3)
    assert 0 <= logged["privacy/clip_fraction"] <= 1
    assert logged["privacy/epsilon"] + logged["privacy/budget_left"] == pytest.approx(50.0)
    assert "train/loss" in trainer.callback_metrics


def test_what_no_noise_covers_can_be_left_out(tmp_path):
    callbacks = [SaveEverywhere(tmp_path)]
    privacy = private(log_unprotected=False)
    _, trainer = run(privacy=privacy, callbacks=callbacks)
    names = {name for name in trainer.callback_metrics if not name.startswith(("val", "privacy"))}
    assert names == {"round/update_norm"}
    for path in tmp_path.glob("*.ckpt"):
        state = torch.load(path, weights_only=True)["callbacks"]["Federation"]
        assert "round" not in state["server"]
        assert state["record"]["finished"] == []


def test_a_budget_ends_the_run_with_its_last_model(tmp_path):
    privacy = private(epsilon=8.0, noise_multiplier=2.0)
    module, trainer = run(50, privacy=privacy, callbacks=[SaveEverywhere(tmp_path)])
    done = trainer.current_epoch
    assert 0 < done < 50
    assert facts(trainer)["privacy/epsilon"] <= 8.0
    last = torch.load(tmp_path / f"{done - 1}-end.ckpt", weights_only=True)
    assert last["callbacks"]["Federation"]["stages"]["privacy"]["released"] == done
    assert torch.equal(last["state_dict"]["net.0.weight"], module.net[0].weight)
    # the next round would have exceeded it, also for a run that is resumed with more rounds
    again, resumed = run(80, privacy=privacy, ckpt_path=tmp_path / f"{done - 1}-end.ckpt")
    assert resumed.current_epoch == done
    assert torch.equal(weights(again), weights(module))
    _, longer = run(done + 1, privacy=private(noise_multiplier=2.0))
    assert facts(longer)["privacy/epsilon"] > 8.0


@pytest.fixture(scope="module")
def after_two_rounds(tmp_path_factory):
    """Options of a run, and its checkpoint."""
    folder, cohort = tmp_path_factory.mktemp("two"), PoissonCohort(fraction=0.5)
    run(2, callbacks=[SaveEverywhere(folder)], privacy=private(), cohort=cohort)
    return {"ckpt_path": folder / "1-end.ckpt", "cohort": cohort}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"clip_norm": 0.2}, "clip_norm was 0.1, not 0.2"),
        (
            {"adaptive_clip": AdaptiveClip(bits_stddev=2.0)},
            "adaptive_clip was None, not AdaptiveClip",
        ),
        ({"secure_noise": True}, "secure_noise was False, not True"),
        ({"accountant": "rdp"}, "privacy cost is therefore another"),
        ({"noise_multiplier": 2.0}, "noise_multiplier was 1, not 2"),
        ({"epsilon": 30.0, "delta": 1e-4, "log_unprotected": False}, None),
    ],
)
def test_every_option_that_changes_when_resuming_is_refused_or_counted(
    after_two_rounds, changed, says
):
    options = {**after_two_rounds, "privacy": private(**changed)}
    if says is not None:
        with pytest.raises(ConfigurationError, match=says):
            run(3, **options)
        return
    _, trainer = run(3, **options)
    _, whole = run(3, privacy=private(**changed), cohort=options["cohort"])
    assert facts(trainer)["privacy/epsilon"] == facts(whole)["privacy/epsilon"]


def test_a_run_without_privacy_or_of_another_cohort_is_no_continuation(after_two_rounds):
    with pytest.raises(ConfigurationError, match="privacy"):
        run(4, **after_two_rounds)
    with pytest.raises(ConfigurationError, match="privacy cost is therefore another"):
        run(4, **{**after_two_rounds, "privacy": private(), "cohort": None})


def test_a_checkpoint_of_other_cohorts_is_refused_even_if_they_cost_the_same_in_the_end(tmp_path):
    """By twos or by threes: after four rounds somebody has had two turns."""
    options = {"noise_multiplier": 2.0, "clip_norm": 0.1, "delta": 1e-3, "secure_noise": False}
    privacy = LocalDP(**options)
    cohorts = [RoundRobinCohort(size=size) for size in (2, 3)]
    said = [str(privacy.mechanism(AccountedRun(c, 6, 4, seed=4))) for c in cohorts]
    assert said[0] == said[1]
    run(4, callbacks=[SaveEverywhere(tmp_path)], privacy=privacy, cohort=cohorts[0])
    with pytest.raises(
        ConfigurationError, match=r"RoundRobinCohort.*size=2.* cost is therefore another"
    ):
        run(4, ckpt_path=tmp_path / "1-end.ckpt", privacy=privacy, cohort=cohorts[1])


@pytest.mark.parametrize("kind", [LocalDP, DistributedDP])
def test_more_rounds_may_follow_where_clients_add_the_noise(kind, tmp_path):
    privacy = kind(clip_norm=0.1, noise_multiplier=2.0, delta=1e-3, secure_noise=False)
    run(2, callbacks=[SaveEverywhere(tmp_path)], privacy=privacy)
    _, resumed = run(4, ckpt_path=tmp_path / "1-end.ckpt", privacy=privacy)
    assert facts(resumed) == facts(run(4, privacy=privacy)[1])


def test_noise_is_found_for_a_budget_and_kept_when_more_rounds_are_asked_for(tmp_path):
    privacy = private(epsilon=4.0, noise_multiplier=None)
    _, trainer = run(3, callbacks=[SaveEverywhere(tmp_path)], privacy=privacy)
    assert trainer.current_epoch == 3
    assert 4.0 - 1e-3 < facts(trainer)["privacy/epsilon"] <= 4.0
    _, resumed = run(9, ckpt_path=tmp_path / "2-end.ckpt", privacy=privacy)
    more(trainer, 4)
    assert resumed.current_epoch == trainer.current_epoch == 3  # all of it was spent in those three


def more(trainer, max_epochs):
    """Fit once more with the same Trainer."""
    trainer.fit_loop.max_epochs = max_epochs
    trainer.should_stop = False
    trainer.fit(trainer.lightning_module, datamodule=trainer.datamodule)


def test_a_trainer_that_fits_again_counts_on():
    privacy = private(
        epsilon=6.0, noise_multiplier=2.0, adaptive_clip=AdaptiveClip(bits_stddev=2.0)
    )
    _, trainer = run(2, privacy=privacy)
    after_two = facts(trainer)
    more(trainer, 4)
    _, whole = run(4, privacy=privacy)
    assert facts(trainer)["privacy/epsilon"] == pytest.approx(facts(whole)["privacy/epsilon"])
    assert facts(trainer)["privacy/clip_norm"] != after_two["privacy/clip_norm"]
    more(trainer, 50)
    assert 4 < trainer.current_epoch < 50
    assert facts(trainer)["privacy/epsilon"] <= 6.0


def test_a_checkpoint_of_central_training_is_no_start(tmp_path):
    central = toy_trainer(max_epochs=1)
    central.fit(ToyModule(), datamodule=toy_data())
    central.save_checkpoint(tmp_path / "central.ckpt")
    with pytest.raises(ConfigurationError, match=r"central.ckpt has no rounds .*checkpoint_path"):
        run(privacy=private(), ckpt_path=tmp_path / "central.ckpt")


def test_a_trainer_that_fits_again_after_rounds_of_unknown_cost_is_refused():
    _, trainer = run(1)
    trainer.callbacks[0] = Federation(seed=4, engine="sequential", privacy=private())
    with pytest.raises(ConfigurationError, match="whose privacy cost is unknown"):
        more(trainer, 2)


class Cohorts(Callback):
    """Notes who took part, which all processes must agree on."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, module):
        rounds = trainer.callbacks[0].rounds
        cohorts, ids = rounds.run.cohorts, sorted(rounds.record.finished)
        drawn = cohorts._sampler.sample(trainer.current_epoch, cohorts.population, cohorts.seed)
        assert ids == drawn.tolist()
        told = Ranks(trainer).gather((ids, cohorts.seed))
        assert told == [told[0]] * trainer.world_size
        assert cohorts.seed >= 2**255
        self.seen.append(ids)


@pytest.mark.parametrize("cohort", [PoissonCohort(fraction=0.5), UniformCohort(size=3)])
def test_cohorts_that_amplify_follow_from_nothing_that_is_shared(cohort, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"privacy": private(secure_noise=True), "cohort": cohort}
    seen, other, resumed = Cohorts(), Cohorts(), Cohorts()
    run(5, callbacks=[seen, SaveEverywhere(tmp_path)], **options)
    run(5, callbacks=[other], **options)
    public = [cohort.sample(r, Population(np.ones(6, int)), seed=4).tolist() for r in range(5)]
    assert seen.seen != other.seen
    assert public not in (seen.seen, other.seen)
    # a checkpoint holds neither the secret nor who took part
    path = tmp_path / "2-end.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]["Federation"]
    assert state["population"]["clients"].tolist() == state["record"]["finished"] == []
    assert not any(state["record"]["means"].values())
    assert not list(tmp_path.rglob("*.secret"))
    # … and a resumed run draws the rounds to come anew, from inside a round and in several processes as well
    _, trainer = run(5, callbacks=[resumed], ckpt_path=path, **options)
    inside, both = Cohorts(), Cohorts()
    run(5, callbacks=[inside], ckpt_path=tmp_path / "3-trained.ckpt", **options)
    assert [len(some.seen) for some in (resumed, inside)] == [2, 1]
    run(4, callbacks=[both], ckpt_path=path, devices=2, **options)
    # at the same ε: rounds are drawn independently
    once = run(5, **options)[1]
    assert facts(trainer)["privacy/epsilon"] == facts(once)["privacy/epsilon"]


def test_where_cohorts_are_known_both_epsilons_are_told(caplog):
    caplog.set_level("INFO")
    cohort = PoissonCohort(fraction=0.5)
    _, trainer = run(5, privacy=private(), cohort=cohort)
    everybody = Population(np.ones(6, int))
    turns = np.bincount(np.concatenate([cohort.sample(r, everybody, 4) for r in range(5)])).max()
    known = gaussian_epsilon(1 / GRID_COST / math.sqrt(turns), 1e-3)
    logged = facts(trainer)
    assert logged["privacy/epsilon_unamplified"] == pytest.approx(known)
    assert logged["privacy/epsilon"] < known
    assert f"rounds ({known:.4g} without amplification by sampling)" in caplog.text
    for other in (
        {"privacy": private()},
        {"privacy": private(secure_noise=True), "cohort": cohort},
    ):
        _, trainer = run(1, **other)
        assert "privacy/epsilon_unamplified" not in facts(trainer)


def test_a_model_that_trains_again_in_another_trainer_counts_on(caplog):
    """ε and δ of its fits add up, also of those in forked processes."""
    caplog.set_level("INFO")
    options = {"privacy": private(secure_noise=True), "cohort": PoissonCohort(fraction=0.5)}
    one = Accountant(Sampling("poisson", 6, 3.0), 1 / GRID_COST).epsilon(3, 1e-3)
    module, once = run(3, **options)
    _, twice = run(3, module=module, **options)
    assert facts(once)["privacy/epsilon"] == pytest.approx(one)
    assert facts(twice)["privacy/epsilon"] == pytest.approx(2 * one)
    assert "by earlier fits of this model" in caplog.text
    local = LocalDP(clip_norm=0.1, noise_multiplier=20.0, delta=1e-3)
    _, third = run(2, module=module, privacy=local, devices=2)
    alone = gaussian_epsilon(20.0 / 2 / GRID_COST / math.sqrt(2), 1e-3)
    assert facts(third)["privacy/epsilon"] == pytest.approx(2 * one + alone, rel=1e-3)
    _, fourth = run(2, module=module, privacy=local)
    assert facts(fourth)["privacy/epsilon"] == pytest.approx(2 * (one + alone), rel=1e-3)
    assert "at δ = 0.004" in caplog.text
    with pytest.raises(ConfigurationError, match="earlier fits of this model have spent"):
        run(1, module=module, privacy=private(epsilon=4.0))


def test_secure_noise_differs_from_run_to_run():
    one, _ = run(1, privacy=private(secure_noise=True))
    other, _ = run(1, privacy=private(secure_noise=True))
    assert not torch.equal(weights(one), weights(other))


def test_the_clip_norm_follows_the_updates():
    privacy = private(clip_norm=1e-3, noise_multiplier=0.0, adaptive_clip=AdaptiveClip())
    _, trainer = run(3, privacy=privacy)  # all updates are longer
    norm = 1e-3 * math.exp(0.2 * 0.5) ** 2
    assert facts(trainer)["privacy/clip_norm"] == pytest.approx(norm)
    assert facts(trainer)["privacy/noisy_clip_fraction"] == pytest.approx(1.0)


def test_what_ε_does_not_cover_is_named():
    module = ToyModule(batch_norm=True)
    data = toy_data(batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match="privacy") as caught:
        run(1, module=module, data=data, privacy=private(delta=0.5))
    said = " ".join(str(warning.message) for warning in caught)
    for word in ("norms of clients", "batch norm", "1 / 6 (clients)", "seed"):
        assert word in said
    assert float(module.net[1].running_var.sub(1).abs().max()) == 0  # it did not move


def test_a_buffer_that_no_step_changes_is_not_named_among_what_stays():
    module = ToyModule()
    module.register_buffer("inv_freq", torch.ones(16))  # as for rotary positions
    with pytest.warns(UserWarning, match="privacy") as caught:
        run(1, module=module, privacy=private(delta=0.5))
    assert not [w for w in caught if "buffers" in str(w.message)]


def test_a_correction_that_stays_with_the_client_is_allowed():
    none, _ = run(1, privacy=private())
    prox, _ = run(1, privacy=private(), correction=FedProx(mu=10.0))
    assert not torch.equal(weights(none), weights(prox))


@pytest.mark.parametrize(
    ("kind", "cohort", "stddev"),
    [
        (CentralDP, UniformCohort(size=3), 2.0 * 0.1 / 3),
        (BandedMatrixDP, RoundRobinCohort(size=2), None),
        (LocalDP, UniformCohort(size=3), 2.0 * 0.1 / math.sqrt(3)),
        (DistributedDP, UniformCohort(size=3), 2.0 * 0.1 / 3),
    ],
)
def test_what_is_logged_is_the_mechanisms(kind, cohort, stddev):
    privacy = kind(clip_norm=0.1, noise_multiplier=2.0, delta=1e-3, secure_noise=False)
    logged = facts(run(4, privacy=privacy, cohort=cohort)[1])
    mechanism = privacy.mechanism(AccountedRun(cohort, 6, 4, 4, num_coordinates=67))
    assert logged["privacy/epsilon"] == pytest.approx(mechanism.epsilon(4), rel=1e-5)
    if stddev is not None:
        assert logged["privacy/noise_stddev"] == pytest.approx(stddev)


def test_a_round_that_is_undone_after_its_noise_leaves_no_row_of_it(monkeypatch):
    """A checkpoint of then trains the round again."""
    mechanisms, descend, released = [], Server._descend, BandedGaussian.released

    def keep(self, *sums):
        mechanisms.append(self)
        return released(self, *sums)

    def fail_once(self, gradient):
        if self.round_index == 1:
            raise RoundFailure("undone")
        descend(self, gradient)

    monkeypatch.setattr(BandedGaussian, "released", keep)
    monkeypatch.setattr(Server, "_descend", fail_once)
    privacy = BandedMatrixDP(clip_norm=0.1, noise_multiplier=2.0, delta=1e-3)
    with pytest.raises(RoundFailure, match="undone"):
        run(4, privacy=privacy, cohort=RoundRobinCohort(size=2))
    assert len(mechanisms) == 2
    assert mechanisms[-1].state_dict()["index"] == 1


def test_local_noise_is_in_the_sum_and_the_server_adds_none():
    """Updates are 0 (learning rate 0), so that what moves the model is the clients' noise."""
    module = ToyModule(lr=0.0, scheduler=False)
    start = weights(module)
    privacy = LocalDP(clip_norm=1.0, noise_multiplier=3.0, secure_noise=False)
    module, _ = run(1, module=module, privacy=privacy)
    moved = weights(module) - start
    assert float(moved.std()) == pytest.approx(3.0 / math.sqrt(6), rel=0.25)


def test_too_few_shares_are_not_released():
    privacy = DistributedDP(clip_norm=0.1, noise_multiplier=2.0, min_shares=5, secure_noise=False)
    with pytest.raises(RoundFailure, match="sum of their noise is too small"):
        run(1, privacy=privacy, cohort=UniformCohort(size=3))


@pytest.mark.parametrize("options", [{"limit_train_batches": 0.5}, {"fast_dev_run": True}])
def test_a_part_of_a_cohort_is_refused(options):
    trainer = toy_trainer(Federation(privacy=private(), engine="sequential"), **options)
    with pytest.raises(ConfigurationError, match="is then no random sample"):
        trainer.fit(ToyModule(), datamodule=toy_data())


@pytest.mark.parametrize("kind", [CentralDP, ExampleDP])
def test_inputs_that_depend_on_everybody_are_refused(kind):
    data = FederatedDataModule(ToyData(), num_clients=3, transforms=[FederatedNormalize()])
    privacy = kind(clip_norm=0.1, noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="FederatedNormalize in data"):
        run(privacy=privacy, data=data)


class Plateau(ToyModule):
    def __init__(self, monitor):
        super().__init__()
        self.monitor = monitor

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": self.monitor}]


@pytest.mark.parametrize(
    ("kind", "monitor"), [(CentralDP, "train/loss"), (ExampleDP, "round/client_update_norm")]
)
def test_a_learning_rate_that_follows_clients_numbers_is_refused(kind, monitor):
    options = {"clip_norm": 0.1, "noise_multiplier": 1.0, "delta": 1e-3, "secure_noise": False}
    privacy = kind(**options, log_unprotected=True)
    module = Plateau(monitor)
    with pytest.raises(ConfigurationError, match=f"the learning rate by {monitor}"):
        run(1, module=module, privacy=privacy)
    for protected in ("round/update_norm", "val/loss"):
        _, trainer = run(1, module=Plateau(protected), privacy=privacy, limit_val_batches=1.0)
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_callbacks_that_look_at_clients_numbers_are_named():
    stopping = [EarlyStopping("train/accuracy"), EarlyStopping("val/loss")]
    stopping.append(EarlyStopping("privacy/clip_fraction"))
    with pytest.warns(UserWarning, match="which models are kept") as caught:
        run(1, privacy=private(), callbacks=stopping, limit_val_batches=1.0)
    [said] = [str(w.message) for w in caught if "are kept" in str(w.message)]
    named = "EarlyStopping (train/accuracy), EarlyStopping (privacy/clip_fraction)"
    assert said.endswith(f"are kept: {named}")


def test_of_two_processes_the_first_draws_the_noise_of_a_secure_generator():
    class SameModel(Callback):
        def on_train_epoch_end(self, trainer, module):
            first, second = Ranks(trainer).gather(weights(module))
            assert torch.equal(first, second)

    run(2, devices=2, callbacks=[SameModel()], privacy=private(secure_noise=True))


ASKED_FOR = ErrorFeedback([TopK(0.5)], under_privacy=True)


@pytest.mark.parametrize("transform", [RandomK(1 / 16), ASKED_FOR], ids=["random", "feedback"])
def test_compression_does_not_break_the_bound(transform):
    """Sixteen-fold random-k makes updates longer; they are clipped again where they arrive."""
    start = weights(still_module())
    privacy = private(clip_norm=1e-3, noise_multiplier=0.0)
    module, _ = run(1, module=still_module(), privacy=privacy, updates=[transform])
    assert 0 < float((weights(module) - start).norm()) <= 1e-3 * (1 + 1e-4)


def test_memories_under_privacy_must_be_asked_for():
    with pytest.raises(ConfigurationError, match="set its under_privacy to true"):
        Federation(privacy=private(), updates=[ErrorFeedback([TopK(0.5)])])


def test_over_a_network_a_resumed_run_draws_from_its_secret(tmp_path):
    def trainer(ckpt_path=None):
        made = Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu")
        made.ckpt_path = ckpt_path
        return made

    first = kept_secret(trainer())
    assert (tmp_path / "cohorts.secret").stat().st_mode & 0o777 == 0o600
    assert kept_secret(trainer("last.ckpt")) == first
    assert kept_secret(trainer()) != first  # another run in the same folder
