"""What a run will send, told before it starts."""

from __future__ import annotations

import math


def cost_line(up: float, down: float, *, num_clients: int, num_rounds: float) -> str:
    """Return one line about bytes: of a client and round, and of the whole run.

    Args:
        up: bytes that a client sends in a round, about.
        down: bytes that it gets.
        num_clients: in a round.
        num_rounds: of the run; infinite if nobody knows.

    Example:
        >>> cost_line(4e6, 4e6, num_clients=5, num_rounds=50)
        'a client sends about 4 MB and receives 4 MB a round; 5 clients in 50 rounds: 1 GB and 1 GB'
    """
    line = f"a client sends about {_shown(up)} and receives {_shown(down)} a round"
    if not math.isfinite(num_rounds):
        return line
    total = num_clients * num_rounds
    return (
        f"{line}; {num_clients} clients in {num_rounds:g} round{'s' * (num_rounds != 1)}: {_shown(total * up)} and "
        f"{_shown(total * down)}"
    )


def _shown(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
