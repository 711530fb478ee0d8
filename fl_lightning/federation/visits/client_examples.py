"""What a client's model is evaluated on: examples that the client held out, or the common test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.groups import limited


@dataclass(frozen=True)
class ClientExamples:
    """Examples by client.

    Attributes:
        num_examples: how many there are for each client, shape (num_clients,).
        batches: from a client to (batch, number of examples), one after the other.
        are_common: whether they are the same ones for all clients.
    """

    num_examples: npt.NDArray[np.int64]
    batches: Callable[[int], Iterator[tuple[Any, int]]]
    are_common: bool = False

    @property
    def clients(self) -> npt.NDArray[np.int64]:
        """The clients for which there are some, increasing."""
        return np.flatnonzero(self.num_examples)


def held_out_examples(data: FederatedDataModule, stage: str) -> ClientExamples:
    """Return what every client holds out for ``validation`` or ``test``.

    Example:
        >>> from fl_lightning.data import Digits
        >>> data = FederatedDataModule(Digits(), num_clients=9, client_test_fraction=0.2, seed=0)
        >>> len(held_out_examples(data, "test").clients)
        9
        >>> len(held_out_examples(data, "validation").clients)
        0
    """
    return ClientExamples(
        data.held_out_for(stage).num_examples, lambda client: data.held_out_batches(client, stage)
    )


def common_test_examples(trainer: Trainer, data: FederatedDataModule) -> ClientExamples:
    """Return the whole test set, limited by ``limit_test_batches``, for every client that trains.

    Raises:
        ConfigurationError: if the data module has not one `DataLoader` for tests.
    """
    loader = data.test_dataloader()
    loader = loader[0] if isinstance(loader, (list, tuple)) and len(loader) == 1 else loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            "ClientEvaluation(common_test_set=True) needs one test set, of which test_dataloader() "
            f"returns a DataLoader, got {type(loader).__name__}: return one, or set "
            "common_test_set to false and data.client_test_fraction"
        )
    count = limited(len(loader), trainer.limit_test_batches)

    def batches(client: int) -> Iterator[tuple[Any, int]]:
        return ((batch, extract_batch_size(batch)) for batch in islice(loader, count))

    total = sum(size for _, size in batches(0))
    return ClientExamples(
        np.where(data.clients.num_examples > 0, total, 0), batches, are_common=True
    )


def chosen_clients(
    data: FederatedDataModule, most: int, examples: ClientExamples | None = None
) -> npt.NDArray[np.int64]:
    """Return the clients that have examples, increasing; if there are more, ``most`` of them.

    Args:
        data: whose clients.
        most: how many at most.
        examples: on which they are evaluated; those that they hold out for validation if None.

    Example:
        >>> from fl_lightning.data import Digits
        >>> data = FederatedDataModule(Digits(), num_clients=9, client_val_fraction=0.2, seed=0)
        >>> len(chosen_clients(data, 10)), len(chosen_clients(data, 4))
        (9, 4)
    """
    clients = (examples or held_out_examples(data, "validation")).clients
    if len(clients) <= most:
        return clients
    return np.sort(numpy_generator(data.seed, "evaluated").choice(clients, most, replace=False))
