"""How pads leave a sum, with shares of the secrets behind them.

    Σ_u x_u = Σ_u y_u - Σ_u pad(b_u) - Σ_v Σ_u ± pad(s_uv)     u: survivors, v: those who dropped

Sources: Bonawitz et al. 2017, figure 4, round 4; Bell et al. 2020, algorithm 2. Differs: nothing is
believed. Every share is compared with the hash that its dealer is bound to, every secret with the
seed's commitment or the advertised key, the sum with its checksum; what is false ends the session,
with the name of who lied where that is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_lightning.secure.protocol.keys import KEY_SIZE, AgreementKey, add_pad
from fl_lightning.secure.protocol.messages import (
    Places,
    RevealedShares,
    SealedShares,
    Table,
)
from fl_lightning.secure.protocol.session import AbortedError, Graph, Session
from fl_lightning.secure.protocol.shamir import (
    SHARE_HASH_SIZE,
    combine,
    seed_commitment,
    seed_pad_key,
    share_hash,
)
from fl_lightning.secure.ring import RingIntegers, has_checksum

Shares = dict[int, dict[int, bytes]]
KINDS = ("keys", "seeds")  # in the order of their hashes


@dataclass(frozen=True)
class Unmasking:
    """State of a session at the server when shares arrive.

    Args:
        session: whose pads they are.
        roster: everyone's public keys.
        sealed: what everyone who shared is bound to.
        graph: everyone's neighbours.
        survivors: whose vectors are in the sum.
    """

    session: Session
    roster: Table
    sealed: Mapping[int, SealedShares]
    graph: Graph
    survivors: Places

    def remove_pads(self, total: RingIntegers, answers: Mapping[int, RevealedShares]) -> None:
        """Subtract all pads from the sum, in place.

        Args:
            total: of the survivors' masked vectors.
            answers: the shares, by the place of their holder.

        Raises:
            AbortedError: if a secret has too few shares, or somebody lied; the total is of no use
                then.
        """
        secrets = self._checked(self._collected(answers))
        for place, seed in secrets["seeds"].items():
            own_pad = seed_pad_key(self.session, place, seed)
            add_pad(total, own_pad, self.session.ring, subtract=True)
        for place, private in secrets["keys"].items():
            self._remove_pads_of(place, AgreementKey(private), total)
        self.session.ring.reduced(total)
        if not has_checksum(total, self.session.ring):
            raise AbortedError(
                "the sum does not fit its checksum: a client sent something else than its vector "
                "under its pads, or two clients used different pads"
            )

    def _remove_pads_of(self, place: int, key: AgreementKey, total: RingIntegers) -> None:
        """Subtract the pads that a dropped client's neighbours have added for it."""
        for peer in self.graph[place] & self.survivors:
            secret = key.secret_with(
                self._pad_key(peer), "pads", self.session.identity, me=place, peer=peer
            )
            add_pad(total, secret, self.session.ring, subtract=peer < place)

    def _collected(self, answers: Mapping[int, RevealedShares]) -> dict[str, Shares]:
        """Return the shares of keys and seeds by whose secret, then by holder."""
        collected: dict[str, Shares] = {kind: {} for kind in KINDS}
        lies = []
        for holder, answer in sorted(answers.items()):
            for kind in KINDS:
                for place, share in sorted(getattr(answer, kind).items()):
                    if share_hash(self.session, kind, place, holder, share) != self._bound(
                        kind, place, holder
                    ):
                        lies.append(
                            f"client {holder} tells a false share of client {place}'s {kind[:-1]}"
                        )
                    collected[kind].setdefault(place, {})[holder] = share
        if lies:
            raise AbortedError("; ".join(lies))
        return collected

    def _checked(self, shares: dict[str, Shares]) -> dict[str, dict[int, bytes]]:
        """Return the secrets by kind, then by whose they are."""
        for place in self.survivors - shares["seeds"].keys():
            raise AbortedError(f"nobody has told shares of client {place}'s seed")
        secrets: dict[str, dict[int, bytes]] = {kind: {} for kind in KINDS}
        for kind in KINDS:
            for place, held in shares[kind].items():
                secrets[kind][place] = secret = self._combined(kind, place, held)
                is_key = kind == "keys"
                told = (
                    AgreementKey(secret).public
                    if is_key
                    else seed_commitment(self.session, place, secret)
                )
                bound = self._pad_key(place) if is_key else self.sealed[place].commitment
                if told != bound:
                    raise AbortedError(
                        f"client {place} has dealt false shares of its {kind[:-1]}: another comes out "
                        "than it is bound to"
                    )
        return secrets

    def _combined(self, kind: str, place: int, held: Mapping[int, bytes]) -> bytes:
        numbers = {holder + 1: int.from_bytes(share, "little") for holder, share in held.items()}
        if len(numbers) < self.session.threshold:
            raise AbortedError(
                f"client {place}'s {kind[:-1]} stays unknown: {len(numbers)} shares of the "
                f"{self.session.threshold} that tell it"
            )
        try:
            return combine(numbers, self.session.threshold)
        except ValueError:
            # each is the one that its dealer is bound to
            raise AbortedError(
                f"client {place} has dealt false shares of its {kind[:-1]}: they do not belong "
                "together"
            ) from None

    def _bound(self, kind: str, place: int, holder: int) -> bytes:
        start = KINDS.index(kind) * SHARE_HASH_SIZE
        return self.sealed[place].hashes[holder][start : start + SHARE_HASH_SIZE]

    def _pad_key(self, place: int) -> bytes:
        return self.roster[place][KEY_SIZE : 2 * KEY_SIZE]
