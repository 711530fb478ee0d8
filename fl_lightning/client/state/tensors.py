"""The tensors of a client's state: buffers and frozen parameters.

Those that local steps change (batch norm's statistics, a mean teacher) are a client's state: every
client begins with the global model's, and the server averages them. The others are constants, such as
class weights or an attention mask: they do not travel, and are checked not to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.swa_utils import AveragedModel

from fl_lightning.client.state.places import same_numbers, same_value
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space

# Whole numbers of the same width, of which a sum is exact whatever the order, NaN or not.
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_number(tensor: Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers, which are averaged."""
    return tensor.is_floating_point() or tensor.is_complex()


def candidates(module: nn.Module) -> dict[str, Tensor]:
    """Buffers and frozen parameters of real or complex numbers, by name: those that may be state."""
    params = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    named: dict[str, Tensor] = dict(module.named_buffers()) | dict(params)
    return {name: tensor for name, tensor in named.items() if is_number(tensor)}


def whole_numbers(module: nn.Module) -> list[Tensor]:
    """Buffers and frozen parameters that are not averaged, as they hold whole numbers."""
    frozen = (param for param in module.parameters() if not param.requires_grad)
    return [t for t in (*module.buffers(), *frozen) if not is_number(t)]


def buffer_names(module: nn.Module) -> list[str]:
    """Return the names of all floating-point buffers."""
    return [name for name, buffer in module.named_buffers() if buffer.is_floating_point()]


def state_space(module: nn.Module, names: Collection[str], without: Collection[str] = ()) -> Space:
    """Return the layout of a client's state.

    Args:
        module: whose state it is.
        names: of the tensors that are.
        without: those that are no part of it.
    """
    named: dict[str, Tensor] = dict(module.named_buffers()) | dict(module.named_parameters())
    chosen = frozenset(names) - frozenset(without)
    return Space({name: tensor for name, tensor in named.items() if name in chosen})


def known_state(module: nn.Module) -> list[str]:
    """Return the names of what modules of torch change while they train, also if they do not now.

    These are statistics of batch and instance norm (unless their momentum is 0, by which they gather
    none), the vectors of spectral norm, averaged models.

    Example:
        >>> known_state(nn.BatchNorm1d(2).eval())
        ['running_mean', 'running_var']
    """
    kept: set[int] = set()
    for child in module.modules():
        if isinstance(child, AveragedModel):
            kept |= {id(t) for t in (*child.parameters(), *child.buffers())}
        elif isinstance(child, _SpectralNorm) or (
            isinstance(child, _NormBase) and child.momentum != 0
        ):
            kept |= {id(buffer) for buffer in child.buffers(recurse=False)}
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                kept |= {id(getattr(child, f"{hook.name}_{part}")) for part in "uv"}
    return [name for name, tensor in candidates(module).items() if id(tensor) in kept]


def matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names that patterns with ``*`` and ``?`` find, whole or after a dot.

    Raises:
        ConfigurationError: if one finds nothing.

    Example:
        >>> matching(nn.Sequential(nn.BatchNorm1d(2)), ["running_*"])
        ['0.running_mean', '0.running_var']
    """
    names = list(candidates(module))
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if _matches(name, pattern)}
        if not matches:
            shown = ", ".join(names[:20]) or "none"
            raise ConfigurationError(
                f"federation.client_state: no buffer and no frozen parameter of real numbers matches "
                f"{pattern!r}; there are {shown}"
            )
        found |= matches
    return [name for name in names if name in found]


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[i:]), pattern) for i in range(len(parts)))


class Constants:
    """Tensors that local training must leave alone, as they are when this is made.

    Args:
        tensors: by name.

    Example:
        >>> mask = torch.zeros(2)
        >>> constants = Constants({"mask": mask})
        >>> constants.changed()
        []
        >>> _ = mask.data.add_(1)
        >>> constants.touched(), constants.changed()
        ([], ['mask'])
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        real = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}
        known = {n: t for n, t in real.items() if t.layout == torch.strided and not t.is_meta}
        self._names, self._tensors = [*known], [*known.values()]
        self._versions = _versions(self._tensors)
        self._sums = _sums(self._tensors)

    def touched(self) -> list[str]:
        """Return those that were written in place and differ; costs nothing if none was written."""
        if not self._tensors or (versions := _versions(self._tensors)) == self._versions:
            return []
        pairs = zip(versions, self._versions, strict=True)
        written = [i for i, (now, before) in enumerate(pairs) if now != before]
        self._versions = versions
        sums = _sums([self._tensors[i] for i in written])
        changed = zip(written, sums, strict=True)
        return [self._names[i] for i, now in changed if now != self._sums[i]]

    def changed(self) -> list[str]:
        """Return those that differ, also where ``.data`` was written; reads them all."""
        trios = zip(self._names, _sums(self._tensors), self._sums, strict=True)
        return [name for name, now, before in trios if now != before]


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _sums(tensors: Sequence[Tensor]) -> list[Any]:
    with torch.no_grad():
        sums = [t.detach().view(_WHOLE[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
        return torch.stack(sums).tolist() if sums else []


def memory_of(tensors: Collection[Tensor]) -> list[Any]:
    """Where tensors are and how large; nothing inside `vmap` and the compiler, where they have no place."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return []
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.size, tensors)]


class ModuleTensors:
    """The parameters and buffers of a module and their places, at one moment.

    ``self.centre = 0.9 * self.centre + …`` puts another tensor into the place of a buffer, and
    ``self.centre.data = …`` other numbers behind it: `bring_home` undoes both and keeps the values.

    Args:
        module: whose tensors.
        copies: keep their values for `changed` and `put_back`, on the CPU: an accelerator may have
            no room for a second model.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> before = ModuleTensors(module, copies=True)
        >>> _ = module(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> before.changed()
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> before.put_back()
        >>> before.changed()
        []
    """

    def __init__(self, module: nn.Module, *, copies: bool = False) -> None:
        self._places: list[tuple[str, Any, str, Tensor]] = [
            (f"{path}.{name}" if path else name, members, name, tensor)
            for path, part in module.named_modules()
            for members in (part._parameters, part._buffers)
            for name, tensor in members.items()
            if tensor is not None and not is_lazy(tensor) and not tensor.is_meta
        ]
        self.note()
        with torch.inference_mode(False):
            tensors = {t for *_, t in self._places} if copies else ()
            self._copies = {t: t.detach().to("cpu", copy=True) for t in tensors}

    def note(self) -> None:
        """Note the memory behind every tensor."""
        self._own = [tensor for *_, tensor in self._places]
        self._tensors = [tensor for tensor in self._own if tensor.layout == torch.strided]
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._now = memory_of(self._tensors)

    def _moved(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors whose memory or shape is another one now, each with what shows the noted one."""
        pairs = zip(self._tensors, self._memory, strict=True)
        return [
            (tensor, memory)
            for tensor, memory in pairs
            if (tensor.data_ptr(), tensor.shape) != (memory.data_ptr(), memory.shape)
            or tensor.dtype != memory.dtype
        ]

    def bring_home(self) -> None:
        """Give every tensor its place in the module and its memory, with the values found there.

        Raises:
            ConfigurationError: if they do not fit.
        """
        held = [m[name] if name in m else None for _, m, name, _ in self._places]  # noqa: SIM401
        is_at_home = all(map(is_, held, self._own))
        moved = {} if memory_of(self._tensors) == self._now else dict(self._moved())
        if is_at_home and not moved:
            return
        places = [(*place, present) for place, present in zip(self._places, held, strict=True)]
        away = {tensor for *_, tensor, present in places if present is not tensor}
        found: dict[Tensor, tuple[str, Tensor]] = {}  # all first: tensors may have changed places
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
                    f"{known[0]} and {path} were one tensor and are two after training_step, which "
                    "replaces only one of them: have it write in place, or make them two"
                )
        with torch.no_grad():
            for tensor, memory in moved.items():
                tensor.data = memory
            for tensor, (_, present) in found.items():
                tensor.copy_(present)

    def changed(self, names: Collection[str] | None = None) -> list[str]:
        """Names of those whose values differ now; looks at ``names`` only, if given."""
        return [
            path
            for path, members, name, tensor in self._places
            if (names is None or path in names)
            and not _same_copy(_present(members, name), self._copies[tensor])
        ]

    def put_back(self) -> None:
        """Put the same tensors with the same values back; what has not changed is not written."""
        for _, members, name, tensor in self._places:
            if _present(members, name) is not tensor:
                members[name] = tensor
        for tensor, memory in [] if memory_of(self._tensors) == self._now else self._moved():
            tensor.data = memory
        with torch.no_grad():
            for tensor, before in self._copies.items():
                if not _same_copy(tensor, before):
                    tensor.copy_(before)


def _present(members: Any, name: str) -> Any:
    return members[name] if name in members else None  # noqa: SIM401 - a scripted module's has no get


def _misfit(path: str, shape: torch.Size, present: object) -> str:
    found = f"shape {tuple(present.shape)}" if isinstance(present, Tensor) else "nothing"
    return (
        f"{path} was replaced by {found} while it trained, it had shape {tuple(shape)}: parameters and "
        "buffers keep their shapes in a federation. Keep what grows in a list on the module."
    )


def _same_copy(now: Tensor | None, before: Tensor) -> bool:
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return same_numbers(now.detach().cpu(), before)


class TrainedFlags:
    """Which parameters train, at one moment.

    A module that steps its optimizers by hand often freezes one part while it trains another. The
    next client starts with the round's parameters that train, whatever the last one left frozen.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> flags = TrainedFlags(layer)
        >>> _ = layer.requires_grad_(False)
        >>> flags.put_back()
        >>> layer.weight.requires_grad
        True
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        self._params = [param for _, param in named]
        self._trains = [param.requires_grad for param in self._params]
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]

    def put_back(self) -> None:
        """Put ``requires_grad`` of every parameter back."""
        if [param.requires_grad for param in self._params] != self._trains:
            for param, trains in zip(self._params, self._trains, strict=True):
                param.requires_grad_(trains)

    def check(self) -> None:
        """Refuse a parameter that was frozen and has trained.

        Raises:
            ConfigurationError: if there is one.
        """
        for name, param in self._frozen:
            if param.requires_grad or param.grad is not None:
                raise ConfigurationError(
                    f"{name} was frozen when the run started and training_step unfroze it: what "
                    "travels between clients and server is settled when a run starts. Leave it "
                    "frozen, or unfreeze it before."
                )
