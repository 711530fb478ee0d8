"""What a run will send, told before it starts."""

from __future__ import annotations

import math

from fl_lightning.client.local_training import GlobalModel
from fl_lightning.privacy.protected import Protected
from fl_lightning.updates.broadcast import Broadcast
from fl_lightning.updates.path import UpdatePath


def cost_line(
    path: UpdatePath,
    broadcast: Broadcast,
    model: GlobalModel,
    *,
    num_clients: int,
    num_rounds: float,
    protected: Protected | None = None,
    more: tuple[int, int] = (0, 0),
) -> str:
    """Return one line about bytes: of a client and round, and of the whole run.

    Args:
        path: what happens to updates.
        broadcast: what happens to models.
        model: the global model, whose sizes count.
        num_clients: in a round.
        num_rounds: of the run; infinite if nobody knows.
        protected: how updates are hidden, which has a price; None if they are not.
        more: bytes up and down of a client besides, for its correction.

    Example:
        >>> import torch
        >>> model = GlobalModel(torch.zeros(1_000_000), torch.zeros(0))
        >>> cost_line(UpdatePath([], 0), Broadcast([], 0), model, num_clients=5, num_rounds=50)
        'a client sends about 4 MB and receives 4 MB a round; 5 clients in 50 rounds: 1 GB and 1 GB'
    """
    up = path.typical_bytes(model.params, model.buffers.numel())
    down = broadcast.send(model.params, model.buffers, 0).num_bytes
    if protected is not None:
        empty = path.typical_bytes(model.params[:0])
        more_up, more_down = protected.typical_bytes(len(model.params), max(2, num_clients))
        up, down = empty + more_up, down + more_down
    up, down = up + more[0], down + more[1]
    line = f"a client sends about {_shown(up)} and receives {_shown(down)} a round"
    if not math.isfinite(num_rounds):
        return line
    total = num_clients * num_rounds
    return (
        f"{line}; {num_clients} clients in {num_rounds:g} rounds: {_shown(total * up)} and "
        f"{_shown(total * down)}"
    )


def _shown(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
