"""Hidden updates in a run: the model of quantised updates, the protocol's bytes, refusals."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from test_masks import Masked, OwnMasks
from test_privacy import facts
from toys import SaveEverywhere, ToyData, ToyModule, federated, toy_data, weights

from fl_lightning import (
    ConfigurationError,
    DistributedDP,
    FederatedDataModule,
    Federation,
    PoissonCohort,
    RoundFailure,
    UniformCohort,
)
from fl_lightning.client.devices import Devices, GivenSpeeds, LogNormalSpeeds
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data import FederatedNormalize
from fl_lightning.data.cohorts.population import Population
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.secure import EncryptedMean, SecureMean
from fl_lightning.secure.secure_sum import SecureSum
from fl_lightning.server import ALIE
from fl_lightning.updates.message import bytes_up

FINE = {"clip": 8.0, "levels": 2**36}
SIZE = 4 * 8 + 8 + 8 * 3 + 3
DEVICES = Devices(speeds=LogNormalSpeeds(), drop_rate=0.15)


def run(aggregator=None, *callbacks, module=ToyModule, data=None, **options):
    options = {"local_steps": 2, "engine": "sequential", "aggregator": aggregator, **options}
    data = data or toy_data(batch_size=4, drop_last=True)
    return federated(module, *callbacks, data=data, **options)[:2]


def test_with_fine_steps_the_run_is_the_plain_one():
    plain, _ = run()
    secure, trainer = run(SecureMean(**FINE))
    assert torch.allclose(weights(secure), weights(plain), atol=1e-6)
    # a client's message: its vector, and beside it what it logs
    facts = trainer.callback_metrics
    bits = (6 * 2**36 * 1024).bit_length()
    up = SecureSum(bits=bits).typical_bytes(SIZE + 1, 6)[0]
    _, trainer = run(trainer={"max_epochs": 1})
    in_clear = trainer.callback_metrics["round/bytes_up"] - bytes_of_numbers(SIZE)
    assert facts["round/bytes_up"] == up + in_clear


def bytes_of_numbers(size):
    """Bytes that a vector takes in a message, with its entry in the header."""
    update = ClientUpdate(0, torch.zeros(size), torch.zeros(0), 5, 1, {"train/loss": 0.5})
    return bytes_up(update) - bytes_up(replace(update, delta=torch.zeros(0)))


class Facts(Callback):
    """Notes what is logged of every round."""

    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, module):
        names = [n for n in trainer.callback_metrics if n.startswith(("round/", "secure/"))]
        self.rows.append({name: float(trainer.callback_metrics[name]) for name in names})


def test_counting_is_running_bit_for_bit_with_clients_that_drop():
    facts, options = [Facts(), Facts()], {"devices": DEVICES, "trainer": {"max_epochs": 6}}
    real, _ = run(SecureMean(threshold=0.5), facts[0], **options)
    counted, _ = run(SecureMean(threshold=0.5, protocol="count"), facts[1], **options)
    assert torch.equal(weights(real), weights(counted))
    assert {row["round/lost"] for row in facts[0].rows} > {0.0}
    for one, other in zip(facts[0].rows, facts[1].rows, strict=True):
        assert all(one[name] == other[name] for name in one if "bytes" in name or "lost" in name)
        assert one["secure/client_seconds"] > 0
        assert not [name for name in other if name.endswith("_seconds") and "secure" in name]
        replies = 6 - one["round/lost"]
        # those who dropped have sent keys and shares, which are not counted as a reply's
        rest = one["round/total_bytes_up"] - replies * one["round/bytes_up"]
        assert (rest > 0) == (one["round/lost"] > 0)
    plain, _ = run(None, **options)
    assert torch.allclose(weights(real), weights(plain), atol=1e-3)


def test_too_many_dropouts_stop_the_run():
    devices = Devices(speeds=LogNormalSpeeds(), drop_rate=0.7)
    with pytest.raises(
        RoundFailure, match=r"the secure sum of \d updates, with \d clients missing"
    ):
        run(SecureMean(), devices=devices, trainer={"max_epochs": 8})


def test_only_active_coordinates_travel():
    _, trainer = run(SecureMean(**FINE), module=Masked)
    _, plain = run(None, module=Masked)
    space = next(c for c in trainer.callbacks if isinstance(c, Federation)).rounds.clients.local
    size = space.space.size
    assert 0 < size < SIZE
    bits = (6 * 2**36 * 1024).bit_length()
    up = SecureSum(bits=bits).typical_bytes(size + 1, 6)[0]
    in_clear = plain.callback_metrics["round/bytes_up"] - bytes_of_numbers(size)
    assert trainer.callback_metrics["round/bytes_up"] == up + in_clear


def test_what_leaves_in_clear_is_told_once_before_training(caplog):
    with caplog.at_level("INFO"):
        run(SecureMean(), trainer={"max_epochs": 2})
    told = [r.message for r in caplog.records if r.message.startswith("secure: ")]
    assert len(told) == 1
    assert (
        "the server sees the sum of updates and of their examples, and no single update" in told[0]
    )
    assert "not hidden: which clients take part and which fail, the metrics" in told[0]


def test_inputs_that_clients_send_sums_for_are_told(caplog):
    data = FederatedDataModule(ToyData(), num_clients=3, transforms=[FederatedNormalize()])
    with caplog.at_level("INFO"):
        run(SecureMean(), trainer={"max_epochs": 1}, data=data)
    [told] = [r.message for r in caplog.records if r.message.startswith("secure: ")]
    assert "the sums of each client's inputs and of their squares" in told


def test_encrypted_updates_give_the_plain_run_and_open_rounds_begin_anew(tmp_path):
    pytest.importorskip("tenseal")
    options = {"trainer": {"max_epochs": 2}, "cohort": UniformCohort(size=3)}
    plain, _ = run(None, **options, engine="slots")
    encrypted, trainer = run(EncryptedMean(fraction=0.5), SaveEverywhere(tmp_path), **options)
    assert torch.allclose(weights(encrypted), weights(plain), atol=1e-4)
    path = tmp_path / "1-trained.ckpt"
    assert "round" not in torch.load(path)["callbacks"]["Federation"]["server"]
    slots = {"ckpt_path": path, "engine": "slots"}
    again, _ = run(EncryptedMean(fraction=0.5), **options, **slots)
    assert torch.allclose(weights(again), weights(encrypted), atol=1e-4)
    assert trainer.callback_metrics["round/bytes_up"] > 1000 * SIZE
    assert trainer.callback_metrics["secure/client_seconds"] > 0


def test_a_round_in_which_one_update_arrives_stops_an_encrypted_run():
    pytest.importorskip("tenseal")
    slow = Devices(speeds=GivenSpeeds([1.0] + [100.0] * 5), deadline=50.0, late="drop")
    with pytest.raises(RoundFailure, match="the mean of one is its update"):
        run(EncryptedMean(), devices=slow, trainer={"max_epochs": 1})


def test_attackers_that_look_at_single_updates_are_refused_at_construction():
    """Options that conflict with a secure sum are in `test_together`."""
    attackers = Attackers(fraction=0.3, forge=ALIE())
    with pytest.raises(
        ConfigurationError, match=r"make updates by looking .* use attackers.poison"
    ):
        Federation(aggregator=SecureMean(), attackers=attackers)


def test_buffers_masks_of_their_own_and_overflow_are_refused_at_the_start():
    with pytest.raises(
        ConfigurationError, match=r"16 entries of buffers .* use group or layer norm"
    ):
        run(SecureMean(), module=lambda: ToyModule(batch_norm=True))
    with pytest.raises(ConfigurationError, match="masks of their own"):
        run(SecureMean(), ahead=[OwnMasks()], module=Masked)
    with pytest.raises(ConfigurationError, match="a sum may overflow: num_clients 6"):
        run(SecureMean(bits=28))


# Private sums that the server cannot read, and cohorts too small to hide in

PRIVATE = pytest.mark.filterwarnings("ignore:privacy:UserWarning")
SMALL = PoissonCohort(fraction=0.3)  # of six clients


def shared(**options):
    defaults = {"clip_norm": 0.1, "noise_multiplier": 2.0, "delta": 1e-3, "secure_noise": False}
    return DistributedDP(**{**defaults, **options})


@PRIVATE
def test_a_private_secure_run_is_the_one_with_sums_in_the_clear():
    clear, trainer = run(privacy=shared(min_shares=5))
    secure, hidden = run(SecureMean(), privacy=shared())
    assert torch.allclose(weights(secure), weights(clear), atol=1e-6)
    assert facts(hidden) == pytest.approx(facts(trainer))


@PRIVATE
def test_clients_that_drop_leave_enough_noise_or_stop_the_run():
    seen = Facts()
    options = {"devices": DEVICES, "trainer": {"max_epochs": 4}}
    aggregator = SecureMean(threshold=0.5)
    run(aggregator, seen, privacy=shared(log_unprotected=True), **options)
    assert {row["round/lost"] for row in seen.rows} == {1.0, 2.0}
    with pytest.raises(RoundFailure, match="the secure sum of"):
        run(aggregator, privacy=shared(min_shares=6), **options)


@PRIVATE
def test_what_is_said_of_shares_of_noise(caplog):
    with caplog.at_level("INFO"):
        run(SecureMean(), privacy=shared(), trainer={"max_epochs": 1})
    said = " ".join(r.message for r in caplog.records)
    assert "towards a server that sees sums of 5 clients or more" in said
    assert "the sum of clipped updates with the noise of at least 5 clients" in said


@PRIVATE
@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": EncryptedMean()},
        {"aggregator": SecureMean(), "privacy": shared(min_shares=2)},
    ],
    ids=["encrypted", "secure and private"],
)
def test_a_cohort_too_small_to_hide_in_does_not_train(options, caplog):
    if isinstance(options["aggregator"], EncryptedMean):
        pytest.importorskip("tenseal")
    sizes = [len(SMALL.sample(r, Population(toy_data().clients.num_examples), 4)) for r in range(8)]
    assert {0, 1} < set(sizes)
    moved, private = [], {k: v for k, v in options.items() if k == "privacy"}

    class Moves(Facts):
        def on_train_epoch_start(self, trainer, module):
            self.before = weights(module)

        def on_train_epoch_end(self, trainer, module):
            moved.append(not torch.equal(weights(module), self.before))

    with caplog.at_level("INFO"):
        work = {"trainer": {"max_epochs": 8}, "seed": 4, "data": toy_data()}
        _, trainer = run(options["aggregator"], Moves(), cohort=SMALL, **work, **private)
    assert trainer.current_epoch == 8
    assert moved == [size > 1 for size in sizes]
    said = [r.message for r in caplog.records if "a cohort of 1 is too small" in r.message]
    assert len(said) == sizes.count(1)


def test_levels_of_a_secure_sum_are_refused_with_shares_of_noise():
    with pytest.raises(ConfigurationError, match="leave clip, levels"):
        run(SecureMean(levels=16), privacy=shared(), cohort=UniformCohort(size=3))
