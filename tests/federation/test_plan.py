"""What the clients of a group do is what each of them would alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyData

from fl_lightning import FederatedDataModule
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.shards import local_order
from fl_lightning.federation.plan import LocalWork, WorkPlan

SEED = 5
BATCH = 4


class OfSizes:
    """Clients of given sizes, their examples in any order."""

    def __init__(self, sizes):
        self.sizes = sizes

    def assign(self, labels, num_clients, seed):
        order = np.random.default_rng(seed).permutation(len(labels))
        return np.split(order[: sum(self.sizes)], np.cumsum(self.sizes)[:-1])


def plan(sizes, local_steps, local_epochs):
    data = FederatedDataModule(
        ToyData(batch_size=BATCH), num_clients=len(sizes), partition=OfSizes(sizes), seed=SEED
    )
    data.setup("fit")
    return data, WorkPlan(data, LocalWork(local_steps, local_epochs, accumulate=1, seed=SEED))


@pytest.mark.parametrize(("steps", "epochs"), [(None, 1), (None, 2), (1, None), (3, None)])
@given(
    sizes=st.lists(st.integers(0, BATCH), min_size=1, max_size=6)
    | st.lists(st.integers(0, 3 * BATCH), min_size=1, max_size=5),
    round_index=st.integers(0, 3),
)
def test_of_a_group(steps, epochs, sizes, round_index):
    data, works = plan(sizes, steps, epochs)
    asked = list(range(len(sizes)))[::-1]
    group = works.of(asked, [round_index] * len(asked))
    assert [client.client_id for client in group] == asked
    for work in group:
        client, shard = work.client_id, data.clients[work.client_id]
        assert (work.num_examples, work.round_index) == (sizes[client], round_index)
        assert work.root_seed == SEED
        if not sizes[client]:
            assert work.sizes == []
            continue
        order, expected = local_order(
            shard,
            BATCH,
            lambda client=client: torch_generator(SEED, "shuffle", round_index, client),
            num_epochs=epochs,
            num_batches=steps,
        )
        assert torch.equal(work.order, order)
        assert work.sizes == expected
