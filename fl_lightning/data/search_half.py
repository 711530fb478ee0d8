"""Two halves of every client's examples, for a search: weights learn from one, choices from the other.

A batch holds examples of the first half and as many of the second half of the same client:

    {"train": the batch's examples, "search": the partner of each of them}

An example's partner is drawn once a run, so that a batch is a function of its examples, and a shuffled
pass over one half is a shuffled pass over the other. Source: Liu et al. 2019, section 2.2 (two halves
of the training set); He et al. 2020, section 3.2 (two halves of every client's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.shards import ClientShards


class SearchHalf:
    """The partners of clients' training examples.

    Args:
        training: whose weights learn from which examples.
        search: the second half of each client's examples, no larger than the first.

    Raises:
        ConfigurationError: for a client with examples in one half only, and for an example of
            several clients, which would have several partners.

    Example:
        >>> import numpy as np
        >>> halves = SearchHalf(ClientShards([np.array([4, 0])]), ClientShards([np.array([2])]))
        >>> halves.partners(torch.tensor([0, 4]))
        tensor([2, 2])
    """

    def __init__(self, training: ClientShards, search: ClientShards) -> None:
        sizes, num_partners = training.num_examples, search.num_examples
        lonely = ((sizes > 0) & (num_partners == 0)).nonzero()[0]
        if len(lonely):
            raise ConfigurationError(
                f"search_fraction: client {lonely[0]} has one example, and a search needs two of every "
                "client, one for the weights and one for the choices: use a partition that gives "
                "each client more"
            )
        mine = torch.from_numpy(training.flat.indices).long()
        theirs = torch.from_numpy(search.flat.indices).long()
        if len(mine.unique()) < len(mine) or len(theirs.unique()) < len(theirs):
            raise ConfigurationError(
                "search_fraction: some examples belong to several clients: use a partition whose shards "
                "do not overlap"
            )
        places = torch.cat([mine, mine.new_zeros(1)])
        self._partner = torch.full((int(places.max()) + 1,), -1)
        for client in range(len(training)):
            ours, others = training[client].long(), search[client].long()
            if len(ours):
                self._partner[ours] = others[torch.arange(len(ours)) % len(others)]

    def partners(self, examples: Tensor) -> Tensor:
        """Return the partner of each example, shape (B,)."""
        return self._partner.index_select(0, examples.long())

    def paired(self, read: Callable[[Tensor], Any]) -> Callable[[Tensor], dict[str, Any]]:
        """Return the function from examples, shape (B,), to a batch with both halves."""
        return lambda examples: {"train": read(examples), "search": read(self.partners(examples))}
