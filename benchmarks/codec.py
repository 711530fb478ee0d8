"""How fast updates are encoded and decoded: ``python -m benchmarks.codec``.

First table: a delta of 4 million numbers as the payloads that compression makes of it, and as it is:
the format alone. Second table: the whole way, what a client does (a transform, then the encoding) and
what the server does (decoding, then undoing the transform, up to a dense vector).

Every row is measured against copying the same delta in float32 (memcpy), the two in turn in one
process on one thread, in process CPU time. GB/s are of the delta in float32, 4 bytes a number,
whatever is sent: how fast a vector is dealt with, not how fast bytes come out. Medians over the
repetitions.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch

from benchmarks.page import ratio
from fl_lightning.updates import QSGD, Affine, Cast, PowerSGD, RandomK, Sign, TopK, ternary
from fl_lightning.updates.message import Agreement, Message, decode, encode, encoded_size
from fl_lightning.updates.payload import FLOATS, Dense, Payload, Quantised, Sparse
from fl_lightning.updates.transform import Chain, Transform

SPACE = "0" * 32
HEADER = (
    f"{'':46}{'MB':>8}{'of fp32':>9}{'encode GB/s':>13}{'of memcpy':>11}{'decode GB/s':>13}"
    f"{'of memcpy':>11}"
)
WAY = HEADER.replace("encode GB/s", "client GB/s").replace("decode GB/s", "server GB/s")


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


def transforms(size: int) -> Iterator[tuple[str, Chain]]:
    """Yield what is measured on the whole way, by name."""
    side = math.isqrt(size)
    shapes = ((side, side), (size - side * side,))
    steps: list[tuple[Transform, ...]] = [
        (),
        (TopK(0.1),),
        (RandomK(0.1),),
        (Sign(),),
        (Sign(block=256),),
        (QSGD(8),),
        (QSGD(4, block=256),),
        (QSGD(1),),
        (Affine(8),),
        (Affine(8, block=256),),
        (Cast("bfloat16"),),
        (PowerSGD(4),),
        (ternary(0.01),),
        (TopK(0.1), QSGD(8)),
        (PowerSGD(4), QSGD(8, block=256)),
    ]
    for each in steps:
        chain = Chain(each).with_shapes(shapes)
        yield chain.name or "plain", chain


def payload_row(name: str, payload: Payload, delta: np.ndarray, repetitions: int) -> str:
    """Return what is known of one payload, as a line of the table."""
    message = Message("model", SPACE, 0, 0, payload, Dense(torch.empty(0)))
    agreement = Agreement(kind="model", space=SPACE, round_index=0, num_params=len(delta))
    data = encode(message)
    if len(data) != encoded_size(message):
        raise AssertionError(f"{name}: {len(data)} bytes, counted {encoded_size(message)}")
    calls = (lambda: encode(message), lambda: decode(data, agreement))
    return row(name, len(data), delta, calls, repetitions)


def transform_row(name: str, chain: Chain, delta: np.ndarray, repetitions: int) -> str:
    """Return what is known of the way through some transforms, as a line of the table."""
    sent, size = Dense(torch.from_numpy(delta)), len(delta)
    agreement = Agreement(
        kind="model",
        space=SPACE,
        round_index=0,
        num_params=chain.sent_size(size),
        transforms=chain.names,
    )

    def client() -> bytes:
        params = chain.on_client(sent, seed=0)
        empty = Dense(torch.empty(0))
        return encode(Message("model", SPACE, 0, 0, params, empty, transforms=chain.names))

    def server() -> torch.Tensor:
        return chain.on_server(decode(data, agreement).params, seed=0, size=size).to_dense()

    data = client()
    return row(name, len(data), delta, (client, server), repetitions)


def row(
    name: str,
    num_bytes: int,
    delta: np.ndarray,
    calls: tuple[Callable[[], object], Callable[[], object]],
    repetitions: int,
) -> str:
    """Return a line: the bytes, and the speeds of sending and of receiving."""
    cells = [f"  {name:44}{num_bytes / 1e6:8.2f}{num_bytes / delta.nbytes:9.1%}"]
    for call in calls:
        seconds, copies = in_turn(call, delta.copy, repetitions)
        speed = delta.nbytes / median(seconds) / 1e9
        cells.append(f"{speed:13.2f}{ratio(copies, seconds):11.2f}")
    return "".join(cells)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4_000_000, help="numbers, default %(default)s")
    parser.add_argument("--repetitions", type=int, default=9, help="default %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    delta = np.random.default_rng(0).standard_normal(arguments.size, np.float32)
    print(HEADER)
    for name, payload in payloads(arguments.size):
        print(payload_row(name, payload, delta, arguments.repetitions), flush=True)
    print(f"\n{WAY}")
    for name, chain in transforms(arguments.size):
        print(transform_row(name, chain, delta, arguments.repetitions), flush=True)


if __name__ == "__main__":
    main()
