"""Whatever takes part in a run: resumed, in two processes and in slots it ends in the same state.

Runs are in double precision, in which slots differ from one client after the other by rounding alone, and
with an exact mean, in which processes differ by nothing.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from test_client_state import Centre, ConstantBuffers, Teacher
from test_corrections import Adam, Groups
from test_local_counts import Warming
from test_manual_optimization import Constant
from test_masks import Masked, NewMasks
from toys import SaveEverywhere, ToyModule, federated, toy_data

from fl_lightning import (
    APFL,
    BandedMatrixDP,
    CentralDP,
    DistributedDP,
    Ditto,
    ExampleDP,
    FedDyn,
    FedProx,
    LocalDP,
    Mean,
    NormalisedMean,
    Personal,
    PoissonCohort,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.data import (
    AvailableCohort,
    ByLossCohort,
    LabelFlip,
    LeastRecentCohort,
    OortCohort,
    PowerOfChoiceCohort,
    RoundRobinCohort,
    Stretches,
)
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.privacy.private_mean import AdaptiveClip
from fl_lightning.secure import SecureMean
from fl_lightning.server import (
    AFL,
    ALIE,
    Bucketing,
    CentredClipping,
    FedAdam,
    FedAsync,
    FedBuff,
    GaussianNoise,
    Krum,
    QFedAvg,
    TrimmedMean,
)
from fl_lightning.updates import QSGD, ErrorFeedback, PowerSGD, TopK

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")

ROUNDS = 3
OF_THE_WALL_CLOCK = {"round/seconds", "secure/client_seconds", "secure/server_seconds"}


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        module: what makes its module.
        block: options of its federation.
        callbacks: what makes its callbacks.
        precision: of its Trainer.
        in_slots: to which tolerance slots end in the same state; None where they do not train it.
        in_processes: to which tolerance two processes do.
    """

    module: Callable[[], Any]
    block: Mapping[str, Any]
    callbacks: Callable[[], Sequence[Any]] = tuple
    precision: str = "64-true"
    in_slots: float | None = 1e-9
    in_processes: float = 0.0

    def fit(self, folder, *, devices=1, ckpt_path=None, **changed):
        """Run it, and return the state and the metrics of its end; all checkpoints are in the folder."""
        shared = {"cohort": UniformCohort(size=3), "local_steps": 2, "aggregator": Mean(exact=True)}
        _, trainer, _ = federated(
            self.module,
            SaveEverywhere(folder),
            ahead=self.callbacks(),
            data=toy_data(batch_size=4, drop_last=True),
            ckpt_path=ckpt_path,
            trainer={"max_epochs": ROUNDS, "precision": self.precision, "devices": devices},
            **shared | {"engine": "sequential"} | self.block | changed,
        )
        state, logged = state_of(folder), trainer.callback_metrics.items()
        metrics = {name: float(value) for name, value in logged if name not in OF_THE_WALL_CLOCK}
        metrics["population"] = state["callbacks"]["Federation"].pop("population")  # with losses
        return state, metrics


def case(module=ToyModule, **block):
    """Return a case; what is not among its attributes is an option of its federation."""
    names = ("callbacks", "precision", "in_slots", "in_processes")
    own = {name: block.pop(name) for name in names if name in block}
    return Case(module, block, **own)


def state_of(folder):
    """Return what the last checkpoint holds but for the record, which is seen in the metrics."""
    checkpoint = torch.load(folder / f"{ROUNDS - 1}-end.ckpt", weights_only=True)
    names = ("state_dict", "callbacks", "global_step", "epoch", "lr_schedulers", "optimizer_states")
    state = {name: checkpoint[name] for name in names}
    federation = state["callbacks"]["Federation"]
    finished = federation.pop("record")["finished"]
    federation["finished"] = sorted(finished)
    federation["memory"] = {tuple(e[:2]): e[2] for e in federation["memory"]["present"]}
    return state


def assert_same_end(found, expected, tolerance=0.0, of_metrics=1e-6):
    """Compare states and metrics; these are in single precision."""
    assert_alike(found[0], expected[0], tolerance)
    assert_alike(found[1], expected[1], max(tolerance, of_metrics))


def assert_alike(found, expected, tolerance=0.0, path=""):
    """Compare nested states; floating-point numbers to a tolerance."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_alike(found[key], value, tolerance, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, tolerance, f"{path}.{number}")
    elif isinstance(expected, torch.Tensor | float):
        options = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(found, expected, **options, msg=lambda said: f"{path}: {said}")
    else:
        assert found == expected, path


Rich = partial(ToyModule, dropout=0.3, batch_norm=True)
ONE_BY_ONE = {"in_slots": None}
HEAD = ["net.4.*"]
LATE = Devices(speeds=LogNormalSpeeds(sigma=1.0), jitter=0.2, drop_rate=0.1)
STALE = {"devices": LATE, "cohort": None}
NOISE = {"clip_norm": 0.1, "noise_multiplier": 2.0, "delta": 1e-3, "secure_noise": False}
PRIVATE = {"aggregator": Mean(weight_by_examples=False, exact=True)}
HIDDEN = {"devices": Devices(speeds=LogNormalSpeeds(), drop_rate=0.15), "cohort": None}
ATTACKED = Attackers(fraction=0.4, forge=GaussianNoise(0.1), poison=LabelFlip(3))
CASES = {
    "server with momentum": case(
        Rich,
        cohort=PoissonCohort(fraction=0.5),
        server_optimizer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5),
    ),
    "half precision": case(Rich, precision="bf16-true", in_slots=None),
    "mixed precision": case(Rich, precision="bf16-mixed", in_slots=None),
    "power of choice": case(Rich, cohort=PowerOfChoiceCohort(size=3, num_candidates=5)),
    "Oort": case(cohort=OortCohort(size=3)),
    "by loss": case(cohort=ByLossCohort(size=3)),
    "least recent of those there": case(
        cohort=AvailableCohort(LeastRecentCohort(size=2), Stretches())
    ),
    "robust, attacked, scheduled": case(
        aggregator=Bucketing(CentredClipping(radius=0.3), bucket_size=2, seed=1, memory_gb=0.0),
        server_optimizer=FedAdam,
        server_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS),
        attackers=ATTACKED,
        cohort=UniformCohort(size=4),
    ),
    "Krum after SCAFFOLD": case(aggregator=Krum(1), correction=Scaffold(), cohort=None),
    "trimmed mean of liars": case(
        Rich,
        aggregator=TrimmedMean(1),
        attackers=Attackers(fraction=0.3, forge=ALIE()),
        cohort=None,
    ),
    "q-FedAvg": case(
        partial(ToyModule, momentum=0.0), aggregator=QFedAvg(1.0), in_processes=1e-6, in_slots=1e-6
    ),
    "AFL": case(aggregator=AFL(0.3), cohort=None, in_processes=1e-6, in_slots=1e-6),
    "FedProx of groups": case(Groups, correction=FedProx(mu=0.5)),
    "SCAFFOLD of groups": case(Groups, correction=Scaffold()),
    "SCAFFOLD of whole shards": case(
        Adam, correction=Scaffold("I"), client_memory_gb=0.0, in_slots=1e-7
    ),
    "FedDyn, new masks": case(Masked, callbacks=lambda: [NewMasks()], correction=FedDyn(alpha=0.3)),
    "FedNova, FedProx, mask": case(
        Masked, correction=FedProx(mu=0.5), aggregator=NormalisedMean(exact=True)
    ),
    "SCAFFOLD, FedAdam, new masks": case(
        Masked,
        callbacks=lambda: [NewMasks()],
        correction=Scaffold(),
        server_optimizer=lambda p: FedAdam(p, lr=0.05),
    ),
    "mask, one local step": case(Masked, local_steps=1),
    "mask in half precision": case(Masked, precision="bf16-true", in_slots=None),
    "mask, asynchronous": case(Masked, asynchronous=FedBuff(concurrency=4, buffer_size=2), **STALE),
    "FedBuff": case(
        Rich, asynchronous=FedBuff(concurrency=5, buffer_size=3), in_processes=1e-9, **STALE
    ),
    "FedAsync": case(asynchronous=FedAsync(concurrency=3), in_processes=1e-9, **STALE),
    "devices with a deadline": case(
        devices=Devices(speeds=LogNormalSpeeds(), drop_rate=0.4, jitter=0.3, deadline=6.0),
        cohort=UniformCohort(size=4),
        local_steps=3,
        seed=3,
    ),
    "FedPer, SCAFFOLD": case(personal=Personal(HEAD), correction=Scaffold()),
    "FedBN": case(Rich, personal=Personal(norms=True)),
    "FedRep": case(Rich, personal=Personal(HEAD, own_epochs=2), **ONE_BY_ONE),
    "Ditto": case(Rich, personal=Ditto(pull=0.5), **ONE_BY_ONE),
    "APFL": case(Rich, personal=APFL(), **ONE_BY_ONE),
    "FedPer, new masks": case(Masked, callbacks=lambda: [NewMasks()], personal=Personal(HEAD)),
    "Ditto, new masks": case(
        Masked, callbacks=lambda: [NewMasks()], personal=Ditto(), **ONE_BY_ONE
    ),
    "APFL, new masks": case(Masked, callbacks=lambda: [NewMasks()], personal=APFL(), **ONE_BY_ONE),
    "compressed with feedback": case(
        Rich, updates=[ErrorFeedback([TopK(0.3), QSGD(4)])], in_slots=1e-6
    ),
    "low rank": case(
        updates=[ErrorFeedback([PowerSGD(1), QSGD(8, block=16)])], download=[QSGD(4)], in_slots=1e-6
    ),
    "central noise": case(
        privacy=CentralDP(**NOISE, adaptive_clip=AdaptiveClip(bits_stddev=2.0)),
        cohort=PoissonCohort(fraction=0.5),
        **PRIVATE,
    ),
    "banded noise": case(
        privacy=BandedMatrixDP(**NOISE), cohort=RoundRobinCohort(size=2), **PRIVATE
    ),
    "local noise": case(privacy=LocalDP(**NOISE), **PRIVATE),
    "shares of noise": case(privacy=DistributedDP(**NOISE), **PRIVATE),
    "noise of examples": case(
        privacy=ExampleDP(**NOISE), cohort=PoissonCohort(fraction=0.6), **ONE_BY_ONE
    ),
    "secure sum": case(aggregator=SecureMean(threshold=0.5), in_slots=1e-3, **HIDDEN),
    "counted secure sum": case(
        aggregator=SecureMean(threshold=0.5, protocol="count"),
        privacy=DistributedDP(**NOISE),
        in_slots=1e-3,
        **HIDDEN,
    ),
    "rates by local steps": case(Warming),
    "two optimizers by hand": case(Constant, correction=FedDyn(alpha=0.1), **ONE_BY_ONE),
    "mean teacher": case(Teacher, **ONE_BY_ONE),
    "constant buffers": case(ConstantBuffers, **ONE_BY_ONE),
    "buffers that are assigned": case(Centre, **ONE_BY_ONE),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder and the end of a case that was never stopped; it is run once."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp("whole")
        return folder, CASES[name].fit(folder)

    return run


@pytest.mark.parametrize("name", CASES)
def test_resumed_from_inside_a_round_or_from_its_end_it_ends_in_the_same_bits(
    name, whole, tmp_path
):
    folder, expected = whole(name)
    for moment in ("1-trained", "1-end"):
        found = CASES[name].fit(tmp_path / moment, ckpt_path=folder / f"{moment}.ckpt")
        assert_same_end(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_where_one_does(name, whole, tmp_path):
    found = CASES[name].fit(tmp_path, devices=2)
    assert_same_end(found, whole(name)[1], CASES[name].in_processes)


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.in_slots])
def test_slots_end_where_one_client_after_the_other_does(name, whole, tmp_path):
    found, expected = CASES[name].fit(tmp_path, engine="slots"), copy.deepcopy(whole(name)[1])
    engines = [state["callbacks"]["Federation"].pop("engine") for state, _ in (found, expected)]
    assert [engine["slots"] is None for engine in engines] == [False, True]
    assert_same_end(found, expected, CASES[name].in_slots, of_metrics=1e-5)
