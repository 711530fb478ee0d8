"""ClusterFedAvg: a vector by hand, one cluster is the mean, order and empty clusters do not matter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import ConfigurationError, Mean
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server import ClusterFedAvg


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


def test_refuses():
    with pytest.raises(ConfigurationError, match="a model of 7 numbers is not 3 centroids"):
        ClusterFedAvg(3).open(torch.zeros(7))
