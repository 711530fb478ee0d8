"""Bytes of another format that travel as a tensor: updates, models, messages of secure sums."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.flower.wire.plain_json import MessageError


def as_tensor(content: bytes) -> Tensor:
    """Return bytes as they travel: uint8, shape (n,).

    Example:
        >>> as_tensor(b"ab"), bytes_of(as_tensor(b"ab"))
        (tensor([97, 98], dtype=torch.uint8), b'ab')
    """
    if not content:  # of which PyTorch makes no tensor
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def bytes_of(tensor: Tensor | None) -> bytes:
    """Return the bytes that have come.

    Raises:
        MessageError: if there are none, or numbers instead.

    Example:
        >>> bytes_of(torch.ones(2, dtype=torch.bfloat16))
        Traceback (most recent call last):
        ...
        fl_lightning.flower.wire.plain_json.MessageError: the message has torch.bfloat16 of shape (2,) where \
bytes must be
    """
    if tensor is None:
        raise MessageError("the message has nothing where bytes must be")
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise MessageError(
            f"the message has {tensor.dtype} of shape {tuple(tensor.shape)} where bytes must be"
        )
    return tensor.contiguous().numpy().tobytes()
