"""Means that look at losses or at clusters: q-FedAvg, tilted, AFL, averages of cluster centres."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize

from fl_lightning import ConfigurationError
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server import AFL, ClusterFedAvg
from fl_lightning.server.means.fair_means import QFedAvg, TiltedMean, on_simplex
from fl_lightning.server.means.mean import Mean

clients = st.lists(
    st.tuples(
        st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2),
        st.floats(0, 8, width=32),
        st.integers(1, 500),
    ),
    min_size=1,
    max_size=6,
)


def updates(entries):
    for client, (delta, loss, num_examples) in enumerate(entries):
        metrics = {} if loss is None else {"train/loss": torch.tensor(loss)}
        yield ClientUpdate(client, torch.tensor(delta), torch.empty(0), num_examples, 1, metrics)


def opened(aggregator, entries=()):
    aggregator.open(torch.empty(2))
    for update in updates(entries):
        aggregator.add(update)
    return aggregator


@settings(max_examples=25)
@given(entries=clients, q=st.floats(0, 4), lr=st.floats(0.01, 1))
def test_q_fedavg_is_the_papers_step(entries, q, lr):
    deltas = np.array([delta for delta, _, _ in entries])
    losses = np.array([loss for _, loss, _ in entries]) + 1e-10
    steps = deltas / lr
    numerator = (losses[:, None] ** q * steps).sum(0)
    squares = (steps**2).sum(1)
    denominator = (q * losses ** (q - 1) * squares + losses**q / lr).sum()
    found = opened(QFedAvg(q, lr), entries).close()
    np.testing.assert_allclose(found, numerator / denominator, rtol=1e-3, atol=1e-5)


@settings(max_examples=25)
@given(entries=clients, tilt=st.floats(0, 3))
def test_the_tilted_mean_by_numpy(entries, tilt):
    deltas, losses, counts = (np.array(part) for part in zip(*entries, strict=True))
    expected = np.average(deltas, axis=0, weights=counts * np.exp(tilt * losses))
    found = opened(TiltedMean(tilt), entries).close()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_a_large_tilt_follows_the_client_that_is_worst_off():
    entries = [([1.0, 0.0], 1.0, 900), ([0.0, 1.0], 2.0, 10)]
    assert opened(TiltedMean(100.0), entries).close().tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("rule", [QFedAvg(4.0, 0.1), TiltedMean(1.0)])
def test_weights_beyond_float32_add_up_over_processes(rule):
    """e^120 is no float32; processes add up products of weights and means."""
    entries = [([1.0, 2.0], 120.0, 1), ([4.0, 0.0], 121.0, 1)]
    expected = opened(copy.deepcopy(rule), entries).close()
    one, other = (opened(copy.deepcopy(rule), [entry]) for entry in entries)
    one.load_sums([sum(pair) for pair in zip(one.sums(), other.sums(), strict=True)])
    torch.testing.assert_close(one.close(), expected, rtol=1e-6, atol=0)


def test_losses_that_cannot_be_used_are_told():
    with pytest.raises(ClientFailure, match=r"client 0: q-FedAvg .* its loss is -1"):
        opened(QFedAvg(1.0, 0.1), [([0.0, 0.0], -1.0, 1)])
    with pytest.raises(ClientFailure, match="no train/loss"):
        opened(QFedAvg(1.0, 0.1), [([0.0, 0.0], None, 1)])
    with pytest.raises(ClientFailure, match="lower the tilt"):
        opened(TiltedMean(1000.0), [([0.0, 0.0], 1.0, 1)])
    with pytest.raises(ClientFailure, match="lower q"):
        opened(QFedAvg(10.0, 0.1), [([0.0, 0.0], 1e38, 1)])
    with pytest.raises(ClientFailure, match="no train/loss"):
        opened(AFL(), [([0.0, 0.0], None, 1)])
    with pytest.raises(ConfigurationError, match="a model of 7 parameters cannot hold 3"):
        ClusterFedAvg(3).open(torch.zeros(7))


@pytest.mark.parametrize("rule", [QFedAvg(1.0, 0.1), TiltedMean(1.0), AFL(0.1)])
def test_a_logged_loss_that_is_not_finite_is_named_before_its_update_is_added(rule):
    rule.open(torch.empty(1))
    metrics = {"train/loss": torch.tensor(torch.nan)}
    update = ClientUpdate(7, torch.ones(1), torch.empty(0), 1, 1, metrics)
    for receive in (partial(rule.check, num_updates=1), rule.add):
        with pytest.raises(ClientFailure, match="client 7: it has logged a train/loss of nan"):
            receive(update)


@pytest.mark.parametrize("rule", [QFedAvg(0.0), TiltedMean(0.0), AFL(0.0)])
def test_a_rule_that_is_off_reads_no_losses(rule):
    entries = [([1.0, 0.0], torch.nan, 2), ([3.0, 0.0], -1.0, 2)]
    assert opened(rule, entries).close().tolist() == [2.0, 0.0]


@pytest.mark.parametrize("loss", [1e17, 3e38])
def test_a_huge_loss_takes_the_whole_weight(loss):
    rule = AFL(0.1)
    opened(rule, [([1.0, 0.0], loss, 2), ([3.0, 0.0], 1.0, 2)]).close()
    assert sorted(rule.weights.values()) == [0.0, 1.0]


vectors = st.lists(st.floats(-3, 3), min_size=1, max_size=6).map(np.array)
few = settings(max_examples=25)


@few
@given(vectors, st.floats(0.1, 5))
def test_the_projection_is_scipys(vector, total):
    found = on_simplex(vector, total)
    expected = minimize(
        lambda x: np.square(x - vector).sum(),
        np.full(len(vector), total / len(vector)),
        jac=lambda x: 2 * (x - vector),
        bounds=[(0, None)] * len(vector),
        constraints=LinearConstraint(np.ones((1, len(vector))), total, total),
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(found, expected.x, atol=1e-5)
    assert found.sum() == pytest.approx(total)
    np.testing.assert_allclose(on_simplex(found, total), found, atol=1e-12)


def test_two_quadratics_meet_where_their_losses_are_equal():
    """max(x² / 2, 2 (x - 10)²) is least at 20/3; the mean of their gradients is 0 at 8."""
    x, aggregator, path = torch.zeros(1, dtype=torch.float64), AFL(step=1e-3), []
    for _ in range(3000):
        aggregator.open(x)
        for client, (a, centre) in enumerate(((1.0, 0.0), (4.0, 10.0))):
            loss, gradient = a / 2 * (x - centre) ** 2, a * (x - centre)
            metrics = {"train/loss": loss.squeeze()}
            delta = 0.05 * gradient
            aggregator.add(ClientUpdate(client, delta, torch.empty(0), 1, 1, metrics))
        x = x - aggregator.close()
        path.append(float(x))
    assert np.mean(path[-500:]) == pytest.approx(20 / 3, abs=1e-3)
    # and λ has made the gradient 0: λ x = (1 - λ) 4 (10 - x)
    assert aggregator.weights[0] == pytest.approx(2 / 3, abs=1e-2)


@few
@given(entries=clients, step=st.floats(0.01, 0.5))
def test_weights_move_along_the_losses_and_weigh_the_next_round(entries, step):
    aggregator = AFL(step)
    opened(aggregator, entries).close()
    losses = np.array([loss for _, loss, _ in entries])
    expected = on_simplex(1 / len(entries) + step * losses)
    np.testing.assert_allclose(list(aggregator.weights.values()), expected, atol=1e-9)
    deltas = np.array([delta for delta, _, _ in entries])
    found = opened(aggregator, entries).close()
    np.testing.assert_allclose(found, expected @ deltas, rtol=1e-4, atol=1e-5)


def test_a_client_that_comes_later_begins_with_the_mean_weight():
    aggregator = AFL(0.1)
    opened(aggregator, [([1.0, 0.0], 3.0, 1), ([0.0, 1.0], 1.0, 1)]).close()
    assert aggregator.weights == pytest.approx({0: 0.6, 1: 0.4})
    aggregator.open(torch.empty(2))
    *_, late = updates([([0.0, 0.0], 0.0, 1)] * 2 + [([6.0, 3.0], 2.0, 1)])
    aggregator.add(late)
    assert aggregator.close().tolist() == [6.0, 3.0]
    expected = on_simplex(np.array([0.4, 0.8 / 3, 1 / 3 + 0.2]))
    assert list(aggregator.weights.values()) == pytest.approx(expected)


def test_clients_without_weight_leave_the_model_where_it_is():
    aggregator = AFL(10.0)
    opened(aggregator, [([1.0, 0.0], 0.0, 1), ([0.0, 1.0], 1.0, 1)]).close()
    assert aggregator.weights == {0: 0.0, 1: 1.0}
    assert opened(aggregator, [([5.0, 5.0], 1.0, 1)]).close().tolist() == [0.0, 0.0]


def merged(present, clients, sizes=None, **options):
    present = torch.tensor(present)
    aggregator = ClusterFedAvg(num_clusters=len(present), **options)
    aggregator.open(present.flatten())
    for number, ends in enumerate(clients):
        delta = (present - torch.tensor(ends)).flatten()
        own = torch.tensor(sizes[number]) if sizes else torch.empty(0)
        aggregator.add(ClientUpdate(number, delta, own, 10, 1))
    return (present.flatten() - aggregator.close()).reshape(present.shape)


CLIENTS = [
    [[0.0, 0], [5, 5], [10, 0]],
    [[10.2, 0], [0.1, 0], [5, 5.2]],
    [[4.9, 5], [9.8, 0.1], [0, -0.1]],
]


def test_centroids_in_any_order_are_merged():
    found = merged([[0.0, 0], [5, 5], [9, 0]], CLIENTS)
    expected = [[0.033333, -0.033333], [4.966667, 5.066667], [10, 0.033333]]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


@settings(max_examples=20)
@given(st.permutations(range(3)))
def test_numbering_follows_the_present_centroids(order):
    present = np.array([[0.0, 0], [5, 5], [9, 0]], np.float32)
    plain, turned = merged(present.tolist(), CLIENTS), merged(present[order].tolist(), CLIENTS)
    torch.testing.assert_close(turned, plain[order], rtol=0, atol=1e-5)


@settings(max_examples=20)
@given(
    ends=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 50), min_size=6, max_size=6),
)
def test_one_cluster_is_the_mean_by_members(ends, sizes):
    present, mean = torch.tensor([1.0]), Mean()
    mean.open(present)
    for number, end in enumerate(ends):
        delta = present - torch.tensor([end])
        mean.add(ClientUpdate(number, delta, torch.empty(0), sizes[number], 1))
    expected = present - mean.close()
    found = merged([[1.0]], [[[end]] for end in ends], [[float(n)] for n in sizes])
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_clusters_without_members_do_not_count():
    found = merged([[0.0], [9.0]], [[[1.0], [500.0]], [[3.0], [9.0]]], [[2.0, 0.0], [2.0, 4.0]])
    assert found.tolist() == [[2.0], [9.0]]


def test_with_fewer_different_centroids_the_others_stay():
    found = merged([[0.0], [5.0], [9.0]], [[[0.5], [9.5], [0.5]]] * 2)
    assert found.tolist() == [[0.5], [5.0], [9.5]]


def test_weights_can_be_left_out():
    clients, sizes = [[[1.0]], [[4.0]]], [[1.0], [2.0]]
    assert merged([[0.0]], clients, sizes).item() == pytest.approx(3.0)
    assert merged([[0.0]], clients, sizes, weight_by_size=False).item() == pytest.approx(2.5)
