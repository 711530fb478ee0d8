"""What a federation's round does, looked up: which clients, which batches, which draws.

Every draw of a `Federation` is a pure function of (seed, purpose, round, client), so anybody can
repeat its round.
"""

from __future__ import annotations

from functools import partial

from benchmarks.bare import Visit
from benchmarks.workloads import SEED, Workload
from fl_lightning import UniformCohort
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.shards import FlatShards, local_order


def federation_plan(work: Workload, clients: FlatShards, round_index: int) -> list[Visit]:
    """Return the visits of a round of the workload's federation, in its order."""
    population = Population(clients.num_examples)
    ids = UniformCohort(size=work.cohort).sample(round_index, population, SEED)
    total = float(clients.num_examples[ids].sum())
    visits = []
    for client in ids.tolist():
        order, sizes = local_order(
            clients[client],
            work.batch_size,
            partial(torch_generator, SEED, "shuffle", round_index, client),
            num_epochs=None if work.local_steps else 1,
            num_batches=work.local_steps,
        )
        share = float(clients.num_examples[client]) / total
        seed = derive_seed(SEED, "local training", round_index, client)
        visits.append(Visit(order.split(sizes), share, seed))
    return visits
