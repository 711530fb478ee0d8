"""Exactly k, first come first served among equals; densities and their schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity import CalibrationPlan, Mask, RandomEntries, next_mask
from fl_lightning.sparsity.calibration.plan import density_schedule, resolve_density
from fl_lightning.sparsity.calibration.rules import apportion, keep_lowest

# few different values: ties everywhere
few = st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=40)


@given(entries=few, data=st.data())
def test_keeps_what_a_stable_sort_keeps(entries, data):
    values = torch.tensor([float(value) for value, _ in entries])
    allowed = torch.tensor([ok for _, ok in entries])
    k = data.draw(st.integers(0, int(allowed.sum())))
    kept = keep_lowest(values, allowed, k)
    order = [i for i in torch.argsort(values, stable=True).tolist() if allowed[i]]
    assert kept.nonzero().flatten().tolist() == sorted(order[:k])


def test_infinite_values_are_ordinary_ones():
    values = torch.tensor([torch.inf, 0.0, -torch.inf, torch.inf])
    assert keep_lowest(values, values > -1, 2).tolist() == [True, True, False, False]


def test_ties_of_three_tensors_do_not_keep_too_many():
    """Of ten entries a fifth is two; a threshold `≤` keeps four."""
    scores = {"a": [0, 0, 0, 4], "b": [[1, 3], [2, 5]], "c": [0, 6]}
    order = {name: torch.tensor(values, dtype=torch.float) for name, values in scores.items()}
    mask = next_mask(order, Mask.ones(order), 2)
    assert [mask[name].int().tolist() for name in "abc"] == [[1, 1, 0, 0], [[0, 0], [0, 0]], [0, 0]]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6), data=st.data())
def test_apportioned_shares_are_within_one_of_the_quota(sizes, data):
    k = data.draw(st.integers(0, sum(sizes)))
    shares = apportion(sizes, k)
    assert sum(shares) == k
    for size, share in zip(sizes, shares, strict=True):
        assert 0 <= share <= size
        assert not size or abs(share - k * size / sum(sizes)) < 1


@given(seed=st.integers(0, 99), per_tensor=st.booleans(), density=st.floats(0.001, 1))
def test_every_round_keeps_exactly_its_number_of_what_was_left(seed, per_tensor, density):
    shapes = {"a": (4, 6), "b": (1,), "c": (13,)}
    mask = Mask.ones({name: torch.empty(shape) for name, shape in shapes.items()})
    for r, k in enumerate(CalibrationPlan(density=density, rounds=5).num_kept(38)):
        order = RandomEntries().order_by(mask, {}, seed + 100 * r)
        order = {name: (values * 4).round() for name, values in order.items()}  # ties
        new = next_mask(order, mask, k, per_tensor=per_tensor)
        assert new.num_active == k
        assert not any((new[name] & ~mask[name]).any() for name in mask)
        assert new == next_mask(order, mask, k, per_tensor=per_tensor)
        mask = new
    assert mask.num_active == max(1, round(38 * density))


def test_more_than_is_left_cannot_be_kept():
    mask = Mask({"a": torch.tensor([True, False])})
    with pytest.raises(ConfigurationError, match="k must be from 0 to 1"):
        next_mask({"a": torch.zeros(2)}, mask, 2)


def test_schedules():
    assert density_schedule(0.1, 4) == pytest.approx([0.562341, 0.316228, 0.177828, 0.1], abs=1e-6)
    five = [0.630957, 0.398107, 0.251189, 0.158489, 0.1]
    assert density_schedule(0.1, 5) == pytest.approx(five, abs=1e-6)
    assert density_schedule(0.29, 1) == [0.29]
    # not int(0.29 * 100), which is 28
    assert CalibrationPlan(density=0.29, rounds=1).num_kept(100) == [29]
    assert CalibrationPlan(sparsity=0.9, progressive=False, rounds=3).num_kept(50) == [50, 50, 5]
    assert CalibrationPlan(density=1e-9, rounds=2).num_kept(10) == [1, 1]
    assert CalibrationPlan(density=0.1, rule=RandomEntries()).num_kept(10) == [1]


def test_density_and_sparsity():
    assert resolve_density(0.1, 0.9) == 0.1
    assert resolve_density(None, 0.0) == 1
    for density, sparsity, message in [
        (None, None, "give density"),
        (0.0, None, r"density must be in \(0, 1\], got 0"),
        (1.1, None, "density must be"),
        (None, 1.0, r"sparsity must be in \[0, 1\), got 1"),
        (None, -0.1, "sparsity must be"),
        (0.1, 0.8, "contradict"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            CalibrationPlan(density=density, sparsity=sparsity)
    with pytest.raises(ConfigurationError, match="rounds of calibration"):
        CalibrationPlan(density=0.1, rounds=0)
    with pytest.raises(ConfigurationError, match="soft_mask"):
        CalibrationPlan(density=0.1, soft_mask=2)
