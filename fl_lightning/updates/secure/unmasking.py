"""How pads leave a sum, with shares of the secrets behind them.

    Σ_u x_u = Σ_u y_u - Σ_u pad(b_u) - Σ_v Σ_u ± pad(s_uv)     u: survivors, v: those who dropped

Sources: Bonawitz et al. 2017, figure 4, round 4; Bell et al. 2020, algorithm 2. Differs: a dropped
client's key is compared with the one it advertised, so that false shares of it end the session
instead of making the sum wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_lightning.updates.secure.graph import Graph
from fl_lightning.updates.secure.keys import KEY_SIZE, AgreementKey
from fl_lightning.updates.secure.messages import Places, RevealedShares, Table
from fl_lightning.updates.secure.pads import add_pad
from fl_lightning.updates.secure.ring import Integers
from fl_lightning.updates.secure.session import AbortedError, Session
from fl_lightning.updates.secure.shamir import combine

Shares = dict[int, dict[int, int]]


@dataclass(frozen=True)
class Unmasking:
    """What the server knows of a session when shares arrive.

    Args:
        session: whose pads they are.
        roster: everyone's public keys.
        graph: everyone's neighbours.
        survivors: whose vectors are in the sum.
    """

    session: Session
    roster: Table
    graph: Graph
    survivors: Places

    def remove_pads(self, total: Integers, answers: Mapping[int, RevealedShares]) -> None:
        """Take all pads out of the sum, in place.

        Args:
            total: of the survivors' masked vectors.
            answers: the shares, by the place of their holder.

        Raises:
            AbortedError: if a secret has too few shares, or false ones; nothing is taken out then.
        """
        seeds = self._secrets(answers, "seeds")
        keys = {place: AgreementKey(key) for place, key in self._secrets(answers, "keys").items()}
        for place, key in keys.items():
            if key.public != self._pad_key(place):
                raise AbortedError(f"shares of client {place}'s key are false")
        for place in self.survivors:
            if place not in seeds:
                raise AbortedError(f"nobody has told shares of client {place}'s seed")
        for seed in seeds.values():
            add_pad(total, seed, self.session.ring, subtract=True)
        for place, key in keys.items():
            self._remove_pads_of(place, key, total)
        self.session.ring.reduced(total)

    def _remove_pads_of(self, place: int, key: AgreementKey, total: Integers) -> None:
        """Take out what the survivors near a dropped client have added for it."""
        for peer in self.graph[place] & self.survivors:
            secret = key.secret_with(
                self._pad_key(peer), "pads", self.session.identity, me=place, peer=peer
            )
            add_pad(total, secret, self.session.ring, subtract=peer < place)

    def _secrets(self, answers: Mapping[int, RevealedShares], kind: str) -> dict[int, bytes]:
        shares: Shares = {}
        for holder, answer in answers.items():
            for place, share in getattr(answer, kind).items():
                shares.setdefault(place, {})[holder + 1] = int.from_bytes(share, "little")
        try:
            return {p: combine(them, self.session.threshold) for p, them in shares.items()}
        except ValueError as error:
            raise AbortedError(f"a client's {kind[:-1]} stays unknown: {error}") from None

    def _pad_key(self, place: int) -> bytes:
        return self.roster[place][KEY_SIZE : 2 * KEY_SIZE]
