"""Integers of updates: sums that fit, no bias, published levels, packed without loss."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.entropy import seeded_entropy, uniform_draws
from fl_lightning.secure.ring import Ring
from fl_lightning.secure.sum_quantiser import SumQuantiser


def draws(seed=0):
    return np.random.default_rng(seed).random


def test_the_levels_of_an_independent_quantiser():
    # flwr 1.41, common/secure_aggregation/quantization.py: quantize(..., 8, 2**22)
    numbers = torch.tensor([-9, -8, 0, 1e-3, 7.9999, 8], dtype=torch.float64)
    quantiser = SumQuantiser(num_clients=1, clip=8.0, levels=2**22)
    seen = np.stack([quantiser.levels_of(numbers, draws(seed)) for seed in range(50)])
    allowed = [{0}, {0}, {2097152}, {2097414, 2097415}, {4194277, 4194278}, {4194304}]
    assert [set(column.tolist()) for column in seen.T] == allowed


@given(
    rows=st.lists(
        st.tuples(st.lists(st.floats(-9, 9), min_size=5, max_size=5), st.integers(1, 40)),
        min_size=1,
        max_size=6,
    ),
    levels=st.integers(1, 1000),
    clip=st.floats(0.1, 8),
    bits=st.integers(18, 64),
)
def test_the_mean_is_within_a_step_of_the_clipped_weighted_mean(rows, levels, clip, bits):
    quantiser = SumQuantiser(num_clients=6, clip=clip, levels=levels, max_examples=30, bits=bits)
    deltas = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    counted = torch.tensor([min(count, 30) for _, count in rows], dtype=torch.float64)
    encoded = [
        quantiser.encode(delta, n, draws()) for delta, (_, n) in zip(deltas, rows, strict=True)
    ]
    total = np.zeros(6, quantiser.ring.dtype)
    for vector in encoded:
        assert vector.dtype == total.dtype
        total = quantiser.ring.reduced(total + vector)
    assert [int(each) for each in total] == [sum(int(v[i]) for v in encoded) for i in range(6)]
    mean = (deltas.clip(-clip, clip) * counted[:, None]).sum(0) / counted.sum()
    assert (quantiser.mean(total) - mean).abs().max() <= quantiser.step * (1 + 1e-9)


@given(st.integers(1, 10**6), st.integers(1, 2**48), st.integers(1, 10**6), st.integers(1, 64))
def test_a_sum_fits_exactly_where_the_quantiser_can_be_made(n, levels, max_examples, bits):
    options = {"num_clients": n, "levels": levels, "max_examples": max_examples, "bits": bits}
    if n * levels * max_examples < 2**bits:
        quantiser = SumQuantiser(clip=1.0, **options)
        [top, examples] = map(int, quantiser.encode(torch.ones(1), max_examples, draws()))
        total = np.array([n * top, n * examples], quantiser.ring.dtype)  # the largest sum
        assert quantiser.mean(total).item() == pytest.approx(1.0)
    else:
        with pytest.raises(ValueError, match=rf"= {n * levels * max_examples} must be below"):
            SumQuantiser(**options)


@pytest.mark.parametrize("draw", [draws(1), uniform_draws(seeded_entropy(1, "rounding"))])
def test_rounding_has_no_bias(draw):
    quantiser = SumQuantiser(num_clients=1, clip=1.0, levels=4)
    numbers = torch.linspace(-1, 1, 11, dtype=torch.float64).repeat(4000)
    error = quantiser.mean(quantiser.encode(numbers, 1, draw)) - numbers
    error = error.view(4000, 11)
    standard_errors = error.std(0) / 4000**0.5
    assert (error.mean(0).abs() <= 4 * standard_errors + 1e-12).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip"),
        ({"levels": 2**49}, "levels"),
        ({"num_clients": 0}, "num_clients"),
        ({"max_examples": 0}, "max_examples"),
        ({"bits": 65}, "bits"),
        ({"levels": 2**48, "max_examples": 2**20, "bits": 64}, "fewer levels or smaller"),
        ({"num_clients": 4, "levels": 64, "max_examples": 1, "bits": 8}, "= 256 must be below"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SumQuantiser(**{"num_clients": 10} | options)


def test_bad_updates_and_sums_are_refused():
    quantiser = SumQuantiser(num_clients=2, levels=4, max_examples=3)
    with pytest.raises(ValueError, match="not finite"):
        quantiser.encode(torch.tensor([1.0, torch.nan]), 1, draws())
    with pytest.raises(ValueError, match="num_examples"):
        quantiser.encode(torch.tensor([1.0]), 0, draws())
    for total in ([], [0, 0], [0, 7], [13, 3]):
        with pytest.raises(ValueError, match="no sum"):
            quantiser.mean(np.array(total, np.uint32))


@given(st.integers(1, 64), st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_packed_integers_come_back(bits, numbers):
    ring = Ring(bits)
    values = ring.checked(np.array([n % ring.modulus for n in numbers], np.uint64))
    data = ring.pack(values)
    assert len(data) == ring.packed_size(len(values)) <= (bits * len(values) + 7) // 8 + 1
    again = ring.unpack(data, len(values))
    assert again.dtype == ring.dtype
    assert np.array_equal(again, values)


def test_integers_have_one_packed_form():
    with pytest.raises(MessageError, match="zero"):
        Ring(3).unpack(b"\xff", 2)
    with pytest.raises(MessageError, match="fill 2 bytes, not 1"):
        Ring(9).unpack(b"\xff", 1)
    for wrong in (np.zeros((2, 2), np.uint8), np.zeros(2), np.array([-1]), np.array([8])):
        with pytest.raises(ValueError, match="values must be"):
            Ring(3).checked(wrong)
