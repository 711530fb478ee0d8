"""What all parties of one secure sum have agreed on before its first message.

Sources: Bonawitz et al. 2017 (CCS, *Practical Secure Aggregation for Privacy-Preserving Machine
Learning*), figure 4, thresholds from section 6; Bell et al. 2020 for the sparse graph. Differs:
the session's identity, a hash of every setting and of a random id of the run, is part of all
messages, keys and signatures: what was recorded in another run, even of the same seed, fits nowhere.

Who pads with whom: everyone with everyone, or a random graph of logarithmic degree.

    a random order of the n clients in a ring; each is joined to its k / 2 next on either side

Such a graph (Harary's) falls apart only if two runs of k / 2 clients in a row are missing. Source:
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
    """Return a random id for one run: 128 bits of the operating system's entropy, as 32 digits."""
    return token_hex(16)


class ProtocolStage(IntEnum):
    """Stage of the protocol: the message that clients send next; rounds 0 to 4 of the paper."""

    ADVERTISE = 0
    SHARE = 1
    MASK = 2
    AGREE = 3
    REVEAL = 4


class RefusedError(ValueError):
    """A party does not go on with a session, because that could give a secret away; says why."""


class AbortedError(RuntimeError):
    """The server has no sum: too few clients are left, or one of them lied; no vector is known."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One secure sum.

    Args:
        run: id of the run, the same in all its rounds and never used for another: `new_run_id`.
        round_index: ≥ 0; in one run every round is used once.
        num_clients: n ≥ 2. They have places 0 to n - 1.
        size: numbers of a vector.
        bits: of the ring in which they are added, from 1 to 64.
        threshold: t, how many shares tell a secret. With everyone as neighbours t > n / 2, and
            t > 2n / 3 if ``active``. With a sparse graph from 2 to k + 1; `SparseGraph.plan` says
            which t keeps what promise.
        num_neighbours: k, even and below n - 1; None for everyone.
        min_survivors: below so many vectors there is no sum; None for t, and with a sparse graph
            for its share t n / (k + 1).
        active: whether a server may break the rules: keys and the set of survivors are signed.
        graph_seed: of the sparse graph.
        purpose: what the vectors are, in words or a hash: parties that believe another one are in another
            session, and get no sum.

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
        """Where the vectors are added."""
        return Ring(self.bits)

    @property
    def length(self) -> int:
        """Integers of a vector that travels: its numbers and their checksum."""
        return self.size + num_checks(self.ring)

    @property
    def least_survivors(self) -> int:
        """How many vectors a sum has at least."""
        if self.min_survivors is not None:
            return self.min_survivors
        if self.num_neighbours is None:
            return self.threshold
        return max(2, -(-self.threshold * self.num_clients // (self.num_neighbours + 1)))

    @property
    def stages(self) -> tuple[ProtocolStage, ...]:
        """The stages in order; only against an active server the survivors are agreed on."""
        return tuple(
            stage for stage in ProtocolStage if self.active or stage != ProtocolStage.AGREE
        )

    @cached_property
    def identity(self) -> bytes:
        """32 bytes, a hash of all settings."""
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
                "active needs everyone as neighbours: with a sparse graph a client cannot check "
                "that all others saw the same survivors; leave num_neighbours out"
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
    """Return everyone's neighbours.

    Args:
        participants: places of those who take part.
        num_neighbours: k, even; None, or at least as many as there are others, for all others.
        seed: of the order.

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
    """Return one client's neighbours: the same as `neighbours`, without those of all others."""
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
    """How many neighbours and which threshold a cohort needs.

    The threshold is low enough that with probability 1 - 2^-correctness_bits the sum of a round is
    not lost, and so high that with probability 1 - 2^-security_bits no coalition of corrupt clients
    and the server learns more than the sum over all honest survivors (semi-honest: everyone follows
    the protocol and remembers what it sees).

    Args:
        corrupt: fraction of the clients that may tell the server all they know, in [0, 1).
        dropped: fraction of the clients that may fall silent, in [0, 1); both below 1 together.
        security_bits: σ.
        correctness_bits: η.

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
        """Return the number of neighbours and the threshold.

        For few clients that is everyone, with a threshold of more than half.
        """
        for num_neighbours in range(2, num_clients - 1, 2):
            threshold = self._threshold(num_clients, num_neighbours)
            if threshold is not None:
                return num_neighbours, threshold
        return num_clients - 1, num_clients // 2 + 1

    def _threshold(self, num_clients: int, num_neighbours: int) -> int | None:
        """Return the highest threshold that keeps both promises, if there is one."""
        others, corrupt = num_clients - 1, math.ceil(self.corrupt * num_clients)
        alive = others - math.ceil(self.dropped * num_clients)
        pairs = num_clients * others / 2
        # two promises of secrecy, each of which gets half of the probability
        leak = 2.0 ** -(self.security_bits + 1)
        if pairs * (self.corrupt + self.dropped) ** num_neighbours > leak:
            return None
        loss = 2.0**-self.correctness_bits / num_clients
        threshold = int(hypergeom.ppf(loss, others, alive, num_neighbours))
        while threshold > 1 and hypergeom.cdf(threshold - 1, others, alive, num_neighbours) > loss:
            threshold -= 1
        known = num_clients * hypergeom.sf(threshold - 1, others, corrupt, num_neighbours)
        return threshold if threshold > 1 and known <= leak else None
