"""Tensors of a client's state: buffers and frozen parameters, and the memory of a module's tensors.

Buffers that local steps change (batch norm's statistics, a mean teacher) are a client's state: every
client starts from the global model's, and the server averages them. Other buffers are constants, such as
class weights or an attention mask: they are not sent, and a check detects changes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space

# Integer type by number of bytes. A sum of integers is exact in any order, even for the bits of a NaN.
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_number(tensor: Tensor) -> bool:
    """Return whether a tensor is floating-point or complex, so that the server can average it."""
    return tensor.is_floating_point() or tensor.is_complex()


def candidates(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the server can average as client state: non-integer buffers and frozen parameters."""
    params = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    named: dict[str, Tensor] = dict(module.named_buffers()) | dict(params)
    return {name: tensor for name, tensor in named.items() if is_number(tensor)}


def whole_numbers(module: nn.Module) -> list[Tensor]:
    """Return integer and bool buffers and frozen parameters, which the server does not average."""
    frozen = (param for param in module.parameters() if not param.requires_grad)
    return [t for t in (*module.buffers(), *frozen) if not is_number(t)]


def state_space(module: nn.Module, names: Collection[str], without: Collection[str] = ()) -> Space:
    """Return the layout of the client state: the tensors in ``names`` except those in ``without``."""
    named: dict[str, Tensor] = dict(module.named_buffers()) | dict(module.named_parameters())
    chosen = frozenset(names) - frozenset(without)
    return Space({name: tensor for name, tensor in named.items() if name in chosen})


class Constants:
    """Checksums of tensors that must stay constant in local training, to detect changes.

    Args:
        tensors: tensors by name, with their original values.

    Example:
        >>> mask = torch.zeros(2)
        >>> constants = Constants({"mask": mask})
        >>> _ = mask.data.add_(1)
        >>> constants.changed()
        ['mask']
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        real = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}
        self._tensors = {
            n: t for n, t in real.items() if t.layout == torch.strided and not t.is_meta
        }
        self._sums = self._now()

    def _now(self) -> list[Any]:
        """Return a checksum of each tensor: the sum of its elements' bits as integers."""
        with torch.no_grad():
            tensors = [tensor.detach() for tensor in self._tensors.values()]
            sums = [t.view(_WHOLE[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
            return torch.stack(sums).tolist() if sums else []

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed."""
        trios = zip(self._tensors, self._now(), self._sums, strict=True)
        return [name for name, now, before in trios if now != before]


def memory_of(tensors: Collection[Tensor]) -> list[Any]:
    """Return the memory addresses and shapes of tensors; empty under `vmap` and `torch.compile`."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return []
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.size, tensors)]


class ModuleTensors:
    """Record of a module's tensor objects, their memory, and which parameters are trainable.

    ``self.centre = 0.9 * self.centre + …`` replaces a buffer by another tensor, and ``self.centre.data =
    …`` replaces its memory: `restore_memory` undoes both and keeps the new values. A module that steps its
    optimizers by hand may freeze one part while it trains another: `freeze_again` undoes this.

    Args:
        module: the module.

    Attributes:
        trainable: trainable parameters by name, each once.
        fixed: buffers and frozen parameters by name, each once.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> tensors, mean = ModuleTensors(module), module.running_mean
        >>> module.running_mean = module.running_mean + 1
        >>> tensors.restore_memory()
        >>> module.running_mean is mean, mean
        (True, tensor([1., 1.]))
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.note()

    def note(self) -> None:
        """Record the module's tensor objects and their memory, and which parameters are trainable."""
        places: list[tuple[str, Any, str, Tensor]] = [
            (f"{path}.{name}" if path else name, members, name, tensor)
            for path, part in self._module.named_modules()
            for members in (part._parameters, part._buffers)
            for name, tensor in members.items()
            if tensor is not None
        ]
        named: dict[Tensor, str] = {}
        for path, *_, tensor in places:
            named.setdefault(tensor, path)
        self._places = [each for each in places if not is_lazy(each[3]) and not each[3].is_meta]
        self._params = {t: path for t, path in named.items() if isinstance(t, nn.Parameter)}
        self._trains = [param.requires_grad for param in self._params]
        self._frozen = [param for param in self._params if not param.requires_grad]
        self.trainable = {path: p for p, path in self._params.items() if p.requires_grad}
        self.fixed = {path: t for t, path in named.items() if path not in self.trainable}
        self._own = [tensor for *_, tensor in self._places]
        self._tensors = [tensor for tensor in self._own if tensor.layout == torch.strided]
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._now = memory_of(self._tensors)

    def freeze_again(self) -> None:
        """Restore every parameter's ``requires_grad`` and memory, after a step that froze or unfroze parameters.

        Raises:
            ConfigurationError: if a frozen parameter has trained, or as in `restore_memory`.
        """
        moved = next((p for p in self._frozen if p.requires_grad or p.grad is not None), None)
        self._put_flags_back()
        if moved is not None:
            raise ConfigurationError(
                f"{self._params[moved]} was frozen when the run started and training_step unfroze it, but "
                "clients and server exchange the same parameters in every round: leave it frozen, or "
                "unfreeze it before the run"
            )
        self.restore_memory()

    def _put_flags_back(self) -> None:
        if [param.requires_grad for param in self._params] != self._trains:
            for param, trains in zip(self._params, self._trains, strict=True):
                param.requires_grad_(trains)

    def _moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor whose memory, shape or dtype has changed, with the recorded memory."""
        pairs = zip(self._tensors, self._memory, strict=True)
        return [
            (tensor, memory)
            for tensor, memory in pairs
            if (tensor.data_ptr(), tensor.shape) != (memory.data_ptr(), memory.shape)
            or tensor.dtype != memory.dtype
        ]

    def restore_memory(self) -> None:
        """Undo the replacement of tensors or their memory by training, and keep the current values.

        Raises:
            ConfigurationError: if a tensor was removed or its shape has changed.
        """
        held = [m[name] if name in m else None for _, m, name, _ in self._places]  # noqa: SIM401
        is_unmoved = all(map(is_, held, self._own))
        moved = {} if memory_of(self._tensors) == self._now else dict(self._moved())
        if is_unmoved and not moved:
            return
        places = [(*place, present) for place, present in zip(self._places, held, strict=True)]
        away = {tensor for *_, tensor, present in places if present is not tensor}
        found: dict[Tensor, tuple[str, Tensor]] = {}  # read all first: two tensors may be swapped
        for path, members, name, tensor, present in places:
            if tensor not in away and tensor not in moved:
                continue
            members[name] = tensor
            if not isinstance(present, Tensor) or present.shape != moved.get(tensor, tensor).shape:
                self.put_back()
                raise ConfigurationError(_misfit(path, moved.get(tensor, tensor).shape, present))
            known = found.setdefault(tensor, (path, present.detach().clone()))
            if known[0] != path and not same_value(present.detach(), known[1]):
                self.put_back()
                raise ConfigurationError(
                    f"{known[0]} and {path} were the same tensor, and training_step has replaced only one of "
                    "them: change it in place (copy_), or use two tensors from the start"
                )
        with torch.no_grad():
            for tensor, memory in moved.items():
                tensor.data = memory
            for tensor, (_, present) in found.items():
                tensor.copy_(present)

    def put_back(self) -> None:
        """Restore the recorded tensor objects, memory and ``requires_grad``, e.g. after an error.

        Current values may be lost.
        """
        self._put_flags_back()
        for _, members, name, tensor in self._places:
            members[name] = tensor
        for tensor, memory in self._moved():
            tensor.data = memory


def _misfit(path: str, shape: torch.Size, present: object) -> str:
    change = (
        f"got the shape {tuple(present.shape)}" if isinstance(present, Tensor) else "was removed"
    )
    return (
        f"{path} {change} while a client trained, it had shape {tuple(shape)}: parameters and buffers must "
        "keep their shapes. Keep what grows in a list on the module"
    )


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 for tensors without memory, e.g. on the meta device."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor)
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def read_tensor(device: str | None, tensor: Tensor) -> list[Any]:
    """Return a tensor's values (moved to ``device`` if given), ``requires_grad`` and gradient."""
    grad = tensor.grad if tensor.is_leaf else None
    return [tensor.detach().to(device or tensor.device), tensor.requires_grad, grad]


def write_tensor(tensor: Tensor, before: list[Any], memory: Tensor) -> None:
    """Restore a tensor from the result of `read_tensor`, in its former memory."""
    with torch.no_grad():
        tensor.data = memory
        tensor.copy_(before[0])
    if tensor.is_leaf:
        tensor.requires_grad_(before[1]).grad = before[2]


def same_value(now: Any, before: Any) -> bool:
    """Return whether two values are equal in type and content; NaN equals NaN.

    Example:
        >>> same_value([1, float("nan"), torch.ones(2)], [1, float("nan"), torch.ones(2)])
        True
        >>> same_value(1, True), same_value(torch.ones(2), torch.ones(2, dtype=torch.float64))
        (False, False)
    """
    if now is before:
        return True
    if isinstance(now, Tensor) and isinstance(before, Tensor):  # a Parameter's copy is a Tensor
        kinds = [(t.dtype, t.shape, t.device, t.layout, t.requires_grad) for t in (now, before)]
        return kinds[0] == kinds[1] and _same_numbers(now, before)
    if type(now) is not type(before):
        return False
    try:
        if isinstance(now, dict):
            return [*now] == [*before] and same_value([*now.values()], [*before.values()])
        if isinstance(now, (list, tuple, deque)):
            return len(now) == len(before) and all(map(same_value, now, before))
        if isinstance(now, np.ndarray):
            alike = now.dtype == before.dtype and now.shape == before.shape
            return alike and np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")
        is_nan = isinstance(now, float) and math.isnan(now) and math.isnan(before)
        return is_nan or (now == before) is True
    except Exception:  # noqa: BLE001 - a user's class may raise anything if it cannot compare
        return False


def _same_numbers(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal; NaN equals NaN."""
    if now.device.type == "meta":
        return True
    try:
        with torch.no_grad():
            if now.layout != torch.strided:
                now, before = now.to_dense(), before.to_dense()
            if torch.equal(now, before) or not (now.is_floating_point() or now.is_complex()):
                return torch.equal(now, before)
            return bool(((now == before) | (now.isnan() & before.isnan())).all())
    except RuntimeError:  # a tensor that has outlived the transform that made it, e.g. vmap
        return False
