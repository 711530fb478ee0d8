"""Bytes up and down of one client, counted without encoding: those of the real encoding.

A dense message's length depends on sizes, dtypes and metrics' names alone, which clients share, so
that a run computes it once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fl_lightning.core.update import ClientUpdate, LazyDeltas, Updates
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.wire.codec import encoded_size
from fl_lightning.updates.wire.message import Message, MessageKind

Shape = tuple[int, torch.dtype]


def bytes_up(updates: ClientUpdate | Updates) -> int:
    """Return the length of a client's update as a message; of several, which are alike, of each.

    Of an update with coordinates that its client may not move, the others travel.

    Example:
        >>> update = ClientUpdate(0, torch.zeros(100), torch.zeros(0), 5, 1, {"train/loss": 0.5})
        >>> bytes_up(update)  # 4 bytes a number and 109 for everything else
        509
    """
    updates = Updates.of(updates)
    active = None if updates.active is None else updates.active[0]
    delta = _shape(updates.deltas, active)
    return _dense_size("update", delta, _shape(updates.buffers), tuple(updates.metrics))


def bytes_down(params: Tensor, buffers: Tensor, active: Tensor | None = None) -> int:
    """Return the length of the global model as a message to one client.

    Args:
        params: shape (k,).
        buffers: shape (b,).
        active: which coordinates the client needs, bool, shape (k,); None for all.
    """
    return _dense_size("model", _shape(params, active), _shape(buffers), ())


def _shape(vector: Tensor | LazyDeltas, active: Tensor | None = None) -> Shape:
    size = vector.shape[-1] if active is None else int(active.count_nonzero())
    return size, vector.dtype


@lru_cache(maxsize=256)
def _dense_size(kind: MessageKind, params: Shape, buffers: Shape, metrics: tuple[str, ...]) -> int:
    """Return the size of a message whose vectors have no storage, because none is looked at."""

    def payload(shape: Shape) -> Dense:
        return Dense(torch.empty(shape[0], dtype=shape[1], device="meta"))

    return encoded_size(
        Message(
            kind,
            space="0" * 32,
            round_index=0,
            client_id=0,
            params=payload(params),
            buffers=payload(buffers),
            num_examples=1 if kind == "update" else 0,
            metrics=dict.fromkeys(metrics, 0.0),
        )
    )
