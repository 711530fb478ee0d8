"""What does not travel must be the same on both sides: frozen weights, constants in buffers."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from fl_lightning.client.local_training import LocalTrainer


def constants_digest(module: nn.Module, local: LocalTrainer) -> str:
    """Return a SHA-256 of a module's numbers that neither travel nor are a client's own.

    A site whose frozen backbone came from another file would train another model, without a word.

    Args:
        module: that trains.
        local: knows what travels and what clients have for themselves.
    """
    elsewhere = {*local.space.names, *local.buffers.names, *local.own.names}
    named = [*module.named_parameters(), *module.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if name not in elsewhere and tensor.is_floating_point():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
