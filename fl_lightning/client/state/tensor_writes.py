"""Which of a module's tensors a training step writes: buffers, parameters, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.state.same_values import same_numbers


class TensorWrites:
    """A module's parameters, buffers and gradients at the moment when this is made.

    Names are those of ``named_parameters`` and ``named_buffers``. A tensor that was replaced by another
    one counts as written where the numbers, the shape or the type differ.

    Args:
        module: the module.

    Example:
        >>> module = nn.BatchNorm1d(1)
        >>> writes = TensorWrites(module)
        >>> _ = module(torch.tensor([[0.0], [2.0]]))
        >>> writes.buffers()
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> writes.put_back()
        >>> writes.buffers(), module.running_mean
        ([], tensor([0.]))
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._homes: list[tuple[dict[str, Any], str, Tensor]] = [
            (members, name, tensor)
            for child in module.modules()
            for members in (child._parameters, child._buffers)
            for name, tensor in members.items()
            if tensor is not None
        ]
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        self._before = {name: tensor.detach().clone() for name, tensor in named.items()}
        self._tensors: dict[str, Tensor] = named
        params = dict(module.named_parameters()).items()
        self._frozen = {name for name, param in params if not param.requires_grad}
        self._params = dict(params)
        self._grads = {n: (p.grad, _copy(p.grad)) for n, p in params}

    def buffers(self) -> list[str]:
        """Return the names of buffers that differ now, of any type."""
        return self._changed(self._module.named_buffers())

    def frozen(self) -> list[str]:
        """Return the names of parameters that do not train, and differ now."""
        return [name for name in self._changed_parameters() if name in self._frozen]

    def trained(self) -> list[str]:
        """Return the names of parameters that train, and differ now."""
        return [name for name in self._changed_parameters() if name not in self._frozen]

    def gradients(self) -> list[str]:
        """Return the names of parameters whose ``grad`` differs now."""
        pairs = ((name, *self._grads[name], param.grad) for name, param in self._params.items())
        return [name for name, _, copy, now in pairs if not _same(now, copy)]

    def _changed_parameters(self) -> list[str]:
        return self._changed(self._module.named_parameters())

    def _changed(self, named: object) -> list[str]:
        present: dict[str, Tensor] = dict(named)  # type: ignore[call-overload]
        return [name for name, now in present.items() if not _same(now, self._before.get(name))]

    def put_back(self) -> None:
        """Give all of them the numbers, and the places in the module, that they had."""
        with torch.no_grad():
            for members, name, tensor in self._homes:
                members[name] = tensor
            for name, tensor in self._tensors.items():
                before = self._before[name]
                if tensor.shape != before.shape or tensor.dtype != before.dtype:
                    tensor.data = before.clone()
                elif not same_numbers(tensor, before):
                    tensor.copy_(before)
        for name, param in self._params.items():
            grad, copy = self._grads[name]
            if grad is not None and copy is not None and not _same(grad, copy):
                grad.copy_(copy)
            param.grad = grad


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _same(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None:
        return now is before
    alike = now.shape == before.shape and now.dtype == before.dtype and now.layout == before.layout
    return alike and same_numbers(now.detach(), before)
