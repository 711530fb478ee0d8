"""The mean of encrypted updates: the server adds ciphertexts, a client decrypts the sum.

    mean = Dec(Σ_k a_k Enc(Δ_k)) / Σ_k a_k        a_k = min(n_k, max_examples) / (m max_examples)

m: size of the largest cohort, so that the a_k sum to at most 1 before all are known. The server gets the mean;
of single updates, it sees the coordinates that are not encrypted. Over a network, sites encrypt, and one of them
decrypts the sum, see `sum_at_sites`. Scheme and limits:
`fl_lightning.secure.encryption.ckks`; encrypting a part: Jin et al. 2023 (2303.10837), section 3.
Differs: the most sensitive coordinates are those that have moved most so far, which needs no client's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.update import ClientUpdate
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters, Sender, library
from fl_lightning.secure.encryption.ckks import (
    CKKSClient,
    CKKSKeys,
    CKKSServer,
    ciphertext_bytes,
    generate_keys,
)
from fl_lightning.secure.encryption.encrypted_update import (
    CKKSLayout,
    EncryptedUpdate,
    encrypted_size,
    most_sensitive,
)
from fl_lightning.secure.encryption.paillier import Paillier, PaillierRound, PaillierSum
from fl_lightning.secure.secure_sum import HiddenUpdates
from fl_lightning.secure.simulation import timed
from fl_lightning.server.aggregator import check_whole
from fl_lightning.server.protected import FEWEST_CLIENTS, ProtectionCost, SumsAtSites, Terms

_MOVED = "moved"
_DEGREE = 8192


@final
class CKKSRound:
    """Simulates one round of `EncryptedMean` with CKKS: encrypts, adds and decrypts updates.

    Args:
        layout: layout of encrypted updates.
        keys: keys of the run.
        most_examples: largest possible number of examples in a round.
    """

    def __init__(self, layout: CKKSLayout, keys: CKKSKeys, most_examples: int) -> None:
        self._client, self._server = CKKSClient(layout, keys), CKKSServer(layout)
        self._most = most_examples
        self._senders: list[Sender] = []

    def encrypt(self, delta: Tensor, num_examples: int, sender: int) -> EncryptedUpdate:
        """Encrypt a client's update, multiplied by its share of the examples.

        Raises:
            ValueError: if a number is not finite, or too large for the scheme.
        """
        values = delta.double() * (num_examples / self._most)
        sent, told = self._client.encrypt(values, sender)
        self._senders.append(told)
        return sent

    def plus(
        self, total: EncryptedUpdate | None, sent: EncryptedUpdate, num_examples: int
    ) -> EncryptedUpdate:
        """Add an encrypted update, already multiplied by its share; ``total`` is None for the first update."""
        return self._server.plus(total, sent)

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """Decrypt the sum of updates, and return their mean weighted by examples, float64."""
        return self._client.open(total, self._senders) * (self._most / num_examples)


@dataclass(frozen=True)
class EncryptedSum:
    """Options of an encrypted sum on which the server and all sites agree.

    Attributes:
        degree: ring degree N of CKKS.
        scheme: name of the encryption scheme.
    """

    degree: int
    scheme: str = "ckks"


@final
class EncryptedMean(HiddenUpdates):
    """The mean of updates weighted by examples; the server adds ciphertexts (CKKS, Paillier) that it cannot read.

    All clients have the key and the server does not: a client that colludes with the server reveals all
    updates. Decrypted sums of CKKS have random noise of about 1e-9 of a whole share. Sums of Paillier are
    exact but for rounding, and thousands of times slower: for small vectors, such as those of a sparse mask.

    Args:
        fraction: fraction of the coordinates that are encrypted, in (0, 1]: those whose means have moved
            most so far, in the first round all. The others are sent in clear.
        max_examples: largest weight of a client, ≥ 1; 1 weights all clients equally.
        degree: ring degree N of CKKS, a power of two; a ciphertext has N / 2 numbers.
        paillier: options of Paillier, to use it instead of CKKS; None for CKKS.

    Raises:
        ConfigurationError: if an option is outside its range; from `begin`, with several processes;
            before training, if Paillier would take longer than its ``max_seconds``.

    Attributes:
        protection_cost: cost of the last closed round; empty while a round is open.
        terms: facts about the run.
        memory: Σ |mean| of every coordinate, with a ``fraction`` below 1.

    Example:
        >>> mean = EncryptedMean()
        >>> mean.begin(Terms(most_clients=3))
        >>> mean.open(torch.empty(1))
        >>> for client, (value, n) in enumerate([(2.0, 1), (4.0, 3)]):
        ...     mean.add(ClientUpdate(client, torch.tensor([value]), torch.empty(0), n, 1))
        >>> mean.close().round(decimals=4)
        tensor([3.5000])
    """

    def __init__(
        self,
        *,
        fraction: float = 1.0,
        max_examples: int = 1024,
        degree: int = _DEGREE,
        paillier: Paillier | None = None,
    ) -> None:
        if not 0 < fraction <= 1:
            raise ConfigurationError(
                f"EncryptedMean: fraction must be in (0, 1], got {fraction}: it is the share "
                "of the coordinates that are encrypted"
            )
        if max_examples < 1:
            raise ConfigurationError(
                f"EncryptedMean: max_examples must be at least 1, got {max_examples}"
            )
        try:
            self._parameters = CKKSParameters(degree=degree)
        except ValueError as error:
            raise ConfigurationError(f"EncryptedMean: {error}") from error
        if paillier is not None and degree != _DEGREE:
            raise ConfigurationError(
                f"EncryptedMean: degree {degree} is an option of CKKS, which paillier replaces: leave one out"
            )
        self.fraction, self.max_examples, self.paillier = fraction, max_examples, paillier
        self.terms = Terms(most_clients=2)

    @property
    @override
    def spans_network(self) -> bool:
        # a server must not choose clear coordinates
        return self.paillier is None and self.fraction == 1

    @property
    @override
    def hides(self) -> str:
        part = "" if self.fraction == 1 else f" of {self.fraction:.3g} of the coordinates"
        return (
            f"updates{part} are encrypted with a key that all clients have and the server has not; "
            "it sees their mean"
            + ("" if self.fraction == 1 else ", and the other coordinates of every update")
        )

    @override
    def begin(self, terms: Terms) -> None:
        if terms.num_processes > 1:
            raise ConfigurationError(
                f"EncryptedMean encrypts all updates with one key, and {terms.num_processes} processes "
                "would have a key each: set trainer.devices to 1"
            )
        self.terms = terms
        self._most = terms.most_clients * self.max_examples
        vars(self).pop("_keys", None)
        self._paillier: PaillierSum | None = None
        if self.paillier is None:
            library()
        else:
            self._paillier = self.paillier.begin(terms, self.max_examples)

    @cached_property
    def _keys(self) -> CKKSKeys:
        """CKKS keys of simulated clients; over a network, sites make a key of their own."""
        return generate_keys(self._parameters)

    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return how many bytes a client sends and receives in a round.

        Raises:
            ConfigurationError: if Paillier would take longer than its ``max_seconds``.
        """
        encrypted = max(1, round(self.fraction * size))
        if self._paillier is not None:
            self._paillier.num_ciphertexts(
                size + 1
            )  # the first round encrypts all, and the examples
            count = self._paillier.num_ciphertexts(encrypted + 1)
            width = self._paillier.width
        else:
            count = -(-encrypted // self._parameters.slots)
            width = ciphertext_bytes(self._parameters)
        up = encrypted_size(count, width, size - encrypted)
        return up + 4 * size // num_clients, up // num_clients

    @override
    def open(self, like: Tensor) -> None:
        self._like, self._cost = like, ProtectionCost()
        self.protection_cost = ProtectionCost()
        self._total: EncryptedUpdate | None = None
        self._counted: dict[int, int] = {}  # examples by client
        if self._adds_at_sites is None:
            layout, most = self._layout(), self._most
            self._round: CKKSRound | PaillierRound
            if self._paillier is not None:
                self._round = PaillierRound(layout, self._paillier, self.terms, most)
            else:
                self._round = CKKSRound(layout, self._keys, most)

    def _layout(self) -> CKKSLayout:
        selected = None
        if self.fraction < 1 and _MOVED in self.memory:
            selected = most_sensitive(self.memory[_MOVED], self.fraction)
        return CKKSLayout(len(self._like), selected, self._parameters, self._round_index)

    def add(self, update: ClientUpdate) -> None:
        """Encrypt a client's update, and add it to the encrypted sum; over a network, only note its examples.

        Raises:
            ConfigurationError: if the update has a mask of the client's own.
            RoundFailure: if a number is too large for the scheme.
        """
        counted = min(update.num_examples, self.max_examples)
        self._counted[update.client_id] = counted
        if self._adds_at_sites is not None:  # the update is at its site
            return
        check_whole(update, "EncryptedMean")
        try:
            with timed(self._cost, "client_seconds"):
                sent = self._round.encrypt(update.delta, counted, update.client_id)
        except ValueError as error:
            self._forget_contexts()
            raise RoundFailure(f"client {update.client_id}'s update: {error}") from error
        with timed(self._cost, "server_seconds"):
            self._total = self._round.plus(self._total, sent, counted)
        self._cost.bytes_up[update.client_id] = sent.num_bytes

    @property
    @override
    def agreed_sum(self) -> EncryptedSum:
        return EncryptedSum(self._parameters.degree)

    @override
    def vector_of(self, update: ClientUpdate) -> npt.NDArray[Any]:
        check_whole(update, "EncryptedMean")
        share = min(update.num_examples, self.max_examples) / self._most
        values: npt.NDArray[np.float64] = (update.delta.detach().double().cpu() * share).numpy()
        return values

    def close(self) -> Tensor:
        """Return the mean of the round's updates, from the sum that a client or a site decrypts.

        Raises:
            RoundFailure: if too few updates have arrived to hide each of them in the mean.
        """
        if (sent := len(self._counted)) < FEWEST_CLIENTS:
            self._forget_contexts()
            raise RoundFailure(
                f"round {self._round_index + 1}: {sent} client sent an update, and EncryptedMean needs "
                f"{FEWEST_CLIENTS} or more: the mean of one is its update"
            )
        mean = (
            self._mean_here()
            if self._adds_at_sites is None
            else self._mean_at_sites(self._adds_at_sites)
        )
        return mean.to(self._like)

    def _mean_here(self) -> Tensor:
        assert self._total is not None
        with timed(self._cost, "client_seconds"):
            mean = self._round.mean(self._total, sum(self._counted.values()))
        # the first client of the round gets the sum and sends back float32
        first = next(iter(self._counted))
        self._cost.bytes_up[first] += 4 * len(mean)
        self._cost.bytes_down[first] = self._total.num_bytes
        self.protection_cost = self._cost
        if self.fraction < 1:
            moved = self.memory.get(_MOVED, torch.zeros_like(mean))
            self.memory[_MOVED] = moved + mean.abs()
        self._total = None
        self._forget_contexts()
        return mean

    def _mean_at_sites(self, adds: SumsAtSites) -> Tensor:
        opened = adds(self._layout(), list(self._counted))
        self.protection_cost = opened.cost
        num_examples = sum(n for c, n in self._counted.items() if c in opened.survivors)
        total: Tensor = opened.total
        return total * (self._most / num_examples)

    def _forget_contexts(self) -> None:
        # they have threads; freed late, in a process forked meanwhile, they would wait for these
        vars(self).pop("_round", None)
