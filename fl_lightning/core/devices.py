"""How numbers get to an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor

# Of these PyTorch does not hold copies under way apart from what is written meanwhile.
_WAITING = ("cpu", "mps")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host's on a device, without waiting for what the device still does.

    Example:
        >>> sent(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    return tensor.to(device, non_blocking=device.type not in _WAITING)
