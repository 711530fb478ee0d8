"""Low rank: exact where the rank is, near the best of its rank elsewhere, nothing where it is off."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from updates.payloads import agreement, assert_same, message

from fl_lightning.updates import QSGD, Affine, Chain, PowerSGD, TopK
from fl_lightning.updates.message import decode, encode, encoded_size
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.sparsifiers import low_rank_factors
from fl_lightning.updates.transform import with_memory

SHAPES = ((12, 20), (12,), (6, 2, 3, 3), (1, 5, 16), (4, 3), ())
SIZE = 240 + 12 + 108 + 80 + 12 + 1


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def received(transform, values, seed=0):
    payload = transform.on_client(Dense(values), seed)
    return transform.on_server(payload, seed, size=len(values)).to_dense()


def relative(error, matrix):
    return float(error.norm() / matrix.norm())


@given(
    rows=st.integers(2, 30),
    columns=st.integers(2, 30),
    rank=st.integers(1, 5),
    iterations=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_a_matrix_of_that_rank_arrives_as_it_is(rows, columns, rank, iterations, seed):
    matrix = normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)
    arrived = received(PowerSGD(rank, iterations, [(rows, columns)]), matrix.flatten(), seed)
    assert relative(arrived.view(rows, columns) - matrix, matrix) < 1e-4


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_the_error_is_near_that_of_the_best_approximation(rank):
    """The truncated singular value decomposition is the best of all matrices of its rank."""
    spectrum = 0.8 ** torch.arange(48.0)
    left, right = torch.linalg.qr(normal(64, 48)).Q, torch.linalg.qr(normal(96, 48, seed=1)).Q
    matrix = left @ spectrum.diag() @ right.T
    best = float(spectrum[rank:].norm())

    def error(iterations):
        arrived = received(PowerSGD(rank, iterations, [(64, 96)]), matrix.flatten())
        return float((arrived.view(64, 96) - matrix).norm())

    errors = [error(iterations) for iterations in (1, 2, 4, 16)]
    assert errors == sorted(errors, reverse=True)
    assert best * (1 - 1e-4) <= errors[-1] <= best * 1.01
    assert errors[2] <= best * 1.1  # the default


def test_the_factors_are_those_of_a_projection():
    matrix = normal(10, 7)
    left, right = low_rank_factors(matrix, 3, 2, torch.Generator().manual_seed(0))
    assert torch.allclose(left.T @ left, torch.eye(3), atol=1e-5)
    assert torch.allclose(left @ right.T, left @ left.T @ matrix, atol=1e-5)
    other = low_rank_factors(1e-20 * matrix, 3, 4, torch.Generator().manual_seed(0))
    assert float((other[0] @ other[1].T).norm()) == pytest.approx(
        1e-20 * float(torch.linalg.svdvals(matrix)[:3].norm()), rel=0.05
    )


def test_vectors_and_tensors_that_would_not_get_smaller_arrive_bit_for_bit():
    values = normal(SIZE)
    transform = PowerSGD(2, shapes=SHAPES)
    payload = transform.on_client(Dense(values), seed=1)
    # matrices of 12 × 20, of 6 × 18 and of 5 × 16; of 4 × 3 two factors have more numbers
    assert payload.size == transform.sent_size(SIZE) == 2 * (32 + 24 + 21) + 12 + 12 + 1
    arrived = transform.on_server(payload, seed=1, size=SIZE).to_dense()
    for start, end in ((240, 252), (440, SIZE)):
        assert torch.equal(arrived[start:end], values[start:end])
    for start, shape in ((0, (12, 20)), (252, (6, 18)), (360, (5, 16))):
        matrix = arrived[start : start + shape[0] * shape[1]].view(shape)
        assert torch.linalg.matrix_rank(matrix, rtol=1e-5) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_that_saves_nothing_changes_no_bit(dtype):
    values = normal(SIZE).to(dtype)
    high = PowerSGD(8, shapes=SHAPES)
    assert torch.equal(received(high, values), values)
    assert high.sent_size(SIZE) == SIZE
    payload, memory = with_memory(Chain((high,)), values, None, seed=0)
    assert torch.equal(payload.to_dense(), values)
    assert not memory.any()


@pytest.mark.parametrize(
    "steps", [(), (QSGD(8, block=16),), (Affine(4, block=16),), (TopK(0.5), QSGD(8))], ids=str
)
def test_it_travels_as_real_bytes_and_others_may_follow(steps):
    chain = Chain((PowerSGD(1), *steps)).with_shapes(SHAPES)
    values = normal(SIZE)
    payload = chain.on_client(Dense(values), seed=5)
    sent = message(payload, transforms=chain.names)
    data = encode(sent)
    assert len(data) == encoded_size(sent) < len(encode(message(Dense(values))))
    arrived = decode(data, agreement(sent, chain.sent_size(SIZE))).params
    assert_same(arrived, payload)
    again = chain.on_server(arrived, seed=5, size=SIZE).to_dense()
    assert torch.equal(again, received(chain, values, seed=5))
    assert torch.equal(payload.to_dense(), chain.on_client(Dense(values), seed=5).to_dense())


def test_quantised_factors_lose_little_more():
    values = normal(64 * 96)
    low = PowerSGD(4, shapes=[(64, 96)])
    exact, rounded = (
        received(Chain(steps), values) for steps in ((low,), (low, QSGD(8, block=64)))
    )
    assert relative(rounded - exact, exact) < 0.02


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: received(PowerSGD(), torch.ones(4)), "set shapes to those"),
        (lambda: received(PowerSGD(shapes=[(2, 2)]), torch.ones(5)), "of 4 numbers in all, got 5"),
    ],
)
def test_bad_options_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
