"""The work of a group, kept end to end, is that of its clients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.client.work import ClientWork, GroupWork

SIZES = st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=6)


def clients_of(sizes):
    made, begin = [], 0
    for client, own in enumerate(sizes):
        order = torch.arange(begin, begin + sum(own))
        made.append(ClientWork(10 + client, sum(own), order, own, client % 3, 7))
        begin += sum(own)
    return made


def plain(work):
    return [client._replace(order=client.order.tolist()) for client in work]


@given(SIZES)
def test_reads_like_a_list(sizes):
    clients = clients_of(sizes)
    group = GroupWork.of(clients)
    assert plain(group) == plain(clients)
    assert plain(group[1:]) == plain(clients[1:])
    assert plain(group[::-2]) == plain(clients[::-2])
    assert GroupWork.of(group) is group
    if clients:
        assert plain([group[-1]]) == plain(clients[-1:])
    with pytest.raises(IndexError):
        group[len(clients)]


@given(SIZES, st.data())
def test_some_of_it(sizes, data):
    clients = clients_of(sizes)
    kept = [data.draw(st.booleans()) for _ in clients]
    expected = [client for client, is_kept in zip(clients, kept, strict=True) if is_kept]
    assert plain(GroupWork.of(clients).where(np.array(kept, bool))) == plain(expected)
