"""Secure sums, one per round: options of the protocol, and the base of aggregators that use it.

The server learns only the sum of the integers of a round.
Source: Bonawitz et al. 2017; the protocol is that of `fl_lightning.secure`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from secrets import randbits
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.update import ClientUpdate
from fl_lightning.secure.entropy import Entropy, seeded_entropy
from fl_lightning.secure.protocol.session import (
    AbortedError,
    ProtocolStage,
    Session,
    SparseGraph,
    new_run_id,
)
from fl_lightning.secure.ring import Ring, RingIntegers
from fl_lightning.secure.simulation import HiddenSum, shortcut, simulate
from fl_lightning.server.aggregator import Aggregator, AllReduce, Gather
from fl_lightning.server.protected import Protected, ProtectionCost, SumsAtSites

# bytes of a vector from which signatures cost less than 20 % of all CPU seconds: best times differ by
# 7 and 10 % at 8 MB with 10 and 20 clients; at 4 MB by 8, -4, 24 and 18 % with 5 to 50
ACTIVE_FROM = 8_000_000


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """Adds clients' integers modulo 2^bits, so that the server learns their sum only.

    Args:
        bits: bits of the ring, from 1 to 64, as those of the quantiser.
        threshold: see `SecureMean`; not used with a sparse graph, which has a threshold of its own.
        sparse: see `SecureMean`.
        active: see `SecureMean`; None for True from vectors of ``ACTIVE_FROM`` bytes on.
        protocol: see `SecureMean`.
        run: id of the run; random, unless messages are to be repeated byte for byte.
        min_survivors: smallest number of vectors in a sum, if that is more than the threshold.

    Raises:
        ValueError: if an option is outside its range, or options contradict each other.

    Example:
        >>> secure_sum = SecureSum(bits=16)
        >>> updates = {7: np.array([1, 2], np.uint16), 3: np.array([10, 20], np.uint16)}
        >>> updates |= {5: np.array([5, 5], np.uint16)}
        >>> secure_sum(updates, round_index=0, seed=0).total
        array([16, 27], dtype=uint16)
        >>> secure_sum.typical_bytes(2, 3)[0]
        2343
    """

    bits: int = 32
    threshold: float = 2 / 3
    sparse: SparseGraph | None = None
    active: bool | None = False
    protocol: Literal["run", "count"] = "run"
    run: str = field(default_factory=new_run_id)
    min_survivors: int | None = None

    def __post_init__(self) -> None:
        low = 2 / 3 if self.active else 1 / 2
        if not low <= self.threshold < 1:
            raise ValueError(
                f"threshold must be from {low:.3g} to below 1, got {self.threshold}: more than "
                "this share of a cohort must answer to the end"
            )
        if self.active and self.sparse is not None:
            raise ValueError(
                "active: true needs every client as every other's neighbour: leave sparse out"
            )
        if self.protocol not in ("run", "count"):
            raise ValueError(f"protocol must be 'run' or 'count', got {self.protocol!r}")
        self.session(max(4, self.min_survivors or 0), size=0)

    def is_active(self, size: int) -> bool:
        """Return whether sums of vectors of this size are protected from a server that breaks the protocol."""
        if self.active is not None:
            return self.active
        is_possible = self.sparse is None and self.threshold >= 2 / 3
        return is_possible and size * Ring(self.bits).dtype.itemsize >= ACTIVE_FROM

    def session(
        self, num_clients: int, *, size: int, round_index: int = 0, graph_seed: int = 0
    ) -> Session:
        """Return the settings of a secure sum over a cohort of this many clients.

        Args:
            num_clients: number of clients in the cohort, ≥ 2.
            size: size of the vectors.
            round_index: number of the round, ≥ 0.
            graph_seed: seed of the sparse graph.

        Raises:
            ValueError: if there is no such session.
        """
        # a hair more, because 2/3 of a multiple of three is a whole number
        threshold, near = min(num_clients, int(self.threshold * num_clients + 1e-9) + 1), None
        if self.sparse is not None:
            near, threshold = self.sparse.plan(num_clients)
        least = self.min_survivors
        if least is not None and near is None:
            least = max(least, threshold)
        return Session(
            run=self.run,
            round_index=round_index,
            num_clients=num_clients,
            size=size,
            threshold=threshold,
            min_survivors=least,
            bits=self.bits,
            num_neighbours=None if near is None or near >= num_clients - 1 else near,
            active=self.is_active(size),
            graph_seed=graph_seed,
        )

    def __call__(
        self,
        updates: Mapping[int, RingIntegers],
        missing: Iterable[int] = (),
        *,
        round_index: int,
        seed: int,
    ) -> HiddenSum:
        """Run the protocol in this process, and return the sum of the vectors.

        Args:
            updates: vectors by client, integers from 0 to 2^bits - 1, all of shape (k,), at least one.
            missing: further clients of the cohort, which drop out before they send a vector.
            round_index: number of the round, ≥ 0.
            seed: seed of all secrets, which protects nothing; with ``run`` all bytes are repeatable.

        Returns:
            The sum, its clients and its cost, by the clients' ids.

        Raises:
            AbortedError: if too few clients are left.
            ValueError: if the cohort has fewer than two clients, or vectors do not fit.
        """
        if not updates:
            raise ValueError("there is no vector to add")
        cohort, size = sorted({*updates, *missing}), len(next(iter(updates.values())))
        graph_seed = derive_seed(seed, "secure sum", round_index)
        session = self.session(
            len(cohort), size=size, round_index=round_index, graph_seed=graph_seed
        )
        nothing = np.zeros(size, session.ring.dtype)
        vectors = {place: updates.get(client, nothing) for place, client in enumerate(cohort)}
        silent = [place for place, client in enumerate(cohort) if client not in updates]

        def entropy_of(place: int) -> Entropy:
            return seeded_entropy(seed, "secure sum", round_index, cohort[place])

        if self.protocol == "count":
            outcome = shortcut(session, vectors, silent)
        else:
            dropouts = dict.fromkeys(silent, ProtocolStage.MASK)
            outcome = simulate(session, vectors, dropouts, entropy_of)
        up, down = (
            Counter({cohort[place]: number for place, number in numbers.items()})
            for numbers in (outcome.cost.bytes_up, outcome.cost.bytes_down)
        )
        survivors = frozenset(cohort[place] for place in outcome.survivors)
        cost = ProtectionCost(up, down, outcome.cost.seconds)
        return HiddenSum(outcome.total, survivors, cost)

    def typical_bytes(self, k: int, n: int) -> tuple[int, int]:
        """Return the bytes that each of n clients sends and receives for k numbers if none drops out."""
        session = self.session(n, size=k)
        nothing = np.broadcast_to(np.zeros(1, session.ring.dtype), (k,))
        cost = shortcut(session, dict.fromkeys(range(n), nothing)).cost
        return cost.bytes_up[0], cost.bytes_down[0]


class HiddenUpdates(Aggregator, Protected):
    """Base of aggregators that hide single updates from the server."""

    exchanges = True
    weight_by_examples = True  # up to a largest weight
    protection_cost = ProtectionCost()  # each round has one of its own
    _round_index = 0
    _adds_at_sites: SumsAtSites | None = None

    @property
    @override
    def protection(self) -> Protected:
        return self

    @override
    def sum_at_sites(self, adds: SumsAtSites) -> None:
        self._adds_at_sites = adds

    @override
    def start_round(self, round_index: int) -> None:
        self._round_index = round_index

    @override
    def sums(self) -> list[Tensor]:
        return []  # see `exchange`

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        return

    @override
    def miss(self, clients: Iterable[int]) -> None:
        return


class HiddenIntegers(HiddenUpdates):
    """Base of aggregators that convert updates to integers, and add these by a secure sum in every round.

    Clients without an update have dropped out before they sent a vector. All vectors are kept until the sum,
    because each is padded; without the protocol only their sum is kept.

    Attributes:
        clients: clients with a vector in the open round.
        memory: empty.
    """

    exact = True
    _secure_sum: SecureSum

    @property
    @override
    def spans_network(self) -> bool:
        return self._secure_sum.protocol == "run"

    @property
    @override
    def agreed_sum(self) -> SecureSum:
        return self._secure_sum

    def sent_size(self, size: int) -> int:
        """Return how many integers a client sends for an update with ``size`` coordinates."""
        return size

    @override
    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        secure_sum = self._secure_sum  # and no client drops out
        num_clients = max(num_clients, secure_sum.min_survivors or 0)
        return secure_sum.typical_bytes(self.sent_size(size), num_clients)

    @override
    def open(self, like: Tensor) -> None:
        self._like, self._ring = like, Ring(self._secure_sum.bits)
        self._keeps_vectors = self._secure_sum.protocol == "run"
        self.protection_cost = ProtectionCost()
        self.clients: list[int] = []
        self._missing: list[int] = []
        # one vector per client, or their sum alone
        self._vectors: list[RingIntegers] = []

    @override
    def add(self, update: ClientUpdate) -> None:
        self.clients.append(update.client_id)
        if self._adds_at_sites is not None:  # the vector is at the site
            return
        vector = self.vector_of(update)
        if self._keeps_vectors or not self._vectors:
            self._vectors.append(vector)
        else:
            total = self._vectors[0]
            np.add(total, vector, out=total)
            self._ring.reduced(total)

    @override
    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        if self._keeps_vectors:
            parts = gather((self.clients, self._vectors))
            self.clients = [client for clients, _ in parts for client in clients]
            self._vectors = [vector for _, vectors in parts for vector in vectors]
            return
        self.clients = [client for clients in gather(self.clients) for client in clients]
        ring = self._ring
        nothing = np.zeros(self.sent_size(len(self._like)), ring.dtype)
        own = self._vectors[0] if self._vectors else nothing
        # integers of 64 bits overflow modulo a multiple of the ring's R
        total = torch.from_numpy(own.astype(np.uint64).view(np.int64)).to(self._like.device)
        all_reduce(total)
        summed = total.cpu().numpy().view(np.uint64).astype(ring.dtype)
        self._vectors = [ring.reduced(summed)] if self.clients else []

    @override
    def miss(self, clients: Iterable[int]) -> None:
        self._missing = sorted(clients)

    def total(self) -> RingIntegers:
        """Return the round's sum modulo 2^bits, shape (size,), and forget the clients' vectors.

        Raises:
            RoundFailure: if too few clients are left for a secure sum.
        """
        try:
            outcome = self._summed()
        except (AbortedError, ValueError) as error:
            raise RoundFailure(
                f"round {self._round_index + 1}: the secure sum of {len(self.clients)} updates, with "
                f"{len(self._missing)} clients missing, gave nothing: {error}"
            ) from error
        self.protection_cost, self._vectors = outcome.cost, []
        total: RingIntegers = outcome.total
        return total

    def _summed(self) -> HiddenSum:
        secure_sum, round_index, vectors = self._secure_sum, self._round_index, self._vectors
        if self._adds_at_sites is not None:
            cohort = sorted({*self.clients, *self._missing})
            size = self.sent_size(len(self._like))
            session = secure_sum.session(
                len(cohort), size=size, round_index=round_index, graph_seed=randbits(63)
            )
            outcome: HiddenSum = self._adds_at_sites(session, cohort)
            return outcome
        if not self._keeps_vectors and vectors:
            nothing = np.broadcast_to(np.zeros(1, vectors[0].dtype), vectors[0].shape)
            vectors = vectors + [nothing] * (len(self.clients) - 1)
        return secure_sum(
            dict(zip(self.clients, vectors, strict=True)),
            self._missing,
            round_index=round_index,
            seed=derive_seed(self.terms.seed, "secure mean"),
        )
