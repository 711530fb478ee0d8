"""The round that the printed vectors of robust rules belong to, and ways to aggregate a round."""

import numpy as np
import torch

from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.server.server import Server


def sines(count=9):
    """Rows sin(1 + 3i + 7j), of which two are replaced."""
    i, j = np.arange(count)[:, None], np.arange(4)
    rows = np.sin(1 + 3 * i + 7 * j)
    rows[-2], rows[-1] = [10, 10, 10, 10], [-8, 9, -7, 6]
    return rows


def aggregate(rule, rows, num_examples=None, client_ids=None, server=None, dtype=torch.float64):
    """Return what a server moves by when these are a round's updates."""
    rows = torch.as_tensor(np.array(rows), dtype=dtype)
    if server is None:
        server = new_server(rule, rows.shape[1], dtype)
    before = server.model.params.clone()
    num_examples = num_examples or [10 * (row + 1) for row in range(len(rows))]
    server.open_round()
    for row, delta in enumerate(rows):
        client = row if client_ids is None else client_ids[row]
        server.receive(
            ClientUpdate(client, delta, torch.empty(0, dtype=dtype), num_examples[row], 1)
        )
    server.close_round()
    return (before - server.model.params).numpy()


def new_server(rule, size, dtype=torch.float64):
    empty = torch.empty(0, dtype=dtype)
    return Server(GlobalModel(torch.zeros(size, dtype=dtype), empty), rule)
