"""The mean of updates of which the server learns only the sum: a secure sum every round.

    mean = (2c / L) Σ_k w_k q_k / Σ_k w_k - c        q_k: levels of Δ_k, w_k = min(n_k, max_examples)

The integers w q and w are added modulo 2^bits by the protocol of `fl_lightning.updates.secure`.
Sources: Bonawitz et al. 2017; the integers are those of `SumQuantiser`, with its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.seeds import derive_seed, numpy_generator
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.kept_updates import check_whole
from fl_lightning.server.protected import Expense, Terms
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.random_k import RandomK
from fl_lightning.updates.secure.graph import SparseGraph
from fl_lightning.updates.secure.ring import Integers
from fl_lightning.updates.secure.secure_sum import SecureSum
from fl_lightning.updates.secure.session import AbortedError, Stage
from fl_lightning.updates.secure.simulation import Outcome
from fl_lightning.updates.secure.sum_quantiser import SumQuantiser
from fl_lightning.updates.secure.unit_seconds import UnitSeconds


@final
class SecureMean:
    """The mean weighted by examples, of updates that the server cannot read.

    Args:
        clip: c > 0; coordinates of an update beyond ±c are moved there.
        levels: L, so many steps from -c to c, to which coordinates are rounded at random.
        max_examples: the most that one client counts for, ≥ 1; 1 counts all the same.
        bits: of the ring in which is added, at most 64; None for the fewest that hold the sum of
            the largest cohort.
        random_k: which coordinates travel, at random, in a round the same of all clients.
        threshold: from 1/2 to below 1: more than this share of a cohort must answer to the end.
        sparse: who pads with whom in large cohorts; None for everyone with everyone.
        active: whether the server may break the rules: 2/3 of a cohort must answer at least.
        protocol: ``"run"`` runs it, every message; ``"count"`` gives the same mean and bytes
            without, with estimated seconds: for experiments, because it protects nothing.

    Raises:
        ConfigurationError: if an option is outside its range, or options contradict each other;
            from `begin`, if a sum might not fit into the ring.

    Attributes:
        expense: see `Protected`.
        memory: nothing is kept from round to round.

    Example:
        >>> mean = SecureMean(clip=4.0, levels=8)
        >>> mean.begin(Terms(most_clients=3))
        >>> mean.open(torch.empty(1))
        >>> for client, (value, n) in enumerate([(2.0, 1), (4.0, 3)]):
        ...     mean.add(ClientUpdate(client, torch.tensor([value]), torch.empty(0), n, 1))
        >>> mean.close(), mean.expense.bytes_up[0]
        (tensor([3.5000]), 435)
    """

    exact = True
    restarts = False

    def __init__(
        self,
        *,
        clip: float = 1.0,
        levels: int = 1 << 16,
        max_examples: int = 1024,
        bits: int | None = None,
        random_k: RandomK | None = None,
        threshold: float = 2 / 3,
        sparse: SparseGraph | None = None,
        active: bool = False,
        protocol: Literal["run", "count"] = "run",
    ) -> None:
        self.clip, self.levels, self.max_examples, self.bits = clip, levels, max_examples, bits
        self.random_k, self.protocol = random_k, protocol
        self._options: dict[str, Any] = {
            "threshold": threshold,
            "sparse": sparse,
            "active": active,
            "protocol": protocol,
        }
        # without all vectors, no client can be left out of the sum later; in a sparse graph one
        # may be whose neighbours are gone
        self._keeps_vectors = protocol == "run" or sparse is not None
        self._unit_seconds: UnitSeconds | None = None
        self._round_index = 0
        self.memory: dict[str, Tensor] = {}
        self.expense = Expense()
        self.begin(Terms(most_clients=2))

    @property
    def hides(self) -> str:
        """What the server sees, in words."""
        if self.protocol == "count":
            return (
                "protocol 'count' protects nothing and gives what a secure sum would, in which the "
                "server sees only the sum of updates and of their examples"
            )
        return "the server sees the sum of updates and of their examples, and no single update"

    def begin(self, terms: Terms) -> None:
        """Learn about the run.

        Raises:
            ConfigurationError: if a cohort is too small, or a sum too large.
        """
        self._seed = terms.seed
        most = terms.most_clients * self.levels * self.max_examples
        bits = self.bits or max(1, min(64, most.bit_length()))
        try:
            self._quantiser = SumQuantiser(
                num_clients=terms.most_clients,
                clip=self.clip,
                levels=self.levels,
                max_examples=self.max_examples,
                bits=bits,
            )
            self._secure_sum = SecureSum(bits=bits, run=f"seed {terms.seed}", **self._options)
            self._secure_sum.session(terms.most_clients, size=1)
        except ValueError as error:
            raise ConfigurationError(f"SecureMean: {error}") from error

    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return what a client sends and receives, if nobody drops."""
        sent = 1 + (size if self.random_k is None else self.random_k.sent_size(size))
        return (
            self._secure_sum.bytes_up(sent, num_clients),
            self._secure_sum.bytes_down(sent, num_clients),
        )

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""
        self._round_index = round_index

    def open(self, like: Tensor) -> None:
        """Start without updates."""
        self._like, self.expense = like, Expense()
        self._clients: list[int] = []
        self._missing: list[int] = []
        # every client's, or only their sum
        self._vectors: list[Integers] = []

    def add(self, update: ClientUpdate) -> None:
        """Take in one update as integers.

        Raises:
            ConfigurationError: if it is under a mask of the client's own.
        """
        check_whole(update, "SecureMean")
        client = update.client_id
        draws = numpy_generator(self._seed, "secure rounding", self._round_index, client).random
        vector = self._quantiser.encode(self._chosen(update.delta), update.num_examples, draws)
        self._take(client, vector)

    def _take(self, client: int, vector: Integers) -> None:
        self._clients.append(client)
        if self._keeps_vectors or not self._vectors:
            self._vectors.append(vector)
        else:
            total = self._vectors[0]
            np.add(total, vector, out=total)
            self._quantiser.ring.reduced(total)

    def exchange(
        self, gather: Callable[[Any], list[Any]], all_reduce: Callable[[Tensor], None]
    ) -> None:
        """Take the updates of all processes for one's own; to be called by all of them."""
        if self._keeps_vectors:
            parts = gather((self._clients, self._vectors))
            self._clients = [client for clients, _ in parts for client in clients]
            self._vectors = [vector for _, vectors in parts for vector in vectors]
            return
        self._clients = [client for clients in gather(self._clients) for client in clients]
        size, ring = self._sent_size(), self._quantiser.ring
        own = self._vectors[0] if self._vectors else np.zeros(size, ring.dtype)
        # integers of 64 bits overflow modulo a multiple of the ring's R
        total = torch.from_numpy(own.astype(np.uint64).view(np.int64)).to(self._like.device)
        all_reduce(total)
        summed = total.cpu().numpy().view(np.uint64).astype(ring.dtype)
        self._vectors = [ring.reduced(summed)] if self._clients else []

    def sums(self) -> list[Tensor]:
        """Return nothing: see `exchange`."""
        return []

    def load_sums(self, sums: list[Tensor]) -> None:
        """Do nothing."""

    def miss(self, clients: Iterable[int]) -> None:
        """Learn which clients of the cohort sent no vector: they dropped before it was due."""
        self._missing = sorted(clients)

    def close(self) -> Tensor:
        """Add up, and return the mean.

        Raises:
            RoundFailure: if too few clients are left for a secure sum.
        """
        try:
            outcome = self._outcome()
        except (AbortedError, ValueError) as error:
            raise RoundFailure(
                f"round {self._round_index}: the secure sum of {len(self._clients)} updates, with "
                f"{len(self._missing)} clients missing, gave nothing: {error}"
            ) from error
        costs, word = outcome.costs, "estimated_" if self.protocol == "count" else ""
        self.expense = Expense(
            bytes_up=costs.bytes_up,
            bytes_down=costs.bytes_down,
            seconds={
                f"{word}client_seconds": costs.client_seconds,
                f"{word}server_seconds": costs.server_seconds,
            },
        )
        self._vectors = []
        return self._spread(self._quantiser.mean(outcome.total)).to(self._like)

    def _outcome(self) -> Outcome:
        vectors = self._vectors
        if not self._keeps_vectors:
            nothing = np.broadcast_to(np.zeros(1, vectors[0].dtype), vectors[0].shape)
            vectors = vectors + [nothing] * (len(self._clients) - 1)
        if self.protocol == "count" and self._unit_seconds is None:
            self._unit_seconds = UnitSeconds.measured()
        return self._secure_sum(
            dict(zip(self._clients, vectors, strict=True)),
            dict.fromkeys(self._missing, Stage.MASK),
            round_index=self._round_index,
            seed=derive_seed(self._seed, "secure mean"),
            unit_seconds=self._unit_seconds,
        )

    def _sent_size(self) -> int:
        size = len(self._like)
        return 1 + (size if self.random_k is None else self.random_k.sent_size(size))

    def _chosen(self, delta: Tensor) -> Tensor:
        if self.random_k is None:
            return delta
        return self.random_k.on_client(Dense(delta), self._shared_seed()).to_dense()

    def _spread(self, mean: Tensor) -> Tensor:
        """Put the chosen coordinates of a mean back in their places."""
        if self.random_k is None:
            return mean
        size = len(self._like)
        return self.random_k.on_server(Dense(mean), self._shared_seed(), size).to_dense()

    def _shared_seed(self) -> int:
        return derive_seed(self._seed, "secure coordinates", self._round_index)

    def state_dict(self) -> dict[str, Any]:
        """Return whose updates there are, and their integers or those of their sum."""
        signed = self._quantiser.ring.dtype.str.replace("u", "i")  # torch has few unsigned dtypes
        return {
            "clients": list(self._clients),
            "vectors": [torch.from_numpy(v.view(signed).copy()) for v in self._vectors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._clients = list(state["clients"])
        unsigned = self._quantiser.ring.dtype
        self._vectors = [v.cpu().numpy().view(unsigned).copy() for v in state["vectors"]]
