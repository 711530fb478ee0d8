"""What a client's examples are for: training, or what it is validated and tested on.

shard = train ∪ validation ∪ test, disjoint; parts are held out one after the other, at random
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.shards import ClientShards

# of a client's examples: what is left to train on is a tenth at least
_MOST_HELD_OUT = 0.9


@dataclass(frozen=True)
class Roles:
    """Every client's examples by what they are for.

    Attributes:
        train: what each client trains on; in a search over architectures, what weights learn from.
        search: what its architecture learns from; empty shards where nothing is held out for it.
        learning: both.
        validation: what it is validated on; empty shards where nothing is held out for it.
        test: what it is tested on; likewise.

    Example:
        >>> import numpy as np
        >>> roles = Roles.of(ClientShards([np.arange(10)]), validation=0.2, test=0.3, seed=0)
        >>> [len(shards[0]) for shards in (roles.train, roles.validation, roles.test)]
        [5, 2, 3]
    """

    train: ClientShards
    search: ClientShards
    learning: ClientShards
    validation: ClientShards
    test: ClientShards

    @classmethod
    def of(
        cls, shards: ClientShards, *, validation: float, test: float, search: float = 0.0, seed: int
    ) -> Self:
        """Hold parts of every client's examples out.

        Args:
            shards: all examples of each client.
            validation: share of them to be validated on, in [0, 1).
            test: share of them to be tested on, in [0, 1).
            search: share of the rest for a search, in [0, 0.5].
            seed: of the choice.
        """
        rest, validated = shards.hold_out(validation, numpy_generator(seed, "client validation"))
        share_of_rest = test / (1 - validation)
        learning, tested = rest.hold_out(share_of_rest, numpy_generator(seed, "client test"))
        train, searched = learning, ClientShards([])
        if search:
            train, searched = learning.hold_out(search, numpy_generator(seed, "search half"))
        return cls(train, searched, learning, validated, tested)

    def placed(self, places: Mapping[int, int], num_clients: int) -> Self:
        """Return the roles of a larger federation, of whose other clients nothing is here.

        Args:
            places: by client of the federation, which client here it is.
            num_clients: of the federation.

        Example:
            >>> import numpy as np
            >>> roles = Roles.of(ClientShards([np.arange(4)]), validation=0.0, test=0.0, seed=0)
            >>> roles.placed({2: 0}, num_clients=3).train.num_examples
            array([0, 0, 4])
        """

        def moved(shards: ClientShards) -> ClientShards:
            nothing = np.empty(0, np.int64)
            here = (places.get(client) for client in range(num_clients))
            return ClientShards([nothing if at is None else shards.flat[at] for at in here])

        parts = (self.train, self.search, self.learning, self.validation, self.test)
        return type(self)(*(moved(part) if len(part) else part for part in parts))


def check_fractions(validation: float, test: float, search: float = 0.0) -> None:
    """Refuse shares of examples that cannot be held out.

    Raises:
        ConfigurationError: naming the option.
    """
    if not 0 <= search <= 0.5:
        raise ConfigurationError(
            f"search_fraction must be 0 or in (0, 0.5], got {search}: it is the share of its examples "
            "that a client's architecture learns from, and its weights do not"
        )
    for name, fraction in (("client_val_fraction", validation), ("client_test_fraction", test)):
        if not 0 <= fraction < 1:
            raise ConfigurationError(
                f"{name} must be in [0, 1), got {fraction}: "
                "it is the share of its examples that a client never trains on"
            )
    if validation + test > _MOST_HELD_OUT:
        raise ConfigurationError(
            f"client_val_fraction and client_test_fraction must be at most {_MOST_HELD_OUT} together, got "
            f"{validation} and {test}: clients train on the rest"
        )
