"""Seeds of random draws: every draw is a pure function of (root seed, purpose, round, client, …).

    seed = first 63 bits of BLAKE2b(root, purpose, ids…)

The scheme is counter-based: no state is carried from one draw to the next, so results do not depend on
the order of the clients, on the number of processes, or on where a run was interrupted.

A root of 2**64 or more is a secret of 256 bits: the key of the hash. Streams from it reveal nothing
about its other streams.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b, shake_256

import numpy as np
import numpy.typing as npt
import torch

from fl_lightning.core.errors import ConfigurationError


def derive_seed(root: int, purpose: str, *ids: int) -> int:
    """Return the seed of the random stream for one purpose (e.g. a round's cohort), in [0, 2**63).

    Args:
        root: seed of the run.
        purpose: purpose of the stream, e.g. ``"cohort"``.
        ids: numbers that distinguish draws of the same purpose, e.g. round and client.

    Example:
        >>> derive_seed(0, "cohort", 3) == derive_seed(0, "cohort", 3)
        True
        >>> derive_seed(0, "cohort", 3) == derive_seed(0, "shuffle", 3)
        False
    """
    return int.from_bytes(_digest(root, purpose, ids), "little") >> 1


def _digest(root: int, purpose: str, ids: tuple[int, ...], size: int = 8) -> bytes:
    key, public = (b"", root) if root < 2**64 else (root.to_bytes(32, "little"), 0)
    name = purpose.encode()
    numbers = [number % 2**64 for number in (public, len(name), *ids)]
    message = struct.pack(f"<{len(numbers)}Q", *numbers) + name
    return blake2b(message, digest_size=size, key=key).digest()


def is_secret(root: int) -> bool:
    """True if a run's root seed is a secret of 256 bits, see `secret_seed`."""
    return root >= 2**64


def secret_seed() -> int:
    """Draw a secret root seed for a run from the operating system's secure generator.

    Example:
        >>> is_secret(secret_seed()), is_secret(2**64 - 1)
        (True, False)
    """
    return secrets.randbits(256) | 2**255


def uniform_stream(root: int, purpose: str, *ids: int, size: int) -> npt.NDArray[np.float64]:
    """Return the first ``size`` uniform numbers in [0, 1) of the stream for one purpose, shape (size,).

    They come from NumPy, or from SHAKE-256 for a secret root, so that some do not reveal others.
    """
    if not is_secret(root):
        return numpy_generator(root, purpose, *ids).random(size)
    stream = shake_256(_digest(root, purpose, ids, 32)).digest(8 * size)
    words = np.frombuffer(stream, "<u8") >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def torch_generator(root: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a torch CPU generator, seeded for one purpose by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(root, purpose, *ids))


def numpy_generator(root: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a NumPy generator, seeded for one purpose by `derive_seed`."""
    return np.random.default_rng(derive_seed(root, purpose, *ids))


def uniform_numbers(
    root: int, purpose: str, rounds: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Draw a uniform number in [0, 1) for each of m clients, shape (m,), in a few array operations.

        u = SplitMix64(seed of (root, purpose, round) + (id + 1) · 2⁶⁴ / φ) / 2⁶⁴

    Source: Steele, Lea & Flood 2014, OOPSLA, "Fast splittable pseudorandom number generators".

    Args:
        root: seed of the run.
        purpose: purpose of the numbers.
        rounds: round of each number, shape (m,).
        ids: client of each number, shape (m,).

    Example:
        >>> clients = np.arange(1000)
        >>> numbers = uniform_numbers(0, "example", np.full(1000, 7), clients)
        >>> one = uniform_numbers(0, "example", np.array([7]), np.array([3]))
        >>> bool(one[0] == numbers[3]), int((numbers < 0.1).sum())
        (True, 107)
    """
    seeds = {number: derive_seed(root, purpose, number) for number in set(rounds.tolist())}
    of_each = np.array([seeds[number] for number in rounds.tolist()], np.uint64)
    mixed = of_each + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (mixed >> np.uint64(11)) * 2.0**-53
    return numbers


def check_seed(owner: str, seed: int | None) -> None:
    """Raise ConfigurationError if a seed is no unsigned integer of 64 bits.

    Args:
        owner: name of the class or block of the option, for the message, e.g. ``"Bucketing"``.
        seed: value of the option; None is allowed.
    """
    if seed is not None and not 0 <= seed < 2**64:
        raise ConfigurationError(
            f"{owner}: seed must be a whole number from 0 to 2^64 - 1, got {seed}"
        )


def run_seed(seed: int | None) -> int:
    """Return ``seed``; if it is None, the seed set by `lightning.seed_everything`, or 0."""
    check_seed("a run", seed)
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


class GlobalGenerators:
    """A snapshot of the global random generators (torch, NumPy, Python), to restore them later.

    Args:
        only_torch: leave out NumPy and Python, whose states take 0.1 ms to read and write.

    Example:
        >>> before = GlobalGenerators()
        >>> drawn = random.random(), float(torch.rand(()))
        >>> before.put_back()
        >>> drawn == (random.random(), float(torch.rand(())))
        True
    """

    def __init__(self, *, only_torch: bool = False) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._others = None if only_torch else (np.random.get_state(), random.getstate())

    def put_back(self) -> None:
        """Restore the global generators to their states in the snapshot."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        if self._others is not None:
            np.random.set_state(self._others[0])
            random.setstate(self._others[1])


@contextlib.contextmanager
def preserve_global_generators(*, only_torch: bool = False) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python at the end of the block."""
    before = GlobalGenerators(only_torch=only_torch)
    try:
        yield
    finally:
        before.put_back()


def seed_global_generators(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python, which dropout and augmentation use."""
    # not torch.manual_seed: before CUDA starts it formats a stack trace, ten times the seeding
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
# maps a count to that many random words, uniform on 64 bits
Draw = Callable[[int], Words]
