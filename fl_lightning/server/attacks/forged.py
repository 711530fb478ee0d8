"""Attackers in a round: they see what others send, and then send something else.

`Forged` wraps an aggregator. It keeps the round's updates until all are there, because the strongest
attacks know the honest ones, and then folds them in, the attackers' replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeds import numpy_generator
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.kept_updates import KeptUpdates
from fl_lightning.server.robust.matrix import Floats, Rows

# Of one attacker, by its client id
Generators = Callable[[int], np.random.Generator]


class Forgery(Protocol):
    """What attackers make of their updates."""

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield what each attacker sends, shape (k,).

        Args:
            rows: all updates of the round, as honest training made them.
            attackers: the places of the attackers' among them, at least one, increasing.
            generators: what an attacker draws from.
        """


@final
class Forged(KeptUpdates):
    """An aggregator whose clients are not all honest.

    Args:
        aggregator: what the updates go to, the attackers' replaced.
        forgery: what attackers send.
        attackers: their client ids.
        seed: root of what they draw.

    Example:
        >>> from fl_lightning.core.update import ClientUpdate
        >>> from fl_lightning.server.means.mean import Mean
        >>> from fl_lightning.server.attacks.alone import SignFlip
        >>> aggregator = Forged(Mean(), SignFlip(), attackers=[1], seed=0)
        >>> aggregator.open(torch.empty(1))
        >>> for client in range(3):
        ...     aggregator.add(ClientUpdate(client, torch.ones(1), torch.empty(0), 1, 1))
        >>> aggregator.close()
        tensor([0.3333])
    """

    def __init__(
        self, aggregator: Aggregator, forgery: Forgery, attackers: Collection[int], seed: int
    ) -> None:
        self.aggregator, self.forgery = aggregator, forgery
        self.attackers = frozenset(attackers)
        self.exact = aggregator.exact
        self.needs_effective_steps = aggregator.needs_effective_steps
        self._seed, self._round_index = seed, 0

    @property
    def reader(self) -> str:
        """The attack."""
        return type(self.forgery).__name__

    @property
    def buffers(self) -> Tensor | None:
        """What the aggregator has made of the last round's buffers; None for their mean."""
        return self.aggregator.buffers

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the aggregator keeps from round to round."""
        return self.aggregator.memory

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self.aggregator.memory = values

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""
        self._round_index = round_index
        self.aggregator.start_round(round_index)

    def open(self, like: Tensor) -> None:
        """Start without updates."""
        self._like = like
        # the rule has as many again, with the attackers' in their places
        self._rows = self.aggregator.new_rows(like)

    def close(self) -> Tensor:
        """Return the aggregate of the honest updates and the forged ones."""
        rows = self._rows
        places = [place for place, client in enumerate(rows.client_ids) if client in self.attackers]
        forged = self.forgery.forge(rows, places, self._generator) if places else iter(())
        self.aggregator.open(self._like)
        for update in rows.updates():
            sent = update
            if update.client_id in self.attackers:
                vector = torch.from_numpy(np.ascontiguousarray(next(forged)))
                sent = replace(update, delta=vector.to(self._like))
            self.aggregator.add(sent)
        del self._rows
        return self.aggregator.close()

    def _generator(self, client: int) -> np.random.Generator:
        return numpy_generator(self._seed, "attack", self._round_index, client)
