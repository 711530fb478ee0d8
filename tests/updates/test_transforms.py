"""Compressions: exactly nothing where they are off, their published rules, no bias where promised."""

import numpy as np
import pytest
import torch
from families import TABLE, made
from hypothesis import given
from hypothesis import strategies as st
from updates.payloads import agreement, assert_same, message

from fl_lightning.updates.message import decode, encode, encoded_size
from fl_lightning.updates.payload import Dense, Quantised, Sparse
from fl_lightning.updates.quantisers import QSGD, Affine, Cast, Sign, ternary
from fl_lightning.updates.sparsifiers import RandomK, TopK
from fl_lightning.updates.transform import Chain, ErrorFeedback, with_memory

SHAPES = {0: ((0,), (2, 0)), 1: ((1,),), 100: ((8, 10), (2, 2, 4), (4,))}
ALL = [
    *map(made, TABLE["transform"]),
    Chain(),
    TopK(0.1),
    RandomK(0.1),
    Sign(),
    Sign(block=7),
    Chain((Chain((Sign("tensor"),)),)),
    ternary(0.1),
    *(QSGD(bits) for bits in range(1, 9)),
    QSGD(4, norm="l2", block=10),
    *(Affine(bits) for bits in (1, 4, 8)),
    Affine(8, block=16),
    Cast("bfloat16"),
    Chain((TopK(0.1), Cast("float16"))),
    Chain((TopK(0.1), QSGD(4, block=3))),
    Chain((RandomK(0.2), TopK(0.5), Affine(8))),
]
vectors = st.lists(st.floats(-1e4, 1e4, width=32), max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def vector(size=100, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def received(transform, values, seed=0):
    """What the server takes the update for."""
    payload = transform.on_client(Dense(values), seed)
    return transform.on_server(payload, seed, size=len(values)).to_dense()


@pytest.mark.parametrize("identity", [Chain(), TopK(1.0), RandomK(1.0), Chain((TopK(1.0),) * 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_off_changes_no_bit(identity, dtype):
    values = vector().to(dtype)
    sent = identity.on_client(Dense(values), seed=3)
    assert isinstance(sent, Dense)
    assert torch.equal(received(identity, values), values)
    assert received(identity, values).dtype == dtype
    payload, memory = with_memory(Chain((identity,)), values, None, seed=0)
    assert torch.equal(payload.to_dense(), values)
    assert not memory.any()


@pytest.mark.parametrize("transform", ALL, ids=repr)
@pytest.mark.parametrize("size", SHAPES)
def test_what_is_sent_can_be_encoded_and_is_a_function_of_the_seed(transform, size):
    values, chain = vector(size), Chain(transform.parts).with_shapes(SHAPES[size])
    payload = chain.on_client(Dense(values), seed=5)
    assert torch.equal(values, vector(size))
    assert payload.size == chain.sent_size(size)
    sent = message(payload, transforms=chain.names)
    data = encode(sent)
    assert len(data) == encoded_size(sent)
    arrived = decode(data, agreement(sent, payload.size)).params
    assert_same(arrived, payload)
    again = chain.on_server(arrived, seed=5, size=size).to_dense()
    assert torch.equal(again, received(chain, values, seed=5))
    assert again.shape == values.shape
    assert_same(arrived, payload)
    for constant in (0.0, 3.0, -1e-30):
        arrived = received(chain, torch.full((size,), constant))
        assert arrived.isfinite().all()
        assert constant or not arrived.any()


@pytest.mark.parametrize("transform", [*ALL, QSGD(8, norm="l2"), QSGD(1, block=10)], ids=repr)
def test_with_feedback_nothing_is_lost_or_it_is_refused(transform):
    chain, memory, norms = Chain(transform.parts).with_shapes(SHAPES[100]), None, []
    if chain.remedy:
        with pytest.raises(ValueError, match=f"diverges.*: {chain.remedy}"):
            ErrorFeedback(chain.parts)
        return
    there, sent = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    for seed in range(150):
        update = vector(100, seed)
        payload, memory = with_memory(chain, update, memory, seed)
        there += update
        sent += chain.on_server(payload, seed, 100).to_dense()
        norms.append(float(memory.norm()))
    assert (sent + memory - there).abs().max() < 1e-3
    assert max(norms[75:]) <= 2 * max(norms[:75])  # the memory stays bounded


@pytest.mark.parametrize(
    "transform",
    [
        QSGD(8),
        QSGD(1),
        QSGD(4, block=7),
        QSGD(3, norm="l2"),
        Affine(8),
        Affine(5, block=64),
        RandomK(0.1),
        TopK(0.1),
    ],
    ids=lambda transform: transform.name,
)
@pytest.mark.parametrize("seed", [1, 2**63 + 2**32 + 3])
def test_a_c_compiler_changes_no_bit(transform, seed, monkeypatch):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    values[::5] = 1.5  # ties
    found = transform.on_client(Dense(values), seed).to_dense()
    monkeypatch.setattr("fl_lightning.kernels.random_rounding.c_library", lambda *_: None)
    assert torch.equal(found, transform.on_client(Dense(values), seed).to_dense())


class TestTopK:
    @given(values=vectors, fraction=st.floats(0.01, 0.99))
    def test_nothing_left_out_is_larger(self, values, fraction):
        arrived = received(TopK(fraction), values)
        kept = arrived != 0
        assert torch.equal(arrived[kept], values[kept])
        wanted = min(len(values), max(1, round(fraction * len(values))))
        assert kept.sum() == min(wanted, int((values != 0).sum()))
        if kept.any() and not kept.all():
            assert values[~kept].abs().max() <= values[kept].abs().min()
        payload = TopK(0.4).on_client(Dense(torch.tensor([1.0, -2.0, 2.0, 2.0, -2.0])), seed=0)
        assert payload.indices.tolist() == [1, 2]  # of equals the first


class TestAffine:
    @given(values=vectors, bits=st.integers(1, 8), block=st.none() | st.integers(1, 9))
    def test_the_error_is_at_most_half_a_step(self, values, bits, block):
        payload = Affine(bits, block).on_client(Dense(values), seed=0)
        steps = payload.scales.repeat_interleave(block or max(1, len(values)))[: len(values)]
        error = (payload.to_dense() - values).abs()
        float32 = torch.finfo(torch.float32)
        rounding = 4 * float32.eps * values.abs().max() if len(values) else 0
        assert (error <= 0.5 * steps + rounding + float32.tiny).all()  # a step may be too small

    @pytest.mark.parametrize("make", [lambda b: Affine(4, b), lambda b: QSGD(4, block=b), Sign])
    def test_a_block_a_tensor_is_each_tensor_by_itself(self, make):
        """On levels of every tensor, where QSGD has nothing to draw."""
        turns = torch.tensor([1.0, -1.0]).repeat(4)
        parts = [scale * turns[:size] for size, scale in ((4, 7.0), (1, 0.5), (7, 300.0))]
        shapes = ((2, 2), (0, 3), (1,), (7,))
        whole = make("tensor").with_shapes(shapes)
        assert whole.block == (4, 1, 7)
        alone = torch.cat([received(make(None), part) for part in parts])
        assert torch.equal(received(whole, torch.cat(parts)), alone)
        assert torch.allclose(alone, torch.cat(parts))

    def test_blocks_of_tensors_must_be_known_and_come_first(self):
        with pytest.raises(ValueError, match="shapes of the tensors are not known"):
            received(Affine(8, "tensor"), vector())
        chain = Chain((TopK(0.5), Affine(8, "tensor"))).with_shapes(((10, 10),))
        with pytest.raises(ValueError, match="set block to a number after a transform that drops"):
            received(chain, vector())

    def test_constants_come_out_exactly(self):
        values = torch.tensor([0.1, 0.1, 0.1, -7.3, -7.3])
        assert torch.equal(received(Affine(8, block=3), values), values)


class TestCast:
    @pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", 2**-8), ("float16", 2**-11)])
    def test_it_rounds_to_the_nearest_in_two_bytes(self, dtype, precision):
        values = vector(1000)
        arrived = received(Cast(dtype), values)
        assert torch.equal(arrived, values.to(getattr(torch, dtype)).float())
        assert ((arrived - values).abs() <= precision * values.abs()).all()
        dense, half = (message(Dense(values)), message(Cast(dtype).on_client(Dense(values), 0)))
        assert encoded_size(dense) - encoded_size(half) == 2000

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_what_is_out_of_range_becomes_the_largest_number(self, dtype):
        arrived = received(Cast(dtype), torch.tensor([3.4e38, -3.4e38]))
        assert arrived.isfinite().all()
        largest = torch.finfo(getattr(torch, dtype)).max
        assert arrived.tolist() == [largest, -largest]


class TestQSGD:
    @pytest.mark.parametrize("bits", range(2, 9))
    def test_numbers_on_a_level_stay(self, bits):
        levels = 2 ** (bits - 1) - 1
        values = torch.arange(-levels, levels + 1) * 0.5
        for seed in range(5):
            assert torch.equal(received(QSGD(bits), values, seed), values)

    @pytest.mark.parametrize("bits", [2, 3, 8])
    def test_the_variance_is_within_the_papers_bound(self, bits):
        """Lemma 3.1: E|T(x) - x|² ≤ min(d / s², √d / s) |x|²."""
        values, levels = vector(400), 2 ** (bits - 1) - 1
        errors = [
            (received(QSGD(bits, norm="l2"), values, seed) - values).square().sum()
            for seed in range(50)
        ]
        bound = min(400 / levels**2, 20 / levels) * values.square().sum()
        assert torch.stack(errors).mean() <= bound


def assert_unbiased(draws, values):
    draws = draws.double()
    error = (draws.mean(0) - values).abs()
    standard_error = draws.std(0) / np.sqrt(len(draws))
    # where every draw is the same number, float32's rounding is all there is
    assert (error <= 4 * standard_error + 1e-6).all()


@pytest.mark.parametrize(
    "transform",
    [*(QSGD(bits, block=20) for bits in range(1, 9)), QSGD(3, "l2", block=20), QSGD(3, block=10)],
    ids=lambda transform: transform.name,
)
def test_qsgd_has_the_update_as_its_mean_within_four_standard_errors(transform):
    values = vector(20)
    assert_unbiased(received(transform, values.repeat(10_000)).view(-1, 20), values)


@pytest.mark.parametrize("transform", [RandomK(0.25), Chain((RandomK(0.5), QSGD(4)))])
def test_random_k_has_the_update_as_its_mean_within_four_standard_errors(transform):
    values = vector(20)
    draws = torch.stack([received(transform, values, seed) for seed in range(1000)])
    assert_unbiased(draws, values)


class TestSign:
    def test_each_block_has_its_mean_magnitude(self):
        values = torch.tensor([1.0, -3.0, 2.0, 0.0, -0.5])
        assert received(Sign(block=2), values).tolist() == [2.0, -2.0, 1.0, 1.0, -0.5]

    @given(values=vectors.filter(len))
    def test_it_contracts(self, values):
        """Karimireddy et al., Lemma 8: |T(x) - x|² = (1 - |x|₁² / (d |x|²)) |x|²."""
        values = values.double()
        error = (received(Sign(), values.float()).double() - values).square().sum()
        expected = values.square().sum() - values.abs().sum() ** 2 / len(values)
        assert float(error) == pytest.approx(float(expected), rel=1e-4, abs=1e-2)


class TestErrorFeedback:
    def test_random_k_with_feedback_does_not_scale(self):
        with pytest.raises(ValueError, match="unbiased: false"):
            ErrorFeedback([RandomK(0.1), QSGD()])
        chain = Chain((RandomK(0.5, unbiased=False),))
        payload, memory = with_memory(chain, torch.tensor([1.0, 2.0]), None, seed=0)
        assert payload.size == 1
        assert payload.values.sum() + memory.sum() == 3.0

    def test_a_memory_of_another_mask(self):
        with pytest.raises(ValueError, match="start a new memory"):
            with_memory(Chain((TopK(0.5),)), torch.ones(3), torch.ones(2), seed=0)


class TestChain:
    def test_each_step_has_a_seed_of_its_own(self):
        one, other = Chain((RandomK(0.5), RandomK(0.5))), Chain((RandomK(0.5),))
        values = torch.ones(1000)
        assert received(one, values).count_nonzero() == 250
        assert (received(one, values) > 0).float().dot(received(other, values)) > 0
        # with one seed for both, the second would take the first half's half again in every round
        places = {tuple(received(one, values[:8], seed).nonzero().flatten()) for seed in range(20)}
        assert len(places) > 10

    def test_ten_percent_of_eight_bits_are_below_five_percent_of_the_bytes(self):
        values = vector(100_000)
        dense, small = Dense(values), Chain((TopK(0.1), QSGD(8))).on_client(Dense(values), seed=0)
        assert encoded_size(message(small)) <= 0.05 * encoded_size(message(dense))

    @pytest.mark.parametrize(
        ("steps", "says"),
        [
            ((Affine(8), QSGD(4)), "use one quantiser"),
            ((Affine(8), TopK(0.1)), "put it before"),
            ((TopK(0.5), RandomK(0.5)), "put it before"),
            ((TopK(0.5), Sign(), Affine(8)), "use one quantiser"),
            ((Affine(8), Cast()), "use one quantiser"),
            ((Cast(), QSGD(8)), "use one quantiser"),
            ((TopK(0.5), Cast(), QSGD(8)), "use one quantiser"),
            ((Cast(), TopK(0.5)), "put it before"),
        ],
    )
    def test_orders_that_make_no_sense(self, steps, says):
        with pytest.raises(ValueError, match=says):
            Chain(steps).on_client(Dense(vector()), seed=0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Quantised(torch.ones(3, dtype=torch.int8), 2, torch.ones(2), block=(1, 1)),
            "blocks of 2 numbers in all, got 3",
        ),
        (lambda: Dense(torch.ones(2, 2)), "must be a vector"),
        (lambda: Dense(torch.ones(2, dtype=torch.int64)), "must be a vector"),
        (lambda: Quantised(torch.ones(2, dtype=torch.int8), 1, torch.ones(1)), "bits must be"),
        (lambda: Quantised(torch.ones(2, dtype=torch.uint8), 2, torch.ones(1)), "codes must be"),
        (lambda: Quantised(torch.ones(2, dtype=torch.int8), 2, torch.ones(2)), "scales must be"),
        (lambda: Sparse(torch.tensor([1]), Dense(torch.ones(2)), 3), "indices must be"),
        (lambda: Sparse(torch.tensor([0, 1]), Dense(torch.ones(2)), 1), "do not fit"),
    ],
)
def test_bad_options_are_refused_at_the_door(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "transform",
    [Chain(), TopK(0.1), RandomK(0.1), QSGD(4, block=7), Affine(8, block=7)],
    ids=lambda transform: transform.name,
)
def test_bytes_do_not_depend_on_the_device(transform):
    values = vector()
    here, there = (
        encode(message(transform.on_client(Dense(each), seed=0)))
        for each in (values, values.cuda())
    )
    assert here == there
