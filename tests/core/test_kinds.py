"""Arguments of the wrong kind in Python are refused with the call to write."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError, FederatedDataModule, Federation, FedProx, UniformCohort
from fl_lightning.core.errors import check_range
from fl_lightning.core.kinds import check_kinds
from fl_lightning.data import Digits
from fl_lightning.server import Bucketing, FedAdam, Krum


class FewMethods:
    """Has the methods of a cohort, and none of what a cohort says of its draw."""

    def expected_size(self, num_clients):
        return 1

    def sample(self, round_index, population, seed):
        return np.zeros(1, int)


def takes(
    *,
    count: int | None = None,
    rate: float = 0.1,
    mode: Literal["max", "min"] = "max",
    names: Sequence[str] = (),
    file: str | Path | None = None,
    loss: Callable[..., Any] | None = None,
    anything: Any = None,
):
    """Stand for a constructor."""


@pytest.mark.parametrize(
    "given",
    [
        {"count": 3, "rate": 1, "mode": "min", "names": ["a"], "file": Path("x")},
        {
            "count": None,
            "rate": np.float32(0.5),
            "names": ("a",),
            "file": "x",
            "loss": torch.nn.L1Loss,
        },
        {"count": np.int64(3), "loss": len, "anything": int},
        {"unknown": 3, "anything": {"a": 1}},
    ],
)
def test_values_of_the_right_kind_pass(given):
    check_kinds(takes, given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"count": "4"}, "count must be a whole number or None, got the text '4': write count=4"),
        ({"count": 1.0}, "count must be a whole number or None, got 1.0: write count=1"),
        ({"count": True}, "count must be a whole number or None, got True"),
        ({"rate": "0.5"}, "rate must be a number, got the text '0.5': write rate=0.5"),
        ({"mode": "best"}, "mode must be one of 'max', 'min', got the text 'best'"),
        (
            {"names": "a"},
            "names must be a list (each entry a text), got the text 'a': write names=['a']",
        ),
        ({"names": {"a": 1}}, "names must be a list (each entry a text), got {'a': 1}"),
        ({"rate": {"a": 1}}, "rate must be a number, got {'a': 1}"),
        ({"file": 3}, "file must be a text or a Path or None, got 3"),
    ],
)
def test_others_are_refused_with_what_to_write(given, says):
    with pytest.raises(ConfigurationError) as refused:
        check_kinds(takes, given)
    assert str(refused.value) == says


def test_a_class_that_the_option_does_not_take_is_not_suggested():
    with pytest.raises(
        ConfigurationError, match=r"rule must be a RobustRule, got the text 'Mean'$"
    ):
        Bucketing(rule="Mean")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cohort": "all"}, "cohort must be a Cohort or None, got the text 'all'"),
        (
            {"cohort": FewMethods()},
            "cohort must be a Cohort or None, got an object of the class Few",
        ),
        ({"cohort": UniformCohort}, "the class UniformCohort: write cohort=UniformCohort(…)"),
        (
            {"correction": "FedProx"},
            "write correction=FedProx(…), from fl_lightning import FedProx",
        ),
        ({"aggregator": "Krum"}, "write aggregator=Krum(…), from fl_lightning.server import Krum"),
        ({"local_steps": 1.0}, "local_steps must be a whole number or None, got 1.0"),
        ({"devices": "slow"}, "devices must be a Devices or a RecordedArrivals or None"),
        ({"updates": "TopK"}, "write updates=[TopK(…)], from fl_lightning.updates import TopK"),
        ({"speedups": "all"}, "speedups must be a list (each entry one of 'direct_layers', 'chan"),
        (
            {"aggregator": {"class_path": "Krum"}},
            "aggregator must be an Aggregator or None",
        ),
        ({"attackers": {"fraction": 0.3}}, "attackers must be an Attackers or None, got {"),
        ({"devices": {"speeds": 1}}, "devices must be a Devices or a RecordedArrivals or None"),
        ({"pad_batches": 1}, "pad_batches must be True or False or None, got 1"),
    ],
)
def test_a_federation_takes_no_names_and_no_classes(options, says):
    with pytest.raises(ConfigurationError) as refused:
        Federation(**options)
    assert says in str(refused.value)


def test_all_wrong_kinds_are_told_together():
    with pytest.raises(ConfigurationError) as refused:
        Federation(cohort="all", local_steps="3")
    assert len(str(refused.value).splitlines()) == 2
    with pytest.raises(ConfigurationError, match=r"num_clients must be .* write num_clients=4"):
        FederatedDataModule(Digits(), num_clients="4")
    with pytest.raises(
        ConfigurationError, match=r"source must be .* the class Digits: write source="
    ):
        FederatedDataModule(Digits)


def test_objects_and_factories_pass():
    federation = Federation(
        correction=FedProx(0.1), aggregator=Krum(1), server_optimizer=torch.optim.SGD, local_steps=2
    )
    assert federation.local_steps == 2
    assert Federation(server_optimizer=FedAdam).server_optimizer is FedAdam


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), True, False])
@pytest.mark.parametrize("allowed", ["at least 0", "above 0", "greater than 0", "a finite number"])
def test_a_range_has_no_infinite_number_unless_it_says_so_and_no_truth_value(value, allowed):
    with pytest.raises(ConfigurationError, match=f"rate must be {allowed}.*, got {value}"):
        check_range("rate", value, allowed)
    check_range("rate", 10**400, "at least 0")
    check_range("rate", float("inf"), "greater than 0 or inf")
