"""A configuration over sites ends in the bits of its simulation."""

import time

import pytest
from flower.site_processes import (
    OF_RUNS,
    Between,
    configuration,
    differing,
    farthest,
    over_network,
    simulated,
    three_sites,
)

from fl_lightning.core.errors import ClientFailure
from fl_lightning.flower.class_paths import DEFAULT
from fl_lightning.flower.messages import Order
from fl_lightning.secure.protocol.session import ProtocolStage

MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
BATCH_NORM = {
    "model__init_args__network": "resnet18",
    "model__init_args__network_kwargs": {},
    "model__init_args__image_size": 32,
    "data__init_args__source__init_args": {"batch_size": 32, "image_size": 32},
    "federation__local_epochs": None,
    "federation__local_steps": 1,
}


def built(name, **arguments):
    return {"class_path": f"fl_lightning.{name}", "init_args": arguments}


SPARSE = built(
    "updates.ErrorFeedback",
    transforms=[built("updates.TopK", fraction=0.1), built("updates.QSGD", bits=8)],
)
SPARSE_SGD = built("SparseSGDM", lr=0.1, momentum=0.9)
CALIBRATION = {"density": 0.3, "rounds": 2, "max_examples": 400}
MASKED = {
    "model__init_args__optimizer": SPARSE_SGD,
    "trainer__callbacks": [
        built("MaskCalibration", **CALIBRATION, head=built("sparsity.RidgeHead"))
    ],
}
NEW_MASKS = {
    "model__init_args__optimizer": SPARSE_SGD,
    "trainer__callbacks": [built("MaskCalibration", **CALIBRATION, every_n_rounds=1)],
}
FAST = {
    "calibrated mask, fitted head": MASKED,
    "rates by local step": {"model__class_path": "flower.site_processes.WarmClassifier"},
    "secure sums": {"federation__aggregator": built("secure.SecureMean")},
}
SLOW = {
    "top-k with feedback": {"federation__updates": [SPARSE]},
    "momentum, clipping": {
        "model__init_args__optimizer__init_args": MOMENTUM,
        "trainer__gradient_clip_val": 0.5,
    },
    "new masks, top-k with feedback": NEW_MASKS | {"federation__updates": [SPARSE]},
    "new masks, SCAFFOLD": NEW_MASKS | {"federation__correction": built("Scaffold")},
    "masked, FedBN": MASKED | {"federation__personal": built("Personal", norms=True)},
    "masked, bf16": MASKED | {"trainer__precision": "bf16-mixed"},
    "SCAFFOLD": {"federation__correction": built("Scaffold")},
    "plain": {},
    "rates by round": {
        "model__init_args__schedule": built("models.Schedule", warmup_rounds=1, kind="cosine"),
    },
    "FedProx": {"federation__correction": built("FedProx", mu=0.1)},
    "FedDyn": {"federation__correction": built("FedDyn", alpha=0.1)},
    "batch norm": BATCH_NORM,
    "FedBN": BATCH_NORM | {"federation__personal": built("Personal", norms=True)},
    "Ditto": {"federation__personal": built("Ditto", pull=0.1)},
    "QSGD down": {"federation__download": [built("updates.QSGD", bits=8)]},
    "PowerSGD": {
        "federation__updates": [
            built("updates.ErrorFeedback", transforms=[built("updates.PowerSGD", rank=1)])
        ]
    },
    "median": {"federation__aggregator": built("server.Median")},
    "FedNova": {
        "federation__aggregator": built("NormalisedMean"),
        "model__init_args__optimizer__init_args": MOMENTUM,
    },
    "FedAdam": {
        "federation__server_optimizer": {
            "class_path": "torch.optim.Adam",
            "init_args": {"lr": 0.01},
        }
    },
    "central DP": {
        "federation__privacy": built(
            "CentralDP", clip_norm=0.5, noise_multiplier=1.0, secure_noise=False
        ),
        "federation__aggregator": built("Mean", weight_by_examples=False),
        "federation__cohort": built("PoissonCohort", fraction=0.7),
    },
    "local DP": {
        "federation__privacy": built(
            "LocalDP", clip_norm=0.5, noise_multiplier=3.0, secure_noise=False
        ),
        "federation__aggregator": built("Mean", weight_by_examples=False),
    },
    "distributed DP": {
        "federation__privacy": built(
            "DistributedDP", clip_norm=0.5, noise_multiplier=3.0, secure_noise=False
        ),
        "federation__aggregator": built("secure.SecureMean"),
    },
    "bf16": {"trainer__precision": "bf16-mixed"},
    "double precision": {"trainer__precision": "64-true"},
    "exact sums": {"federation__aggregator": built("Mean", exact=True)},
}

pytestmark = OF_RUNS

CLASSES = (*DEFAULT, "flower.site_processes.WarmClassifier")


def cases():
    yield from (pytest.param(options, id=name) for name, options in FAST.items())
    for name, options in SLOW.items():
        yield pytest.param(options, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", list(cases()))
def test_a_run_over_sites_has_the_bits_of_its_simulation(options, tmp_path):
    config = configuration(**options)
    with three_sites(config, classes=CLASSES, seeded_noise=True) as sites:
        network = over_network(sites, config, tmp_path / "network")
    alone = simulated(config, tmp_path / "alone")
    assert network["epoch"] == alone["epoch"] == 2
    assert differing(network, alone) == []


HELD_OUT = {
    "data__init_args__client_val_fraction": 0.2,
    "data__init_args__client_test_fraction": 0.2,
    "trainer__callbacks": [built("ClientEvaluation", every_n_rounds=2)],
    "trainer__logger": True,
    "test_after_fit": True,
}
PERSONAL = {"federation__personal": built("Personal", head=True)}
NO_TEST_SET = {"data__init_args__source__init_args__test_fraction": 0.0}
TUNED = {"federation__personal": built("FineTuned")}


@pytest.mark.parametrize(
    "options",
    [
        PERSONAL | NO_TEST_SET,
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(TUNED, marks=pytest.mark.slow),
    ],
)
def test_clients_are_evaluated_at_their_sites(options, tmp_path):
    config = configuration(trainer__max_epochs=2, **HELD_OUT, **options)
    with three_sites(config) as sites:
        over_network(sites, config, tmp_path / "network")
    simulated(config, tmp_path / "alone")
    for stage in ("validation", "test"):
        [there] = (tmp_path / "network").rglob(f"clients_{stage}.csv")
        [here] = (tmp_path / "alone").rglob(f"clients_{stage}.csv")
        assert there.read_text() == here.read_text()
        assert len(there.read_text().splitlines()) == 7
        assert ("personal/" in there.read_text()) == ("federation__personal" in options)


class Killing(Between):
    """A channel on which sites die, as subclasses say.

    Args:
        sites: the processes.

    Attributes:
        killed: sites that have died.
    """

    def __init__(self, sites):
        super().__init__(sites)
        self.killed = []

    def kill(self, site):
        """Kill a site and start it again."""
        self.killed.append(site)
        self._sites.kill(site)
        self._sites.start(site)


ENCRYPTED = {"federation__aggregator": built("secure.EncryptedMean")}
NOISE = 1e-6  # what encrypted sums may differ by: what is opened has fresh noise
# what a killed site or server has to find again: memory of clients, or vectors of a hidden sum
KEPT = {
    "encrypted": ENCRYPTED,
    "memory": {"federation__correction": built("Scaffold"), "federation__updates": [SPARSE]},
    "vectors": {"federation__aggregator": built("secure.SecureMean")},
    "masks": NEW_MASKS | {"federation__updates": [SPARSE]},
}


class KillingAt(Killing):
    """A channel on which a site dies once for each of some orders, while it works or before it knows."""

    def __init__(self, sites, wanted):
        super().__init__(sites)
        self._wanted = list(wanted)

    def send(self, site, message, ttl):
        self._channel.send(site, message, ttl)
        order = Order.from_bytes(message, limit=2**30)
        if self._wanted and self._wanted[0](order):
            self._wanted.pop(0)
            time.sleep(0.2)
            self.kill(site)


@pytest.mark.slow
def test_a_site_that_is_killed_in_a_calibration_finds_the_same_mask(tmp_path):
    config = configuration(**KEPT["masks"])
    moments = [
        lambda order: order.kind == "calibrate" and order.round == 0,
        lambda order: order.kind == "hello" and "mask" in order.options,
        lambda order: order.kind == "calibrate" and order.round == 1,
        lambda order: order.kind == "hello" and order.round == 1,
        lambda order: order.kind == "calibrate" and order.round == 2,
    ]
    with three_sites(config) as sites:
        channel = KillingAt(sites, moments)
        network = over_network(sites, config, tmp_path / "network", channel=channel)
    assert channel._wanted == []
    assert differing(network, simulated(config, tmp_path / "alone")) == []


@pytest.mark.slow
def test_a_mask_in_a_file_goes_to_sites_and_into_hidden_sums(tmp_path):
    simulated(configuration(**MASKED, trainer__logger=True), tmp_path / "before")
    [file] = (tmp_path / "before").rglob("mask_v0.safetensors")
    given = built("MaskCalibration", mask_file=str(file))
    options = MASKED | {"trainer__callbacks": [given]} | KEPT["vectors"]
    config = configuration(**options)
    with three_sites(config) as sites:
        network = over_network(sites, config, tmp_path / "network")
    assert differing(network, simulated(config, tmp_path / "alone")) == []


class KillingInSums(Killing):
    """A channel on which a site dies in the first round's sum, at a stage of the protocol."""

    def __init__(self, sites, stage):
        super().__init__(sites)
        self._stage = stage

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=2**30)
        if order.kind == "sum" and order.options["stage"] == self._stage and not self.killed:
            self.kill(site)
        self._channel.send(site, message, ttl)


@pytest.mark.slow
def test_a_site_that_is_killed_in_a_sum_is_named(tmp_path):
    config = configuration(federation__aggregator=built("secure.SecureMean"))
    with three_sites(config) as sites:
        channel = KillingInSums(sites, ProtocolStage.SHARE)
        with pytest.raises(
            ClientFailure, match=r"at site .: it left the secure sum at stage SHARE"
        ):
            over_network(sites, config, tmp_path / "network", channel=channel)


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_one_site_may_have_all_clients(kept, tmp_path):
    config = configuration(**KEPT[kept])
    with three_sites(config, {"a": range(6)}) as sites:
        network = over_network(sites, config, tmp_path / "network")
    apart = farthest(network, simulated(config, tmp_path / "alone"))
    assert apart <= (NOISE if kept == "encrypted" else 0)


@pytest.mark.slow
def test_clients_with_an_example_or_two_train_as_in_the_simulation(tmp_path):
    config = configuration(
        data__init_args__partition=built("data.DirichletSizes", alpha=0.05, min_examples=1),
        data__init_args__source__init_args={"batch_size": 32},
        federation__cohort=built("AllClients"),
        federation__on_client_failure="skip",
    )
    with three_sites(config) as sites:
        network = over_network(sites, config, tmp_path / "network")
    assert differing(network, simulated(config, tmp_path / "alone")) == []


@pytest.mark.slow
def test_a_number_that_is_not_finite_names_client_and_site(tmp_path):
    config = configuration(
        model__init_args__optimizer__init_args={"lr": 1e30}, trainer__max_epochs=1
    )
    with (
        three_sites(config) as sites,
        pytest.raises(ClientFailure, match=r"client \d+: at site .: .* not finite"),
    ):
        over_network(sites, config, tmp_path / "network")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_site_with_other_frozen_weights_is_refused(seed, tmp_path):
    config = configuration(model__init_args__freeze_backbone=True)
    with three_sites(config) as sites:
        sites.kill("a")
        sites.own["seed_everything"] = seed
        sites.start("a")
        if seed == 0:
            over_network(sites, config, tmp_path / "network")
            return
        with pytest.raises(ClientFailure, match=r"at site a: the order's model does not fit"):
            over_network(sites, config, tmp_path / "network")
