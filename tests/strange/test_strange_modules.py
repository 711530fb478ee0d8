"""Odd but legal modules: every engine gives what a plain loop gives, or says why it does not.

Bars: the update of two rounds is the loop's to 1e-5 of its norm in float32, and to 1e-12, tensor by
tensor, in float64. Where slots are asked for and clients train one after the other, one sentence says
why. No client's result depends on who trained before it.
"""

import re
import warnings
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from lightning.pytorch import LightningModule
from toys import Given, Ordered, toy_trainer

from fl_lightning import ClientFailure, ConfigurationError, FederatedDataModule, Federation
from fl_lightning.federation.clients import choice
from fl_lightning.federation.plan import LocalWork, WorkPlan
from strange import TABLE
from strange.plain_loop import moved, new_module, plain_loop, tensors_of
from strange.rows import ROUNDS, Source

FALLS_BACK = re.compile(
    r"engine: sequential.*?(?:, not slots as asked for, because | from round \d+ on, because )(.*)",
    re.DOTALL,
)
PRECISIONS = {torch.float32: "32-true", torch.float64: "64-true"}

TRAINED = {row.name: row for row in TABLE if row.refused is None}
REFUSED = {row.name: row for row in TABLE if row.refused is not None}
# the engine's whole machinery runs, a compiler and several processes with it: a few of each family
FEW = ("CrossEntropy", "ClassWeights", "IgnoreIndex", "SupervisedContrastive", "PythonCounter")


def params(rows):
    """Return names of rows, the slow ones marked."""
    return [pytest.param(n, marks=[pytest.mark.slow] * r.is_slow) for n, r in rows.items()]


@dataclass
class Ended:
    """A run that is over: the global model, the engine that it used and why not slots."""

    model: dict
    engine: str | None
    reason: str | None
    metrics: dict
    module: LightningModule


def data_of(row):
    return FederatedDataModule(
        Source(row), num_clients=len(row.shards), partition=Given(row.shards), seed=0
    )


def run(row, engine, dtype=torch.float32, devices=1, cohort=None, rounds=ROUNDS):
    """Train a row's module and return what came out."""
    federation = Federation(
        engine=engine, local_epochs=row.local_epochs, seed=0, cohort=cohort, slots=3
    )
    several = {"devices": devices} if devices > 1 else {}
    options = {"precision": PRECISIONS[dtype], **row.trainer, **several}
    module = new_module(row)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = toy_trainer(federation, max_epochs=rounds, **options)
        trainer.fit(module, datamodule=data_of(row))
    found = (FALLS_BACK.fullmatch(str(warning.message)) for warning in caught)
    reasons = [match.group(1) for match in found if match]
    used = None if devices > 1 else engine_of(federation)  # known to the other processes
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Ended(tensors_of(module), used, reasons[0] if reasons else None, metrics, module)


def engine_of(federation):
    return "sequential" if federation.rounds.clients.engine.slots is None else "slots"


def plan_of(row):
    """Return the work of all clients in a round."""
    plan = WorkPlan(data_of(row), LocalWork(None, row.local_epochs, 1, seed=0))
    everybody = list(range(len(row.shards)))
    return lambda round_index: list(plan.of(everybody, round_index))


@cache
def expected(name, dtype=torch.float32):
    """Return the model at the start and after the plain loop."""
    row = TRAINED[name]
    start = tensors_of(new_module(row, dtype))
    return start, plain_loop(row, plan_of(row), ROUNDS, dtype)


def norm(tensors):
    parts = [t.abs().double().flatten() for t in tensors]
    return float(torch.cat([torch.zeros(1, dtype=torch.float64), *parts]).norm())


def far(found, start, end):
    """Return how far a model is from the expected one, as a share of how far that one moved."""
    real = [n for n, t in end.items() if t.is_floating_point() or t.is_complex()]
    length = norm(moved(end[n], start[n]) for n in real)
    assert length > 0, "nothing was trained"
    return norm(moved(found[n], end[n]) for n in real) / length


def far_by_tensor(found, start, end):
    """Return the largest such share of all tensors; where one hardly moves, rounding does not count."""
    shares = {}
    for name, tensor in end.items():
        if tensor.is_floating_point() or tensor.is_complex():
            finite = tensor[tensor.isfinite()]
            rounding = 1e2 * torch.finfo(tensor.dtype).eps * norm([finite])
            excess = norm([moved(found[name], tensor)]) - rounding
            shares[name] = max(0.0, excess) / max(norm([moved(tensor, start[name])]), 1e-30)
    return max(shares.values())


def assert_others_equal(found, end):
    """Integer buffers are the server's."""
    assert found.keys() == end.keys()
    for name, tensor in end.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            assert torch.equal(found[name], tensor), name


def assert_as_expected(name, ended, dtype=torch.float32):
    start, end = expected(name, dtype)
    if dtype == torch.float64:
        assert far_by_tensor(ended.model, start, end) <= 1e-12
    else:
        assert far(ended.model, start, end) <= TRAINED[name].tolerance
    assert_others_equal(ended.model, end)


def assert_says_why(row, ended):
    """Where slots were asked for: they were used, or one sentence says why not."""
    assert ended.engine in row.engines, ended.reason
    assert (ended.engine == "slots") == (ended.reason is None)
    if ended.reason is not None:
        assert 10 < len(ended.reason) < 400
        assert "\n" not in ended.reason


def test_every_row_has_a_name_of_its_own():
    assert len({row.name for row in TABLE}) == len(TABLE)


# single precision is what runs are made of; double precision tells an error from rounding
DTYPES = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", params(TRAINED))
def test_clients_in_reversed_order_are_those_of_a_plain_loop(name, dtype):
    """In slots; one after the other where these cannot, in double precision and for a few of each family."""
    row = TRAINED[name]
    ended = run(row, "slots", dtype, cohort=Ordered(-1))
    assert_as_expected(name, ended, dtype)
    assert_says_why(row, ended)
    if ended.engine == "slots" and (dtype == torch.float64 or name in FEW):
        assert_as_expected(name, run(row, "sequential", dtype, cohort=Ordered(-1)), dtype)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_lists_hold_what_all_clients_append_in_a_round(engine):
    row, outputs = TRAINED["Outputs"], []
    plain_loop(row, plan_of(row), 1, torch.float32, at_end=lambda m: outputs.extend(m.outputs))
    ended = run(row, engine, rounds=1)
    assert ended.metrics["epoch_mean"] == pytest.approx(float(torch.stack(outputs).mean()))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("PythonCounter", lambda module: module.count),
        ("RunningMean", lambda module: module.baseline),
        ("OwnPythonGenerator", lambda module: module.random.getstate()),
    ],
)
def test_python_state_is_after_a_round_as_before(name, state):
    assert state(run(TRAINED[name], "sequential").module) == state(new_module(TRAINED[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_compiled_slots(name, monkeypatch):
    monkeypatch.setattr(choice, "SHORT_RUN_STEPS", 0)
    ended = run(TRAINED[name], "slots")
    assert_as_expected(name, ended)
    assert_says_why(TRAINED[name], ended)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
@pytest.mark.parametrize("name", params(REFUSED))
def test_what_cannot_be_is_refused_in_a_sentence(name, engine):
    refusals = ConfigurationError, ClientFailure, RuntimeError  # the last one is Lightning's
    with pytest.raises(refusals, match=REFUSED[name].refused):
        run(REFUSED[name], engine)
