"""A round's updates side by side: the same in memory and in a file, in blocks, over processes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.robust import matrix as update_rows
from fl_lightning.server.robust.matrix import UpdateRows, chosen_rows, mixed_rows, rows_and_one
from fl_lightning.server.robust.passes import combined, products, sorted_sum, squared_distances

MATRIX = np.random.default_rng(0).standard_normal((7, 5000)).astype(np.float32)


def rows_of(matrix, memory_limit=2**30, clients=None):
    rows = UpdateRows(torch.empty(matrix.shape[1]), memory_limit=memory_limit)
    for place, row in enumerate(matrix):
        client = place if clients is None else clients[place]
        metrics = {"train/loss": torch.tensor(float(client))}
        rows.append(
            ClientUpdate(
                client,
                torch.from_numpy(row),
                torch.full((2,), float(client)),
                10 + client,
                2,
                metrics,
                None,
                1.5,
            )
        )
    return rows


def whole(rows):
    return np.concatenate([block.copy() for _, block in rows.blocks()], axis=1)


@pytest.mark.parametrize("kept", [0, 1, 3, 7])
def test_a_file_gives_back_the_bits(kept, monkeypatch):
    monkeypatch.setattr(update_rows, "_BLOCK_BYTES", 1)  # blocks of 1024 columns
    rows = rows_of(MATRIX, memory_limit=kept * MATRIX[0].nbytes)
    assert len(list(rows.blocks())) == 5
    assert (whole(rows) == MATRIX).all()
    assert [u.delta.tolist() for u in rows.updates()] == MATRIX.tolist()
    assert [(u.client_id, u.num_examples, u.num_steps) for u in rows.updates()] == [
        (i, 10 + i, 2) for i in range(7)
    ]


@given(clients=st.permutations(range(7)))
def test_rows_are_in_the_order_of_their_clients(clients):
    matrix = MATRIX[:, :3]
    rows = rows_of(matrix, memory_limit=24, clients=clients)
    assert (whole(rows)[clients] == matrix).all()
    assert rows.client_ids == list(range(7))
    assert rows.num_examples.tolist() == list(range(10, 17))


def test_an_update_may_change_afterwards():
    delta = torch.ones(3)
    rows = UpdateRows(delta)
    rows.append(ClientUpdate(0, delta, torch.empty(0), 1, 1))
    delta.zero_()
    assert whole(rows).tolist() == [[1.0, 1.0, 1.0]]


def test_processes_exchange_their_updates_bit_for_bit():
    owners = [[4, 1], [], [0, 3, 2]]
    shares = [rows_of(MATRIX[clients], 0, clients) for clients in owners]
    order = [client for clients in owners for client in sorted(clients)]
    told = []
    for share in shares:
        share.exchange(lambda updates: told.append(updates) or [], None)
    for mine, share in zip(owners, shares, strict=True):
        waiting = iter(order)

        def all_reduce(vector, mine=mine, waiting=waiting):
            client = next(waiting)
            contributed = MATRIX[client] if client in mine else np.zeros_like(MATRIX[0])
            assert (vector.numpy() == contributed).all()
            vector.copy_(torch.from_numpy(MATRIX[client]))

        everyone = share.exchange(lambda _: told, all_reduce)
        assert (whole(everyone) == MATRIX[:5]).all()
        assert [float(u.metrics["train/loss"]) for u in everyone.updates()] == [0, 1, 2, 3, 4]
        assert [u.buffers.tolist() for u in everyone.updates()] == [[i, i] for i in range(5)]


def test_passes_are_numpys(monkeypatch):
    monkeypatch.setattr(update_rows, "_BLOCK_BYTES", 1)
    rows, wide = rows_of(MATRIX), MATRIX.astype(float)
    np.testing.assert_allclose(products(rows), wide @ wide.T, rtol=1e-5, atol=1e-2)
    expected = ((wide[:, None] - wide) ** 2).sum(2)
    np.testing.assert_allclose(squared_distances(rows), expected, rtol=1e-5)
    weights = np.arange(7.0)
    np.testing.assert_allclose(combined(rows, weights), weights @ wide, rtol=1e-4, atol=1e-4)
    ordered = weights @ np.sort(wide, axis=0)
    np.testing.assert_allclose(sorted_sum(rows, weights), ordered, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spread", [1e-2, 2e-4, 1e-6])
@pytest.mark.parametrize("origin", [0.0, 1e4])
def test_near_rows_are_told_apart(spread, origin):
    """In float32 a Gram matrix of rows that differ in their last digits has none of these left."""
    random = np.random.default_rng(0)
    common = random.standard_normal(20_000) + origin
    wide = common + spread * max(1.0, origin) * random.standard_normal((9, 20_000))
    wide[0] = 1e6 * random.standard_normal(20_000)  # one that is far from all
    matrix = wide.astype(np.float32)
    wide = matrix.astype(float)
    expected = ((wide[:, None] - wide) ** 2).sum(2)
    np.testing.assert_allclose(squared_distances(rows_of(matrix)), expected, rtol=2e-3)


def test_views_are_rows():
    rows = rows_of(MATRIX)
    chosen = chosen_rows(rows, [5, 1, 2])
    assert (whole(chosen) == MATRIX[[5, 1, 2]]).all()
    assert (np.concatenate([b.copy() for _, b in chosen.blocks([2])], 1) == MATRIX[[2]]).all()
    assert chosen.client_ids == [5, 1, 2]
    mixed = mixed_rows(rows, np.ones((2, 7)) / 7)
    np.testing.assert_allclose(whole(mixed)[1], MATRIX.mean(0), atol=1e-5)
    assert (len(mixed), mixed.num_examples.tolist()) == (2, [13.0, 13.0])
    longer = rows_and_one(rows, np.ones(5000))
    assert whole(longer)[7].tolist() == [1.0] * 5000
    assert (len(longer), longer.num_columns) == (8, 5000)
    assert not np.isnan(whole(longer)).any()


def test_a_row_that_overflows_is_infinitely_far():
    matrix = np.array([[1.0, 2.0], [1.0, 3.0], [1e30, 0.0]], np.float32)
    distances = squared_distances(rows_of(matrix))
    assert distances[0, 1] == pytest.approx(1.0)
    assert np.isinf(distances[2, :2]).all()
    assert distances[2, 2] == 0
