"""What it costs that the server cannot read updates: ``python -m benchmarks.secure``.

Secure sums: quantisation and the real protocol in one process, every message as its bytes; a client
that drops does so when its vector is due, the most expensive moment. CPU seconds on one thread, of
one client, of the server, and of everyone relative to adding the same vectors in the clear, which
is timed just before. Bytes are those of one client that stays, relative to 4 bytes a number.

Encryption: one client's update of floats with CKKS, and integers with Paillier, packed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from benchmarks.process import MeasurementError, run
from benchmarks.rivals import RIVALS, TIMEOUT
from fl_lightning.secure.encryption.ckks import CKKSClient, CKKSServer, generate_keys
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout
from fl_lightning.secure.encryption.paillier import PaillierSum
from fl_lightning.secure.protocol.session import ProtocolStage, Session, SparseGraph
from fl_lightning.secure.secure_sum import SecureSum
from fl_lightning.secure.simulation import simulate
from fl_lightning.secure.sum_quantiser import SumQuantiser

SPARSE_FROM = 50  # clients
LEVELS = 2**22  # Flower's default
SUMS = (
    f"{'':8}{'clients':>9}{'dropped':>9}{'padded with':>13}{'threshold':>11}{'client s':>10}"
    f"{'server s':>10}{'of plain':>10}{'MB up':>8}{'of fp32':>9}{'kB down':>9}"
)
CIPHERS = (
    f"{'':26}{'numbers':>9}{'encrypt s':>11}{'add s':>8}{'decrypt s':>11}{'MB up':>8}"
    f"{'of fp32':>9}{'MB down':>9}{'error':>10}"
)
Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result and the CPU seconds."""
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


def session_of(num_clients: int, size: int) -> Session:
    """Return what a cohort of this size would agree on."""
    sparse = SparseGraph() if num_clients >= SPARSE_FROM else None
    return SecureSum(run="benchmark", sparse=sparse).session(num_clients, size=size)


def sum_row(num_clients: int, dropped: float, size: int) -> str:
    """Return what one secure sum costs, as a line of the table."""
    session = session_of(num_clients, size)
    delta = torch.randn(size, generator=torch.Generator().manual_seed(0))
    quantiser = SumQuantiser(num_clients=num_clients, levels=LEVELS)
    draw = np.random.default_rng(0).random
    sent, quantise = timed(lambda: quantiser.encode(delta, 1, draw))
    vector = sent[:size]
    silent = dict.fromkeys(range(round(dropped * num_clients)), ProtocolStage.MASK)

    def plain() -> np.ndarray:
        total = np.zeros_like(vector)
        for _ in range(num_clients - len(silent)):
            total += vector
        return total

    expected, plain_seconds = timed(plain)
    outcome = simulate(session, dict.fromkeys(range(num_clients), vector), silent)
    if not np.array_equal(outcome.total, expected):
        raise AssertionError("the secure sum is not the plain one")
    costs, last = outcome.cost, num_clients - 1
    client = costs.seconds["client_seconds"] / num_clients + quantise
    up, down = costs.bytes_up[last], costs.bytes_down[last]
    seconds = (client, costs.seconds["server_seconds"], plain_seconds)
    return _sum_row("ours", session, len(silent), seconds, (up, down))


def flwr_row(num_clients: int, dropped: float, size: int) -> str:
    """Return what the same costs with Flower's SecAgg+, in an environment of its own."""
    session, num_dropped = session_of(num_clients, size), round(dropped * num_clients)
    python, pins = RIVALS["flwr"]
    environment = [word for pin in pins for word in ("--with", pin)]
    command = ["uv", "run", "--isolated", "--no-project", "--python", python, *environment]
    command += ["python", "-m", "benchmarks.rivals.flwr_secagg"]
    options = {
        "clients": num_clients,
        "dropped": num_dropped,
        "size": size,
        "shares": (session.num_neighbours or num_clients - 1) + 1,
        "threshold": session.threshold,
    }
    try:
        told = run([*command, *(f"--{name}={value}" for name, value in options.items())], TIMEOUT)
    except MeasurementError as error:
        return f"  {'flwr':6}{num_clients:9}{num_dropped:9}  {error}"
    seconds = (told["client_seconds"], told["server_seconds"], 0.0)
    return _sum_row("flwr", session, num_dropped, seconds, (told["bytes_up"], told["bytes_down"]))


def _sum_row(
    whose: str,
    session: Session,
    num_dropped: int,
    seconds: tuple[float, float, float],
    sizes: tuple[int, int],
) -> str:
    client, server, plain = seconds
    up, down = sizes
    near = session.num_neighbours or session.num_clients - 1
    all_seconds = client * session.num_clients + server
    of_plain = f"{all_seconds / plain:10.0f}" if plain else f"{'':10}"
    return (
        f"  {whose:6}{session.num_clients:9}{num_dropped:9}{near:13}{session.threshold:11}"
        f"{client:10.3f}{server:10.3f}{of_plain}"
        f"{up / 1e6:8.2f}{up / (4 * max(session.size, 1)):9.1%}{down / 1e3:9.1f}"
    )


def ckks_row(name: str, layout: CKKSLayout) -> str:
    """Return what encryption with CKKS costs one client, and the server for it."""
    delta = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    keys = generate_keys(layout.parameters)
    client, server = CKKSClient(layout, keys), CKKSServer(layout)
    (update, sender), encrypt = timed(lambda: client.encrypt(0.25 * delta))
    other, other_sender = client.encrypt(0.75 * delta, client=1)
    total, add = timed(lambda: server.sum([update, other]))
    values, decrypt = timed(lambda: client.open(total, [sender, other_sender]))
    error = float((values - delta).abs().max())
    return _cipher_row(
        name,
        layout.size,
        (encrypt, add / 2, decrypt),
        (len(update.encode()), len(total.encode())),
        f"{error:.1e}",
    )


def paillier_row(bits: int, size: int) -> str:
    """Return what encryption with Paillier costs."""
    quantiser = SumQuantiser(num_clients=100, levels=2**16)
    scheme = PaillierSum(quantiser, bits)
    vector = np.random.default_rng(0).integers(0, 2**16, size).astype(np.uint32)
    data, encrypt = timed(lambda: scheme.encrypt(vector))
    total, add = timed(lambda: scheme.plus(data, data))
    values, decrypt = timed(lambda: scheme.decrypt(total, size))
    error = "exact" if np.array_equal(values, 2 * vector) else "wrong"
    times = (encrypt, add, decrypt)
    num_bytes = len(data) * scheme.width
    return _cipher_row(f"Paillier {bits}", size, times, (num_bytes, num_bytes), error)


def _cipher_row(
    name: str,
    size: int,
    seconds: tuple[float, float, float],
    sizes: tuple[int, int],
    error: str,
) -> str:
    encrypt, add, decrypt = seconds
    up, down = sizes
    return (
        f"  {name:24}{size:9}{encrypt:11.2f}{add:8.2f}{decrypt:11.2f}{up / 1e6:8.2f}"
        f"{up / (4 * size):9.1%}{down / 1e6:9.2f}{error:>10}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1_000_000, help="numbers, default %(default)s")
    parser.add_argument("--clients", default="10,100", help="default %(default)s")
    parser.add_argument("--dropped", default="0,0.2", help="fractions, default %(default)s")
    parser.add_argument("--rivals", default="", choices=["", "flwr"], help="beside ours")
    parser.add_argument("--paillier", type=int, default=10_000, help="integers with Paillier")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(SUMS)
    for num_clients in map(int, arguments.clients.split(",")):
        for dropped in map(float, arguments.dropped.split(",")):
            print(sum_row(num_clients, dropped, arguments.size), flush=True)
            if arguments.rivals:
                print(flwr_row(num_clients, dropped, arguments.size), flush=True)
    print(f"\n{CIPHERS}")
    tenth = torch.arange(0, arguments.size, 10)
    print(ckks_row("CKKS 8192", CKKSLayout(arguments.size)), flush=True)
    print(ckks_row("CKKS 8192, every tenth", CKKSLayout(arguments.size, tenth)), flush=True)
    for bits in (2048, 3072):
        print(paillier_row(bits, arguments.paillier), flush=True)


if __name__ == "__main__":
    main()
