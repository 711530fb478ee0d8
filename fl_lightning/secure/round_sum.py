"""The secure sum of one round's integers, of which the server learns nothing but the sum.

Clients' vectors are taken in one after the other; who sends none has dropped out before it was due.
Kept are all vectors, because one may have to be left out, or only their sum where none can be.
Source: Bonawitz et al. 2017; the protocol is that of `fl_lightning.secure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from secrets import randbits
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.seeds import derive_seed
from fl_lightning.secure.protocol.session import AbortedError, ProtocolStage
from fl_lightning.secure.ring import Ring, RingIntegers
from fl_lightning.secure.secure_sum import SecureSum, by_client
from fl_lightning.secure.simulation import SumOutcome
from fl_lightning.secure.unit_seconds import UnitSeconds
from fl_lightning.server.protected import AddsAtSites, Expense


class RoundSum:
    """Adds up the integers of one round after the other.

    Args:
        secure_sum: adds them.
        seed: of the protocol's keys.

    Attributes:
        secure_sum: as given; may be changed between rounds.
        adds_at_sites: adds vectors that are at sites; None where they are taken in here.
        expense: of the last round that was closed; of nothing while one is open.
        clients: whose vectors are in the open round.

    Example:
        >>> rounds = RoundSum(SecureSum(bits=8), seed=0)
        >>> rounds.open(size=1, device=torch.device("cpu"), round_index=0)
        >>> for client, number in enumerate([1, 2, 250]):
        ...     rounds.take(client, lambda n=number: np.array([n], np.uint8))
        >>> rounds.total()
        array([253], dtype=uint8)
    """

    def __init__(self, secure_sum: SecureSum, seed: int) -> None:
        self.secure_sum, self._seed = secure_sum, seed
        self._unit_seconds: UnitSeconds | None = None
        self.adds_at_sites: AddsAtSites | None = None
        self.expense = Expense()

    def open(self, size: int, device: torch.device, round_index: int) -> None:
        """Start without vectors.

        Args:
            size: numbers of a vector.
            device: where processes exchange theirs.
            round_index: which round.
        """
        self._ring = Ring(self.secure_sum.bits)
        # without all vectors, no client can be left out of the sum later; in a sparse graph one
        # may be whose neighbours are gone
        is_sparse = self.secure_sum.sparse is not None
        self._keeps_vectors = self.secure_sum.protocol == "run" or is_sparse
        self._size, self._device, self._round_index = size, device, round_index
        self.expense = Expense()
        self.clients: list[int] = []
        self._missing: list[int] = []
        # every client's, or only their sum
        self._vectors: list[RingIntegers] = []

    def take(self, client: int, vector: Callable[[], RingIntegers]) -> None:
        """Take in one client's integers, which are asked for unless they are at its site."""
        self.clients.append(client)
        if self.adds_at_sites is None:
            self._take(vector())

    def _take(self, vector: RingIntegers) -> None:
        if self._keeps_vectors or not self._vectors:
            self._vectors.append(vector)
        else:
            total = self._vectors[0]
            np.add(total, vector, out=total)
            self._ring.reduced(total)

    def exchange(
        self, gather: Callable[[Any], list[Any]], all_reduce: Callable[[Tensor], None]
    ) -> None:
        """Take the vectors of all processes for one's own; to be called by all of them."""
        if self._keeps_vectors:
            parts = gather((self.clients, self._vectors))
            self.clients = [client for clients, _ in parts for client in clients]
            self._vectors = [vector for _, vectors in parts for vector in vectors]
            return
        self.clients = [client for clients in gather(self.clients) for client in clients]
        ring = self._ring
        own = self._vectors[0] if self._vectors else np.zeros(self._size, ring.dtype)
        # integers of 64 bits overflow modulo a multiple of the ring's R
        total = torch.from_numpy(own.astype(np.uint64).view(np.int64)).to(self._device)
        all_reduce(total)
        summed = total.cpu().numpy().view(np.uint64).astype(ring.dtype)
        self._vectors = [ring.reduced(summed)] if self.clients else []

    def miss(self, clients: Iterable[int]) -> None:
        """Learn which clients of the cohort sent no vector: they dropped before it was due."""
        self._missing = sorted(clients)

    def total(self) -> RingIntegers:
        """Return the sum modulo 2^bits, shape (size,), and forget the vectors.

        Raises:
            RoundFailure: if too few clients are left for a secure sum.
        """
        try:
            outcome = self._outcome()
        except (AbortedError, ValueError) as error:
            raise RoundFailure(
                f"round {self._round_index}: the secure sum of {len(self.clients)} updates, with "
                f"{len(self._missing)} clients missing, gave nothing: {error}"
            ) from error
        costs = outcome.costs
        word = "estimated_" if self.secure_sum.protocol == "count" else ""
        seconds = {f"{word}server_seconds": costs.server_seconds}
        if self.adds_at_sites is None:  # sites do not tell theirs
            seconds[f"{word}client_seconds"] = costs.client_seconds
        self.expense = Expense(costs.bytes_up, costs.bytes_down, seconds)
        self._vectors = []
        return outcome.total

    def _outcome(self) -> SumOutcome:
        if self.adds_at_sites is not None:
            return self._outcome_at_sites(self.adds_at_sites)
        vectors = self._vectors
        if not self._keeps_vectors and vectors:
            nothing = np.broadcast_to(np.zeros(1, vectors[0].dtype), vectors[0].shape)
            vectors = vectors + [nothing] * (len(self.clients) - 1)
        if self.secure_sum.protocol == "count" and self._unit_seconds is None:
            self._unit_seconds = UnitSeconds.measured()
        return self.secure_sum(
            dict(zip(self.clients, vectors, strict=True)),
            dict.fromkeys(self._missing, ProtocolStage.MASK),
            round_index=self._round_index,
            seed=derive_seed(self._seed, "secure mean"),
            unit_seconds=self._unit_seconds,
        )

    def _outcome_at_sites(self, adds: AddsAtSites) -> SumOutcome:
        cohort = sorted({*self.clients, *self._missing})
        session = self.secure_sum.session(
            len(cohort), size=self._size, round_index=self._round_index, graph_seed=randbits(63)
        )
        return by_client(adds(session, cohort), cohort)

    def state_dict(self) -> dict[str, Any]:
        """Return whose vectors there are, and these or their sum."""
        signed = self._ring.dtype.str.replace("u", "i")  # torch has few unsigned dtypes
        return {
            "clients": list(self.clients),
            "vectors": [torch.from_numpy(v.view(signed).copy()) for v in self._vectors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.clients = list(state["clients"])
        self._vectors = [v.cpu().numpy().view(self._ring.dtype).copy() for v in state["vectors"]]
