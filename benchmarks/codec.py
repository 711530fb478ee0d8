"""How fast updates are encoded and decoded: ``python -m benchmarks.codec``.

A delta of 4 million numbers as the payloads that compression makes of it, and as it is. Every row
is measured against copying the same delta in float32 (memcpy), the two in turn in one process on
one thread, in process CPU time. GB/s are of the delta in float32, 4 bytes a number, whatever is
sent: how fast a vector is dealt with, not how fast bytes come out. Medians over the repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch

from benchmarks.report import ratio
from fl_lightning.updates.codec import decode, encode, encoded_size
from fl_lightning.updates.message import Agreement, Message
from fl_lightning.updates.payload import FLOATS, Dense, Payload, Quantised, Sparse

SPACE = "0" * 32
HEADER = (
    f"{'':26}{'MB':>8}{'of fp32':>9}{'encode GB/s':>13}{'of memcpy':>11}{'decode GB/s':>13}"
    f"{'of memcpy':>11}"
)


def payloads(size: int) -> Iterator[tuple[str, Payload]]:
    """Yield what is measured, by name."""
    rng = np.random.default_rng(0)
    delta = torch.from_numpy(rng.standard_normal(size, np.float32))

    def quantised(count: int, bits: int, block: int | None = None) -> Quantised:
        codes = torch.from_numpy(rng.integers(0, 2**bits, count, np.uint8))
        shape = -(-count // block) if block else 1
        return Quantised(codes, bits, torch.ones(shape), torch.zeros(shape), block)

    for dtype in FLOATS:
        yield str(dtype).removeprefix("torch."), Dense(delta.to(dtype))
    for bits in (8, 4, 2, 1):
        yield f"{bits} bits", quantised(size, bits)
    yield "8 bits, blocks of 256", quantised(size, 8, 256)
    for share in (0.1, 0.01):
        kept = int(share * size)
        indices = torch.from_numpy(np.sort(rng.choice(size, kept, replace=False)))
        yield f"top {share:.0%}, float32", Sparse(indices, Dense(delta[:kept]), size)
        yield f"top {share:.0%}, 8 bits", Sparse(indices, quantised(kept, 8), size)


def in_turn(
    one: Callable[[], object], other: Callable[[], object], repetitions: int
) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of each, without a first time that warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + repetitions):
        for call, times in zip((one, other), seconds, strict=True):
            began = time.process_time()
            call()
            times.append(time.process_time() - began)
    return seconds[0][1:], seconds[1][1:]


def row(name: str, payload: Payload, delta: np.ndarray, repetitions: int) -> str:
    """Return what is known of one payload, as a line of the table."""
    message = Message("model", SPACE, 0, 0, payload, Dense(torch.empty(0)))
    agreement = Agreement(kind="model", space=SPACE, round_index=0, num_params=len(delta))
    data = encode(message)
    if len(data) != encoded_size(message):
        raise AssertionError(f"{name}: {len(data)} bytes, counted {encoded_size(message)}")
    cells = [f"  {name:24}{len(data) / 1e6:8.2f}{len(data) / delta.nbytes:9.1%}"]
    for call in (lambda: encode(message), lambda: decode(data, agreement)):
        seconds, copies = in_turn(call, delta.copy, repetitions)
        speed = delta.nbytes / median(seconds) / 1e9
        cells.append(f"{speed:13.2f}{ratio(copies, seconds):11.2f}")
    return "".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4_000_000, help="numbers, default %(default)s")
    parser.add_argument("--repetitions", type=int, default=9, help="default %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    delta = np.random.default_rng(0).standard_normal(arguments.size, np.float32)
    print(HEADER)
    for name, payload in payloads(arguments.size):
        print(row(name, payload, delta, arguments.repetitions), flush=True)


if __name__ == "__main__":
    main()
