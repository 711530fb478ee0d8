"""Data module of a server whose clients' examples are at sites: it knows only how many each client has.

Below: checks of a configuration before any site is contacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import conflicts
from fl_lightning.data.federated import MAX_CLIENTS_COUNTED, FederatedDataModule
from fl_lightning.data.roles import Roles
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.summary import PartitionSummary
from fl_lightning.federation import LocalWork, Options, WorkPlan, network_parts, shown_by

_AT_SITES = (
    "over a network the server cannot read clients' examples, which are at their sites: leave out the part of "
    "the configuration that reads them, such as a fitted head"
)


class DataElsewhere(FederatedDataModule):
    """Data module of a server: only its evaluation loaders read data; clients' examples are at sites.

    If the server has no test set, a test asks the sites to evaluate the clients' test examples, as far as
    `ClientEvaluation` is there and their policies let metrics leave.

    Args:
        data: data module of the configuration; its training set is never read.
        num_examples: number of examples of every client.
        held_out: number of held-out examples of every client, by stage (``validation``, ``test``).
        batch_size: size of clients' local batches.
        drop_last: True if clients leave out a smaller last batch.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        *,
        num_examples: Mapping[int, int],
        held_out: Mapping[str, Mapping[int, int]],
        batch_size: int,
        drop_last: bool,
    ) -> None:
        super().__init__(
            data.source,
            num_clients=len(num_examples),
            seed=data.seed,
            transforms=data.transforms,  # of the server's own validation
        )
        if sorted(num_examples) != list(range(len(num_examples))):
            raise ConfigurationError(
                f"the sites' clients must be numbered from 0 without a gap, got {sorted(num_examples)}: "
                "set clients in each site.yaml"
            )
        nothing = FlatShards.of([])
        held = {stage: _shards_of(sizes) for stage, sizes in held_out.items()}
        vars(self)["_roles"] = Roles(_shards_of(num_examples), nothing, nothing, **held)
        self._size, self._drops = batch_size, drop_last
        if any(held_out["test"].values()):
            self.test_dataloader = self._test_sets  # type: ignore[method-assign]

    @property
    def training(self) -> NoReturn:
        """Raise ConfigurationError, because the training data are at sites."""
        raise ConfigurationError(_AT_SITES)

    def _clients_test_set(self) -> DataLoader[Any]:
        """Return a loader without a batch: sites test on their clients' examples, and the server on nothing."""
        return DataLoader(_Nothing())

    def _read(self, *, augmented: bool) -> Callable[[Tensor], Any]:
        """Return a function that refuses to read examples, because they are at sites."""

        def refuse(indices: Tensor) -> Any:
            raise ConfigurationError(_AT_SITES)

        return refuse

    @property
    def batch_size(self) -> int:
        """Number of examples in a client's local batch."""
        return self._size

    @property
    def drop_last(self) -> bool:
        """True if clients leave out a smaller last batch."""
        return self._drops

    @property
    def draw_weights(self) -> None:
        """None: the server draws no batches, so it needs no weights of examples."""
        return

    def summary(self) -> PartitionSummary:
        """Return a summary of how many examples clients have, without classes, which only sites know."""
        return PartitionSummary.of(self.clients, None, max_clients=MAX_CLIENTS_COUNTED)


class _Nothing(IterableDataset[Any]):
    """Dataset without a batch and without a length: Lightning would skip an evaluation on a loader of length 0."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _shards_of(sizes: Mapping[int, int]) -> FlatShards:
    """Return clients' shards that have the sizes that sites report, but no indices of examples."""
    lengths = np.array([sizes[client] for client in sorted(sizes)], np.int64)
    shards = FlatShards(np.empty(0, np.int32), np.zeros_like(lengths))
    shards.num_examples = lengths
    return shards


@final
class WorkElsewhere(WorkPlan):
    """Plan of a server: which clients train in which round. Sites choose the examples and steps.

    Args:
        data: data module of the server.
        seed: seed of the run.
    """

    def __init__(self, data: FederatedDataModule, seed: int) -> None:
        super().__init__(data, LocalWork(None, None, accumulate=1, seed=seed))
        self._seed = seed

    @override
    def of(self, clients: Sequence[int], rounds: int | Sequence[int]) -> GroupWork:
        # no index of an example: their number is what a site claims
        chosen, nothing = np.array(clients, np.int64), np.empty(0, np.int64)
        return GroupWork(
            client_ids=chosen,
            num_examples=self.num_examples[chosen],
            order=torch.from_numpy(nothing),
            sizes=nothing,
            num_steps=np.zeros_like(chosen),
            rounds=np.broadcast_to(np.array(rounds, np.int64), chosen.shape),
            root_seed=self._seed,
        )


SCALED = "16-mixed"  # a precision


def check_over_network(trainer: Trainer, module: Any, data: Any, options: Options) -> None:
    """Raise if options of a run have no meaning over a network, or another one than in a simulation.

    Raises:
        ConfigurationError: naming all of them.
    """
    problems = list(conflicts(network_parts(trainer, module, options)))
    if trainer.world_size > 1:
        problems.append(
            f"trainer.devices: the server is one process, got {trainer.world_size}: set devices to 1; "
            "sites have devices of their own"
        )
    if isinstance(data, FederatedDataModule):
        problems += unknown_elsewhere(data)
    else:
        problems.append(
            "data: over a network the configuration is that of a federation: wrap the data module in "
            "fl_lightning.FederatedDataModule"
        )
    if problems:
        raise ConfigurationError("\n".join(problems))


def unknown_elsewhere(data: FederatedDataModule) -> list[str]:
    """Return an error for each option that needs the examples of all clients in one place."""
    weight = "data.update_weight: sites report how many examples their clients have, and no sums of a column: "
    problems = [] if data.update_weight is None else [f"{weight}leave update_weight out"]
    return problems + [
        f"data.transforms {type(each).__name__} learns from all clients' examples, which are at sites: use "
        "Normalize with numbers that are known, in the configurations of server and sites"
        for each in data.transforms
        if shown_by([each])
    ]
