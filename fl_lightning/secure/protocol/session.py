"""Settings on which all parties of a secure sum agree before the first message.

Sources: Bonawitz et al. 2017 (CCS, *Practical Secure Aggregation for Privacy-Preserving Machine
Learning*), figure 4, thresholds from section 6; Bell et al. 2020 for the sparse graph. Differs:
the session's identity, a hash of all settings and of the random id of the run, is part of all messages,
keys and signatures: a message of another run, even with the same seed, is never accepted.

Pairs of clients share pads: all pairs, or the edges of a random graph of logarithmic degree.

    the n clients in a ring in random order, each joined to the next k / 2 on either side

Such a graph (Harary's) is disconnected only if two runs of k / 2 clients in a row are missing. Source:
Bell et al. 2020 (CCS, *Secure Single-Server Aggregation with (Poly)Logarithmic Overhead*), section
3.1 and algorithm 1. Differs: a client holds a share of its own secrets too, as in Bonawitz et al.
2017; the bound on falling apart is ours, (n over 2) (γ + δ)^k, for two runs instead of one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import sha256
from secrets import token_hex

from scipy.stats import hypergeom

from fl_lightning.core.seeds import numpy_generator
from fl_lightning.secure.ring import Ring, num_checks

MAX_CLIENTS = 1 << 24
MAX_SIZE = 1 << 40
_SETTINGS = struct.Struct("<BQIQBIIIBQ")


def new_run_id() -> str:
    """Return a random id for a run: 128 bits of the system's entropy, 32 hexadecimal digits."""
    return token_hex(16)


class ProtocolStage(IntEnum):
    """Stages of the secure-sum protocol, named by what clients do; rounds 0 to 4 of Bonawitz et al. 2017."""

    ADVERTISE = 0
    SHARE = 1
    MASK = 2
    AGREE = 3
    REVEAL = 4


class RefusedError(ValueError):
    """Raised at a party that leaves a secure sum because its next message could reveal a secret."""


class AbortedError(RuntimeError):
    """Raised if a secure sum fails because too few clients are left or a client has lied; no vector is revealed."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Settings of the secure sum of one round, on which clients and server agree.

    Args:
        run: id of the run, the same in all its rounds and never used for another run: `new_run_id`.
        round_index: number of the round, ≥ 0, used once per run.
        num_clients: n ≥ 2; clients have places 0 to n - 1.
        size: size of the vectors.
        bits: bits of the ring, from 1 to 64.
        threshold: t, the number of shares that determine a secret. With all clients as neighbours
            t > n / 2, and t > 2n / 3 if ``active``. With a sparse graph from 2 to k + 1, see
            `SparseGraph.plan`.
        num_neighbours: k, even and below n - 1; None for all other clients.
        min_survivors: smallest number of vectors in a sum; None for t, or t n / (k + 1) with a sparse
            graph.
        active: True for protection from a server that breaks the rules: keys and survivors are signed.
        graph_seed: seed of the sparse graph.
        purpose: meaning of the vectors, as a text or a hash; parties with different purposes are in
            different sessions, and get no sum.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> Session(run="demo", round_index=0, num_clients=6, size=10, threshold=3)
        Traceback (most recent call last):
        ...
        ValueError: threshold must be from 4 to 6, more than 1/2 of num_clients 6, got 3
    """

    run: str
    round_index: int
    num_clients: int
    size: int
    threshold: int
    bits: int = 32
    num_neighbours: int | None = None
    min_survivors: int | None = None
    active: bool = False
    graph_seed: int = 0
    purpose: str = ""

    def __post_init__(self) -> None:
        Ring(self.bits)
        for name, low, high in (
            ("round_index", 0, 2**63 - 1),
            ("num_clients", 2, MAX_CLIENTS),
            ("size", 0, MAX_SIZE),
            ("graph_seed", 0, 2**63 - 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {getattr(self, name)}")
        self._check_neighbours()
        self._check_threshold()
        least = self.threshold if self.num_neighbours is None else 2
        if not least <= self.least_survivors <= self.num_clients:
            raise ValueError(
                f"min_survivors must be from {least} to num_clients {self.num_clients}, got "
                f"{self.min_survivors}"
            )

    @property
    def ring(self) -> Ring:
        """Ring of integers modulo 2^bits in which vectors are added."""
        return Ring(self.bits)

    @property
    def length(self) -> int:
        """Number of integers in a client's vector with its checksum."""
        return self.size + num_checks(self.ring)

    @property
    def least_survivors(self) -> int:
        """Smallest number of clients whose vectors may be summed."""
        if self.min_survivors is not None:
            return self.min_survivors
        if self.num_neighbours is None:
            return self.threshold
        return max(2, -(-self.threshold * self.num_clients // (self.num_neighbours + 1)))

    @property
    def stages(self) -> tuple[ProtocolStage, ...]:
        """Stages of the protocol in order, with ``AGREE`` only in active sessions."""
        return tuple(
            stage for stage in ProtocolStage if self.active or stage != ProtocolStage.AGREE
        )

    @cached_property
    def identity(self) -> bytes:
        """Hash of all settings, 32 bytes, on which every message, key and signature of the session depends."""
        settings = _SETTINGS.pack(
            2,  # the version of the protocol
            self.round_index,
            self.num_clients,
            self.size,
            self.bits,
            self.threshold,
            self.num_neighbours or 0,
            self.least_survivors,
            self.active,
            self.graph_seed,
        )
        about = f"{self.run}\0{self.purpose}" if self.purpose else self.run
        return sha256(settings + about.encode()).digest()

    def _check_neighbours(self) -> None:
        if self.num_neighbours is None:
            return
        if self.active:
            raise ValueError(
                "active: true needs every client as every other's neighbour, since in a sparse graph a client "
                "cannot check that all others saw the same survivors: leave num_neighbours out"
            )
        k = self.num_neighbours
        if k % 2 or not 2 <= k < self.num_clients - 1:
            raise ValueError(
                f"num_neighbours must be even and from 2 to num_clients - 2 = "
                f"{self.num_clients - 2}, or None for everyone, got {k}"
            )

    def _check_threshold(self) -> None:
        if self.num_neighbours is None:
            holders, share = self.num_clients, "2/3" if self.active else "1/2"
            least = (2 * holders // 3 if self.active else holders // 2) + 1
            rule = f", more than {share} of num_clients {holders}"
        else:
            least, holders, rule = 2, self.num_neighbours + 1, ", of num_neighbours and oneself"
        if not least <= self.threshold <= holders:
            raise ValueError(
                f"threshold must be from {least} to {holders}{rule}, got {self.threshold}"
            )


Graph = dict[int, frozenset[int]]


def neighbours(participants: Collection[int], num_neighbours: int | None, seed: int) -> Graph:
    """Return the neighbours of each participant: the clients with which it shares pads and secrets.

    Args:
        participants: places of the participants.
        num_neighbours: k, even; None or a number above that of the other participants for all of them.
        seed: seed of the random order.

    Example:
        >>> neighbours(range(4), None, seed=0)[1]
        frozenset({0, 2, 3})
        >>> {len(them) for them in neighbours(range(50), 6, seed=0).values()}
        {6}
    """
    everyone = frozenset(participants)
    if num_neighbours is None or num_neighbours >= len(everyone) - 1:
        return {place: everyone - {place} for place in everyone}
    order = _order(everyone, seed)
    return {place: _around(order, at, num_neighbours) for at, place in enumerate(order)}


def neighbours_of(
    place: int, participants: Collection[int], num_neighbours: int | None, seed: int
) -> frozenset[int]:
    """Return the neighbours of one participant, as `neighbours` returns them for all participants."""
    everyone = frozenset(participants)
    if num_neighbours is None or num_neighbours >= len(everyone) - 1:
        return everyone - {place}
    order = _order(everyone, seed)
    return _around(order, order.index(place), num_neighbours)


def _order(participants: frozenset[int], seed: int) -> list[int]:
    generator = numpy_generator(seed, "secure sum graph", len(participants))
    order: list[int] = generator.permutation(sorted(participants)).tolist()
    return order


def _around(order: list[int], at: int, num_neighbours: int) -> frozenset[int]:
    half = num_neighbours // 2
    return frozenset(order[(at + step) % len(order)] for step in range(-half, half + 1) if step)


@dataclass(frozen=True)
class SparseGraph:
    """Options of a sparse graph of clients that share pads: it gives the number of neighbours and the threshold.

    With probability 1 - 2^-correctness_bits the sum of a round succeeds. With probability
    1 - 2^-security_bits the server and corrupt clients together learn only the sum over all honest
    survivors, if all parties follow the protocol (semi-honest).

    Args:
        corrupt: fraction of the clients that may collude with the server, in [0, 1).
        dropped: fraction of the clients that may drop out, in [0, 1); both below 1 together.
        security_bits: σ, see above.
        correctness_bits: η, see above.

    Raises:
        ValueError: if a fraction is outside its range.

    Example:
        >>> SparseGraph(corrupt=0.05, dropped=0.2).plan(1000)
        (50, 21)
        >>> SparseGraph(corrupt=0.05, dropped=0.2).plan(100_000)
        (64, 27)
    """

    corrupt: float = 0.05
    dropped: float = 0.2
    security_bits: int = 40
    correctness_bits: int = 20

    def __post_init__(self) -> None:
        if min(self.corrupt, self.dropped) < 0 or self.corrupt + self.dropped >= 1:
            raise ValueError(
                "corrupt and dropped must be fractions of the clients, below 1 together, got "
                f"{self.corrupt} and {self.dropped}"
            )

    def plan(self, num_clients: int) -> tuple[int, int]:
        """Return how many neighbours each client of a cohort has, and how many shares determine a secret.

        For few clients these are all other clients, and a threshold of more than half.
        """
        for num_neighbours in range(2, num_clients - 1, 2):
            threshold = self._threshold(num_clients, num_neighbours)
            if threshold is not None:
                return num_neighbours, threshold
        return num_clients - 1, num_clients // 2 + 1

    def _threshold(self, num_clients: int, num_neighbours: int) -> int | None:
        """Return the highest threshold for which success and security are as likely as wanted; None if there is none."""
        others, corrupt = num_clients - 1, math.ceil(self.corrupt * num_clients)
        alive = others - math.ceil(self.dropped * num_clients)
        pairs = num_clients * others / 2
        # two events reveal something, each gets half of the probability
        leak = 2.0 ** -(self.security_bits + 1)
        if pairs * (self.corrupt + self.dropped) ** num_neighbours > leak:
            return None
        loss = 2.0**-self.correctness_bits / num_clients
        threshold = int(hypergeom.ppf(loss, others, alive, num_neighbours))
        while threshold > 1 and hypergeom.cdf(threshold - 1, others, alive, num_neighbours) > loss:
            threshold -= 1
        known = num_clients * hypergeom.sf(threshold - 1, others, corrupt, num_neighbours)
        return threshold if threshold > 1 and known <= leak else None
