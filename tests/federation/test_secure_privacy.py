"""Private sums that the server cannot read, and cohorts too small to be hidden in."""

import pytest
import torch
from test_privacy import facts
from test_secure import Facts
from toys import SaveEverywhere, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import (
    ConfigurationError,
    DistributedDP,
    Federation,
    PoissonCohort,
    RoundFailure,
    UniformCohort,
)
from fl_lightning.client.devices import Devices, LogNormalSpeeds
from fl_lightning.data.cohorts.population import Population
from fl_lightning.secure import EncryptedMean, SecureMean

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")
DEVICES = Devices(speeds=LogNormalSpeeds(), drop_rate=0.15)
SMALL = PoissonCohort(fraction=0.3)  # of six clients


def run(max_epochs=3, callbacks=(), ckpt_path=None, trainer=None, **options):
    torch.manual_seed(0)
    federation = Federation(**{"seed": 4, "engine": "sequential", "local_steps": 2, **options})
    limits = {"max_epochs": max_epochs, **(trainer or {})}
    trainer = toy_trainer(federation, *callbacks, **limits)
    module = ToyModule()
    trainer.fit(module, datamodule=toy_data(), ckpt_path=ckpt_path)
    return module, trainer


def shared(**options):
    defaults = {"clip_norm": 0.1, "noise_multiplier": 2.0, "delta": 1e-3, "secure_noise": False}
    return DistributedDP(**{**defaults, **options})


@pytest.mark.parametrize("protocol", ["run", "count"])
def test_a_private_secure_run_is_the_one_with_sums_in_the_clear(protocol):
    clear, trainer = run(privacy=shared(min_shares=5))
    secure, hidden = run(privacy=shared(), aggregator=SecureMean(protocol=protocol))
    assert torch.allclose(weights(secure), weights(clear), atol=1e-6)
    assert facts(hidden) == pytest.approx(facts(trainer))


def test_clients_that_drop_leave_enough_noise_and_runs_resume(tmp_path):
    seen = Facts()
    options = {"privacy": shared(log_unprotected=True), "devices": DEVICES}
    options["aggregator"] = SecureMean(threshold=0.5)
    module, trainer = run(4, callbacks=[seen, SaveEverywhere(tmp_path)], **options)
    assert {row["round/lost"] for row in seen.rows} == {1.0, 2.0}
    again, resumed = run(4, ckpt_path=tmp_path / "1-end.ckpt", **options)
    assert torch.equal(weights(again), weights(module))
    assert facts(resumed) == facts(trainer)
    two = {"devices": 2}
    together, _ = run(4, trainer=two, **options)
    assert torch.equal(weights(together), weights(module))
    with pytest.raises(RoundFailure, match="the secure sum of"):
        run(4, **{**options, "privacy": shared(min_shares=6)})


def test_what_is_said(caplog):
    with caplog.at_level("INFO"):
        run(1, privacy=shared(), aggregator=SecureMean())
    said = " ".join(r.message for r in caplog.records)
    assert "towards a server that sees sums of 5 clients or more" in said
    assert "the sum of clipped updates with the noise of at least 5 clients" in said


@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": SecureMean()},
        {"aggregator": SecureMean(protocol="count")},
        {"aggregator": EncryptedMean()},
        {"aggregator": SecureMean(), "privacy": shared(min_shares=2)},
    ],
    ids=["run", "count", "encrypted", "private"],
)
def test_a_cohort_too_small_to_hide_in_does_not_train(options, caplog):
    if isinstance(options["aggregator"], EncryptedMean):
        pytest.importorskip("tenseal")
    sizes = [len(SMALL.sample(r, Population(toy_data().clients.num_examples), 4)) for r in range(8)]
    assert {0, 1} < set(sizes)
    moved = []

    class Moves(Facts):
        def on_train_epoch_start(self, trainer, module):
            self.before = weights(module)

        def on_train_epoch_end(self, trainer, module):
            moved.append(not torch.equal(weights(module), self.before))

    with caplog.at_level("INFO"):
        _, trainer = run(8, cohort=SMALL, callbacks=[Moves()], **options)
    assert trainer.current_epoch == 8
    assert moved == [size > 1 for size in sizes]
    said = [r.message for r in caplog.records if "a cohort of 1 is too small" in r.message]
    assert len(said) == sizes.count(1)


def test_levels_of_a_secure_sum_are_refused_with_shares_of_noise():
    with pytest.raises(ConfigurationError, match="leave clip, levels"):
        run(privacy=shared(), aggregator=SecureMean(levels=16), cohort=UniformCohort(size=3))
