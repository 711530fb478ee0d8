"""The parameters and buffers of a module at one moment: which tensors they were, and their numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.client.state.same_values import same_numbers


class ModuleTensors:
    """Copies of them, on the CPU: an accelerator may have no room for a second model.

    Args:
        module: whose tensors.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> before = ModuleTensors(module)
        >>> _ = module(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> before.changed()
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> before.put_back()
        >>> before.changed()
        []
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[str, dict[str, Any], str, Tensor]] = [
            (f"{path}.{name}" if path else name, members, name, tensor)
            for path, part in module.named_modules()
            for members in (part._parameters, part._buffers)
            for name, tensor in members.items()
            if tensor is not None and not is_lazy(tensor) and not tensor.is_meta
        ]
        with torch.inference_mode(False):
            self._copies = {tensor: _copy(tensor) for *_, tensor in self._places}

    def changed(self, names: Collection[str] | None = None) -> list[str]:
        """Return the names of those whose numbers are others now; looks at ``names`` only, if given."""
        return [
            path
            for path, members, name, tensor in self._places
            if (names is None or path in names)
            and not _same(members.get(name), self._copies[tensor])
        ]

    def put_back(self) -> None:
        """Have the same tensors with the same numbers as then; what has not changed is not written."""
        for _, members, name, tensor in self._places:
            if members.get(name) is not tensor:
                members[name] = tensor
        with torch.no_grad():
            for tensor, copy in self._copies.items():
                if not _same(tensor, copy):
                    tensor.copy_(copy)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _same(now: Tensor | None, before: Tensor) -> bool:
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return same_numbers(now.detach().cpu(), before)
