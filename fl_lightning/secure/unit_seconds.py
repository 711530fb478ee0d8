"""What a secure sum's seconds are made of on this machine, measured in CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from fl_lightning.secure.entropy import system_entropy
from fl_lightning.secure.protocol.keys import AgreementKey, SigningKey, check_signature, seal
from fl_lightning.secure.protocol.pads import add_pad
from fl_lightning.secure.protocol.shamir import split
from fl_lightning.secure.ring import Ring


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of one thread.

    Attributes:
        agreement: of one key agreement with its derivation.
        box: of sealing or opening the shares for one neighbour.
        share_term: of one share, per unit of the threshold.
        pad_byte: of adding one byte of a pad.
        message_byte: of writing or reading one byte of a message.
        signature: of making a signature.
        verification: of checking one.

    Example:
        >>> measured = UnitSeconds.measured(repetitions=1)
        >>> 0 < measured.pad_byte < measured.agreement
        True
    """

    agreement: float = 0.0
    box: float = 0.0
    share_term: float = 0.0
    pad_byte: float = 0.0
    message_byte: float = 0.0
    signature: float = 0.0
    verification: float = 0.0

    @classmethod
    def measured(cls, repetitions: int = 5) -> UnitSeconds:
        """Return this machine's; takes some 20 ms a repetition."""
        ring, key, peer = Ring(32), AgreementKey(bytes(range(32))), AgreementKey(b"peer" * 8)
        total = np.zeros(1 << 18, ring.dtype)
        sign, verify = _signing()

        def agree() -> None:
            for _ in range(20):
                key.secret_with(peer.public, "pads", b"context", me=0, peer=1)

        def box() -> None:
            for _ in range(100):
                seal(b"k" * 32, b"s" * 66, b"context", sender=0, receiver=1)

        def share() -> None:
            split(b"s" * 32, range(1, 41), 20, system_entropy)

        def pack() -> None:
            ring.unpack(ring.pack(total), len(total))

        return cls(
            agreement=_seconds(repetitions, agree) / 20,
            box=_seconds(repetitions, box) / 100,
            share_term=_seconds(repetitions, share) / (40 * 20),
            pad_byte=_seconds(repetitions, lambda: add_pad(total, b"k" * 32, ring)) / total.nbytes,
            message_byte=_seconds(repetitions, pack) / total.nbytes / 2,
            signature=_seconds(repetitions, sign) / 10,
            verification=_seconds(repetitions, verify) / 10,
        )


def _signing() -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what makes ten signatures, and what checks ten."""
    key = SigningKey(b"sign" * 8)
    public, signature = key.public, key.sign(b"content")

    def sign() -> None:
        for _ in range(10):
            key.sign(b"content")

    def verify() -> None:
        for _ in range(10):
            check_signature(public, signature, b"content", "it")

    return sign, verify


def _seconds(repetitions: int, call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(repetitions):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return median(times)
